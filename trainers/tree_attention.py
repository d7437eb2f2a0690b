"""Attention over packed trees: exact, without an N x N tensor.

The rule: a query ``q`` sees a key ``k`` iff ``k <= q < subtree_end[k]`` (depth-first order makes this "k is on q's
path"). A *plan* covers the packed tokens by blocks: some queries and a superset of the keys they may see; the rule
inside each block decides, so any cover is exact and the cover only decides the cost. Blocks of similar shape run as one
padded call of ``scaled_dot_product_attention``.

Models are not patched: :data:`ATTENTION` is registered with transformers' ``AttentionInterface``, and a forward pass
that carries a plan as the keyword argument ``tree_plan`` is packed; without one it is plain ``sdpa``, padding masks
included. (A switch around the forward pass would be off when gradient checkpointing repeats it in the backward pass.)
For FlexAttention, :func:`tree_mask_mod` is the same rule as a ``mask_mod``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turntree.errors import ConfigError

__all__ = [
    "ATTENTION",
    "AttentionPlan",
    "check_supported",
    "enable_packed_attention",
    "plan_attention",
    "tree_mask_mod",
]

ATTENTION = "turntree_packed"
"""Name under which packed attention is registered with transformers."""

# Costs of the cover, counted in query-key pairs: one more block, and one more key to gather. Then limits: the longest
# block, the largest padded call, and how many pairs of a plan keep their mask and gathered keys for the backward pass
# (the other calls build them again).
_BLOCK_COST = 2_048
_KEY_COST = 32
_MAX_QUERIES = 512
_CALL_PAIRS = 1 << 20
_KEPT_PAIRS = 1 << 24

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
    index -1 and are never seen; padded queries repeat the block's last one (no soft-max is empty) and are not read.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a pack's attention runs.

    ``order`` [N]: where each token's output lies among the calls' padded outputs; ``pairs``: query-key pairs computed.
    """

    calls: tuple[_Call, ...]
    order: Tensor
    subtree_end: Tensor
    pairs: int


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
    groups = list(_batches(_cover(_runs(ends, previous))))
    calls = tuple(_calls(groups, subtree_end))
    order = torch.empty(len(ends), dtype=torch.int64)
    offset = 0
    for group, call in zip(groups, calls):
        length = call.queries.shape[1]
        for row, block in enumerate(group):
            first = offset + row * length
            order[block.start : block.stop] = torch.arange(first, first + block.queries)
        offset += call.queries.numel()
    pairs = sum(c.queries.numel() * c.keys.shape[1] for c in calls)
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
            if parent >= 0 and (runs[parent].stop != before + 1 or end > runs[parent].subtree_end):
                raise ValueError(f"token {i}: branches inside a chain of tokens; packed trees branch at its end")
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


def _cost(queries: int, keys: int) -> int:
    return queries * keys + _KEY_COST * keys + _BLOCK_COST


def _cover(runs: Sequence[_Run]) -> list[_Block]:
    """The cheapest of, bottom up: a whole subtree as one block, or its top run alone and covers of its children."""
    splits: dict[int, list[_Block]] = {}
    costs: list[int] = [0] * len(runs)
    for i in range(len(runs) - 1, -1, -1):
        run = runs[i]
        above, width, own = _size(run.ancestors), run.subtree_end - run.start, run.stop - run.start
        whole, split = _cost(width, above + width), _cost(own, above + own)
        joined, extra = _join([runs[c] for c in run.children], [costs[c] for c in run.children])
        if run.children and (width > _MAX_QUERIES or split + extra < whole):
            splits[run.start] = joined
            costs[i] = split + extra
        else:
            costs[i] = whole
    roots = [i for i, run in enumerate(runs) if run.parent < 0]
    by_start = {run.start: run for run in runs}
    blocks: list[_Block] = []
    stack, _ = _join([runs[i] for i in roots], [costs[i] for i in roots])
    while stack:
        block = stack.pop()
        run = by_start[block.start]
        if run.start in splits and block.stop == run.subtree_end:
            blocks += _pieces(run.start, run.stop, run.ancestors)
            stack += splits[run.start]
        else:
            blocks += _pieces(block.start, block.stop, block.ancestors)
    return blocks


