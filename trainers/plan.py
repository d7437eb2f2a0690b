"""How trees grow: the shape of a prompt's trees, the limits of their turns, and the budget of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from turntree.errors import ConfigError
from turntree.trainers.expansion import ExpansionRule, chain, needs_of

__all__ = ["Allowance", "Budget", "GrowthPlan", "Limits", "Prompt", "Schedule", "part"]

Schedule: TypeAlias = Literal["auto", "fixed", "overlap"]
"""``fixed``: engine and tools take turns, in the same batches in every run; ``overlap``: they work at the same time;
``auto``: ``overlap`` for an engine that declares, by an attribute ``in_flight``, how many single requests it takes."""


def part(total: int, index: int, parts: int) -> int:
    """The ``index``-th of ``parts`` equal parts of ``total``; the first ones are larger by the remainder."""
    return total // parts + (index < total % parts)


def _at_least(name: str, value: int | float | None, minimum: int | float) -> None:
    if value is not None and not value >= minimum:
        raise ConfigError(f"{name} must be at least {minimum}, found {value}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task to grow trees for. ``uid`` names this *instance*: unique in a rollout, whatever the task's own id is."""

    uid: str
    task: Any


@dataclass(frozen=True, slots=True)
class Allowance:
    """What moves between prompts: expansions (trajectories), generated tokens and tool calls (0 where unbounded)."""

    expansions: int = 0
    generated_tokens: int = 0
    tool_calls: int = 0

    def __add__(self, other: Allowance) -> Allowance:
        return Allowance(
            self.expansions + other.expansions,
            self.generated_tokens + other.generated_tokens,
            self.tool_calls + other.tool_calls,
        )

    def __neg__(self) -> Allowance:
        return Allowance(-self.expansions, -self.generated_tokens, -self.tool_calls)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one prompt may use, all its trees together; None is unbounded.

    Checked between the rounds of a tree, against the tree's equal share, so that trees never wait for each other.
    The first chains always run. The overshoot is at most one round, and is reported.
    """

    leaves: int | None = None
    generated_tokens: int | None = None
    tool_calls: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _at_least(f"budget.{name}", getattr(self, name), 1)

    def share(self, index: int, trees: int) -> Budget:
        """The part of tree ``index`` of ``trees``: equal, remainders to the first trees, at least 1."""

        def own(total: int | None) -> int | None:
            return None if total is None else max(1, part(total, index, trees))

        return Budget(own(self.leaves), own(self.generated_tokens), own(self.tool_calls))

    def extended(self, by: Allowance) -> Budget:
        """This budget with ``by`` added; what is unbounded stays so."""

        def more(bound: int | None, amount: int) -> int | None:
            return None if bound is None else bound + amount

        return Budget(
            more(self.leaves, by.expansions),
            more(self.generated_tokens, by.generated_tokens),
            more(self.tool_calls, by.tool_calls),
        )


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """The shape of a prompt's trees.

    Each of ``trees`` independent trees starts with ``chains`` whole trajectories from its root. Then ``rounds`` times
    ``rule`` picks ``expansions`` places, each of which is grown to a leaf: ``chains + rounds * expansions`` leaves a
    tree. Of these ``kept_leaves`` random ones stay for training (None: all); the others count as used all the same.

    ``adaptive`` is a threshold in nats (None: off): a prompt is settled when all first chains of all its trees answered
    in their first turn, each with a mean negative log-prob of its sampled tokens below the threshold. A settled prompt
    is not expanded; what it leaves over goes to other prompts of the rollout (see ``turntree.trainers.adaptive``).
    """

    trees: int = 1
    chains: int = 1
    rounds: int = 0
    expansions: int = 0
    kept_leaves: int | None = None
    rule: ExpansionRule = chain
    budget: Budget | None = None
    adaptive: float | None = None

    def __post_init__(self) -> None:
        self._check_shape()
        self._check_adaptive()

    def _check_shape(self) -> None:
        for name, minimum in (("trees", 1), ("chains", 1), ("rounds", 0), ("expansions", 0), ("kept_leaves", 1)):
            _at_least(name, getattr(self, name), minimum)
        needs_of(self.rule)
        if bool(self.rounds) != bool(self.expansions):
            raise ConfigError(
                f"rounds={self.rounds} with expansions={self.expansions} grows nothing; set both above 0, or both to 0"
            )
        if self.rounds and self.rule is chain:
            raise ConfigError(
                f"rounds={self.rounds} needs an expansion rule, but rule=chain never expands; choose another rule "
                "(random_nodes, entropy, ...) or set rounds=0 and expansions=0"
            )
        if self.kept_leaves is not None and self.kept_leaves > self.leaves:
            raise ConfigError(
                f"kept_leaves={self.kept_leaves}, but a tree has chains + rounds * expansions = {self.leaves} leaves; "
                "lower kept_leaves or grow more"
            )

    def _check_adaptive(self) -> None:
        _at_least("adaptive", self.adaptive, 0)
        if self.adaptive is None:
            return
        if not self.rounds:
            raise ConfigError(
                f"adaptive={self.adaptive} moves expansions between prompts, but rounds=0 makes none; set rounds and "
                "expansions above 0, or leave adaptive out"
            )
        if needs_of(self.rule) == "any":
            raise ConfigError(
                f"adaptive={self.adaptive} decides when the first chains of a prompt end, but rule {self.rule!r} "
                "expands before that (needs = 'any'); choose another rule, or leave adaptive out"
            )

    @property
    def leaves(self) -> int:
        """Leaves of a tree that runs through all rounds."""
        return self.chains + self.rounds * self.expansions


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a rollout; all lengths are in tokens.

    ``max_context_tokens`` bounds prompt and trajectory together, ``max_response_tokens`` what follows the prompt. An
    observation that fits exactly is kept; an episode without room for another token ends as truncated and is scored.
    A failed tool call is repeated ``tool_retries`` times, after ``tool_backoff_s`` seconds, doubled each time (the
    turn is not sampled again); an aborted generation is repeated ``engine_retries`` times.
    ``max_concurrent_trees`` bounds memory (trees that wait for others in an adaptive plan are not counted),
    ``max_batch_requests`` the size of one engine call, or the requests in flight of an engine that takes them one by
    one. ``schedule``: whether searches and generation overlap; see :data:`Schedule`.
    """

    max_turn_tokens: int
    max_context_tokens: int
    max_response_tokens: int | None = None
    tool_retries: int = 2
    tool_backoff_s: float = 0.5
    engine_retries: int = 2
    max_concurrent_trees: int | None = None
    max_batch_requests: int | None = None
    schedule: Schedule = "auto"

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ConfigError(f"schedule={self.schedule!r}: expected one of {', '.join(get_args(Schedule))}")
        for name in ("max_turn_tokens", "max_context_tokens", "max_response_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("tool_retries", "tool_backoff_s", "engine_retries"):
            _at_least(name, getattr(self, name), 0)
        for name in ("max_concurrent_trees", "max_batch_requests"):
            _at_least(name, getattr(self, name), 1)

    def room(self, context: int, prompt: int) -> int:
        """Tokens that still fit after ``context`` tokens, ``prompt`` of which are the prompt; never negative."""
        room = self.max_context_tokens - context
        if self.max_response_tokens is not None:
            room = min(room, self.max_response_tokens - (context - prompt))
        return max(0, room)
