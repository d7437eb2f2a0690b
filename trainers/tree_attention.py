"""Attention over packed trees: exact, without an N x N tensor.

The rule: a query ``q`` sees a key ``k`` iff ``k <= q < subtree_end[k]`` (depth-first order makes this "k is on q's
path"), and in a layer with a sliding window of ``w`` iff also ``position[q] - position[k] < w``. A *plan* covers the
packed tokens by blocks (:mod:`turntree.trainers.tree_cover`); blocks of similar shape run as one padded call of
``scaled_dot_product_attention``. On a CPU, layers without a window attend whole runs where that costs less
(:mod:`turntree.trainers.tree_runs`). On a GPU larger packs run through FlexAttention, with the same rule as its
``mask_mod`` (:mod:`turntree.trainers.tree_flex`).

Models are not patched: :data:`ATTENTION` is registered with transformers' ``AttentionInterface``, and a forward pass
that carries a plan as the keyword argument ``tree_plan`` is packed; without one it is plain ``sdpa``, padding masks
included. (A switch around the forward pass would be off when gradient checkpointing repeats it in the backward pass.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turntree.agents.architecture import attention_problem, capped_attention
from turntree.errors import ConfigError
from turntree.trainers.tree_cover import Block, batches, cover, cover_cost, find_runs, trim
from turntree.trainers.tree_runs import Part, attend_runs, parts, parts_cost, takes

__all__ = [
    "ATTENTION",
    "AttentionPlan",
    "Cover",
    "check_supported",
    "enable_packed_attention",
    "plan_attention",
    "tree_mask_mod",
]

ATTENTION = "turntree_packed"
"""Name under which packed attention is registered with transformers."""

_log = logging.getLogger(__name__)

Kernel = Literal["auto", "blocks", "runs", "flex"]

# How many query-key pairs of a cover keep their mask and gathered keys for the backward pass (the other calls build
# them again), and from how many tokens on a GPU runs FlexAttention.
_KEPT_PAIRS = 1 << 24
_FLEX_TOKENS = 1024

# What a call costs on a CPU, in query-key pairs times the width of all heads.
_CALL_COST = 1 << 20


@dataclass(frozen=True, slots=True)
class _Call:
    """Blocks that run as one padded call: indices [B, Lq] and [B, Lk] into the pack, and the mask where kept.

    ``mask`` is an additive float32 [B, 1, Lq, Lk], or None where it is rebuilt by :func:`_mask`. Padded keys have
    index -1 and are never seen; padded queries repeat the block's last one (no soft-max is empty) and are not read.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Cover:
    """How the layers of one window run.

    ``order`` [N]: where each token's output lies among the calls' padded outputs; ``pairs``: query-key pairs computed;
    ``window``: None where every key on the path is seen.
    """

    calls: tuple[_Call, ...]
    order: Tensor
    pairs: int
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a pack's attention runs. ``subtree_end``, ``position``: int64 [N]; the rest is made where it is needed."""

    subtree_end: Tensor
    position: Tensor
    longest: int
    blocks: tuple[Block, ...]
    parts: tuple[Part, ...]
    kernel: Kernel
    _made: dict[Any, Any] = field(default_factory=dict)

    def cover(self, window: int | None = None) -> Cover:
        """The calls of layers with a sliding window (None: without one), made once."""
        window = self._window(window)
        if window not in self._made:
            self._made[window] = _make_cover(self, window)
        return cast("Cover", self._made[window])

    def block_mask(self, window: int | None = None) -> Any:
        """FlexAttention's ``BlockMask`` of these layers, made once."""
        from turntree.trainers.tree_flex import tree_block_mask

        key = ("flex", self._window(window))
        if key not in self._made:
            self._made[key] = tree_block_mask(self.subtree_end, self.position, window=key[1])
        return self._made[key]

    def by_runs(self, width: int, window: int | None = None) -> bool:
        """Whether heads of ``width`` numbers in all attend by runs rather than by blocks."""
        if self.kernel != "auto" or self._window(window) is not None:
            return self.kernel == "runs" and self._window(window) is None
        if ("runs", width) not in self._made:
            costs = [pairs * width + calls * _CALL_COST for pairs, calls in self._costs()]
            self._made["runs", width] = costs[0] < costs[1]
        return cast("bool", self._made["runs", width])

    def _costs(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return parts_cost(self.parts), cover_cost(self.blocks)

    def _window(self, window: int | None) -> int | None:
        return None if window is None or window >= self.longest else window


def tree_mask_mod(
    subtree_end: Tensor, position: Tensor | None = None, *, window: int | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as a FlexAttention ``mask_mod(batch, head, query, key) -> bool``. ``window`` needs ``position``."""

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        seen = (key <= query) & (query < subtree_end[key])
        if window is None or position is None:
            return seen
        return seen & (position[query] - position[key] < window)

    return mask_mod


def plan_attention(subtree_end: Tensor, predecessor: Tensor, *, kernel: Kernel | None = None) -> AttentionPlan:
    """Cover the packed tokens [N] by blocks and by parts. Memory grows with tokens and branchings, not with N^2.

    ``kernel``: ``blocks``, ``runs`` (blocks where a layer has a window or bounds its scores), ``flex``, or ``auto``,
    the cheaper of runs and blocks. Default: FlexAttention on a GPU for larger packs, ``auto`` elsewhere.
    Raises ``ValueError`` if the two columns are not those of depth-first trees.
    """
    ends, previous = subtree_end.tolist(), predecessor.tolist()
    runs = find_runs(ends, previous)
    position: list[int] = []
    for before in previous:
        position.append(position[before] + 1 if before >= 0 else 0)
    chosen = kernel or ("flex" if len(ends) >= _FLEX_TOKENS and _flex_is_right(subtree_end.device.type) else "auto")
    depth = torch.tensor(position, dtype=torch.int64, device=subtree_end.device)
    return AttentionPlan(
        subtree_end, depth, max(position, default=-1) + 1, tuple(cover(runs)), tuple(parts(runs)), chosen
    )


@functools.cache
def _flex_is_right(device: str) -> bool:
    """Whether FlexAttention gives what blocks give on this kind of device, forward and backward; tried once."""
    if device != "cuda":
        return False
    ends = torch.tensor([700] * 300 + [500] * 200 + [700] * 200, device=device)
    before = torch.arange(-1, 699, device=device)
    before[500] = 299
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, h, 700, 64, device=device, generator=generator, requires_grad=True) for h in (4, 2, 2))
    found: list[list[Tensor]] = []
    try:
        with torch.enable_grad():
            for kernel in ("blocks", "flex"):
                plan = plan_attention(ends, before, kernel=kernel)
                out, _ = _attention_forward(nn.Identity(), q, k, v, None, tree_plan=plan, sliding_window=256)
                found.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), (q, k, v))])
    except Exception as error:  # whatever the compiler raises, blocks do the work
        _log.warning("FlexAttention cannot be used here (%s); packed attention runs by blocks", error)
        return False
    gap = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))
    if not gap < 1e-2:  # TF32 products leave about 1e-3
        _log.warning("FlexAttention differs from attention by blocks by %.2g; packed attention runs by blocks", gap)
    return gap < 1e-2


def _make_cover(plan: AttentionPlan, window: int | None) -> Cover:
    blocks = plan.blocks if window is None else [trim(block, window) for block in plan.blocks]
    groups = list(batches(blocks))
    calls = tuple(_calls(groups, plan, window))
    order = torch.empty(len(plan.subtree_end), dtype=torch.int64)
    offset = 0
    for group, call in zip(groups, calls):
        length = call.queries.shape[1]
        for row, block in enumerate(group):
            first = offset + row * length
            order[block.start : block.stop] = torch.arange(first, first + block.queries)
        offset += call.queries.numel()
    pairs = sum(c.queries.numel() * c.keys.shape[1] for c in calls)
    return Cover(calls, order.to(plan.subtree_end.device), pairs, window)


def _calls(groups: Sequence[Sequence[Block]], plan: AttentionPlan, window: int | None) -> Iterator[_Call]:
    kept = 0
    for group in groups:
        queries, keys = (index.to(plan.subtree_end.device) for index in _indices(group))
        pairs = queries.numel() * keys.shape[1]
        keep = kept + pairs <= _KEPT_PAIRS
        kept += pairs if keep else 0
        yield _Call(queries, keys, _mask(queries, keys, plan, window) if keep else None)


def _indices(group: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """The padded queries [B, Lq] and keys [B, Lk] of a call."""
    longest, widest = max(b.queries for b in group), max(b.keys for b in group)
    queries = torch.empty((len(group), longest), dtype=torch.int64)
    keys = torch.full((len(group), widest), -1, dtype=torch.int64)
    for row, block in enumerate(group):
        queries[row] = torch.arange(block.start, block.start + longest).clamp(max=block.stop - 1)
        spans = [*block.ancestors, (block.first_key, block.stop)]
        keys[row, : block.keys] = torch.cat([torch.arange(start, stop) for start, stop in spans])
    return queries, keys


def _mask(queries: Tensor, keys: Tensor, plan: AttentionPlan, window: int | None) -> Tensor:
    """The rule inside a call, additive float32 [B, 1, Lq, Lk]."""
    q, k = queries[:, :, None], keys.clamp(min=0)[:, None, :]
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    seen = tree_mask_mod(plan.subtree_end, plan.position, window=window)(zero, zero, q, k) & (keys[:, None, :] >= 0)
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


@dataclass(frozen=True, slots=True)
class _Scores:
    """What a model does to its scores: the factor (None: 1 / sqrt(D)), and the bound of Gemma 2."""

    scaling: float | None
    softcap: float | None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, plan: AttentionPlan, window: int | None, scores: _Scores
) -> Tensor:
    """One padded call. ``q`` [N, Hq, D], ``k`` [N, Hkv, D], ``v`` [N, Hkv, Dv] -> [B * Lq, Hq * Dv]."""
    mask = call.mask if call.mask is not None else _mask(call.queries, call.keys, plan, window)
    keys = call.keys.clamp(min=0)
    query, key, value = _gather(q, call.queries), _gather(k, keys), _gather(v, keys)
    if scores.softcap is not None:
        out = capped_attention(query, key, value, mask, scaling=scores.scaling, softcap=scores.softcap)
    else:
        groups = q.shape[1] // k.shape[1]
        native = groups > 1 and q.device.type == "cpu"  # elsewhere grouped heads under a mask take the slowest kernel
        if groups > 1 and not native:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask.to(q.dtype), scale=scores.scaling, enable_gqa=native
        )
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
    scores = _Scores(kwargs.get("scaling"), kwargs.get("softcap"))
    if tree_plan is None:
        _check_mask(type(module).__name__, query, attention_mask)
        if scores.softcap is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        _check_options(type(module).__name__, kwargs)
        out = capped_attention(query, key, value, attention_mask, scaling=scores.scaling, softcap=scores.softcap)
        return out.transpose(1, 2), None
    _check_call(tree_plan, type(module).__name__, query, kwargs)
    window = kwargs.get("sliding_window")
    if tree_plan.kernel == "flex":
        from turntree.trainers.tree_flex import flex_attend

        mask = tree_plan.block_mask(window)
        return flex_attend(query, key, value, mask, scaling=scores.scaling, softcap=scores.softcap), None
    if (
        scores.softcap is None
        and takes(query, key, value)
        and tree_plan.by_runs(query.shape[1] * query.shape[3], window)
    ):
        return attend_runs(query, key, value, tree_plan.parts, scaling=scores.scaling), None
    return _run_blocks(tree_plan, tree_plan.cover(window), query, key, value, scores), None


def _run_blocks(
    plan: AttentionPlan, cover: Cover, query: Tensor, key: Tensor, value: Tensor, scores: _Scores
) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs: list[Tensor] = []
    for call in cover.calls:
        arguments = (q, k, v, call, plan, cover.window, scores)
        # Capped scores are [B, H, Lq, Lk]: they are computed again rather than kept.
        if torch.is_grad_enabled() and (call.mask is None or scores.softcap is not None):
            outputs.append(cast("Tensor", checkpoint(_attend, *arguments, use_reentrant=False)))
        else:
            outputs.append(_attend(*arguments))
    return F.embedding(cover.order, torch.cat(outputs)).view(1, q.shape[0], q.shape[1], -1)


def _check_mask(name: str, query: Tensor, mask: Tensor | None) -> None:
    """A mask of one number for many tokens is that of a packed pass, whose plan has got lost on its way here."""
    if query.shape[2] > 1 and mask is not None and mask.numel() == 1:
        raise ConfigError(
            f"{name} is not given the keyword arguments of the model's forward pass, one of which is the plan of the "
            "pack; packed training needs a model that hands them on"
        )


def _check_call(plan: AttentionPlan, name: str, query: Tensor, options: dict[str, Any]) -> None:
    tokens = len(plan.subtree_end)
    if query.shape[0] != 1 or query.shape[2] != tokens:
        raise ConfigError(f"{name}: the plan is for [1, {tokens}] tokens, found {tuple(query.shape)[::2]}")
    _check_options(name, options)


def _check_options(name: str, options: dict[str, Any]) -> None:
    if options.get("dropout"):
        raise ConfigError(
            f"{name} uses attention dropout {options['dropout']}; set attention_dropout=0 to train on packed trees"
        )
    for option in ("position_bias", "s_aux"):
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
    if problem := attention_problem(model):
        raise ConfigError(f"{name} has {problem}; packed trees need full attention or a sliding window in every layer")


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
