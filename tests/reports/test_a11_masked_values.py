"""A11: values under mask 0 never enter a sequence's or turn's mean, loss or gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from turntree.trainers.losses import Aggregation, Denominators, Occurrences, RatioLevel, policy_loss


def loss_and_gradient(
    advantage: list[float], logp: list[float], *, ratio: RatioLevel, how: Aggregation
) -> tuple[Tensor, Tensor]:
    current = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(4, dtype=torch.int64)
    occurrences = Occurrences(
        logp=current,
        old_logp=torch.full((4,), -1.0, dtype=torch.float64),
        advantage=torch.tensor(advantage, dtype=torch.float64),
        weight=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        leaf=zero,
        turn=zero,
        n_leaves=1,
        n_turns=1,
    )
    total = Denominators.of_occurrences(occurrences.weight, zero, n_leaves=1)
    assert total == Denominators(weight=2.0, rows=1.0, width=2.0)
    loss = policy_loss(occurrences, total, ratio=ratio, aggregation=how, clip_low=0.5, clip_high=0.5).loss
    (grad,) = torch.autograd.grad(loss, current)
    return loss.detach(), grad


@pytest.mark.parametrize("ratio", ["token", "turn", "sequence"])
@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_a11_masked_advantages_and_log_probs_change_nothing(ratio: RatioLevel, how: Aggregation) -> None:
    base = loss_and_gradient([1, 1, 0, 0], [-0.9, -1.2, -1.0, -1.0], ratio=ratio, how=how)
    other = loss_and_gradient([1, 1, 10, 10], [-0.9, -1.2, -9.0, 3.0], ratio=ratio, how=how)
    torch.testing.assert_close(other, base, rtol=0, atol=0)
    assert base[1][:2].abs().min() > 0


def test_a11_the_turn_ratio_is_the_mean_over_the_turn_alone() -> None:
    loss, _ = loss_and_gradient([1, 1, 10, 10], [-0.9, -1.2, -9.0, 3.0], ratio="turn", how="seq-mean-token-mean")
    torch.testing.assert_close(loss.item(), -torch.tensor(-0.05, dtype=torch.float64).exp().item())


def test_a11_replacing_a_column_keeps_the_check() -> None:
    column = torch.zeros(2)
    index = torch.zeros(2, dtype=torch.int64)
    occurrences = Occurrences(column, column, column, column, index, index, 1, 1)
    with pytest.raises(ValueError, match="weight has shape"):
        replace(occurrences, weight=torch.zeros(3))
