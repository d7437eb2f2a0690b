"""Attention over packed trees: exact, without an N x N tensor.

The rule: a query ``q`` sees a key ``k`` iff ``k <= q < subtree_end[k]`` (depth-first order makes this "k is on q's
path"). A *plan* covers the packed tokens by blocks: some queries and a superset of the keys they may see; the rule
inside each block decides, so any cover is exact and the cover only decides the cost. Blocks of similar shape run as one
padded call of ``scaled_dot_product_attention``.

Models are not patched: :data:`ATTENTION` is registered with transformers' ``AttentionInterface`` and a forward pass
carries its plan as a keyword argument (:func:`packed_attention`). For FlexAttention, :func:`tree_mask_mod` is the same
rule as a ``mask_mod``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from turntree.errors import ConfigError

__all__ = ["ATTENTION", "AttentionPlan", "check_supported", "packed_attention", "plan_attention", "tree_mask_mod"]

ATTENTION = "turntree_packed"
"""Name under which packed attention is registered with transformers."""

# Costs of the cover, in query-key pairs: what one more block costs, the longest piece of a run, the largest padded
# call, and the largest call whose mask is kept (others rebuild theirs, and their scores, in the backward pass).
_BLOCK_COST = 2_048
_MAX_QUERIES = 512
_CALL_PAIRS = 1 << 20
_KEPT_PAIRS = 1 << 20

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries ``[start, stop)`` and their keys: the ancestors' spans, then ``[first_key, stop)``."""

    start: int
    stop: int
    first_key: int
    ancestors: tuple[Span, ...]

    @property
    def queries(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> int:
        return self.stop - self.first_key + _size(self.ancestors)


@dataclass(frozen=True, slots=True)
class _Call:
    """Blocks that run as one padded call: indices [B, Lq] and [B, Lk] into the pack, and the mask where kept.

    ``mask`` is an additive float32 [B, 1, Lq, Lk], or None where it is rebuilt from ``subtree_end``. Padded keys have
    index -1 and are never seen, except that a padded query sees the first key, so that no softmax is empty.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a pack's attention runs. ``order`` [N]: where each token's output lies among the calls' padded outputs."""

    calls: tuple[_Call, ...]
    order: Tensor
    subtree_end: Tensor
    pairs: int

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionPlan:
        return self


def tree_mask_mod(subtree_end: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as a FlexAttention ``mask_mod(batch, head, query, key) -> bool``, for ``create_block_mask``."""

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key <= query) & (query < subtree_end[key])

    return mask_mod


def plan_attention(subtree_end: Tensor, predecessor: Tensor) -> AttentionPlan:
    """Cover the packed tokens [N] by blocks. Memory grows with tokens and branchings, not with N^2.

    Raises ``ValueError`` if the two columns are not those of depth-first trees.
    """
    ends, previous = subtree_end.tolist(), predecessor.tolist()
    blocks = _cover(_runs(ends, previous))
    calls = tuple(_call(group, subtree_end) for group in _batches(blocks))
    order = torch.empty(len(ends), dtype=torch.int64)
    offset = 0
    for call in calls:
        flat = call.queries.flatten()
        real = flat >= 0
        order[flat[real].cpu()] = torch.nonzero(real).flatten().cpu() + offset
        offset += flat.numel()
    calls = tuple(_Call(c.queries.clamp(min=0), c.keys, c.mask) for c in calls)
    pairs = sum(c.queries.shape[0] * c.queries.shape[1] * c.keys.shape[1] for c in calls)
    return AttentionPlan(calls, order.to(subtree_end.device), subtree_end, pairs)


@dataclass(slots=True)
class _Run:
    """A maximal chain of tokens that are seen up to the same end, with the runs that hang below it."""

    start: int
    stop: int
    subtree_end: int
    parent: int
    ancestors: tuple[Span, ...]
    children: list[int]


def _size(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _runs(ends: Sequence[int], previous: Sequence[int]) -> list[_Run]:
    runs: list[_Run] = []
    owner: list[int] = []
    for i, (end, before) in enumerate(zip(ends, previous)):
        if not (i < end <= len(ends) and before < i):
            raise ValueError(f"token {i}: subtree_end {end} and predecessor {before} are not those of a packed tree")
        if before == i - 1 and before >= 0 and end == ends[before]:
            runs[-1].stop = i + 1
        else:
            parent = owner[before] if before >= 0 else -1
            spans = (*runs[parent].ancestors, (runs[parent].start, runs[parent].stop)) if parent >= 0 else ()
            if parent >= 0:
                runs[parent].children.append(len(runs))
            runs.append(_Run(i, i + 1, end, parent, _merge(spans), []))
        owner.append(len(runs) - 1)
    return runs


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Join touching spans, so that a first child's path stays one slice."""
    out: list[Span] = []
    for start, stop in spans:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def _cover(runs: Sequence[_Run]) -> list[_Block]:
    """The cheapest of: a whole subtree as one block, or its top run alone and its children's covers."""
    best: list[tuple[int, bool]] = [(0, False)] * len(runs)
    for i in range(len(runs) - 1, -1, -1):
        run = runs[i]
        above = _size(run.ancestors)
        width = run.subtree_end - run.start
        whole = width * (above + width) + _BLOCK_COST
        own = run.stop - run.start
        split = own * (above + own) + _BLOCK_COST + sum(best[c][0] for c in run.children)
        joined = width <= _MAX_QUERIES and whole <= split
        best[i] = (whole if joined else split, joined)
    blocks: list[_Block] = []
    stack = [i for i, run in enumerate(runs) if run.parent < 0]
    while stack:
        i = stack.pop()
        run, joined = runs[i], best[i][1]
        if joined:
            blocks.append(_Block(run.start, run.subtree_end, run.start, run.ancestors))
        else:
            blocks += _pieces(run)
            stack += run.children
    return blocks


def _pieces(run: _Run) -> Iterator[_Block]:
    for start in range(run.start, run.stop, _MAX_QUERIES):
        yield _Block(start, min(start + _MAX_QUERIES, run.stop), run.start, run.ancestors)


def _batches(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Group blocks of similar shape while padding costs less than another call."""
    group: list[_Block] = []
    longest = widest = real = 0
    for block in sorted(blocks, key=lambda b: (-b.queries, -b.keys, b.start)):
        lq, lk = max(longest, block.queries), max(widest, block.keys)
        padded = (len(group) + 1) * lq * lk
        real += block.queries * block.keys
        if group and (padded > _CALL_PAIRS or padded - real > (len(group) + 1) * _BLOCK_COST):
            yield group
            group, real = [], block.queries * block.keys
            lq, lk = block.queries, block.keys
        group.append(block)
        longest, widest = lq, lk
    if group:
        yield group


def _call(group: Sequence[_Block], subtree_end: Tensor) -> _Call:
    longest, widest = max(b.queries for b in group), max(b.keys for b in group)
    queries = torch.full((len(group), longest), -1, dtype=torch.int64)
    keys = torch.full((len(group), widest), -1, dtype=torch.int64)
    for row, block in enumerate(group):
        queries[row, : block.queries] = torch.arange(block.start, block.stop)
        spans = [*block.ancestors, (block.first_key, block.stop)]
        keys[row, : block.keys] = torch.cat([torch.arange(start, stop) for start, stop in spans])
    queries, keys = queries.to(subtree_end.device), keys.to(subtree_end.device)
    kept = len(group) * longest * widest <= _KEPT_PAIRS
    return _Call(queries, keys, _mask(queries, keys, subtree_end) if kept else None)


def _mask(queries: Tensor, keys: Tensor, subtree_end: Tensor) -> Tensor:
    """The rule inside a call, additive float32 [B, 1, Lq, Lk]."""
    q, k = queries[:, :, None], keys[:, None, :]
    seen = (k >= 0) & (k <= q) & (q < subtree_end[keys.clamp(min=0)][:, None, :])
    seen[:, :, 0] |= queries < 0
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, call: _Call, subtree_end: Tensor, scaling: float | None) -> Tensor:
    """One padded call. ``q`` [N, Hq, D], ``k`` [N, Hkv, D], ``v`` [N, Hkv, Dv] -> [B * Lq, Hq * Dv]."""
    mask = call.mask if call.mask is not None else _mask(call.queries, call.keys, subtree_end)
    keys = call.keys.clamp(min=0)
    groups = q.shape[1] // k.shape[1]
    query = _gather(q, call.queries)
    key, value = _gather(k, keys), _gather(v, keys)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(q.dtype), scale=scaling)
    return out.transpose(1, 2).reshape(call.queries.numel(), -1)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """[N, H, D] at [B, L] -> [B, H, L, D]. ``embedding`` because its backward pass is much faster than indexing's."""
    rows = F.embedding(index, x.reshape(x.shape[0], -1))
    return rows.view(*index.shape, x.shape[1], x.shape[2]).transpose(1, 2)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: [1, H, N, D] in, [1, N, H, D] out."""
    del attention_mask
    plan = _checked(tree_plan, module, query, dropout, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs: list[Tensor] = []
    for call in plan.calls:
        if call.mask is None and torch.is_grad_enabled():
            out = checkpoint(_attend, q, k, v, call, plan.subtree_end, scaling, use_reentrant=False)
            outputs.append(cast("Tensor", out))
        else:
            outputs.append(_attend(q, k, v, call, plan.subtree_end, scaling))
    out = F.embedding(plan.order, torch.cat(outputs))
    return out.view(1, q.shape[0], q.shape[1], -1), None


def _checked(
    plan: AttentionPlan | None, module: nn.Module, query: Tensor, dropout: float, kwargs: dict[str, Any]
) -> AttentionPlan:
    name = type(module).__name__
    if plan is None:
        raise ConfigError(f"{name} runs {ATTENTION!r} attention without a plan; use packed_logprobs, not the model")
    if query.shape[0] != 1 or query.shape[2] != plan.order.numel():
        raise ConfigError(f"{name}: the plan is for [1, {plan.order.numel()}] tokens, found {tuple(query.shape)[::2]}")
    if dropout > 0.0:
        raise ConfigError(f"{name} uses attention dropout {dropout}; set attention_dropout=0 to train on packed trees")
    for option in ("sliding_window", "softcap", "position_bias", "s_aux"):
        if kwargs.get(option) is not None:
            raise ConfigError(f"{name} uses {option}, which packed attention does not support; train it unpacked")
    return plan


AttentionInterface.register(ATTENTION, _attention_forward)
# No mask function is registered under this name on purpose: transformers then builds no mask at all.


def check_supported(model: nn.Module) -> None:
    """Raise ``ConfigError`` for a model whose attention cannot run on packed trees, saying why."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not hasattr(model, "get_decoder") or not hasattr(model, "get_output_embeddings"):
        raise ConfigError(f"{name} is not a transformers causal language model; packed training needs one")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{name} does not take attention functions from transformers' AttentionInterface")
    unusual = sorted({t for t in getattr(config, "layer_types", None) or () if t != "full_attention"})
    if unusual:
        raise ConfigError(f"{name} has {', '.join(unusual)} layers; packed trees need full attention in every layer")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ConfigError(
            f"{name} has a sliding window of {config.sliding_window}; packed trees need full attention. Set "
            "sliding_window=None if contexts stay below it."
        )


@contextmanager
def packed_attention(model: nn.Module) -> Iterator[None]:
    """Run the model's attention over packed trees inside the ``with`` block; the setting is restored afterwards."""
    check_supported(model)
    config = cast("Any", model).config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
