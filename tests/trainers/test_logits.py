"""Log-probs and entropies from logits against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turntree.trainers.logits import read_logits


def by_autograd(logits: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    chosen = torch.distributions.Categorical(logits=logits * scale)
    return chosen.log_prob(ids), chosen.entropy()


@pytest.mark.parametrize("scale", [1.0, 1 / 0.7])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_those_of_autograd(scale: float, entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    ids = torch.randint(0, 11, (6,), generator=generator)
    found, wanted = read_logits(logits, ids, scale=scale, entropy=entropy), by_autograd(logits, ids, scale)
    pairs = list(zip(found, wanted))[: 1 + entropy]
    weights = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    for a, b in pairs:
        torch.testing.assert_close(a, b)
    ours, theirs = (
        torch.autograd.grad([pair[i] for pair in pairs], logits, [w for _, w in zip(pairs, weights)])[0]
        for i in range(2)
    )
    torch.testing.assert_close(ours, theirs)
    assert len(found[1]) == (6 if entropy else 0)


def test_forbidden_tokens_have_no_part_in_entropy_and_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, float("-inf"), -1.0]], requires_grad=True)
    logp, entropy = read_logits(logits, torch.tensor([1]), entropy=True)
    wanted, spread = by_autograd(logits[:, [0, 1, 3]], torch.tensor([1]), 1.0)
    torch.testing.assert_close(logp, wanted)
    torch.testing.assert_close(entropy, spread)
    (grad,) = torch.autograd.grad(logp.sum() + entropy.sum(), logits)
    assert torch.isfinite(grad).all()
    assert float(grad[0, 2]) == 0.0


def test_half_precision_reads_in_float32() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    logp, _ = read_logits(logits, torch.arange(4), scale=2.0)
    torch.testing.assert_close(logp, by_autograd(logits.detach().float(), torch.arange(4), 2.0)[0])
    assert torch.autograd.grad(logp.sum(), logits)[0].dtype is torch.bfloat16
    assert logp.dtype is torch.float32


def test_entropies_that_are_reported_alone_cost_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (wanted,) = torch.autograd.grad(read_logits(logits, torch.arange(4))[0].sum(), logits)
    logp, entropy = read_logits(logits, torch.arange(4), entropy=True)
    assert entropy.isfinite().all()
    monkeypatch.setattr("turntree.trainers.logits._finite", None)  # only what entropies need calls it
    assert torch.equal(torch.autograd.grad(logp.sum(), logits)[0], wanted)


def test_gradients_of_entropies_alone_are_those_of_autograd() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    _, entropy = read_logits(logits, torch.arange(4), scale=0.5, entropy=True)
    ours, theirs = (
        torch.autograd.grad(h.sum(), logits)[0] for h in (entropy, by_autograd(logits, torch.arange(4), 0.5)[1])
    )
    torch.testing.assert_close(ours, theirs)


def test_the_backward_pass_keeps_the_logits_alone() -> None:
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    logits = torch.randn(8, 1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        read_logits(logits, torch.arange(8), scale=0.5)
    assert sum(kept.values()) < 1.1 * 4 * logits.numel()
