"""Everything between a rollout and its first update: shaped rewards, packs, score pass, credit, mini-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from turntree.agents.lora import without_adapter
from turntree.trainers.credit import Advantages, CreditRule, credit_needs
from turntree.trainers.distributed.ranks import ALONE, Ranks
from turntree.trainers.distributed.share import share_scores
from turntree.trainers.forward import score_packs
from turntree.trainers.losses import entropy_balanced
from turntree.trainers.metrics import collected_metrics
from turntree.trainers.packing import (
    Pack,
    SharedTurns,
    column,
    pack_groups,
    pack_pairs,
    table,
    turn_columns,
    write_advantages,
)
from turntree.trainers.pairs import Pair
from turntree.trainers.rollout import Rollout
from turntree.trainers.shaping import Overlong, charge, kl_token_rewards
from turntree.trainers.tree import Group, Node

__all__ = ["Preparation", "Prepared"]


@dataclass(slots=True)
class Prepared:
    """A rollout that is ready to train on.

    ``rollout`` holds the groups that have enough scored leaves; ``advantages`` and ``minibatches`` (none where every
    group was dropped) cover these. ``values`` holds V of each sampled token where the credit rule wants values.
    """

    rollout: Rollout
    minibatches: list[list[Pack]]
    advantages: Advantages
    metrics: dict[str, float] = field(default_factory=dict)
    values: dict[Node, npt.NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preparation:
    """How rollouts become mini-batches.

    ``model``, ``reference`` and ``value_head`` are the networks of the score pass (None: not needed). With a
    ``kl_reward`` (coefficient, estimator) the KL to the reference is taken from the rewards. ``pairs``, for objectives
    that compare turns, chooses the pairs of a group; credit is then given for the reports only. Each of the ``ranks``,
    which prepare the same rollout, makes its share of the score pass.
    """

    credit: CreditRule
    model: torch.nn.Module
    max_pack_tokens: int
    groups_per_update: int
    reference: torch.nn.Module | None = None
    value_head: torch.nn.Module | None = None
    shared_turns: SharedTurns = "per_leaf"
    min_scored_leaves: int = 2
    temperature: float = 1.0
    overlong: Overlong | None = None
    kl_reward: tuple[float, str] | None = None
    entropy_balance: float = 0.0
    pairs: Callable[[Group], list[Pair]] | None = None
    ranks: Ranks = ALONE

    def prepare(self, rollout: Rollout) -> Prepared:
        """Pack, score and credit ``rollout``; the rewards of its leaves change where shaping is on."""
        start = time.monotonic()
        kept = rollout.drop_small_groups(self.min_scored_leaves)
        if self.overlong is not None:
            self.overlong.apply(kept.groups)
        size = self.groups_per_update
        parts = [kept.groups[first : first + size] for first in range(0, len(kept.groups), size)]
        minibatches = [self._pack(groups) for groups in parts]
        packs = [pack for minibatch in minibatches for pack in minibatch]
        share_scores(packs, self._score, ranks=self.ranks)
        signals = self._signals(kept.groups, parts, minibatches)
        advantages = self.credit(kept.groups, **signals)
        if self.pairs is None:
            self._write(advantages, minibatches)
        metrics = {**collected_metrics(kept, packs, advantages), "timing_s/score": time.monotonic() - start}
        return Prepared(kept, minibatches, advantages, metrics, signals.get("values", {}))

    def _pack(self, groups: Sequence[Group]) -> list[Pack]:
        if self.pairs is not None:
            return pack_pairs(groups, max_pack_tokens=self.max_pack_tokens, pairs=self.pairs)
        return pack_groups(groups, max_pack_tokens=self.max_pack_tokens, shared_turns=self.shared_turns)

    def _score(self, packs: Sequence[Pack]) -> None:
        score_packs(
            self.model,
            packs,
            key="old_logp",
            temperature=self.temperature,
            entropy=self.entropy_balance > 0,
            value_head=self.value_head,
        )
        if self.reference is None:
            return
        # Under LoRA the policy is its own reference, with the adapter off.
        with without_adapter(self.model) if self.reference is self.model else nullcontext():
            score_packs(self.reference, packs, key="ref_logp", temperature=self.temperature)

    def _signals(
        self, groups: Sequence[Group], parts: Sequence[Sequence[Group]], minibatches: Sequence[Sequence[Pack]]
    ) -> dict[str, dict[Node, npt.NDArray[np.float64]]]:
        """What the credit rule wants to be given; rewards of tokens that it does not ask for go to the leaves."""
        wanted, signals = credit_needs(self.credit), {}
        if "values" in wanted:
            signals["values"] = _merged(turn_columns(p, g, "value") for g, p in zip(parts, minibatches, strict=True))
        rewards: dict[Node, npt.NDArray[np.float64]] = {}
        if self.kl_reward is not None:
            coef, kind = self.kl_reward
            rewards = _merged(
                kl_token_rewards(p, g, coef=coef, kind=kind) for g, p in zip(parts, minibatches, strict=True)
            )
        by_token = "token_rewards" in wanted
        if rewards:
            charge(groups, rewards, by_token=by_token)
        if by_token and self.kl_reward is not None:  # without a KL tokens have no rewards of their own
            signals["token_rewards"] = rewards
        return signals

    def _write(self, advantages: Advantages, minibatches: Sequence[Sequence[Pack]]) -> None:
        for number, minibatch in enumerate(minibatches):
            rows = slice(number * self.groups_per_update, (number + 1) * self.groups_per_update)
            write_advantages(minibatch, _part(advantages, rows))
            if self.entropy_balance:
                _balance(minibatch, self.entropy_balance)


def _merged(tables: Iterable[dict[Node, npt.NDArray[np.float64]]]) -> dict[Node, npt.NDArray[np.float64]]:
    return {node: values for table_ in tables for node, values in table_.items()}


def _part(advantages: Advantages, rows: slice) -> Advantages:
    """The advantages of some of the groups."""
    returns, weights = advantages.returns, advantages.weights
    return replace(
        advantages,
        values=advantages.values[rows],
        returns=returns[rows] if returns is not None else None,
        weights=weights[rows] if weights is not None else None,
    )


def _balance(packs: Sequence[Pack], coef: float) -> None:
    """AEPO's entropy-balanced advantages, with the statistics of the whole mini-batch."""
    advantage = [column(pack, "occurrences", "advantage") for pack in packs]
    entropy = [column(pack, "tokens", "old_entropy")[column(pack, "occurrences", "token")] for pack in packs]
    weight = [column(pack, "occurrences", "weight") for pack in packs]
    balanced = entropy_balanced(torch.cat(advantage), torch.cat(entropy), torch.cat(weight), coef=coef)
    for pack, values in zip(packs, balanced.split([len(part) for part in advantage]), strict=True):
        table(pack, "occurrences").set("advantage", values)
