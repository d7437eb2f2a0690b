"""Tools, and the one function that executes calls: grouped by tool, retried, counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from turntree.envs.core import Effects, Tool, ToolCall, ToolFailure, ToolResult
from turntree.errors import ToolError
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["CallCounter", "SearchTool", "execute"]

_Outcome = ToolResult | ToolFailure


@dataclass
class CallCounter:
    """Exact counts over one or more :func:`execute` runs, by tool name.

    ``calls``: calls answered or given up; ``attempts``: executions sent to the tool, retries included;
    ``shared``: calls answered by an identical call of the same batch; ``failures``: calls that failed for good.
    """

    calls: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, table: str, tool: str, count: int) -> None:
        counts: dict[str, int] = getattr(self, table)
        counts[tool] = counts.get(tool, 0) + count


@dataclass(frozen=True)
class SearchTool:
    """A search backend as a tool. A call's argument is the query, its result a tuple of up to ``k`` passages."""

    backend: SearchBackend
    k: int = 3
    name: str = "search"
    effects: Effects = "none"

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        """One batched search. Raises ``RetrievalError`` when the backend fails or breaks its contract."""
        found = self.backend.search([call.argument for call in calls], k=self.k)
        return [_result(passages, self.k) for passages in found]


def _result(passages: object, k: int) -> _Outcome:
    if not isinstance(passages, (list, tuple)) or not all(isinstance(p, Passage) for p in passages):
        return ToolFailure("bad_result", f"expected a list of passages for each query, found {passages!r:.200}")
    return ToolResult(tuple(passages[:k]))


def execute(
    tools: Mapping[str, Tool],
    calls: Sequence[ToolCall],
    *,
    retries: int = 2,
    backoff_s: float = 0.5,
    counter: CallCounter | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[_Outcome]:
    """Execute ``calls``, batched by tool; one outcome each, in the same order.

    A failed call is tried again up to ``retries`` times, after ``backoff_s``, then twice as long, and so on; calls
    that succeeded are never sent again. Identical calls of a tool without effects are sent once and share the
    result. What is still failing then comes back as a :class:`ToolFailure`. Raises ``ToolError`` for a tool that does
    not exist or answers with the wrong number of outcomes.
    """
    counter = counter if counter is not None else CallCounter()
    outcomes: dict[int, _Outcome] = {}
    for name in dict.fromkeys(call.tool for call in calls):
        places = [i for i, call in enumerate(calls) if call.tool == name]
        mine = [calls[i] for i in places]
        answers = _execute_one(
            _find(tools, name), mine, retries=retries, backoff_s=backoff_s, counter=counter, sleep=sleep
        )
        outcomes.update(zip(places, answers, strict=True))
    return [outcomes[i] for i in range(len(calls))]


def _find(tools: Mapping[str, Tool], name: str) -> Tool:
    if name not in tools:
        raise ToolError(f"a turn calls the tool {name!r}, but the core has {sorted(tools)}; add it to core.tools")
    return tools[name]


def _execute_one(
    tool: Tool,
    calls: Sequence[ToolCall],
    *,
    retries: int,
    backoff_s: float,
    counter: CallCounter,
    sleep: Callable[[float], None],
) -> list[_Outcome]:
    """All calls of one tool, duplicates shared where nothing can depend on how often they are made."""
    unique = list(dict.fromkeys(calls)) if tool.effects == "none" else list(calls)
    answers: list[_Outcome] = [ToolFailure("not_run", "the call was not executed")] * len(unique)
    waiting = list(range(len(unique)))
    for attempt in range(retries + 1):
        if attempt:
            sleep(backoff_s * 2 ** (attempt - 1))
        counter.add("attempts", tool.name, len(waiting))
        for index, outcome in zip(waiting, _attempt(tool, [unique[i] for i in waiting]), strict=True):
            answers[index] = outcome
        waiting = [i for i in waiting if isinstance(answers[i], ToolFailure)]
        if not waiting:
            break
    if tool.effects == "none":
        places = {call: i for i, call in enumerate(unique)}
        answers = [answers[places[call]] for call in calls]
    counter.add("calls", tool.name, len(calls))
    counter.add("shared", tool.name, len(calls) - len(unique))
    counter.add("failures", tool.name, sum(isinstance(a, ToolFailure) for a in answers))
    return answers


def _attempt(tool: Tool, calls: Sequence[ToolCall]) -> list[_Outcome]:
    """One batch. Infrastructure errors become failures of every call of the batch; bugs are raised."""
    try:
        outcomes = tool.run(calls)
    except (ToolError, OSError, TimeoutError) as error:
        return [ToolFailure(type(error).__name__, str(error))] * len(calls)
    if len(outcomes) != len(calls):
        raise ToolError(
            f"the tool {tool.name!r} answered {len(outcomes)} outcomes to {len(calls)} calls; it must give exactly one "
            "for each call, in the same order"
        )
    return outcomes
