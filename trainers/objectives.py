"""Policy objectives: TorchRL ``LossModule`` over one pack of trees, built from the pure losses.

An algorithm is a set of arguments; :func:`grpo`, :func:`tree_grpo`, :func:`at2po`, :func:`gspo` and :func:`dapo` return
those of the papers. ``PolicyObjective(network, **at2po())``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from turntree.errors import ConfigError
from turntree.trainers.forward import packed_logprobs
from turntree.trainers.losses import (
    Aggregation,
    Denominators,
    KLEstimator,
    Occurrences,
    PolicyLoss,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    aggregate,
    kl_estimate,
    policy_loss,
    ratio_moments,
)
from turntree.trainers.packing import Pack, table

__all__ = [
    "LossFunction",
    "ObjectiveArgs",
    "PolicyObjective",
    "at2po",
    "combine_metrics",
    "dapo",
    "gather_occurrences",
    "grpo",
    "gspo",
    "tree_grpo",
]

LossFunction: TypeAlias = Callable[[Occurrences, Denominators], PolicyLoss]
"""A custom policy loss: this pack's share of the mini-batch's loss."""

_LEVELS: tuple[RatioLevel, ...] = ("token", "turn", "sequence")


class ObjectiveArgs(TypedDict, total=False):
    """Keyword arguments of :class:`PolicyObjective`."""

    ratio: RatioLevel
    turn_ratio: TurnRatio
    ratio_gradient: RatioGradient
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    kl_coef: float
    kl_estimator: KLEstimator
    entropy_coef: float
    importance_cap: float | None
    temperature: float


class PolicyObjective(LossModule):  # type: ignore[misc]
    """Policy loss, KL to a reference and entropy bonus of one pack.

    Args:
        network: a transformers causal language model (its weights are the module's parameters).
        ratio: level of the importance ratio; ``turn_ratio`` and ``ratio_gradient`` as in :mod:`.losses`.
        clip_low, clip_high, dual_clip: the ratio is clipped to [1 - low, 1 + high]; dual clip c > 1, or None.
        aggregation: how token losses become one number; KL and entropy follow it.
        kl_coef, kl_estimator: KL loss against ``tokens.ref_logp``; no reference is needed at 0.
        entropy_coef: entropy bonus.
        importance_cap: weight every token by min(exp(old - sampler log-prob), cap); None for no weight.
        temperature: the sampling temperature.
        loss: a custom policy loss instead of the clipped surrogate.
        entropy_metric: report the entropy where no bonus needs it.

    The input is a pack (:mod:`turntree.trainers.packing`) with advantages written, with ``old_logp`` written by
    ``score_packs`` (without it the current log-probs serve, detached: right for one update a rollout), and with the
    mini-batch's ``Denominators`` (``denominators.write(pack)``; without them the pack counts as the mini-batch).

    The output holds ``loss_objective``, ``loss_kl`` and ``loss_entropy``, whose sum is to be minimised, and detached
    metrics. All are shares: added over the packs of a mini-batch they are exact; see :func:`combine_metrics`.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        ratio: RatioLevel = "token",
        turn_ratio: TurnRatio = "geometric",
        ratio_gradient: RatioGradient = "straight_through",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        aggregation: Aggregation = "token-mean",
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        entropy_coef: float = 0.0,
        importance_cap: float | None = None,
        temperature: float = 1.0,
        loss: LossFunction | None = None,
        entropy_metric: bool = True,
    ) -> None:
        super().__init__()
        self.network = network
        self.aggregation: Aggregation = aggregation
        self.kl_coef, self.kl_estimator, self.entropy_coef = kl_coef, kl_estimator, entropy_coef
        self.importance_cap, self.temperature, self.entropy_metric = importance_cap, temperature, entropy_metric
        self._surrogate = {
            "ratio": ratio,
            "turn_ratio": turn_ratio,
            "ratio_gradient": ratio_gradient,
            "clip_low": clip_low,
            "clip_high": clip_high,
            "dual_clip": dual_clip,
            "aggregation": aggregation,
        }
        self._custom = loss
        self.in_keys = ["tokens", "occurrences", "rows"]
        self.out_keys = ["loss_objective", "loss_kl", "loss_entropy"]
        self._check()

    @property
    def functional(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False

    def _check(self) -> None:
        """Run every option once on nothing, so that a wrong one fails here and not after the first rollout."""
        nothing = torch.zeros(0)
        index = torch.zeros(0, dtype=torch.int64)
        empty = Occurrences(nothing, nothing, nothing, nothing, index, index, 0, 0)
        if self._custom is None:
            policy_loss(empty, Denominators(0.0, 0.0, 0.0), **cast("dict[str, Any]", self._surrogate))
        aggregate(nothing, empty, Denominators(0.0, 0.0, 0.0), how=self.aggregation)
        kl_estimate(nothing, nothing, kind=self.kl_estimator)
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ConfigError(f"importance_cap must be positive or None, found {self.importance_cap}")

    def forward(self, pack: TensorDictBase, denominators: Denominators | None = None) -> TensorDict:
        """Losses and metrics of one pack; raises ``ConfigError`` where ``kl_coef`` needs a missing ``ref_logp``."""
        pack = cast("Pack", pack)
        total = denominators if denominators is not None else Denominators.read(pack)
        wanted = self.entropy_coef != 0.0 or self.entropy_metric
        output = packed_logprobs(self.network, pack, temperature=self.temperature, entropy=wanted)
        occurrences = gather_occurrences(
            pack, output.logp, entropy=output.entropy, importance_cap=self.importance_cap
        ).kept()
        policy = self._policy(occurrences, total)
        kl = self._kl(occurrences, total)
        entropy = self._mean(occurrences.entropy, occurrences, total)
        return TensorDict(
            {
                "loss_objective": policy.loss,
                "loss_kl": kl * self.kl_coef if self.kl_coef else kl.detach() * 0.0,
                "loss_entropy": -entropy * self.entropy_coef if self.entropy_coef else entropy.detach() * 0.0,
                "clip_fraction": policy.clip_fraction.detach(),
                "clip_fraction_lower": policy.clip_fraction_lower.detach(),
                "approx_kl": policy.approx_kl.detach(),
                "kl_reference": kl.detach(),
                "entropy": entropy.detach(),
                "sampler_mismatch": self._mismatch(occurrences, total),
                **{f"ratio_moments_{level}": ratio_moments(occurrences, level=level) for level in _LEVELS},
            },
            batch_size=[],
        )

    def _policy(self, occurrences: Occurrences, total: Denominators) -> PolicyLoss:
        if self._custom is not None:
            return self._custom(occurrences, total)
        return policy_loss(occurrences, total, **cast("dict[str, Any]", self._surrogate))

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
        if occurrences.sampler_logp is None:
            return occurrences.logp.new_zeros(())
        gap = (occurrences.old_logp.detach() - occurrences.sampler_logp).abs()
        return aggregate(gap, occurrences, total, how="token-mean")


def gather_occurrences(
    pack: Pack, logp: Tensor, *, entropy: Tensor | None = None, importance_cap: float | None = None
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
    )


def combine_metrics(outputs: Sequence[TensorDictBase]) -> dict[str, float]:
    """Sum the objective's outputs over the packs of a mini-batch.

    Ratio moments become ``ess_token``, ``ess_turn`` and ``ess_sequence``, effective sample sizes in (0, 1], and
    ``ratio_mean`` (token level); without any occurrence they are 1.
    """
    totals: dict[str, Tensor] = {}
    for output in outputs:
        for name, value in output.items():
            part = cast("Tensor", value).detach().double()
            totals[cast("str", name)] = totals.get(cast("str", name), torch.zeros_like(part)) + part
    result = {name: float(value) for name, value in totals.items() if not name.startswith("ratio_moments_")}
    for level in _LEVELS:
        count, first, second = totals.get(f"ratio_moments_{level}", torch.zeros(3)).tolist()
        result[f"ess_{level}"] = first * first / (count * second) if count > 0 and second > 0 else 1.0
        if level == "token":
            result["ratio_mean"] = first / count if count > 0 else 1.0
    return result


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
