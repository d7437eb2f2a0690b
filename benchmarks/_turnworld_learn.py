"""Learning TurnWorld-S: an arm's rollouts, credit and loss on tabular logits, by the library's own functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _turnworld import Question, World, question
from _turnworld_rollout import Policy, Rollout, grow
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.build import credit_rule, growth_plan
from turntree.trainers.config import AlgorithmConfig
from turntree.trainers.credit import CreditRule, credit_needs
from turntree.trainers.credit.base import count_leaves
from turntree.trainers.losses import Denominators, Occurrences, policy_loss
from turntree.trainers.plan import GrowthPlan
from turntree.trainers.seeds import derive_rng
from turntree.trainers.tree import Group, Node

__all__ = ["Arm", "Curve", "Learner", "true_gradient"]

FloatArray = npt.NDArray[np.float64]

PROMPTS = 16
"""Questions of a rollout."""
EPS = 1e-4
"""Of Adam. Every context has logits of its own, so that with a tiny epsilon the smallest credit of a prompt that only
failed becomes a full step of its contexts: a fault of tables, which rules with a baseline of the whole batch would pay
for, and rules that give such prompts exactly 0 would not."""

_SHAPE = ("name", "trees", "chains", "rounds", "expansions", "budget_leaves", "expansion", "expansion_args")
_CREDIT = ("credit", "credit_args", "shared_turns")
_LOSS = ("ratio", "turn_ratio", "ratio_gradient", "clip", "clip_low", "clip_high", "dual_clip", "aggregation")
_READ = frozenset((*_SHAPE, *_CREDIT, *_LOSS))


@dataclass(frozen=True)
class Arm:
    """What is compared: an algorithm, the updates that each rollout is used for, and the shapes to tune over.

    ``shapes`` are changes of the algorithm's options, each an alternative. Raises ``ConfigError`` for options of an
    algorithm that this bench would not follow.
    """

    algorithm: AlgorithmConfig
    epochs: int = 1
    shapes: tuple[dict[str, Any], ...] = ({},)

    def __post_init__(self) -> None:
        default = AlgorithmConfig()
        for option in fields(AlgorithmConfig):
            name = option.name
            if name not in _READ and getattr(self.algorithm, name) != getattr(default, name):
                raise ConfigError(f"arm {self.name}: TurnWorld-S has no {name}; leave it at its default")
        if "values" in credit_needs(self.credit):
            raise ConfigError(f"arm {self.name}: credit={self.algorithm.credit} needs a value head; there is none here")

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def is_chain(self) -> bool:
        return not self.algorithm.rounds

    def variants(self) -> list[Arm]:
        """The arm in each of its shapes."""
        return [Arm(replace(self.algorithm, **shape), self.epochs) for shape in self.shapes]

    @property
    def shape(self) -> str:
        """``trees x (chains + rounds x expansions)``, without the parts that are 1 or 0."""
        a = self.algorithm
        tree = f"{a.chains}" + (f"+{a.rounds}x{a.expansions}" if a.rounds else "")
        return f"{a.trees}x({tree})" if a.trees > 1 else tree

    @cached_property
    def credit(self) -> CreditRule:
        return credit_rule(self.algorithm)

    def plan(self, world: World) -> GrowthPlan:
        """The vocabulary of token-entropy branching is the number of different search turns."""
        return growth_plan(self.algorithm, vocab_size=world.relations * world.senses)


@dataclass(slots=True)
class Curve:
    """Expected exact match after ``tokens`` tokens and ``calls`` searches."""

    tokens: list[int] = field(default_factory=list)
    em: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def area(self, budget: float) -> float:
        """Mean exact match over the first ``budget`` tokens, straight lines between updates."""
        x, y = np.asarray(self.tokens, float), np.asarray(self.em)
        inside = x < budget
        x, y = np.append(x[inside], budget), np.append(y[inside], np.interp(budget, x, y))
        return float(np.trapezoid(y, x) / budget)

    def reaches(self, em: float) -> float:
        """Tokens at which the curve first reaches ``em``; infinite if it does not."""
        for i, y in enumerate(self.em):
            if y >= em:
                if i == 0:
                    return float(self.tokens[0])
                share = (em - self.em[i - 1]) / (y - self.em[i - 1])
                return self.tokens[i - 1] + share * (self.tokens[i] - self.tokens[i - 1])
        return float("inf")


class Learner:
    """An arm in a world. Cold start, questions and draws follow from ``seed``; all arms get the same questions."""

    def __init__(self, world: World, arm: Arm, *, seed: int) -> None:
        self.world = world
        self.arm = arm
        self.plan = arm.plan(world)
        self.logits = world.cold_start(seed).requires_grad_()
        self.draws = derive_rng("turnworld", seed, "draws")
        self.questions = _questions(world, seed)

    def rollout(self) -> Rollout:
        """The next ``PROMPTS`` questions, with the current policy."""
        asked = [next(self.questions) for _ in range(PROMPTS)]
        return grow(self.world, Policy.of(self.world, self.logits), asked, plan=self.plan, rng=self.draws)

    def gradient(self, rollout: Rollout) -> Tensor:
        """The direction of ascent of the first update's loss ``[3 C, K]``."""
        batch = _batch(rollout, self.arm)
        (gradient,) = torch.autograd.grad(self._loss(batch, self._logp(batch).detach()), self.logits)
        return -gradient

    def train(self, budget: int, *, lr: float) -> Curve:
        """Rollout after rollout until ``budget`` tokens are used, as the world counts them."""
        adam = torch.optim.Adam([self.logits], lr=lr, betas=(0.9, 0.99), eps=EPS)
        curve = Curve([0], [self.exact_match()], [0])
        while curve.tokens[-1] < budget:
            rollout = self.rollout()
            batch = _batch(rollout, self.arm)
            old = self._logp(batch).detach()
            for _ in range(self.arm.epochs):
                adam.zero_grad()
                self._loss(batch, old).backward()
                adam.step()
            curve.tokens.append(curve.tokens[-1] + rollout.cost(self.world))
            curve.calls.append(curve.calls[-1] + rollout.calls)
            curve.em.append(self.exact_match())
            rollout.release()
        return curve

    def exact_match(self) -> float:
        with torch.no_grad():
            return float(self.world.exact_match(self.logits))

    def _logp(self, batch: _Batch) -> Tensor:
        return self.world.log_probs(self.logits)[batch.rows, batch.columns]

    def _loss(self, batch: _Batch, old: Tensor) -> Tensor:
        occurrences = Occurrences(
            logp=self._logp(batch),
            old_logp=old,
            advantage=batch.advantage,
            weight=batch.weight,
            leaf=batch.leaf,
            turn=batch.turn,
            n_leaves=batch.n_leaves,
            n_turns=batch.n_turns,
        )
        over = Denominators.of_occurrences(batch.weight, batch.leaf, n_leaves=batch.n_leaves, turn=batch.turn)
        a = self.arm.algorithm
        options: dict[str, Any] = {name: getattr(a, name) for name in _LOSS}
        return policy_loss(occurrences, over, **options).loss


