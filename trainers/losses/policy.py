"""Policy losses: the clipped surrogate and the negative log-likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses.clipping import CLIPS, Clip, cispo, clip_binds, clipped_surrogate
from turntree.trainers.losses.occurrences import (
    AGGREGATIONS,
    Aggregation,
    Denominators,
    Occurrences,
    aggregate,
    segment_shares,
)
from turntree.trainers.losses.ratios import (
    Band,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    check_clip,
    check_level,
    clip_range,
    importance_ratio,
    make_bands,
)

__all__ = ["PolicyLoss", "check_surrogate", "nll", "policy_loss", "ratio_metrics"]


def _nothing() -> Tensor:
    return torch.zeros(())


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``loss`` is a scalar with a graph, this batch's share of the mini-batch's loss; the rest are detached shares
    of means, which add up over the packs of a mini-batch: occurrences clipped, occurrences held by the dual clip,
    old_logp - logp, and whatever else the loss wants to report, by name."""

    loss: Tensor
    clip_fraction: Tensor = field(default_factory=_nothing)
    clip_fraction_lower: Tensor = field(default_factory=_nothing)
    approx_kl: Tensor = field(default_factory=_nothing)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def policy_loss(
    occurrences: Occurrences,
    denominators: Denominators,
    *,
    ratio: RatioLevel = "token",
    turn_ratio: TurnRatio = "geometric",
    ratio_gradient: RatioGradient = "straight_through",
    clip: Clip = "hard",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    by_turns: Sequence[Band | Mapping[str, Any]] = (),
    aggregation: Aggregation = "token-mean",
) -> PolicyLoss:
    """The clipped surrogate at one ratio level, or at a level that depends on the number of turns.

    Sources: PPO arXiv 1707.06347 eq. 7; dual clip arXiv 1912.09729 eq. 5; GSPO arXiv 2507.18071 eqs. 5 and 15; AT2PO's
    turn ratio as in its published code (geometric mean); the kinds of ``clip`` as in :mod:`.clipping`. Raises
    ``ConfigError`` for an unknown option or an impossible combination (:func:`check_surrogate`).
    """
    bands = check_surrogate(
        ratio=ratio,
        turn_ratio=turn_ratio,
        ratio_gradient=ratio_gradient,
        clip=clip,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        by_turns=by_turns,
        aggregation=aggregation,
    )
    occ = occurrences.kept()
    r = importance_ratio(occ, level=ratio, turn_ratio=turn_ratio, gradient=ratio_gradient, by_turns=bands)
    low, high = clip_range(occ, bands, clip_low=clip_low, clip_high=clip_high)
    if clip == "cispo":
        values, clipped = cispo(r, occ.advantage, occ.logp, clip_low=low, clip_high=high)
        held = torch.zeros_like(clipped)
    else:
        values, clipped, held = clipped_surrogate(
            r, occ.advantage, clip_low=low, clip_high=high, dual_clip=dual_clip, clip=clip
        )
    if occ.importance is not None:
        values = values * occ.importance
    return PolicyLoss(
        loss=aggregate(values, occ, denominators, how=aggregation),
        clip_fraction=_token_mean(clipped.to(values.dtype), occ, denominators),
        clip_fraction_lower=_token_mean(held.to(values.dtype), occ, denominators),
        approx_kl=_token_mean(occ.old_logp - occ.logp, occ, denominators),
    )


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
) -> tuple[Band, ...]:
    """The bands of ``by_turns``, once every option and combination of :func:`policy_loss` makes sense.

    Raises ``ConfigError`` with the reason: a word that is not known, a number out of range, or an option that could
    have no effect beside the others.
    """
    check_level(ratio)
    check_clip(clip_low, clip_high)
    bands = make_bands(by_turns, ratio=ratio, clip_low=clip_low, clip_high=clip_high)
    if clip not in CLIPS:
        raise ConfigError(f"clip must be one of {', '.join(CLIPS)}, found {clip!r}")
    if turn_ratio not in ("geometric", "product"):
        raise ConfigError(f"turn_ratio must be 'geometric' or 'product', found {turn_ratio!r}")
    if ratio_gradient not in ("straight_through", "true"):
        raise ConfigError(f"ratio_gradient must be 'straight_through' or 'true', found {ratio_gradient!r}")
    if aggregation not in AGGREGATIONS:
        raise ConfigError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, found {aggregation!r}")
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


def nll(occurrences: Occurrences, denominators: Denominators, *, aggregation: Aggregation = "token-mean") -> PolicyLoss:
    """-A log pi, aggregated: weighted maximum likelihood, without ratio and clipping.

    With A = 1 it is supervised fine-tuning; with A = 1 on accepted trajectories and 0 on the others it is
    rejection-sampling fine-tuning, where the rejected ones count in the denominator unless their weight is 0; with
    other advantages it is REINFORCE.
    """
    occ = occurrences.kept()
    return PolicyLoss(
        loss=aggregate(-occ.advantage * occ.logp, occ, denominators, how=aggregation),
        approx_kl=_token_mean(occ.old_logp - occ.logp, occ, denominators),
    )


def ratio_metrics(
    occurrences: Occurrences,
    denominators: Denominators,
    *,
    level: RatioLevel,
    turn_ratio: TurnRatio = "geometric",
    clip: Clip = "hard",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    by_turns: Sequence[Band] = (),
) -> dict[str, Tensor]:
    """What the ratios are at one level, whichever the loss uses; detached, by name.

    ``ratio_moments_<level>`` [3]: sums of w, w r and w r^2, which add up over packs; the effective sample size as a
    share is m1^2 / (m0 m2), exactly 1 for unchanged weights. A turn weighs its mean omega, a sequence 1.
    ``ratio_extremes_<level>`` [2]: least and largest ratio, infinities without any. ``clip_fraction_<level>``: this
    batch's share of the weighted share of occurrences that would clip, were this the level of the loss.
    """
    with torch.no_grad():
        occ = occurrences.kept()
        r = importance_ratio(occ, level=level, turn_ratio=turn_ratio)
        low, high = clip_range(occ, by_turns, clip_low=clip_low, clip_high=clip_high)
        clipped = clip_binds(r, occ.advantage, clip_low=low, clip_high=high, clip=clip)
        weight = occ.weight
        if level == "turn":
            weight = segment_shares(weight, occ.turn)
        elif level == "sequence":
            weight = segment_shares(torch.ones_like(weight), occ.leaf)
        ends = r.new_tensor([torch.inf, -torch.inf]) if not len(r) else torch.stack([r.min(), r.max()])
        return {
            f"ratio_moments_{level}": torch.stack([weight.sum(), (weight * r).sum(), (weight * r * r).sum()]),
            f"ratio_extremes_{level}": ends,
            f"clip_fraction_{level}": _token_mean(clipped.to(r.dtype), occ, denominators),
        }


def _token_mean(values: Tensor, occurrences: Occurrences, denominators: Denominators) -> Tensor:
    return aggregate(values.detach(), occurrences, denominators, how="token-mean")
