"""Policy objectives: TorchRL ``LossModule`` over one pack of trees, built from the pure losses.

An algorithm is a set of arguments; :func:`grpo`, :func:`tree_grpo`, :func:`at2po`, :func:`gspo` and :func:`dapo` return
those of the papers. ``PolicyObjective(network, **at2po())``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypedDict, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from turntree.errors import ConfigError
from turntree.trainers.forward import PackedOutput, packed_logprobs
from turntree.trainers.losses import (
    LEVELS,
    Aggregation,
    Band,
    Clip,
    Denominators,
    KLEstimator,
    Occurrences,
    Pairs,
    PolicyLoss,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    aggregate,
    check_surrogate,
    explained_variance,
    kl_estimate,
    policy_loss,
    ratio_metrics,
    value_loss,
)
from turntree.trainers.packing import Pack, table

__all__ = [
    "LossFunction",
    "ObjectiveArgs",
    "PairLossFunction",
    "PolicyObjective",
    "at2po",
    "combine_metrics",
    "dapo",
    "gather_occurrences",
    "gather_pairs",
    "grpo",
    "gspo",
    "loss_needs",
    "tree_grpo",
]

LossFunction: TypeAlias = Callable[[Occurrences, Denominators], PolicyLoss]
"""A custom policy loss: this pack's share of the mini-batch's loss."""
PairLossFunction: TypeAlias = Callable[[Pairs, Denominators], PolicyLoss]
"""A loss of pairs of sibling turns; its attribute ``needs`` is ``"pairs"``."""


class ObjectiveArgs(TypedDict, total=False):
    """Keyword arguments of :class:`PolicyObjective`."""

    ratio: RatioLevel
    turn_ratio: TurnRatio
    ratio_gradient: RatioGradient
    clip: Clip
    clip_low: float
    clip_high: float
    dual_clip: float | None
    by_turns: Sequence[Band | Mapping[str, Any]]
    aggregation: Aggregation
    sum_norm: float | None
    kl_coef: float
    kl_estimator: KLEstimator
    entropy_coef: float
    value_coef: float
    value_clip: float | None
    importance_cap: float | None
    temperature: float


class PolicyObjective(LossModule):  # type: ignore[misc]
    """Policy loss, KL to a reference, entropy bonus and value loss of one pack.

    Args:
        network: a transformers causal language model (its weights are the module's parameters).
        ratio: level of the importance ratio; ``turn_ratio`` and ``ratio_gradient`` as in :mod:`.losses`.
        clip: what gradient clipped tokens keep: ``hard``, ``soft``, ``soft_upper`` or ``cispo``.
        clip_low, clip_high, dual_clip: the ratio is clipped to [1 - low, 1 + high]; dual clip c > 1, or None.
        by_turns: other level and clip range for trajectories of few turns (:class:`.losses.Band`), smallest first.
        aggregation: how token losses become one number; KL and entropy follow it.
        sum_norm: the constant of ``seq-mean-token-sum-norm`` instead of the longest trajectory's sampled tokens.
        kl_coef, kl_estimator: KL loss against ``tokens.ref_logp``; no reference is needed at 0.
        entropy_coef: entropy bonus.
        value_head: maps hidden states to values (its weights are the module's parameters too); None for no value loss.
        value_coef, value_clip: of the value loss, see :func:`.losses.value_loss`; unused without a ``value_head``.
        importance_cap: weight every token by min(exp(old - sampler log-prob), cap); None for no weight.
        temperature: the sampling temperature.
        loss: a custom policy loss instead of the clipped surrogate; with the attribute ``needs = "pairs"`` it is called
            with the pack's pairs of sibling turns (packs of ``pack_pairs``). Ratio and clip then serve metrics only.
        entropy_metric: report the entropy where no bonus needs it.
        forward: the forward pass, with the arguments of ``packed_logprobs`` after the network; None for that function.

    Raises ``ConfigError`` with the reason for an unknown option or an impossible combination.

    The input is a pack (:mod:`turntree.trainers.packing`) with advantages written, with ``old_logp`` written by
    ``score_packs`` (without it the current log-probs serve, detached: right for one update a rollout), and with the
    mini-batch's ``Denominators`` (``denominators.write(pack)``; without them the pack counts as the mini-batch).

    The output holds ``loss_objective``, ``loss_kl``, ``loss_entropy`` and ``loss_value``, whose sum is to be minimised,
    and detached metrics; see :func:`combine_metrics` for adding them up over the packs of a mini-batch, which is exact.
    """

    def __init__(
        self,
        network: nn.Module,
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
        sum_norm: float | None = None,
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        entropy_coef: float = 0.0,
        value_head: nn.Module | None = None,
        value_coef: float = 0.5,
        value_clip: float | None = 0.5,
        importance_cap: float | None = None,
        temperature: float = 1.0,
        loss: LossFunction | PairLossFunction | None = None,
        entropy_metric: bool = True,
        forward: Callable[..., PackedOutput] | None = None,
    ) -> None:
        super().__init__()
        self._forward_pass = forward or functools.partial(packed_logprobs, network)
        self.network, self.value_head = network, value_head
        self.aggregation: Aggregation = aggregation
        self.sum_norm = sum_norm
        self.kl_coef, self.kl_estimator, self.entropy_coef = kl_coef, kl_estimator, entropy_coef
        self.value_coef, self.value_clip = value_coef, value_clip
        self.importance_cap, self.temperature, self.entropy_metric = importance_cap, temperature, entropy_metric
        self._surrogate: dict[str, Any] = {
            "ratio": ratio,
            "turn_ratio": turn_ratio,
            "ratio_gradient": ratio_gradient,
            "clip": clip,
            "clip_low": clip_low,
            "clip_high": clip_high,
            "dual_clip": dual_clip,
            "by_turns": by_turns,
            "aggregation": aggregation,
        }
        self._surrogate["by_turns"] = check_surrogate(**self._surrogate, sum_norm=sum_norm)
        self._levels = {
            key: self._surrogate[key] for key in ("turn_ratio", "clip", "clip_low", "clip_high", "by_turns")
        }
        self._custom = loss
        self.needs = "occurrences" if loss is None else loss_needs(loss)
        self.in_keys = ["tokens", "occurrences", "rows"]
        self.out_keys = ["loss_objective", "loss_kl", "loss_entropy", "loss_value"]
        self._check()

    @property
    def functional(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False

    def _check(self) -> None:
        """Refuse what is not part of the surrogate and would fail, or have no effect, after the first rollout."""
        kl_estimate(torch.zeros(0), torch.zeros(0), kind=self.kl_estimator)
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ConfigError(f"importance_cap must be positive or None, found {self.importance_cap}")
        for name, value in (("value_coef", self.value_coef), ("value_clip", self.value_clip)):
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be at least 0, found {value}")

    def forward(self, pack: TensorDictBase, denominators: Denominators | None = None) -> TensorDict:
        """Losses and metrics of one pack; raises ``ConfigError`` for a missing ``ref_logp`` or ``pairs`` table."""
        pack = cast("Pack", pack)
        total = denominators if denominators is not None else Denominators.read(pack)
        total = total if self.sum_norm is None else replace(total, width=self.sum_norm)
        output = self._run(pack)
        occurrences = gather_occurrences(
            pack, output.logp, entropy=output.entropy, value=output.value, importance_cap=self.importance_cap
        ).kept()
        policy = self._policy(pack, occurrences, total)
        kl = self._kl(occurrences, total)
        entropy = self._mean(occurrences.entropy, occurrences, total)
        results: dict[str, Tensor] = {
            "loss_objective": policy.loss,
            "loss_kl": kl * self.kl_coef if self.kl_coef else kl.detach() * 0.0,
            "loss_entropy": -entropy * self.entropy_coef if self.entropy_coef else entropy.detach() * 0.0,
            **self._value(occurrences, total),
            "clip_fraction": policy.clip_fraction.detach(),
            "clip_fraction_lower": policy.clip_fraction_lower.detach(),
            "approx_kl": policy.approx_kl.detach(),
            "kl_reference": kl.detach(),
            "entropy": entropy.detach(),
            "sampler_mismatch": self._mismatch(occurrences, total),
            **{name: value.detach() for name, value in policy.metrics.items()},
        }
        for level in LEVELS:
            results.update(ratio_metrics(occurrences, total, level=level, **self._levels))
        return TensorDict(results, batch_size=[])

    def _run(self, pack: Pack) -> PackedOutput:
        wanted = self.entropy_coef != 0.0 or self.entropy_metric
        return self._forward_pass(pack, temperature=self.temperature, entropy=wanted, value_head=self.value_head)

    def _policy(self, pack: Pack, occurrences: Occurrences, total: Denominators) -> PolicyLoss:
        if self._custom is None:
            return policy_loss(occurrences, total, **self._surrogate)
        if self.needs == "pairs":
            return cast("PairLossFunction", self._custom)(gather_pairs(pack, occurrences), total)
        return cast("LossFunction", self._custom)(occurrences, total)

    def _value(self, occurrences: Occurrences, total: Denominators) -> dict[str, Tensor]:
        """Value loss and its metrics; a loss of 0 alone where the pack carries no values."""
        if occurrences.value is None:
            return {"loss_value": occurrences.logp.new_zeros(())}
        found = value_loss(occurrences, total, clip=self.value_clip)
        return {
            "loss_value": found.loss * self.value_coef if self.value_coef else found.loss.detach() * 0.0,
            "value_loss": found.loss.detach(),
            "value_clip_fraction": found.clip_fraction,
            "value_mean": found.mean,
            "value_moments": found.moments,
        }

    def _kl(self, occurrences: Occurrences, total: Denominators) -> Tensor:
        if occurrences.ref_logp is None:
            if self.kl_coef:
                raise ConfigError(
                    f"kl_coef is {self.kl_coef} but the pack has no ref_logp; run score_packs(reference, packs, "
                    'key="ref_logp") first, or set kl_coef=0'
                )
            return occurrences.logp.new_zeros(())
        return self._mean(
            kl_estimate(occurrences.logp, occurrences.ref_logp, kind=self.kl_estimator), occurrences, total
        )

    def _mean(self, values: Tensor | None, occurrences: Occurrences, total: Denominators) -> Tensor:
        if values is None:
            return occurrences.logp.new_zeros(())
        return aggregate(values, occurrences, total, how=self.aggregation)

    def _mismatch(self, occurrences: Occurrences, total: Denominators) -> Tensor:
        """Weighted mean of |old - sampler log-prob|: how far the engine's numbers are from the trainer's."""
        gap = (occurrences.old_logp.detach() - cast("Tensor", occurrences.sampler_logp)).abs()
        return aggregate(gap, occurrences, total, how="token-mean")


def loss_needs(loss: Callable[..., Any]) -> Literal["occurrences", "pairs"]:
    """What a custom loss is called with. Raises ``ConfigError`` for an unknown word."""
    needs: Any = getattr(loss, "needs", None)
    if needs is None and isinstance(loss, functools.partial):
        return loss_needs(loss.func)
    if needs not in (None, "occurrences", "pairs"):
        raise ConfigError(f"loss {loss!r}: needs must be 'occurrences' or 'pairs', found {needs!r}")
    return "pairs" if needs == "pairs" else "occurrences"


def gather_occurrences(
    pack: Pack,
    logp: Tensor,
    *,
    entropy: Tensor | None = None,
    value: Tensor | None = None,
    importance_cap: float | None = None,
) -> Occurrences:
    """The occurrences of a pack on ``logp``'s device, with per-token columns [N] gathered to [O]."""
    tokens, rows = table(pack, "tokens"), table(pack, "occurrences").to(logp.device)
    columns = {str(name): cast("Tensor", value) for name, value in rows.items()}
    token, turn = columns["token"], columns["turn"]

    def gathered(name: str) -> Tensor | None:
        values = cast("Tensor | None", tokens.get(name, None))
        return None if values is None else values.to(logp.device)[token]

    current = logp[token]
    old = gathered("old_logp")
    old = current.detach() if old is None else old
    sampler = cast("Tensor", gathered("sampler_logp"))
    importance = None if importance_cap is None else (old - sampler).exp().clamp(max=importance_cap)
    return Occurrences(
        logp=current,
        old_logp=old,
        advantage=columns["advantage"],
        weight=columns["weight"],
        leaf=columns["leaf"],
        turn=turn,
        n_leaves=len(table(pack, "rows")),
        n_turns=int(turn[-1]) + 1 if len(turn) else 0,
        ref_logp=gathered("ref_logp"),
        sampler_logp=sampler,
        entropy=None if entropy is None else entropy[token],
        importance=importance,
        value=None if value is None else value[token],
        old_value=gathered("value"),
        ret=columns["ret"],
    )


def gather_pairs(pack: Pack, occurrences: Occurrences) -> Pairs:
    """The pairs of a pack, with log-probs summed over the tokens of positive weight of each turn.

    Raises ``ConfigError`` for a pack without pairs or without reference log-probs.
    """
    pairs = cast("TensorDict | None", pack.get("pairs", None))
    if pairs is None:
        raise ConfigError("this loss needs pairs of sibling turns and the pack has none; pack with pack_pairs")
    if occurrences.ref_logp is None:
        raise ConfigError(
            "this loss compares pairs against a reference and the pack has no ref_logp; run score_packs(reference, "
            'packs, key="ref_logp") first'
        )
    kept = occurrences.kept()
    winner, loser, margin = (cast("Tensor", pairs.get(k)).to(kept.logp.device) for k in ("winner", "loser", "margin"))

    def per_turn(values: Tensor) -> Tensor:
        return values.new_zeros(kept.n_turns).index_add(0, kept.turn, values)

    logp, ref = per_turn(kept.logp), per_turn(cast("Tensor", kept.ref_logp))
    return Pairs(logp[winner], logp[loser], ref[winner], ref[loser], margin)


def combine_metrics(outputs: Sequence[TensorDictBase]) -> dict[str, float]:
    """The objective's outputs over the packs of a mini-batch: sums, but for the extremes of ratios.

    Of each level ``token``, ``turn`` and ``sequence``: ``ess_<level>``, the effective sample size in (0, 1], and
    ``ratio_mean_<level>``, ``ratio_min_<level>``, ``ratio_max_<level>``; without any occurrence all are 1. With values
    also ``value_explained_variance``, of the current ones.
    """
    columns: dict[str, list[Tensor]] = {}
    for output in outputs:
        for name, value in output.items():
            columns.setdefault(str(name), []).append(cast("Tensor", value).detach().double().cpu())
    stacked = {name: torch.stack(values) for name, values in columns.items()}
    result = {name: float(values.sum()) for name, values in stacked.items() if values.ndim == 1}
    for level in LEVELS:
        result.update(_ratio_summary(level, stacked))
    if "value_moments" in stacked:
        result["value_explained_variance"] = explained_variance(stacked["value_moments"].sum(0))
    return result


def _ratio_summary(level: str, stacked: Mapping[str, Tensor]) -> dict[str, float]:
    moments = stacked.get(f"ratio_moments_{level}", torch.zeros(1, 3)).sum(0)
    extremes = stacked.get(f"ratio_extremes_{level}", torch.ones(1, 2))
    count, first, second = moments.tolist()
    some = count > 0 and second > 0
    return {
        f"ess_{level}": first * first / (count * second) if some else 1.0,
        f"ratio_mean_{level}": first / count if some else 1.0,
        f"ratio_min_{level}": float(extremes[:, 0].min()) if some else 1.0,
        f"ratio_max_{level}": float(extremes[:, 1].max()) if some else 1.0,
    }


def grpo() -> ObjectiveArgs:
    """GRPO as run beside AT2PO and Tree-GRPO: token ratio, dual clip 3, k3 KL 0.001 (arXiv 2402.03300)."""
    return {
        "ratio": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "aggregation": "token-mean",
        "kl_coef": 0.001,
        "kl_estimator": "k3",
    }


def tree_grpo() -> ObjectiveArgs:
    """Tree-GRPO's published training: GRPO's loss with an entropy bonus of 0.001."""
    return {**grpo(), "entropy_coef": 0.001}


def at2po() -> ObjectiveArgs:
    """AT2PO: geometric-mean turn ratio, clip 3e-3 / 4e-3, mean over trajectories, no KL."""
    return {
        "ratio": "turn",
        "turn_ratio": "geometric",
        "ratio_gradient": "straight_through",
        "clip_low": 3e-3,
        "clip_high": 4e-3,
        "aggregation": "seq-mean-token-mean",
        "kl_coef": 0.0,
    }


def gspo() -> ObjectiveArgs:
    """GSPO: sequence ratio, clip 3e-4 / 4e-4 (arXiv 2507.18071, section 5.1)."""
    return {**at2po(), "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}


def dapo() -> ObjectiveArgs:
    """DAPO: clip 0.2 / 0.28, token-mean over the mini-batch, no KL (arXiv 2503.14476)."""
    return {**grpo(), "clip_high": 0.28, "kl_coef": 0.0}
