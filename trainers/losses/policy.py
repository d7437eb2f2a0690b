"""Policy losses: the clipped surrogate and the negative log-likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turntree.trainers.losses.clipping import cispo, clip_binds, clipped_surrogate
from turntree.trainers.losses.occurrences import Denominators, Occurrences, aggregate, segment_shares
from turntree.trainers.losses.ratios import clip_range, importance_ratio
from turntree.trainers.surrogate import (
    Aggregation,
    Band,
    Clip,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    check_surrogate,
)

__all__ = ["PolicyLoss", "nll", "policy_loss", "ratio_metrics"]


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
