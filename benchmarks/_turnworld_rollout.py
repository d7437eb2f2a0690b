"""Trees of TurnWorld-S, grown in lock step from a table of the policy's choices.

The shape of the trees and the expansion rule are a :class:`GrowthPlan`, as in a run. Only the sampling is its own: one
draw for all trajectories of a round at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from _turnworld import (
    ANSWER_TOKENS,
    OBSERVATION_TOKENS,
    SEARCH_TOKENS,
    START,
    Question,
    State,
    World,
    answer,
    search,
)
from torch import Tensor

from turntree.envs.task import FrozenDict
from turntree.trainers.expansion import ask_rule
from turntree.trainers.plan import GrowthPlan
from turntree.trainers.tree import Group, Node, Tree

__all__ = ["Policy", "Rollout", "grow"]

FloatArray = npt.NDArray[np.float64]

_ZEROS = [(0.0,) * n for n in range(max(*SEARCH_TOKENS, *ANSWER_TOKENS))]
_NOTHING = FrozenDict()
_OBSERVATION = (0,) * OBSERVATION_TOKENS


@dataclass(frozen=True, slots=True)
class Policy:
    """A table of choices ready for sampling: log-probs, cumulated probabilities ``[6 C, K]``, entropies ``[6 C]``."""

    logprobs: FloatArray
    cumulated: FloatArray
    entropies: FloatArray

    @classmethod
    def of(cls, world: World, logits: Tensor) -> Policy:
        with torch.no_grad():
            table = world.log_probs(logits)
            p = table.exp()
            cumulated = p.cumsum(1)
            entropies = -(p * table.nan_to_num(neginf=0.0)).sum(1)
        # Rounding may leave the last sum a little below 1: no draw may fall beyond the last choice that exists.
        cumulated[cumulated >= cumulated[:, -1:] - 1e-12] = 1.0
        return cls(table.numpy(), cumulated.numpy(), entropies.numpy())

    def draw(self, rows: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """One choice from each row."""
        passed: npt.NDArray[np.int64] = (self.cumulated[rows] <= rng.random((*rows.shape, 1))).sum(-1)
        return passed


@dataclass(slots=True)
class Rollout:
    """``groups``, one a question. ``rows`` and ``columns`` hold all choices, by place in the table; ``choices`` says
    which of them a turn made. ``generated_tokens`` counts sampled tokens, ``observation_tokens`` those of
    observations; shared turns count once."""

    groups: list[Group] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    choices: dict[Node, range] = field(default_factory=dict)
    generated_tokens: int = 0
    observation_tokens: int = 0

    def cost(self, world: World) -> int:
        """What a budget of ``world`` counts."""
        return self.generated_tokens + world.observations * self.observation_tokens

    @property
    def calls(self) -> int:
        """Searches made; those of shared turns count once."""
        return self.observation_tokens // OBSERVATION_TOKENS

    def release(self) -> None:
        """Unlink turns from their parents, so that trees go at once and not when cycles are looked for."""
        for node in self.choices:
            node.parent = None


@dataclass(slots=True)
class _Walker:
    """A trajectory that grows: its next turn is child ``ordinal`` of ``parent``."""

    question: Question
    parent: Node
    ordinal: int
    picked: Node | None = None


def grow(
    world: World, policy: Policy, questions: Sequence[Question], *, plan: GrowthPlan, rng: np.random.Generator
) -> Rollout:
    """Grow ``plan.trees`` trees for every question. All draws, also those of the rule, come from ``rng``."""
    out, asked = Rollout(), dict[Tree, Question]()
    for i, q in enumerate(questions):
        seeds = rng.integers(2**62, size=plan.trees).tolist()
        trees = [Tree(Node(state=START), str(i), j, seed=seed) for j, seed in enumerate(seeds)]
        out.groups.append(Group(str(i), trees))
        asked.update(dict.fromkeys(trees, q))
    _walk(world, policy, [_Walker(q, t.root, c) for t, q in asked.items() for c in range(plan.chains)], out, rng)
    for _ in range(plan.rounds):
        _walk(world, policy, [w for t, q in asked.items() for w in _expansions(t, q, plan, rng)], out, rng)
    return out


def _expansions(tree: Tree, q: Question, plan: GrowthPlan, rng: np.random.Generator) -> list[_Walker]:
    k = plan.expansions
    if plan.budget is not None and plan.budget.leaves is not None:
        k = min(k, (plan.budget.share(tree.index, plan.trees).leaves or 0) - len(tree.leaves()))
    walkers: list[_Walker] = []
    scheduled: dict[Node, int] = {}
    for pick in ask_rule(plan.rule, tree, k, rng) if k > 0 else []:
        ordinal = scheduled.get(pick.parent, len(pick.parent.children))
        scheduled[pick.parent] = ordinal + 1
        walkers.append(_Walker(q, pick.parent, ordinal, pick.picked))
    tree.rounds += 1
    return walkers


def _walk(world: World, policy: Policy, walkers: list[_Walker], out: Rollout, rng: np.random.Generator) -> None:
    """One turn of every trajectory, until all have answered."""
    while walkers:
        searching: list[_Walker] = []
        answering: list[_Walker] = []
        for w in walkers:
            (answering if w.parent.state.answers(len(w.question)) else searching).append(w)
        if answering:
            _answers(world, policy, answering, out, rng)
        walkers = _searches(world, policy, searching, out, rng) if searching else []


def _searches(
    world: World, policy: Policy, walkers: list[_Walker], out: Rollout, rng: np.random.Generator
) -> list[_Walker]:
    at = [(w.question[w.parent.state.hop], w.parent.state.tried) for w in walkers]
    rows = np.array([(world.relation_row(c, tried), world.sense_row(c)) for c, tried in at])
    columns = policy.draw(rows, rng)
    lengths = rng.integers(SEARCH_TOKENS[0], SEARCH_TOKENS[1] + 1, size=len(walkers)).tolist()
    onward = []
    for w, made, node in zip(walkers, columns.tolist(), _turns(policy, rows, columns, lengths, out)):
        state: State = w.parent.state
        node.state, node.action, node.observation_ids = search(state, *made), "search", _OBSERVATION
        out.observation_tokens += OBSERVATION_TOKENS
        onward.append(_Walker(w.question, _attach(w, node), 0))
    return onward


def _answers(world: World, policy: Policy, walkers: list[_Walker], out: Rollout, rng: np.random.Generator) -> None:
    rows = np.array([[world.answer_row(w.question[-1])] for w in walkers])
    columns = policy.draw(rows, rng)
    lengths = rng.integers(ANSWER_TOKENS[0], ANSWER_TOKENS[1] + 1, size=len(walkers)).tolist()
    for w, made, node in zip(walkers, columns.tolist(), _turns(policy, rows, columns, lengths, out)):
        node.state, node.action, node.status = w.parent.state, "answer", "answered"
        node.reward = answer(w.parent.state, made[0], hops=len(w.question))
        _attach(w, node)


def _turns(
    policy: Policy,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    lengths: Sequence[int],
    out: Rollout,
) -> list[Node]:
    """Nodes of ``lengths`` tokens: the choices first, then tokens of probability 1."""
    width = rows.shape[1]
    logprobs = policy.logprobs[rows, columns]
    nll = (-logprobs.sum(1) / width).tolist()
    first, nodes = len(out.rows), list[Node]()
    made = zip(columns.tolist(), logprobs.tolist(), policy.entropies[rows].tolist(), lengths, nll)
    for i, (column, logprob, entropy, length, mean) in enumerate(made):
        node = Node(
            turn_ids=_turn_ids(*column, length=length),
            logprobs=tuple(logprob) + _ZEROS[length - width],
            entropies=tuple(entropy) + _ZEROS[length - width],
            entropy=mean,
            info=_NOTHING,
        )
        out.choices[node] = range(first + i * width, first + (i + 1) * width)
        nodes.append(node)
    out.rows += rows.ravel().tolist()
    out.columns += columns.ravel().tolist()
    out.generated_tokens += sum(lengths)
    return nodes


@functools.cache
def _turn_ids(*choices: int, length: int) -> tuple[int, ...]:
    """Choices are numbered from 1; 0 is every other token."""
    return (*(c + 1 for c in choices), *(0,) * (length - len(choices)))


def _attach(walker: _Walker, node: Node) -> Node:
    node.ordinal, node.picked = walker.ordinal, walker.picked
    return walker.parent.add_child(node)
