"""The options of the clipped surrogate, and which of them go together.

Plain Python, so that a configuration is checked without loading torch; the losses themselves are in
:mod:`turntree.trainers.losses`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from turntree.errors import ConfigError

__all__ = [
    "AGGREGATIONS",
    "CLIPS",
    "GRADIENTS",
    "LEVELS",
    "TURN_RATIOS",
    "Aggregation",
    "Band",
    "Clip",
    "RatioGradient",
    "RatioLevel",
    "TurnRatio",
    "check_level",
    "check_surrogate",
    "make_bands",
]

RatioLevel = Literal["token", "turn", "sequence"]
"""What a ratio is taken over."""
LEVELS: tuple[RatioLevel, ...] = get_args(RatioLevel)
"""Every level."""
TurnRatio = Literal["geometric", "product"]
"""Ratio of a turn or sequence: exp of the mean, or of the sum, of its tokens' log-ratios."""
TURN_RATIOS: tuple[TurnRatio, ...] = get_args(TurnRatio)
"""How a turn's ratio is formed."""
RatioGradient = Literal["straight_through", "true"]
"""``straight_through``: value sg[s] exp(lp - sg[lp]), each token carries its own gradient (GSPO-token).
``true``: the ratio is differentiated through all of its tokens."""
GRADIENTS: tuple[RatioGradient, ...] = get_args(RatioGradient)
"""How a shared ratio is differentiated."""
Clip = Literal["hard", "soft", "soft_upper", "cispo"]
"""``hard``: no gradient where the clip binds (PPO). ``soft``: the same value, with the gradient bound x d log r
(GPPO). ``soft_upper``: soft above, hard below (AEPO). ``cispo``: the clipped ratio is a constant weight of
-A log pi."""
CLIPS: tuple[Clip, ...] = get_args(Clip)
"""Kinds of clipping."""
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "turn-mean"]
"""How losses of tokens become one number."""
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
"""Every aggregation."""


def check_surrogate(
    *,
    ratio: RatioLevel,
    turn_ratio: TurnRatio,
    ratio_gradient: RatioGradient,
    clip: Clip,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    by_turns: Sequence[Band | Mapping[str, Any]],
    aggregation: Aggregation,
    sum_norm: float | None = None,
) -> tuple[Band, ...]:
    """The bands of ``by_turns``, once every option and combination of the clipped surrogate makes sense.

    Raises ``ConfigError`` with the reason: a word that is not known, a number out of range, or an option that could
    have no effect beside the others.
    """
    check_level(ratio)
    _check_clip(clip_low, clip_high)
    bands = make_bands(by_turns, ratio=ratio, clip_low=clip_low, clip_high=clip_high)
    if clip not in CLIPS:
        raise ConfigError(f"clip must be one of {', '.join(CLIPS)}, found {clip!r}")
    if turn_ratio not in TURN_RATIOS:
        raise ConfigError(f"turn_ratio must be 'geometric' or 'product', found {turn_ratio!r}")
    if ratio_gradient not in GRADIENTS:
        raise ConfigError(f"ratio_gradient must be 'straight_through' or 'true', found {ratio_gradient!r}")
    _check_aggregation(aggregation, sum_norm)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ConfigError(f"dual_clip must be above 1 or None, found {dual_clip}")
    pooled = any(level != "token" for level in (ratio, *(band.ratio for band in bands)))
    if turn_ratio == "product" and not pooled:
        raise ConfigError(
            "turn_ratio=product pools the tokens of a turn or sequence; with ratio=token there is no pool"
        )
    if ratio_gradient == "true" and not pooled:
        raise ConfigError("ratio_gradient=true differentiates a pooled ratio; with ratio=token both forms are the same")
    if clip == "cispo" and ratio_gradient == "true":
        raise ConfigError("clip=cispo takes the ratio as a constant weight; ratio_gradient=true would have no effect")
    if clip == "cispo" and dual_clip is not None:
        raise ConfigError("clip=cispo bounds the weight by 1 + clip_high on its own; set dual_clip to None")
    return bands


def _check_aggregation(aggregation: str, sum_norm: float | None) -> None:
    if aggregation not in AGGREGATIONS:
        raise ConfigError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, found {aggregation!r}")
    if sum_norm is not None and aggregation != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"sum_norm={sum_norm} divides seq-mean-token-sum-norm only; aggregation={aggregation} has a denominator of "
            "its own"
        )
    if sum_norm is not None and not sum_norm > 0:
        raise ConfigError(f"sum_norm must be positive or None, found {sum_norm}")


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
    _check_clip(values["clip_low"], values["clip_high"], f"{name}.")
    return Band(turns, values["ratio"], float(values["clip_low"]), float(values["clip_high"]))


def check_level(level: str, name: str = "ratio") -> None:
    """Raises ``ConfigError`` for a word that is no level."""
    if level not in LEVELS:
        raise ConfigError(f"{name} must be 'token', 'turn' or 'sequence', found {level!r}")


def _check_clip(low: Any, high: Any, prefix: str = "") -> None:
    """Raises ``ConfigError`` for a range that no ratio can be clipped to."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in (low, high))
    if not numbers or not 0 <= low <= 1 or high < 0:
        raise ConfigError(
            f"{prefix}clip_low={low!r}, {prefix}clip_high={high!r}: expected 0 <= clip_low <= 1 (no ratio is "
            "below 0) and clip_high >= 0"
        )
