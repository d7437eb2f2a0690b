"""Executing the tool calls of many episodes: in batches, retried without anybody waiting for the back-off.

Without an inbox the calls that wait are executed at once, by the thread that asks, in one batch. With one they are
handed to threads, while the engine generates for other rows: a tool may have as many batches in flight as it declares
by an attribute ``in_flight`` (one without it), and what waits is spread over those that are free. So a slow search is
asked one query at a time, and a busy one in batches.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from turntree.envs.core import Tool, ToolCall, ToolFailure, ToolResult
from turntree.envs.tools import CallCounter, execute, repeatable
from turntree.trainers.inbox import Inbox
from turntree.trainers.plan import Schedule

__all__ = ["Outcome", "ToolDesk", "in_flight", "overlaps"]

Outcome: TypeAlias = ToolResult | ToolFailure
"""What became of a tool call."""


def in_flight(part: Any) -> int:
    """What an engine or a tool declares to take at the same time, from several threads; 0 where it declares nothing."""
    declared: Any = getattr(part, "in_flight", None)
    return declared if isinstance(declared, int) and declared > 0 else 0


def overlaps(schedule: Schedule, engine: Any) -> bool:
    """Whether work is handed to threads: as ``schedule`` says; ``auto``: where the engine declares ``in_flight``.

    What a batch gains that starts before the last search has ended, it loses by being smaller, unless rows can join it
    (see ``benchmarks/growth.py``); and an engine in this process repeats its results exactly in equal batches only.
    """
    return schedule == "overlap" or (schedule == "auto" and in_flight(engine) > 0)


@dataclass(eq=False, slots=True)
class _Order:
    """The calls of one turn."""

    done: Callable[[Sequence[Outcome]], None]
    outcomes: list[Outcome | None]
    left: int


@dataclass(eq=False, slots=True)
class _Call:
    """One call of an order, tried ``tries`` times so far."""

    order: _Order
    place: int
    call: ToolCall
    tries: int = 0


@dataclass(eq=False, slots=True)
class _Lane:
    """What waits for one tool, and how many of its batches are running."""

    waiting: list[_Call] = field(default_factory=list)
    running: int = 0


class ToolDesk:
    """Executes tool calls and hands the outcomes of a turn over when they are complete.

    A failed call is tried again up to ``retries`` times, ``backoff_s`` seconds later, then twice as long, and so on,
    unless its tool is not repeatable; meanwhile everything else goes on. ``attempts`` counts the calls handed to
    tools, retries included, identical ones of a batch once.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        retries: int,
        backoff_s: float,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tools = tools
        self.retries = retries
        self.backoff_s = backoff_s
        self.inbox = inbox
        self.clock = clock
        self.attempts = 0
        self._waiting: list[_Call] = []
        self._later: list[tuple[float, int, _Call]] = []
        self._lanes: dict[str, _Lane] = {}
        self._numbers = itertools.count()

    def put(self, calls: Sequence[ToolCall], done: Callable[[Sequence[Outcome]], None]) -> None:
        """Ask for the calls of a turn, at least one; ``done`` gets one outcome each, in order.

        It is called within a later :meth:`start`, or, with an inbox, when that is emptied.
        """
        order = _Order(done, [None] * len(calls), len(calls))
        self._waiting.extend(_Call(order, place, call) for place, call in enumerate(calls))

    def start(self) -> None:
        """Execute, or hand to threads, all calls that wait and whose back-off is over."""
        now = self.clock()
        waiting, self._waiting = self._waiting, []
        while self._later and self._later[0][0] <= now:
            waiting.append(heapq.heappop(self._later)[2])
        if self.inbox is None:
            if waiting:
                outcomes, attempts = _attempt(self.tools, waiting)
                self._take(waiting, outcomes, attempts)
            return
        for item in waiting:
            self._lanes.setdefault(item.call.tool, _Lane()).waiting.append(item)
        for name, lane in self._lanes.items():
            self._dispatch(name, lane, self.inbox)

    def wait_s(self) -> float | None:
        """Seconds until the next retry is due; None when none is planned."""
        return max(0.0, self._later[0][0] - self.clock()) if self._later else None

    def _dispatch(self, name: str, lane: _Lane, inbox: Inbox) -> None:
        """Spread what waits over the batches that the tool can still take."""
        slots = max(1, in_flight(self.tools.get(name)))
        free = slots - lane.running
        if free < 1 or not lane.waiting:
            return
        size = -(-len(lane.waiting) // free)
        waiting, lane.waiting = lane.waiting, []
        for batch in (waiting[i : i + size] for i in range(0, len(waiting), size)):
            lane.running += 1
            then = functools.partial(self._returned, lane, batch)
            inbox.submit(f"tool-{name}", slots, functools.partial(_attempt, self.tools, batch), then)

    def _returned(self, lane: _Lane, batch: Sequence[_Call], found: tuple[list[Outcome], int]) -> None:
        lane.running -= 1
        self._take(batch, *found)

    def _take(self, batch: Sequence[_Call], outcomes: Sequence[Outcome], attempts: int) -> None:
        self.attempts += attempts
        for item, outcome in zip(batch, outcomes, strict=True):
            self._settle(item, outcome)

    def _settle(self, item: _Call, outcome: Outcome) -> None:
        """Take the outcome of a call in, or plan its next try; the turn is answered with the last of its calls."""
        if isinstance(outcome, ToolFailure) and item.tries < self.retries and repeatable(self.tools[item.call.tool]):
            due = self.clock() + self.backoff_s * 2**item.tries
            item.tries += 1
            heapq.heappush(self._later, (due, next(self._numbers), item))
            return
        order = item.order
        order.outcomes[item.place] = outcome
        order.left -= 1
        if not order.left:
            order.done([o for o in order.outcomes if o is not None])


def _attempt(tools: Mapping[str, Tool], batch: Sequence[_Call]) -> tuple[list[Outcome], int]:
    """One try of each call, and how many were handed to tools. May run in a thread: it changes nothing."""
    counter = CallCounter()
    calls = [item.call for item in batch]
    return execute(tools, calls, retries=0, counter=counter), sum(counter.attempts.values())
