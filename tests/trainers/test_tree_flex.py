"""The block mask of FlexAttention against the rule, block by block, and memory of long trees."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from turntree.trainers import tree_attention, tree_flex
from turntree.trainers.packing import column, pack_groups
from turntree.trainers.tree import Group
from turntree.trainers.tree_attention import plan_attention, tree_mask_mod

Groups = Callable[..., list[Group]]


def blocks_of(counts: Tensor, columns: Tensor, number: int) -> Tensor:
    """FlexAttention's lists as a table [Q, K]."""
    out = torch.zeros(number, number, dtype=torch.bool)
    for row in range(number):
        out[row, columns[0, 0, row, : int(counts[0, 0, row])].long()] = True
    return out


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), window=st.sampled_from([None, 1, 4, 9]), size=st.sampled_from([4, 16, 128]))
def test_blocks_are_skipped_only_where_nothing_is_seen(
    random_groups: Groups, seed: int, window: int | None, size: int
) -> None:
    groups = random_groups(seed)
    if not any(g.scored_leaves() for g in groups):
        return
    (pack,) = pack_groups(groups, max_pack_tokens=10**6)
    end, before = column(pack, "tokens", "subtree_end"), column(pack, "tokens", "predecessor")
    plan = plan_attention(end, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_flex, "BLOCK", size)
        mask = tree_flex.tree_block_mask(end, plan.position, window=window)
    number = -(-len(end) // size)
    part = blocks_of(mask.kv_num_blocks, mask.kv_indices, number)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    whole = blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices, number)
    assert not (part & whole).any()
    index, zero = torch.arange(len(end)), torch.zeros((), dtype=torch.int64)
    rule = tree_mask_mod(end, plan.position, window=window)(zero, zero, index[:, None], index[None])
    counted = torch.nn.functional.pad(rule, (0, number * size - len(end), 0, number * size - len(end)))
    seen = counted.view(number, size, number, size).sum((1, 3))
    assert not seen[~(part | whole)].any()
    assert (seen[whole][: number * number] == size * size).all() or len(end) % size
    # What the kernel computes: whole blocks entirely, partial ones by the rule.
    padded = len(end) + (-len(end)) % size
    rows = torch.arange(padded)
    by_rule = mask.mask_mod(zero, zero, rows[:, None], rows[None])
    grid = (rows[:, None] // size, rows[None] // size)
    computed = whole[grid] | (part[grid] & by_rule)
    assert torch.equal(computed[: len(end), : len(end)], rule)


def test_a_tree_of_32k_tokens_needs_no_square_tensor() -> None:
    turns, prompt, length = 64, 2_048, 480
    total = prompt + turns * length
    end, before = torch.full((total,), total), torch.arange(-1, total - 1)
    for start in range(prompt, total, length):
        end[start : start + length] = start + length
        before[start] = prompt - 1
    plan = plan_attention(end, before, kernel="flex")
    tracemalloc.start()
    mask = plan.block_mask()
    tracemalloc.stop()
    assert plan.block_mask() is mask
    tensors = [mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
    assert sum(t.numel() * t.element_size() for t in tensors if t is not None) < 4 << 20
    assert mask.sparsity() > 85


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, 1.5)])
def test_outputs_equal_those_of_blocks(random_groups: Groups, window: int | None, softcap: float | None) -> None:
    (pack,) = pack_groups(random_groups(3), max_pack_tokens=10**6)
    end, before = column(pack, "tokens", "subtree_end"), column(pack, "tokens", "predecessor")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, len(end), 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    kernels: tuple[Any, ...] = ("blocks", "flex")
    blocks, flex = (
        tree_attention._attention_forward(
            nn.Identity(), q, k, v, None, scaling=0.7, softcap=softcap, sliding_window=window,
            tree_plan=plan_attention(end, before, kernel=kernel),
        )[0]
        for kernel in kernels
    )  # fmt: skip
    torch.testing.assert_close(flex, blocks, rtol=1e-9, atol=1e-9)


def test_without_a_gpu_flex_attention_is_not_chosen() -> None:
    assert plan_attention(torch.full((2_000,), 2_000), torch.arange(-1, 1_999)).kernel == "auto"
    assert not tree_attention._flex_is_right("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_flex_gives_what_blocks_give() -> None:
    assert tree_attention._flex_is_right("cuda")
