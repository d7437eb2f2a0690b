"""What a model's attention and positions allow: read from its configuration, for engines and packed training alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turntree.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention_problem", "capped_attention", "exact_positions", "text_config"]

_LAYERS = frozenset({"full_attention", "sliding_attention"})
_BY_LENGTH = frozenset({"dynamic", "longrope"})


def text_config(model: Any) -> Any:
    """The configuration of the language model; None for a module that is none of transformers'."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_problem(model: Any) -> str:
    """Why a model's attention is more than causal attention, full or in a sliding window; '' where it is not."""
    config = text_config(model)
    unusual = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if unusual:
        return f"{', '.join(unusual)} layers"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "attention sinks"
    if getattr(config, "use_bidirectional_attention", None):
        return "bidirectional attention"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "global_head_dim", None):
        return "keys and values that differ in shape by layer, or are shared by layers"
    return ""


def exact_positions(config: Any) -> int | None:
    """Number of positions within which a rotation does not depend on how long the text is; None without a bound.

    ``linear``, ``llama3`` and ``yarn`` scaling change the frequencies once and for all. ``dynamic`` and ``longrope``
    change them with the longest text of a forward pass once it is past this bound: keys computed before, or a row that
    lies beside others in one pass, would be rotated by other frequencies.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [rotary] if "rope_type" in rotary else [part for part in rotary.values() if isinstance(part, dict)]
    bounds = [_bound(config, kind) for kind in kinds if kind.get("rope_type") in _BY_LENGTH]
    return min(bounds, default=None)


def _bound(config: Any, kind: dict[str, Any]) -> int:
    own = kind.get("original_max_position_embeddings") if kind["rope_type"] == "longrope" else None
    found = own or getattr(config, "max_position_embeddings", None)
    if found is None:
        raise ConfigError(f"expected max_position_embeddings with {kind['rope_type']} positions, found none")
    return int(found)


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores are bounded by ``softcap * tanh(score / softcap)`` (Gemma 2): [B, H, Lq, D] in and out.

    ``mask``: bool (True is seen) or additive, broadcast to [B, H, Lq, Lk]; None is causal, the queries being the last
    of the keys. ``key`` and ``value`` may have fewer heads. The soft-max is in float32.
    """
    import torch

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(2, 3) * (scale / softcap)) * softcap
    if mask is None:
        queries, keys = scores.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(value.dtype) @ value
