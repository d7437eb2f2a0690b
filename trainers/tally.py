"""What a rollout used, counted exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from turntree.envs.task import EMPTY, FrozenDict
from turntree.trainers.plan import Allowance, Budget
from turntree.trainers.tree import Tree

__all__ = ["RolloutStats", "Tally"]

_TABLES = ("by_tool", "errors", "truncated")


@dataclass(slots=True)
class Tally:
    """Running counts of one tree, or of many added up. See :class:`RolloutStats` for what each counts."""

    trajectories: int = 0
    turns: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    tool_calls: int = 0
    aborted: int = 0
    pruned: int = 0
    by_tool: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add ``other``'s counts to these."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _TABLES:
            if counted := getattr(other, name):
                getattr(self, name).update(counted)

    def close(self, tree: Tree) -> None:
        """Count what became of the leaves of a finished tree."""
        for leaf in tree.leaves():
            self.pruned += leaf.pruned
            if leaf.status == "failed":
                self.errors[str(leaf.info["error"])] += 1
            elif leaf.status == "truncated":
                self.truncated[str(leaf.info.get("stop_reason", "unknown"))] += 1

    def within(self, budget: Budget, *, running: int = 0) -> bool:
        """Whether there is some of every bounded thing left, once ``running`` more trajectories have ended."""
        used = ((self.trajectories + running, budget.leaves), (self.generated_tokens, budget.generated_tokens))
        return all(b is None or n < b for n, b in (*used, (self.tool_calls, budget.tool_calls)))


_COUNTS = tuple(f.name for f in fields(Tally) if f.name not in _TABLES)


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Counts of a whole rollout.

    ``trajectories``: leaves of all kinds. ``turns``: sampled turns. ``generated_tokens``: everything that the engine
    returned; ``discarded_tokens`` of these are in no tree (aborted turns, and tokens after a stop string or limit).
    ``tool_calls``: calls of turns that were answered, ``by_tool``: the same by tool; ``tool_attempts``: calls handed to
    tools, retries included, identical ones of a batch once. ``aborted``: aborted generations. ``errors``: failed leaves
    by type; ``truncated``: truncated leaves by reason. ``pruned``: leaves left out of training by ``kept_leaves``.
    ``overshoot_*``: use beyond the prompts' budgets, which are what was bought plus or less what moved.
    ``dropped_groups``: groups with too few scored leaves, once they were dropped.

    Adaptive budgets: ``settled_prompts`` gave up ``moved_expansions``, ``moved_generated_tokens`` and
    ``moved_tool_calls`` to trees of other prompts, which used ``moved_expansions_used`` of the expansions.
    """

    prompts: int = 0
    trees: int = 0
    trajectories: int = 0
    turns: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    tool_calls: int = 0
    tool_attempts: int = 0
    aborted: int = 0
    pruned: int = 0
    dropped_groups: int = 0
    overshoot_leaves: int = 0
    overshoot_generated_tokens: int = 0
    overshoot_tool_calls: int = 0
    settled_prompts: int = 0
    moved_expansions: int = 0
    moved_expansions_used: int = 0
    moved_generated_tokens: int = 0
    moved_tool_calls: int = 0
    by_tool: FrozenDict = EMPTY
    errors: FrozenDict = EMPTY
    truncated: FrozenDict = EMPTY

    @property
    def failed(self) -> int:
        """Leaves that failed, of all types."""
        return sum(self.errors.values())

    def as_dict(self) -> dict[str, int]:
        """All counts, flat: ``generated_tokens``, ..., ``error/<type>/count``, ``truncated/<reason>/count``.

        Calls by tool are ``tool_calls/<tool>/count``.
        """
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _TABLES}
        flat["failed"] = self.failed
        flat |= {f"tool_calls/{tool}/count": n for tool, n in sorted(self.by_tool.items())}
        flat |= {f"error/{kind}/count": n for kind, n in sorted(self.errors.items())}
        return flat | {f"truncated/{reason}/count": n for reason, n in sorted(self.truncated.items())}

    @staticmethod
    def joined(parts: Sequence[RolloutStats]) -> RolloutStats:
        """The counts of several rollouts, added up."""
        total: dict[str, Any] = {}
        for item in fields(RolloutStats):
            values = [getattr(part, item.name) for part in parts]
            tables = item.name in _TABLES
            total[item.name] = FrozenDict(sum((Counter(v) for v in values), Counter())) if tables else sum(values)
        return RolloutStats(**total)

    @staticmethod
    def of(
        per_prompt: Iterable[tuple[Tally, Allowance]],
        *,
        trees: int,
        tool_attempts: int,
        budget: Budget | None,
        settled: int,
        moved: Allowance,
        moved_used: int,
    ) -> RolloutStats:
        """Add up the prompts' tallies and measure each against ``budget`` and what it was given (negative: gave away).

        ``moved`` is what ``settled`` prompts gave away in all, ``moved_used`` how many of its expansions were grown.
        """
        total, over, prompts, budget = Tally(), Tally(), 0, budget or Budget()
        for tally, given in per_prompt:
            prompts += 1
            total.add(tally)
            over.trajectories += _beyond(tally.trajectories, budget.leaves, given.expansions)
            over.generated_tokens += _beyond(tally.generated_tokens, budget.generated_tokens, given.generated_tokens)
            over.tool_calls += _beyond(tally.tool_calls, budget.tool_calls, given.tool_calls)
        counts = {name: getattr(total, name) for name in _COUNTS}
        return RolloutStats(
            prompts=prompts,
            trees=trees,
            tool_attempts=tool_attempts,
            overshoot_leaves=over.trajectories,
            overshoot_generated_tokens=over.generated_tokens,
            overshoot_tool_calls=over.tool_calls,
            settled_prompts=settled,
            moved_expansions=moved.expansions,
            moved_expansions_used=moved_used,
            moved_generated_tokens=moved.generated_tokens,
            moved_tool_calls=moved.tool_calls,
            by_tool=FrozenDict(total.by_tool),
            errors=FrozenDict(total.errors),
            truncated=FrozenDict(total.truncated),
            **counts,
        )


def _beyond(used: int, bound: int | None, given: int) -> int:
    return 0 if bound is None else max(0, used - bound - given)
