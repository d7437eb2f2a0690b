"""The options of an algorithm, and which of them cannot work together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from turntree.errors import ConfigError
from turntree.trainers.combinations import refusal
from turntree.trainers.options import at_least, finite, one_of, opt
from turntree.trainers.surrogate import (
    AGGREGATIONS,
    CLIPS,
    GRADIENTS,
    LEVELS,
    TURN_RATIOS,
    Aggregation,
    Clip,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    check_surrogate,
)

__all__ = ["AlgorithmConfig", "built_in"]

_PER_TURN = (
    "at2po",
    "at2po_reference",
    "at2po_centred",
    "tree_diff",
    "tree_diff_reference",
    "sibling_baseline",
    "shrunk_loo",
    "arpo",
)


def built_in(path: str) -> str:
    """The name of a built-in rule that an import path means; '' for a rule of somebody else."""
    module, _, name = path.partition(":")
    return name if module.startswith("turntree.trainers.") else ""


@dataclass(frozen=True)
class AlgorithmConfig:
    """One combination of expansion rule, credit rule and objective."""

    name: str = opt("custom", "name written into results.")
    trees: int = opt(1, "independent trees of a prompt.")
    chains: int = opt(8, "complete trajectories that start each tree.")
    rounds: int = opt(0, "rounds of expansion after them.")
    expansions: int = opt(0, "new trajectories that each round adds to each tree.")
    kept_leaves: int | None = opt(None, "leaves of a tree that are kept for training (null: all).")
    budget_leaves: int | None = opt(None, "trajectories of a prompt, checked at rounds (null: unbounded).")
    budget_tokens: int | None = opt(None, "generated tokens of a prompt, checked at rounds (null: unbounded).")
    budget_tool_calls: int | None = opt(None, "tool calls of a prompt, checked at rounds (null: unbounded).")
    adaptive: float | None = opt(
        None,
        "a prompt whose first chains all end after one turn, each of mean negative log-prob below this (nats), gives "
        "its expansions to the other prompts of the rollout (null: off).",
    )
    expansion: str = opt("turntree.trainers.expansion:chain", "import path of the expansion rule.")
    expansion_args: dict[str, Any] = opt({}, "keyword arguments of the expansion rule.")
    source: str = opt(
        "policy", "who plays: policy, or teacher (supervised training on sft.data, else on what coldstart.* keeps)."
    )
    dynamic_sampling: int = opt(
        0, "DAPO: drop groups of equal rewards and sample more prompts, up to this many batches a step (0: off)."
    )
    overlong_tokens: int | None = opt(
        None, "DAPO: sampled tokens of a trajectory at which the overlong penalty is full (null: no penalty)."
    )
    overlong_buffer: int = opt(1, "sampled tokens before overlong_tokens over which the penalty grows linearly.")
    overlong_factor: float = opt(1.0, "the full overlong penalty; it is never larger.")
    credit: str = opt("turntree.trainers.credit:grpo", "import path of the credit rule.")
    credit_args: dict[str, Any] = opt({}, "keyword arguments of the credit rule.")
    min_scored_leaves: int = opt(2, "groups with fewer scored leaves are dropped and counted.")
    shared_turns: str = opt("per_leaf", "weight of a turn shared by leaves: per_leaf (1) or once (1 / leaves).")
    entropy_balance: float = opt(
        0.0, "AEPO: advantages are multiplied by 1 + this x z-score of the token's entropy in the mini-batch (0: off)."
    )
    objective: str = opt(
        "", "import path of a loss f(occurrences, denominators), or f(pairs, denominators) ('' : the clipped ratio)."
    )
    objective_args: dict[str, Any] = opt({}, "keyword arguments of the objective.")
    pair_min_margin: float = opt(0.0, "objectives of pairs: siblings whose values differ by more than this are paired.")
    pair_max_per_parent: int | None = opt(None, "objectives of pairs: pairs of one parent, widest first (null: all).")
    ratio: str = opt("token", "level of the importance ratio: token, turn or sequence.")
    turn_ratio: str = opt("geometric", "ratio of a turn or sequence: geometric (mean of log-ratios) or product (sum).")
    ratio_gradient: str = opt(
        "straight_through", "straight_through: each token its own gradient; true: through the whole turn or sequence."
    )
    clip: str = opt("hard", "hard (PPO), soft (clipped tokens keep a gradient), soft_upper (AEPO), or cispo.")
    clip_low: float = opt(0.2, "ratios are clipped below 1 - clip_low.")
    clip_high: float = opt(0.2, "ratios are clipped above 1 + clip_high.")
    dual_clip: float | None = opt(None, "bound of the loss for negative advantages (null: none).")
    by_turns: list[dict[str, Any]] = opt(
        [],
        "other settings for trajectories of few turns: {max_turns, ratio, clip_low, clip_high} each, smallest first.",
    )
    aggregation: str = opt(
        "token-mean", "token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm or turn-mean."
    )
    sum_norm: float | None = opt(
        None, "divisor of seq-mean-token-sum-norm (null: the longest trajectory's sampled tokens)."
    )
    kl_coef: float = opt(0.0, "coefficient of the KL term against the reference model (0: no reference model).")
    kl_estimator: str = opt("k3", "k1, k2 or k3; with a trailing +: that value, the gradient of k2.")
    kl_in: str = opt("loss", "loss, or reward (subtracted from the reward of each sampled token; gives no gradient).")
    reference_every: int | None = opt(None, "steps after which the policy becomes the reference (null: frozen).")
    entropy_coef: float = opt(0.0, "coefficient of the entropy bonus.")
    value_coef: float = opt(0.5, "coefficient of the value loss; only for credit rules that need values.")
    value_clip: float | None = opt(0.5, "range of a value around the old one in the value loss (null: not clipped).")

    def __post_init__(self) -> None:
        finite("algorithm", self)
        for name in ("trees", "chains", "min_scored_leaves"):
            at_least(f"algorithm.{name}", getattr(self, name), 1)
        for name in (
            "rounds",
            "expansions",
            "clip_low",
            "clip_high",
            "kl_coef",
            "adaptive",
            "dynamic_sampling",
            "overlong_factor",
            "entropy_balance",
            "pair_min_margin",
            "value_coef",
            "value_clip",
        ):
            at_least(f"algorithm.{name}", getattr(self, name), 0)
        for name in (
            "budget_leaves",
            "budget_tokens",
            "budget_tool_calls",
            "overlong_tokens",
            "overlong_buffer",
            "pair_max_per_parent",
            "reference_every",
        ):
            at_least(f"algorithm.{name}", getattr(self, name), 1)
        if bool(self.rounds) != bool(self.expansions):
            raise ConfigError(
                f"algorithm.rounds={self.rounds} and algorithm.expansions={self.expansions}: "
                "set both above 0 to expand, or both to 0"
            )
        one_of("algorithm.source", self.source, ("policy", "teacher"))
        one_of("algorithm.shared_turns", self.shared_turns, ("per_leaf", "once"))
        one_of("algorithm.ratio", self.ratio, LEVELS)
        one_of("algorithm.turn_ratio", self.turn_ratio, TURN_RATIOS)
        one_of("algorithm.ratio_gradient", self.ratio_gradient, GRADIENTS)
        one_of("algorithm.clip", self.clip, CLIPS)
        one_of("algorithm.kl_estimator", self.kl_estimator, ("k1", "k2", "k3", "k1+", "k2+", "k3+"))
        one_of("algorithm.kl_in", self.kl_in, ("loss", "reward"))
        one_of("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        levels = self._levels()
        leaves = self.chains + self.rounds * self.expansions
        if self.kept_leaves is not None and not 1 <= self.kept_leaves <= leaves:
            raise ConfigError(f"algorithm.kept_leaves={self.kept_leaves}: expected 1 to {leaves}, the leaves of a tree")
        if self.trees * (self.kept_leaves or leaves) < self.min_scored_leaves:
            raise ConfigError(
                f"a prompt has {self.trees * (self.kept_leaves or leaves)} leaves but algorithm.min_scored_leaves="
                f"{self.min_scored_leaves}: every group would be dropped; raise trees, chains or expansions"
            )
        reason = next(chain(self._impossible_trees(), self._impossible_losses(levels)), None)
        if reason is not None:
            raise ConfigError(reason)

    def _levels(self) -> tuple[RatioLevel, ...]:
        """The ratio levels in use, once the options of the clipped ratio were checked."""
        ratio = cast("RatioLevel", self.ratio)
        try:
            bands = check_surrogate(
                ratio=ratio,
                turn_ratio=cast("TurnRatio", self.turn_ratio),
                ratio_gradient=cast("RatioGradient", self.ratio_gradient),
                clip=cast("Clip", self.clip),
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                dual_clip=self.dual_clip,
                by_turns=self.by_turns,
                aggregation=cast("Aggregation", self.aggregation),
                sum_norm=self.sum_norm,
            )
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from None
        return (ratio, *(band.ratio for band in bands))

    def _impossible_trees(self) -> Iterator[str]:
        """Why trees cannot be grown as asked; nothing if they can."""
        leaves = self.chains + self.rounds * self.expansions
        if built_in(self.credit).startswith("tree_grpo") and (self.kept_leaves or leaves) == 1:
            yield "algorithm.credit=tree_grpo compares the leaves of a tree, but each tree has one: raise chains"
        if self.source == "teacher" and (self.rounds or self.trees * self.chains > 1 or not self.objective):
            yield (
                "algorithm.source=teacher plays each question once and has no ratio: set trees=1, chains=1, rounds=0, "
                "expansions=0 and an objective such as turntree.trainers.losses:nll"
            )
        if self.adaptive is not None and not self.rounds:
            yield "algorithm.adaptive moves expansions between prompts, but algorithm.rounds=0: there are none to move"
        if built_in(self.expansion) != "chain" and not self.rounds:
            yield (
                f"algorithm.expansion={self.expansion} is asked between rounds, but algorithm.rounds=0: set rounds and "
                "expansions above 0, or expansion=turntree.trainers.expansion:chain"
            )
        for name in ("budget_leaves", "budget_tokens", "budget_tool_calls"):
            if getattr(self, name) is not None and not self.rounds:
                yield (
                    f"algorithm.{name} ends the expansion of a tree, but algorithm.rounds=0: first chains always run, "
                    "so bound them by chains and the limits of a turn"
                )

    def _impossible_losses(self, levels: Iterable[RatioLevel]) -> Iterator[str]:
        """Why credit and objective do not go together; nothing if they do."""
        expansion, credit = (built_in(path) for path in (self.expansion, self.credit))
        for level in levels:
            why = refusal(expansion, credit, level)
            if why and not self.objective:
                yield f"expansion {expansion}, credit {credit} and ratio {level} do not go together: {why}"
        compares = self.kl_coef > 0 or (self.objective and built_in(self.objective) != "nll")
        if self.reference_every is not None and not compares:
            yield "algorithm.reference_every renews the reference model, but algorithm.kl_coef=0: there is none"
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            yield (
                f"algorithm.overlong_buffer={self.overlong_buffer} is more than algorithm.overlong_tokens="
                f"{self.overlong_tokens}; expected at most as much"
            )
        if self.kl_in == "reward" and self.kl_estimator.endswith("+"):
            yield (
                f"algorithm.kl_estimator={self.kl_estimator} with algorithm.kl_in=reward: a reward has no gradient; "
                f"use {self.kl_estimator[:-1]}"
            )
        if self.ratio_gradient == "true" and "sequence" in levels and credit in _PER_TURN:
            yield (
                f"algorithm.ratio_gradient=true with ratio=sequence, credit {credit}: the sequence has one ratio but "
                "an advantage for each turn; use straight_through or ratio=turn"
            )
