"""Policy losses as pure functions of occurrences: 1-D tensors in, a small typed result out.

An occurrence is one sampled token of one trajectory; ``O`` of them are a batch. A turn that several trajectories share
occurs once in each, with a declared weight omega. Ratio level, clipping, KL estimator and aggregation are separate
arguments, so that an algorithm is a combination of them:

- GRPO, PPO, DAPO: token ratios (verl ``compute_policy_loss_vanilla``); dual clip after Ye et al. 2020.
- GSPO: sequence ratios (arXiv 2507.18071); AT2PO: turn ratios, both length-normalised.

Occurrences of weight 0 are inert: they enter no mean, ratio, metric or gradient, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.packing import Pack, column, table

__all__ = [
    "Aggregation",
    "Denominators",
    "KLEstimator",
    "Occurrences",
    "PolicyLoss",
    "RatioGradient",
    "RatioLevel",
    "TurnRatio",
    "aggregate",
    "clipped_surrogate",
    "importance_ratio",
    "kl_estimate",
    "policy_loss",
    "ratio_moments",
]

RatioLevel = Literal["token", "turn", "sequence"]
TurnRatio = Literal["geometric", "product"]
"""Ratio of a turn or sequence: exp of the mean, or of the sum, of its tokens' log-ratios."""
RatioGradient = Literal["straight_through", "true"]
"""``straight_through``: value sg[s] exp(lp - sg[lp]), each token carries its own gradient (GSPO-token).
``true``: the ratio is differentiated through all of its tokens."""
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLEstimator = str
"""``k1``, ``k2`` (= ``mse``), ``k3`` (= ``low_var_kl``), ``abs``; with a ``+``: that value, the gradient of ``k2``."""