def _join(siblings: Sequence[_Run], costs: Sequence[int]) -> tuple[list[_Block], int]:
    """Put neighbouring subtrees that share their ancestors into one block where that is cheaper."""
    out: list[_Block] = []
    total = 0
    last = 0
    for run, cost in zip(siblings, costs):
        if out and out[-1].stop == run.start:
            width = run.subtree_end - out[-1].start
            together = _cost(width, width + _size(run.ancestors))
            if width <= _MAX_QUERIES and together <= last + cost:
                out[-1] = _Block(out[-1].start, run.subtree_end, out[-1].start, run.ancestors)
                total += together - last
                last = together
                continue
        out.append(_Block(run.start, run.subtree_end, run.start, run.ancestors))
        total += cost
        last = cost
    return out, total


def _pieces(first: int, end: int, ancestors: tuple[Span, ...]) -> Iterator[_Block]:
    for start in range(first, end, _MAX_QUERIES):
        yield _Block(start, min(start + _MAX_QUERIES, end), first, ancestors)


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


def _calls(groups: Sequence[Sequence[_Block]], subtree_end: Tensor) -> Iterator[_Call]:
    kept = 0
    for group in groups:
        queries, keys = _indices(group)
        queries, keys = queries.to(subtree_end.device), keys.to(subtree_end.device)
        pairs = queries.numel() * keys.shape[1]
        keep = kept + pairs <= _KEPT_PAIRS
        kept += pairs if keep else 0
        yield _Call(queries, keys, _mask(queries, keys, subtree_end) if keep else None)


def _indices(group: Sequence[_Block]) -> tuple[Tensor, Tensor]:
    """The padded queries [B, Lq] and keys [B, Lk] of a call."""
    longest, widest = max(b.queries for b in group), max(b.keys for b in group)
    queries = torch.empty((len(group), longest), dtype=torch.int64)
    keys = torch.full((len(group), widest), -1, dtype=torch.int64)
    for row, block in enumerate(group):
        queries[row] = torch.arange(block.start, block.start + longest).clamp(max=block.stop - 1)
        spans = [*block.ancestors, (block.first_key, block.stop)]
        keys[row, : block.keys] = torch.cat([torch.arange(start, stop) for start, stop in spans])
    return queries, keys


def _mask(queries: Tensor, keys: Tensor, subtree_end: Tensor) -> Tensor:
    """The rule inside a call, additive float32 [B, 1, Lq, Lk]."""
    q, k = queries[:, :, None], keys[:, None, :]
    seen = (k >= 0) & (k <= q) & (q < subtree_end[keys.clamp(min=0)][:, None, :])
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
    tree_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: [1, H, N, D] in, [1, N, H, D] out."""
    if tree_plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    _check_call(tree_plan, type(module).__name__, query, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scaling = kwargs.get("scaling")
    outputs: list[Tensor] = []
    for call in tree_plan.calls:
        if call.mask is None and torch.is_grad_enabled():
            out = checkpoint(_attend, q, k, v, call, tree_plan.subtree_end, scaling, use_reentrant=False)
            outputs.append(cast("Tensor", out))
        else:
            outputs.append(_attend(q, k, v, call, tree_plan.subtree_end, scaling))
    out = F.embedding(tree_plan.order, torch.cat(outputs))
    return out.view(1, q.shape[0], q.shape[1], -1), None


def _check_call(plan: AttentionPlan, name: str, query: Tensor, options: dict[str, Any]) -> None:
    if query.shape[0] != 1 or query.shape[2] != plan.order.numel():
        raise ConfigError(f"{name}: the plan is for [1, {plan.order.numel()}] tokens, found {tuple(query.shape)[::2]}")
    if options.get("dropout"):
        raise ConfigError(
            f"{name} uses attention dropout {options['dropout']}; set attention_dropout=0 to train on packed trees"
        )
    for option in ("sliding_window", "softcap", "position_bias", "s_aux"):
        if options.get(option) is not None:
            raise ConfigError(f"{name} uses {option}, which packed attention does not support; train it unpacked")


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


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


def enable_packed_attention(model: nn.Module) -> None:
    """Let the model take plans; forward passes without one stay what they were under ``sdpa``.

    Raises ``ConfigError`` for a model that cannot (:func:`check_supported`) or that runs another attention.
    """
    config = getattr(model, "config", None)
    current = getattr(config, "_attn_implementation", None)
    if current == ATTENTION:
        return
    check_supported(model)
    if current not in ("sdpa", "eager"):
        raise ConfigError(
            f"{type(model).__name__} was loaded with attn_implementation={current!r}; packed training needs 'sdpa'"
        )
    cast("Any", config)._attn_implementation = ATTENTION
