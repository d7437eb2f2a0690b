"""Attention by runs: every visible pair once, and the figures of dense attention in all number types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.trainers.test_tree_attention import columns, dense_rule, long_tree
from turntree.trainers import tree_attention, tree_runs
from turntree.trainers.tree import Group
from turntree.trainers.tree_attention import plan_attention
from turntree.trainers.tree_cover import find_runs
from turntree.trainers.tree_runs import parts

Groups = Callable[..., list[Group]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), piece=st.sampled_from([1, 2, 5, 128]))
def test_parts_hold_every_visible_pair_exactly_once(random_groups: Groups, seed: int, piece: int) -> None:
    groups = random_groups(seed)
    if not any(g.scored_leaves() for g in groups):
        return
    end, before = columns(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_runs, "_PIECE", piece)
        found = parts(find_runs(end.tolist(), before.tolist()))
    counts = torch.zeros(len(end), len(end), dtype=torch.int64)
    for part in found:
        seen = torch.ones(part.stop - part.start, part.last - part.first, dtype=torch.int64)
        counts[part.start : part.stop, part.first : part.last] += seen.tril() if part.causal else seen
    assert torch.equal(counts, dense_rule(end, before).long())
    # The output's first writer is a query's triangle, and each has one.
    kinds = [part.causal for part in found]
    assert kinds == sorted(kinds, reverse=True)
    assert sorted(i for p in found if p.causal for i in range(p.start, p.stop)) == list(range(len(end)))


def attended(
    kernel: str, dtype: torch.dtype, *, sizes: tuple[int, int] = (16, 16), plain: bool = False
) -> list[Tensor]:
    """Output and gradients of [1, 4 and 2, N, size] heads over a tree of 3 leaves, under the same upstream gradient."""
    end, before = long_tree(3, 300, 150)
    generator = torch.Generator().manual_seed(0)
    widths = (sizes[0], sizes[0], sizes[1])
    made = [torch.randn(1, h, len(end), d, generator=generator) for h, d in zip((4, 2, 2), widths)]
    q, k, v = (x.to(dtype).requires_grad_() for x in made)
    if plain:
        scores = (q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / sizes[0] ** 0.5).masked_fill(
            ~dense_rule(end, before), float("-inf")
        )
        out = (scores.softmax(-1) @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    else:
        plan = plan_attention(end, before, kernel=kernel)  # type: ignore[arg-type]
        out, _ = tree_attention._attention_forward(nn.Identity(), q, k, v, None, tree_plan=plan)
    upstream = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out, *torch.autograd.grad((out * upstream).sum(), (q, k, v))]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_runs_equal_dense_attention(dtype: torch.dtype, bound: float) -> None:
    exact = attended("", dtype, plain=True)
    for found, wanted in zip(attended("runs", dtype), exact, strict=True):
        assert found.dtype is dtype
        gap = (found.double() - wanted.double()).abs().max() / wanted.abs().max()
        assert float(gap) < bound


def test_values_of_another_width_run_by_blocks() -> None:
    for found, wanted in zip(
        attended("runs", torch.float32, sizes=(16, 8)), attended("", torch.float32, sizes=(16, 8), plain=True)
    ):
        torch.testing.assert_close(found, wanted.float(), rtol=0, atol=1e-4)


def test_a_gradient_that_is_one_number_is_taken() -> None:
    end, before = long_tree(2, 5, 3)
    q = torch.randn(1, 2, 11, 8, requires_grad=True)
    plan = plan_attention(end, before, kernel="runs")
    tree_attention._attention_forward(nn.Identity(), q, q, q, None, tree_plan=plan)[0].sum().backward()
    found, q.grad = q.grad, None
    plan = plan_attention(end, before, kernel="blocks")
    tree_attention._attention_forward(nn.Identity(), q, q, q, None, tree_plan=plan)[0].sum().backward()
    torch.testing.assert_close(found, q.grad)


def test_what_the_backward_pass_keeps_is_no_more_than_its_inputs_and_outputs() -> None:
    end, before = long_tree(4, 600, 300)
    n, kept = len(end), dict[int, int]()

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    q, k = (torch.randn(1, h, n, 16, requires_grad=True) for h in (4, 2))
    plan = plan_attention(end, before, kernel="runs")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        tree_attention._attention_forward(nn.Identity(), q, k, k, None, tree_plan=plan)
    assert sum(kept.values()) <= 4 * n * (4 * 16 + 2 * 16 + 4 * 16 + 4)


def test_many_short_runs_go_by_blocks_and_few_long_ones_by_runs() -> None:
    assert not plan_attention(*long_tree(200, 50, 3)).by_runs(64)
    long = plan_attention(*long_tree(4, 600, 300))
    assert long.by_runs(576)
    assert not long.by_runs(576, window=64)
    assert not plan_attention(*long_tree(4, 600, 300), kernel="blocks").by_runs(576)
