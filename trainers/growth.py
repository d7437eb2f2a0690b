"""A tree while it grows, and the rewards of its leaves."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.agents.engines.protocol import Request
from turntree.agents.scorer import Failed, Finished, FinishedTurn, Scored
from turntree.envs.task import FrozenDict
from turntree.trainers.episode import Ask
from turntree.trainers.plan import Allowance, Budget, Prompt
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Node, Tree

__all__ = ["Growth", "Job", "as_finished", "reward", "total"]


@dataclass(eq=False, slots=True)
class Growth:
    """One tree while it grows: ``picks`` expansions of its rounds are behind it, ``left`` may follow.

    ``family`` are the trees of its prompt. ``running`` trajectories wait for engine or tools, ``landed`` ones have
    ended, ``judged`` more are being scored. ``place`` orders the trees that are in flight. In an adaptive plan,
    ``certain`` says whether its first chains were (None: still running), ``given`` what the deal brought it.
    """

    prompt: Prompt
    tree: Tree
    budget: Budget
    left: int
    family: list[Growth]
    tally: Tally = field(default_factory=Tally)
    running: int = 0
    picks: int = 0
    place: int = 0
    judged: int = 0
    certain: bool | None = None
    given: Allowance = field(default_factory=Allowance)
    landed: list[Node] = field(default_factory=list)
    scheduled: dict[Node, int] = field(default_factory=dict)

    @property
    def in_flight(self) -> bool:
        """Whether there are trajectories that run, or that landed and were not scored yet."""
        return bool(self.running or self.landed or self.judged)

    def next_ordinal(self, parent: Node) -> int:
        """The ordinal of the next child of ``parent``, counting children whose turn is still being sampled."""
        # An inner node's first child is its own chain's next turn, scheduled when the node was made.
        ordinal = self.scheduled.get(parent, 0 if parent is self.tree.root else 1)
        self.scheduled[parent] = ordinal + 1
        return ordinal


@dataclass(frozen=True, slots=True)
class Job:
    """An episode that waits for the engine."""

    growth: Growth
    episode: Generator[Ask, Any, Node]
    ask: Request


def total(growths: Sequence[Growth]) -> Tally:
    """The counts of several trees, added up."""
    added = Tally()
    for growth in growths:
        added.add(growth.tally)
    return added


def as_finished(growth: Growth, leaf: Node) -> Finished:
    """The trajectory that ends in ``leaf`` as scorers and finishers see it."""
    path = leaf.trajectory()
    return Finished(
        task=growth.prompt.task,
        prompt=growth.tree.root.observation,
        turns=tuple(FinishedTurn(n.text, n.action, n.observation, n.info) for n in path),
        status="answered" if leaf.status == "answered" else "truncated",
        answer=leaf.info.get("answer"),
        reward=sum(n.step_reward for n in path),
        state=leaf.state,
        info=leaf.info,
    )


def reward(leaf: Node, scored: Scored) -> None:
    """Write what a leaf was judged to be into it."""
    if scored.finished is not None and scored.finished.answer != leaf.info.get("answer"):
        leaf.info = FrozenDict({**leaf.info, "answer": scored.finished.answer})
    if isinstance(scored.reward, Failed):
        leaf.status = "failed"
        leaf.info = FrozenDict({**leaf.info, "error": scored.reward.kind, "message": scored.reward.message})
        return
    leaf.reward = scored.reward
    if scored.parts:
        parts = {**leaf.info.get("reward_parts", {}), **scored.parts}
        leaf.info = FrozenDict({**leaf.info, "reward_parts": parts})
