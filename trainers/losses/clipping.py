"""Clipped surrogates: what keeps an update near the policy that sampled, and what gradient clipped tokens keep."""

from __future__ import annotations

import torch
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses.ratios import ClipRange
from turntree.trainers.surrogate import Clip

__all__ = ["cispo", "clip_binds", "clipped_surrogate"]


def clipped_surrogate(
    ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: ClipRange,
    clip_high: ClipRange,
    dual_clip: float | None = None,
    clip: Clip = "hard",
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-r A, -clip(r, 1 - low, 1 + high) A); with a dual clip c, at most -c A where A < 0.

    All [O]: the values, where the clip binds (bool), and where the dual clip binds (bool). ``clip`` changes gradients
    only: a soft bound b is b r / sg[r] (arXiv 2508.07629 on both sides, arXiv 2510.14545 above only). Where the dual
    clip binds there is no gradient. Raises ``ConfigError`` for another ``clip`` or a dual clip of at most 1.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ConfigError(f"dual_clip must be above 1 or None, found {dual_clip}")
    if clip not in ("hard", "soft", "soft_upper"):
        raise ConfigError(f"a clipped surrogate is 'hard', 'soft' or 'soft_upper', found {clip!r}")
    unit = _unit(ratio)
    lower = (1.0 - clip_low) * (unit if clip == "soft" else unit.detach())
    upper = (1.0 + clip_high) * (unit if clip != "hard" else unit.detach())
    bounded = _bounded(ratio, lower, upper)
    values = torch.maximum(-advantage * ratio, -advantage * bounded)
    clipped = clip_binds(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return values, clipped, torch.zeros_like(clipped)
    ceiling = -advantage * dual_clip
    negative = advantage < 0
    held = negative & (values > ceiling)
    return torch.where(negative, torch.minimum(values, ceiling), values), clipped, held


def cispo(
    ratio: Tensor, advantage: Tensor, logp: Tensor, *, clip_low: ClipRange, clip_high: ClipRange
) -> tuple[Tensor, Tensor]:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi, and where the ratio was clipped (bool); all [O].

    CISPO, arXiv 2506.13585, Eqs. 4 and 5: no token loses its gradient. ``clip_low=1`` leaves the weight unbounded
    below, as the paper does.
    """
    clipped = clip_binds(ratio, advantage, clip_low=clip_low, clip_high=clip_high, clip="cispo")
    return -_bounded(ratio, 1.0 - clip_low, 1.0 + clip_high).detach() * advantage * logp, clipped


def clip_binds(
    ratio: Tensor, advantage: Tensor, *, clip_low: ClipRange, clip_high: ClipRange, clip: Clip = "hard"
) -> Tensor:
    """Where clipping changes the objective [O], bool: ratios out of range, on the side where A would push them
    further; for ``cispo`` on either side."""
    below, above = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    if clip == "cispo":
        return below | above
    return (below & (advantage < 0)) | (above & (advantage > 0))


def _bounded(ratio: Tensor, lower: ClipRange, upper: ClipRange) -> Tensor:
    """``ratio``, or the bound it is beyond, with the gradient of what is taken."""
    return torch.where(ratio < lower, lower, torch.where(ratio > upper, upper, ratio))


def _unit(ratio: Tensor) -> Tensor:
    """r / sg[r]: value 1, gradient d log r; without a gradient where r is too small to be divided by."""
    safe = torch.where(ratio.detach() >= torch.finfo(ratio.dtype).tiny, ratio, 1.0)
    return safe / safe.detach()
