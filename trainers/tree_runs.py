"""Attention over packed trees by whole rectangles of visible pairs: no mask, no gathered copy, nothing computed twice.

In depth-first order the tokens below a run are one span, and each of them sees the whole run. So what is visible falls
apart into a rectangle per branching run (its descendants' queries, its keys) and one triangle per run, cut into
pieces. Each part is a plain call of PyTorch's flash attention on slices; parts of one query are merged by their
log-sum-exp, and the backward pass gives each part the merged output and log-sum-exp, as ring attention does.

One operator of PyTorch's library (``turntree::run_attention``), so that it is one node of the autograd graph and one
name for a policy of activation checkpointing. It keeps queries, keys, values, output and log-sum-exp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from turntree.trainers.tree_cover import Run

__all__ = ["RUN_ATTENTION", "Part", "attend_runs", "parts", "parts_cost", "takes"]

_PIECE = 128
"""Longest piece of a run whose triangle is computed at once: half of its square is thrown away."""

# What it costs to merge a query, in query-key pairs.
_MERGE_COST = 20


class Part(NamedTuple):
    """Queries ``[start, stop)`` that see the keys ``[first, last)``: all of them, or where ``causal`` those before."""

    start: int
    stop: int
    first: int
    last: int
    causal: bool


def parts(runs: Sequence[Run]) -> list[Part]:
    """All visible pairs of a pack, each once; triangles first, and of every query exactly one."""
    triangles = [Part(start, stop, start, stop, True) for run in runs for start, stop in _pieces(run)]
    before = [
        Part(start, stop, run.start, start, False) for run in runs for start, stop in _pieces(run) if start > run.start
    ]
    below = [Part(run.stop, run.subtree_end, run.start, run.stop, False) for run in runs if run.stop < run.subtree_end]
    return [*triangles, *before, *below]


def _pieces(run: Run) -> Iterator[tuple[int, int]]:
    """The run in pieces of equal length, give or take one."""
    length = run.stop - run.start
    count = -(-length // _PIECE)
    bounds = [run.start + length * i // count for i in range(count + 1)]
    yield from itertools.pairwise(bounds)


def parts_cost(found: Sequence[Part]) -> tuple[int, int]:
    """Query-key pairs that the parts cost, merges included, and the number of calls."""
    pairs = ((p.stop - p.start) * (p.last - p.first + (0 if p.causal else _MERGE_COST)) for p in found)
    return sum(pairs), len(found)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's flash attention on CPU takes these [1, H, N, D] as they are."""
    return (
        query.device.type == "cpu"
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[1] % key.shape[1] == 0
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    )


def attend_runs(query: Tensor, key: Tensor, value: Tensor, found: Sequence[Part], *, scaling: float | None) -> Tensor:
    """[1, H, N, D] in (``key``, ``value`` may have fewer heads), [1, N, H, D] out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = _run_attention(query, key, value, [int(x) for part in found for x in part], scale)
    return cast("Tensor", out)


def _unflatten(numbers: Sequence[int]) -> Iterator[Part]:
    for i in range(0, len(numbers), 5):
        start, stop, first, last, causal = numbers[i : i + 5]
        yield Part(start, stop, first, last, bool(causal))


@torch.library.custom_op("turntree::run_attention", mutates_args=(), device_types="cpu")
def _run_attention(
    query: Tensor, key: Tensor, value: Tensor, numbers: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N]; parts are merged in float32 at least."""
    _, heads, tokens, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((1, tokens, heads, size), dtype=wide)
    total = query.new_empty((1, heads, tokens), dtype=wide)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for part in _unflatten(numbers):
        queries, keys = slice(part.start, part.stop), slice(part.first, part.last)
        one, norm = attend(
            query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, part.causal, scale=scale
        )  # [1, H, L, D], [1, H, L]
        mine, theirs = out[:, queries], one.transpose(1, 2).to(wide)
        if part.causal:
            mine.copy_(theirs)
            total[:, :, queries] = norm
        else:
            known = total[:, :, queries]
            share = torch.sigmoid(norm - known).transpose(1, 2)[..., None]
            mine.lerp_(theirs, share)
            known.copy_(torch.logaddexp(known, norm))
    return out.to(query.dtype), total


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None, None]:
    query, key, value, out, total = ctx.saved_tensors
    wide = torch.promote_types(query.dtype, torch.float32)
    rows, columns = query.shape[2], key.shape[2]
    grads = [
        torch.zeros((1, count, x.shape[1], x.shape[3]), dtype=wide).transpose(1, 2)
        for x, count in ((query, rows), (key, columns), (value, columns))
    ]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for part in _unflatten(ctx.numbers):
        queries, keys = slice(part.start, part.stop), slice(part.first, part.last)
        found = differentiate(
            grad[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys], out[:, :, queries],
            total[:, :, queries], 0.0, part.causal, scale=ctx.scale,
        )  # fmt: skip
        for whole, span, mine in zip(grads, (queries, keys, keys), found):
            whole[:, :, span] += mine
    dq, dk, dv = (x.to(query.dtype) for x in grads)
    return dq, dk, dv, None, None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.numbers, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


_run_attention.register_autograd(_backward, setup_context=_keep)

RUN_ATTENTION = torch.ops.turntree.run_attention.default
"""The operator, for policies of activation checkpointing."""
