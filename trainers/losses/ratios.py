"""Importance ratios at the level of tokens, turns or sequences, and levels by number of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses.occurrences import Occurrences, segment_shares, segment_sum
from turntree.trainers.surrogate import GRADIENTS, Band, RatioGradient, RatioLevel, TurnRatio, check_level

__all__ = ["ClipRange", "clip_range", "importance_ratio"]

ClipRange: TypeAlias = float | Tensor
"""One bound for all occurrences, or one for each [O]."""

_TOKEN_CLAMP = 20.0
_SEGMENT_CLAMP = 10.0


def importance_ratio(
    occurrences: Occurrences,
    *,
    level: RatioLevel,
    turn_ratio: TurnRatio = "geometric",
    gradient: RatioGradient = "straight_through",
    by_turns: Sequence[Band] = (),
) -> Tensor:
    """The ratio of each occurrence [O] at a level; all occurrences of a segment share one value.

    ``by_turns`` gives trajectories of few turns another level. Clamps follow the references: token log-ratios to
    +-20, turn and sequence log-ratios to at most 10 in the straight-through form; in the true-gradient form the tokens
    are clamped to +-20 before they are pooled, and the pool to at most 20.
    """
    if gradient not in GRADIENTS:
        raise ConfigError(f"ratio_gradient must be 'straight_through' or 'true', found {gradient!r}")
    log_ratio = _log_ratio(occurrences, level, turn_ratio, gradient)
    band = _band_of(occurrences, by_turns)
    for index, entry in enumerate(by_turns):
        if entry.ratio != level:
            other = _log_ratio(occurrences, entry.ratio, turn_ratio, gradient)
            log_ratio = torch.where(band == index, other, log_ratio)
    return log_ratio.exp()


def clip_range(
    occurrences: Occurrences, by_turns: Sequence[Band], *, clip_low: float, clip_high: float
) -> tuple[ClipRange, ClipRange]:
    """``clip_low`` and ``clip_high`` of each occurrence [O]; plain numbers without ``by_turns``."""
    if not by_turns:
        return clip_low, clip_high
    bounds = [*((b.clip_low, b.clip_high) for b in by_turns), (clip_low, clip_high)]
    low, high = occurrences.weight.new_tensor(bounds)[_band_of(occurrences, by_turns)].unbind(1)
    return low, high


def _band_of(occurrences: Occurrences, by_turns: Sequence[Band]) -> Tensor:
    """The first band that each occurrence's trajectory fits into [O]; ``len(by_turns)`` where it fits into none.

    Turns without an occurrence of positive weight do not count.
    """
    shares = segment_shares((occurrences.weight > 0).double(), occurrences.turn)
    turns = segment_sum(shares, occurrences.leaf, occurrences.n_leaves).round()
    limits = turns.new_tensor([band.max_turns for band in by_turns])
    return torch.bucketize(turns, limits)[occurrences.leaf]


def _log_ratio(occurrences: Occurrences, level: str, how: str, gradient: str) -> Tensor:
    """Clamped log-ratio of each occurrence [O]."""
    log_ratio = occurrences.logp - occurrences.old_logp
    if level == "token":
        return log_ratio.clamp(-_TOKEN_CLAMP, _TOKEN_CLAMP)
    segment, count = _segments(occurrences, level)
    if gradient == "true":
        pooled = _pooled(log_ratio.clamp(-_TOKEN_CLAMP, _TOKEN_CLAMP), segment, count, how)
        return pooled.clamp(max=_TOKEN_CLAMP)[segment]
    pooled = _pooled(log_ratio.detach(), segment, count, how)[segment]
    return (pooled + occurrences.logp - occurrences.logp.detach()).clamp(max=_SEGMENT_CLAMP)


def _segments(occurrences: Occurrences, level: str) -> tuple[Tensor, int]:
    """The segment of each occurrence [O] at level ``turn`` or ``sequence``, and how many there are."""
    check_level(level)
    if level == "turn":
        return occurrences.turn, occurrences.n_turns
    return occurrences.leaf, occurrences.n_leaves


def _pooled(values: Tensor, segment: Tensor, count: int, how: str) -> Tensor:
    """Mean or sum of ``values`` [O] in each segment, [count]."""
    total = segment_sum(values, segment, count)
    if how == "product":
        return total
    if how != "geometric":
        raise ConfigError(f"turn_ratio must be 'geometric' or 'product', found {how!r}")
    return total / segment_sum(torch.ones_like(values), segment, count).clamp(min=1.0)
