"""Importance ratios at the level of tokens, turns or sequences, and levels by number of turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses.occurrences import Occurrences, segment_shares, segment_sum

__all__ = [
    "LEVELS",
    "Band",
    "ClipRange",
    "RatioGradient",
    "RatioLevel",
    "TurnRatio",
    "clip_range",
    "importance_ratio",
    "make_bands",
]

RatioLevel = Literal["token", "turn", "sequence"]
LEVELS: tuple[RatioLevel, ...] = ("token", "turn", "sequence")
TurnRatio = Literal["geometric", "product"]
"""Ratio of a turn or sequence: exp of the mean, or of the sum, of its tokens' log-ratios."""
RatioGradient = Literal["straight_through", "true"]
"""``straight_through``: value sg[s] exp(lp - sg[lp]), each token carries its own gradient (GSPO-token).
``true``: the ratio is differentiated through all of its tokens."""
ClipRange: TypeAlias = float | Tensor
"""One bound for all occurrences, or one for each [O]."""

_TOKEN_CLAMP = 20.0
_SEGMENT_CLAMP = 10.0


@dataclass(frozen=True, slots=True)
class Band:
    """Level and clip range of trajectories with at most ``max_turns`` turns."""

    max_turns: int
    ratio: RatioLevel
    clip_low: float
    clip_high: float


def make_bands(
    entries: Sequence[Band | Mapping[str, Any]], *, ratio: RatioLevel, clip_low: float, clip_high: float
) -> tuple[Band, ...]:
    """Check the entries of ``by_turns``, smallest ``max_turns`` first; what an entry leaves out is as in the arguments.

    Raises ``ConfigError`` that names the entry: an unknown or missing key, a value out of range, or an order in which
    a band could never apply.
    """
    defaults = {"ratio": ratio, "clip_low": clip_low, "clip_high": clip_high}
    bands: list[Band] = []
    for index, entry in enumerate(entries):
        given = dataclasses.asdict(entry) if isinstance(entry, Band) else entry
        band = _band(given, defaults, f"by_turns[{index}]")
        if bands and band.max_turns <= bands[-1].max_turns:
            raise ConfigError(
                f"by_turns[{index}].max_turns={band.max_turns} is not above the {bands[-1].max_turns} before it, so "
                "that the entry would never apply; put the smallest first"
            )
        bands.append(band)
    return tuple(bands)


def _band(given: Any, defaults: Mapping[str, Any], name: str) -> Band:
    known = [f.name for f in dataclasses.fields(Band)]
    if not isinstance(given, Mapping) or not set(given) <= set(known) or "max_turns" not in given:
        raise ConfigError(f"{name}: expected max_turns and any of ratio, clip_low, clip_high, found {given!r}")
    values = {**defaults, **given}
    turns = values["max_turns"]
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise ConfigError(f"{name}.max_turns={turns!r}: expected a whole number of at least 1")
    check_level(values["ratio"], f"{name}.ratio")
    check_clip(values["clip_low"], values["clip_high"], f"{name}.")
    return Band(turns, values["ratio"], float(values["clip_low"]), float(values["clip_high"]))


def check_level(level: str, name: str = "ratio") -> None:
    """Raises ``ConfigError`` for a word that is no level."""
    if level not in LEVELS:
        raise ConfigError(f"{name} must be 'token', 'turn' or 'sequence', found {level!r}")


def check_clip(low: Any, high: Any, prefix: str = "") -> None:
    """Raises ``ConfigError`` for a range that no ratio can be clipped to."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in (low, high))
    if not numbers or not 0 <= low <= 1 or high < 0:
        raise ConfigError(
            f"{prefix}clip_low={low!r}, {prefix}clip_high={high!r}: expected 0 <= clip_low <= 1 (no ratio is "
            "below 0) and clip_high >= 0"
        )


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
    if gradient not in ("straight_through", "true"):
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
