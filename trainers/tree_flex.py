"""Attention over packed trees through PyTorch's FlexAttention: the same rule, block-sparse on a GPU.

The block mask is made from each block's smallest and largest ``subtree_end`` and position, so nothing of size N x N
exists: a block of keys ``K`` before a block of queries ``Q`` is seen in part only if ``max(subtree_end[K]) > min(Q)``,
and seen whole if ``min(subtree_end[K]) > max(Q)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

__all__ = ["BLOCK", "flex_attend", "tree_block_mask"]

BLOCK = 128
"""Queries, and keys, of a block; packs are padded to whole blocks by tokens that see only themselves."""


def tree_block_mask(subtree_end: Tensor, position: Tensor, *, window: int | None = None) -> BlockMask:
    """The block mask of a pack; ``subtree_end`` and ``position`` are its columns, int64 [N].

    Partial blocks are decided by :func:`turntree.trainers.tree_attention.tree_mask_mod`.
    """
    from turntree.trainers.tree_attention import tree_mask_mod

    n = len(subtree_end)
    length = -(-n // BLOCK) * BLOCK
    alone = torch.arange(n, length, device=subtree_end.device) + 1
    end, depth = torch.cat([subtree_end, alone]), F.pad(position, (0, length - n))
    ends, depths = end.view(-1, BLOCK), depth.view(-1, BLOCK)
    first = torch.arange(0, length, BLOCK, device=end.device)
    before = first[None, :] < first[:, None]  # [queries, keys]
    some = before & (ends.amax(1)[None, :] > first[:, None])
    whole = before & (ends.amin(1)[None, :] >= first[:, None] + BLOCK)
    if window is not None:
        some &= depths.amin(1)[:, None] - depths.amax(1)[None, :] < window
        whole &= depths.amax(1)[:, None] - depths.amin(1)[None, :] < window
    whole &= some
    part = (some & ~whole) | torch.eye(len(first), dtype=torch.bool, device=end.device)
    return BlockMask.from_kv_blocks(
        *_lists(part),
        *_lists(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=tree_mask_mod(end, depth, window=window),
        seq_lengths=(length, length),
    )


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a table of blocks [Q, K]: the number in each row, and their columns, first in order."""
    counts = blocks.sum(1, dtype=torch.int32)
    columns = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], columns[None, None].contiguous()


def flex_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, scaling: float | None, softcap: float | None
) -> Tensor:
    """[1, H, N, D] in (``key``, ``value`` may have fewer heads), [1, N, H, Dv] out."""
    n = query.shape[2]
    pad = (0, 0, 0, mask.seq_lengths[0] - n)
    out = _kernel(query.device.type)(
        F.pad(query, pad),
        F.pad(key, pad),
        F.pad(value, pad),
        score_mod=None if softcap is None else _cap(softcap),
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast("Tensor", out)[:, :, :n].transpose(1, 2)


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled once for all lengths. On CPU, where it has no backward pass, plain and dense: for tests alone.

    ``fullgraph``: past PyTorch's limit of recompilations this is an error, not a silent N x N fallback.
    """
    if device == "cpu":
        return flex_attention
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@functools.cache
def _cap(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Gemma 2's bound of the scores."""

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head, query, key
        return torch.tanh(score / softcap) * softcap

    return score_mod