def _questions(world: World, seed: int) -> Iterator[Question]:
    rng = derive_rng("turnworld", seed, "questions")
    while True:
        yield question(world, rng)


def true_gradient(world: World, logits: Tensor) -> Tensor:
    """Of the expected exact match ``[3 C, K]``, exactly."""
    at = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(world.exact_match(at), at)
    return gradient


# Occurrences of choices


@dataclass(frozen=True, slots=True)
class _Batch:
    """One entry for each choice of each trajectory: where it is in the table, and what it is worth; all ``[O]``."""

    rows: Tensor
    columns: Tensor
    advantage: Tensor
    weight: Tensor
    leaf: Tensor
    turn: Tensor
    n_leaves: int
    n_turns: int


def _batch(rollout: Rollout, arm: Arm) -> _Batch:
    """The other tokens of a turn have probability 1: they have no gradient and are left out."""
    groups = rollout.groups
    credit = arm.credit(groups)
    paths = [leaf.trajectory() for group in groups for leaf in group.scored_leaves()]
    turns = [node for path in paths for node in path]
    made = [rollout.choices[node] for node in turns]
    counts = np.array([len(choices) for choices in made])
    where = np.array([choice for choices in made for choice in choices])
    turn = np.repeat(np.arange(len(turns)), counts)
    leaf = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    weight = _flat(credit.weights) if credit.weights is not None else np.ones(len(turns))
    if arm.algorithm.shared_turns == "once":
        shares = _shares(groups)
        weight = weight * [shares[node] for node in turns]
    advantage = _flat(credit.values)
    if credit.per == "token":  # the choices are a turn's first tokens
        starts = np.cumsum([0, *(len(node.turn_ids) for node in turns)])[:-1]
        advantage = advantage[np.concatenate([start + np.arange(n) for start, n in zip(starts, counts)])]
    else:
        advantage = advantage[turn]
    return _Batch(
        rows=torch.tensor(rollout.rows)[where],
        columns=torch.tensor(rollout.columns)[where],
        advantage=torch.from_numpy(advantage),
        weight=torch.from_numpy(weight[turn]),
        leaf=torch.from_numpy(leaf[turn]),
        turn=torch.from_numpy(turn),
        n_leaves=len(paths),
        n_turns=len(turns),
    )


def _flat(values: Sequence[Sequence[FloatArray]]) -> FloatArray:
    return np.concatenate([row for group in values for row in group])


def _shares(groups: Sequence[Group]) -> dict[Node, float]:
    counts = (count_leaves(group.scored_leaves()) for group in groups)
    return {node: 1.0 / n for group in counts for node, n in group.items()}