_TOKEN_CLAMP = 20.0
_SEGMENT_CLAMP = 10.0


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Flat occurrences of sampled tokens.

    ``logp``, ``old_logp``, ``advantage``, ``weight`` [O] float; ``leaf`` [O] int64 in [0, n_leaves); ``turn`` [O]
    int64 in [0, n_turns), unique per (leaf, turn). ``ref_logp``, ``sampler_logp``, ``entropy`` and ``importance`` (a
    detached factor per token) are [O] float or None.
    """

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    weight: Tensor
    leaf: Tensor
    turn: Tensor
    n_leaves: int
    n_turns: int
    ref_logp: Tensor | None = None
    sampler_logp: Tensor | None = None
    entropy: Tensor | None = None
    importance: Tensor | None = None

    def __post_init__(self) -> None:
        expected = tuple(self.logp.shape)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor) and (tuple(value.shape) != expected or value.ndim != 1):
                raise ValueError(
                    f"{item.name} has shape {tuple(value.shape)}; all columns of occurrences need the shape of logp, "
                    f"{expected}, and one dimension"
                )

    def kept(self) -> Occurrences:
        """Without the occurrences of weight 0."""
        keep = self.weight > 0
        if bool(keep.all()):
            return self
        tensors = {f.name: v[keep] for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **cast("dict[str, Any]", tensors))


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a mini-batch's losses are divided by, summed over all of its packs (and ranks) before the first loss.

    ``weight``: sum of omega; ``rows``: trajectories with a positive sum of omega; ``width``: the constant of
    ``seq-mean-token-sum-norm`` (by default the largest number of sampled tokens of a trajectory).
    """

    weight: float
    rows: float
    width: float

    @classmethod
    def of(cls, packs: Iterable[Pack], *, width: float | None = None) -> Denominators:
        """Over all packs of a mini-batch."""
        parts = [
            cls.of_occurrences(
                column(p, "occurrences", "weight"), column(p, "occurrences", "leaf"), n_leaves=len(table(p, "rows"))
            )
            for p in packs
        ]
        longest = max((p.width for p in parts), default=0.0)
        total = cls(sum((p.weight for p in parts), 0.0), sum((p.rows for p in parts), 0.0), longest)
        return total if width is None else replace(total, width=width)

    @classmethod
    def of_occurrences(cls, weight: Tensor, leaf: Tensor, *, n_leaves: int) -> Denominators:
        """Of one table of occurrences."""
        sums = _segment_sum(weight.double(), leaf, n_leaves)
        counts = _segment_sum((weight > 0).double(), leaf, n_leaves)
        longest = float(counts.max()) if n_leaves else 0.0
        return cls(float(sums.sum()), float((sums > 0).sum()), longest)

    def write(self, pack: Pack) -> None:
        """Store in a pack under ``denominators``, where the objective looks for them."""
        values = {f.name: torch.tensor(getattr(self, f.name), dtype=torch.float64) for f in fields(self)}
        pack.set("denominators", TensorDict(values, batch_size=[]))

    @classmethod
    def read(cls, pack: Pack) -> Denominators:
        """The inverse of :meth:`write`; without stored ones, those of this pack alone."""
        stored = cast("TensorDict | None", pack.get("denominators", None))
        if stored is None:
            return cls.of([pack])
        return cls(**{f.name: float(cast("Tensor", stored.get(f.name))) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``loss`` is a scalar with a graph, this batch's share of the mini-batch's loss; the rest are detached shares
    of weighted means: occurrences clipped, occurrences held by the dual clip, and old_logp - logp."""

    loss: Tensor
    clip_fraction: Tensor
    clip_fraction_lower: Tensor
    approx_kl: Tensor


def policy_loss(
    occurrences: Occurrences,
    denominators: Denominators,
    *,
    ratio: RatioLevel = "token",
    turn_ratio: TurnRatio = "geometric",
    ratio_gradient: RatioGradient = "straight_through",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
) -> PolicyLoss:
    """The clipped surrogate at one ratio level.

    Sources: PPO arXiv 1707.06347 eq. 7; dual clip arXiv 1912.09729 eq. 5; GSPO arXiv 2507.18071 eqs. 5 and 15; AT2PO's
    turn ratio as in its published code (geometric mean). Raises ``ConfigError`` for an unknown option.
    """
    occ = occurrences.kept()
    r = importance_ratio(occ, level=ratio, turn_ratio=turn_ratio, gradient=ratio_gradient)
    values, clipped, held = clipped_surrogate(
        r, occ.advantage, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    if occ.importance is not None:
        values = values * occ.importance

    def mean(x: Tensor) -> Tensor:
        return aggregate(x.detach(), occ, denominators, how="token-mean")

    return PolicyLoss(
        loss=aggregate(values, occ, denominators, how=aggregation),
        clip_fraction=mean(clipped.to(values.dtype)),
        clip_fraction_lower=mean(held.to(values.dtype)),
        approx_kl=mean(occ.old_logp - occ.logp),
    )


def importance_ratio(
    occurrences: Occurrences,
    *,
    level: RatioLevel,
    turn_ratio: TurnRatio = "geometric",
    gradient: RatioGradient = "straight_through",
) -> Tensor:
    """The ratio of each occurrence [O] at a level; all occurrences of a segment share one value.

    Clamps follow the references: token log-ratios to +-20, turn and sequence log-ratios to at most 10 in the
    straight-through form; in the true-gradient form the tokens are clamped to +-20 before their mean.
    """
    log_ratio = occurrences.logp - occurrences.old_logp
    if level == "token":
        return log_ratio.clamp(-_TOKEN_CLAMP, _TOKEN_CLAMP).exp()
    segment, count = _segments(occurrences, level)
    if gradient == "true":
        return _pooled(log_ratio.clamp(-_TOKEN_CLAMP, _TOKEN_CLAMP), segment, count, turn_ratio)[segment].exp()
    if gradient != "straight_through":
        raise ConfigError(f"ratio_gradient must be 'straight_through' or 'true', found {gradient!r}")
    pooled = _pooled(log_ratio.detach(), segment, count, turn_ratio)[segment]
    return (pooled + occurrences.logp - occurrences.logp.detach()).clamp(max=_SEGMENT_CLAMP).exp()


def _segments(occurrences: Occurrences, level: str) -> tuple[Tensor, int]:
    if level == "turn":
        return occurrences.turn, occurrences.n_turns
    if level == "sequence":
        return occurrences.leaf, occurrences.n_leaves
    raise ConfigError(f"ratio must be 'token', 'turn' or 'sequence', found {level!r}")


def _segment_sum(values: Tensor, segment: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, segment, values)


def _pooled(values: Tensor, segment: Tensor, count: int, how: str) -> Tensor:
    """Mean or sum of ``values`` [O] in each segment, [count]."""
    total = _segment_sum(values, segment, count)
    if how == "product":
        return total
    if how != "geometric":
        raise ConfigError(f"turn_ratio must be 'geometric' or 'product', found {how!r}")
    return total / _segment_sum(torch.ones_like(values), segment, count).clamp(min=1.0)


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-r A, -clip(r, 1 - low, 1 + high) A); with a dual clip c, at most -c A where A < 0.

    All [O]: the values, where the clip binds (bool), and where the dual clip binds (bool).
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ConfigError(f"dual_clip must be above 1 or None, found {dual_clip}")
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    values = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is None:
        return values, clipped, torch.zeros_like(clipped)
    ceiling = -advantage * dual_clip
    negative = advantage < 0
    held = negative & (values > ceiling)
    return torch.where(negative, torch.minimum(values, ceiling), values), clipped, held


def kl_estimate(logp: Tensor, ref_logp: Tensor, *, kind: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) from tokens sampled from the policy, elementwise.

    Schulman, "Approximating KL divergence" (2020). k1 = lp - ref; k2 = (lp - ref)^2 / 2; k3 = exp(d) - d - 1 with
    d = ref - lp clamped to +-20 and the result to +-10; ``abs`` = |lp - ref|. A trailing ``+`` keeps the value and
    takes the gradient of k2, which is unbiased.
    """
    if kind.endswith("+"):
        value = kl_estimate(logp.detach(), ref_logp, kind=kind[:-1])
        surrogate = kl_estimate(logp, ref_logp, kind="k2")
        return surrogate - surrogate.detach() + value
    difference = logp - ref_logp
    if kind == "k1":
        return difference
    if kind in ("k2", "mse"):
        return 0.5 * difference.square()
    if kind == "abs":
        return difference.abs()
    if kind in ("k3", "low_var_kl"):
        delta = (-difference).clamp(-_TOKEN_CLAMP, _TOKEN_CLAMP)
        return (delta.exp() - delta - 1.0).clamp(-10.0, 10.0)
    raise ConfigError(
        f"unknown KL estimator {kind!r}; use k1, k2 (mse), k3 (low_var_kl) or abs, with a trailing + for the gradient "
        "of k2"
    )


def aggregate(values: Tensor, occurrences: Occurrences, denominators: Denominators, *, how: Aggregation) -> Tensor:
    """This batch's share of the mini-batch's aggregate of ``values`` [O]; shares of all packs add up to it.

    token-mean = sum(omega f) / sum(omega); seq-mean-token-mean = mean over trajectories of the same; seq-mean-token-sum
    = mean over trajectories of sum(omega f); seq-mean-token-sum-norm = sum(omega f) / width (Dr. GRPO). Trajectories
    whose omega sum to 0 are skipped; an empty batch gives 0.
    """
    weighted = occurrences.weight * values
    if how == "token-mean":
        return _ratio(weighted.sum(), denominators.weight)
    if how == "seq-mean-token-sum":
        return _ratio(weighted.sum(), denominators.rows)
    if how == "seq-mean-token-sum-norm":
        return _ratio(weighted.sum(), denominators.width)
    if how != "seq-mean-token-mean":
        raise ConfigError(
            "aggregation must be token-mean, seq-mean-token-mean, seq-mean-token-sum or seq-mean-token-sum-norm, "
            f"found {how!r}"
        )
    sums = _segment_sum(weighted, occurrences.leaf, occurrences.n_leaves)
    weights = _segment_sum(occurrences.weight, occurrences.leaf, occurrences.n_leaves)
    means = sums / torch.where(weights > 0, weights, torch.ones_like(weights))
    return _ratio(means.sum(), denominators.rows)


def _ratio(total: Tensor, denominator: float) -> Tensor:
    return total / denominator if denominator > 0 else total * 0.0


def ratio_moments(occurrences: Occurrences, *, level: RatioLevel) -> Tensor:
    """[3]: sum of w, w r and w r^2 over tokens, turns or sequences (geometric-mean ratios), detached.

    Additive over packs; the effective sample size as a fraction is m1^2 / (m0 m2), exactly 1 for unchanged weights.
    A turn weighs omega, a sequence 1.
    """
    with torch.no_grad():
        occ = occurrences.kept()
        r = importance_ratio(occ, level=level)
        weight = occ.weight
        if level != "token":
            segment, count = _segments(occ, level)
            first = _segment_sum(torch.ones_like(weight), segment, count)[segment].reciprocal()
            weight = first * (weight if level == "turn" else 1.0)
        return torch.stack([weight.sum(), (weight * r).sum(), (weight * r * r).sum()])
