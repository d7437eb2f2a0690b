"""One rollout in the air: tickets out to workers, trees in, each once."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from turntree.errors import EngineError
from turntree.trainers.cluster.pool import Seat, WorkerPool, first_line, is_loss, own_error
from turntree.trainers.cluster.wire import GrownTree, Ticket, TreeId, WorkDone, rebuild_tree, split_ticket
from turntree.trainers.plan import Prompt
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Tree

__all__ = ["Flight", "Landed"]

_log = logging.getLogger(__name__)

_POLL_S = 0.2
"""How long a look at the workers takes at most, in seconds, when nothing arrives."""


@dataclass(slots=True)
class Landed:
    """Every tree of a rollout with what it used, and what bringing them home took."""

    trees: dict[TreeId, tuple[Tree, Tally]] = field(default_factory=dict)
    tool_attempts: int = 0
    requeued: int = 0
    doubled: int = 0
    worker_seconds: list[float] = field(default_factory=list)
    usage: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Task:
    """A ticket at a worker, which streams its trees."""

    seat: Seat
    ticket: Ticket
    stream: Any
    last_news: float = field(default_factory=time.monotonic)


class Flight:
    """Grows ``trees`` trees for each prompt on the workers of ``pool``, in a thread of its own.

    Whole prompts are handed out, in parts of ``prompts_per_task``. When a worker is lost, those of its trees that did
    not arrive are handed out again, once; a tree that is lost twice ends the flight with an ``EngineError``. What
    arrives twice counts once.
    """

    def __init__(self, pool: WorkerPool, prompts: Sequence[Prompt], *, trees: int) -> None:
        self.pool = pool
        whole = Ticket(tuple(prompts), {p.uid: tuple(range(trees)) for p in prompts})
        self.wanted = whole.trees
        self.landed = Landed()
        self.requeued: set[TreeId] = set()
        self.tasks: list[_Task] = []
        self.cancelled = False
        each = pool.cluster.prompts_per_task
        parts = -(-len(prompts) // each) if each else pool.cluster.workers
        self.tickets = deque(split_ticket(whole, parts))
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="flight")
        self._done: Future[Landed] = self._executor.submit(self._fly)

    def land(self) -> Landed:
        """Wait for all trees."""
        try:
            return self._done.result()
        except BaseException:
            self.cancelled = True
            raise
        finally:
            self._executor.shutdown(wait=False)

    def cancel(self) -> None:
        """Stop looking; what workers still grow is dropped."""
        self.cancelled = True
        self._executor.shutdown(wait=True)

    def _fly(self) -> Landed:
        while len(self.landed.trees) < len(self.wanted) or self.tasks:
            if self.cancelled or self.pool.closed:
                raise EngineError("the rollout was given up before all of its trees were there")
            self._dispatch()
            self._listen()
        return self.landed

    def _dispatch(self) -> None:
        """A ticket to every worker that is up, has the newest weights and nothing to do."""
        busy = {task.seat for task in self.tasks}
        for seat in list(self.pool.seats):
            if not self.tickets:
                return
            # Without a task there is nothing else to wait for.
            if seat not in busy and self.pool.settle(seat, timeout_s=0.0 if self.tasks else _POLL_S):
                ticket = self.tickets.popleft()
                self.tasks.append(_Task(seat, ticket, seat.actor.rollout.remote(ticket)))

    def _listen(self) -> None:
        if not self.tasks:
            return
        streams = [task.stream for task in self.tasks]
        ready, _ = self.pool.ray.wait(streams, num_returns=1, timeout=_POLL_S)
        for task in [t for t in self.tasks if any(t.stream is r for r in ready)]:
            self._hear(task)
        for task in list(self.tasks):
            if time.monotonic() - task.last_news > self.pool.cluster.timeout_s:
                self._lose(task, EngineError(f"no tree within cluster.timeout_s={self.pool.cluster.timeout_s:g} s"))

    def _hear(self, task: _Task) -> None:
        """The next thing that a worker sends."""
        try:
            news = self.pool.ray.get(next(task.stream))
        except StopIteration:
            self._lose(task, EngineError("it ended its work without saying so"))
        except self.pool.ray.exceptions.RayError as error:
            if not is_loss(error):
                self.tasks.remove(task)
                raise own_error(error) from error
            self._lose(task, error)
        else:
            task.last_news = time.monotonic()
            self._take(task, news)

    def _take(self, task: _Task, news: GrownTree | WorkDone) -> None:
        landed = self.landed
        if isinstance(news, GrownTree):
            name = news.tree.id
            if name not in self.wanted or name in landed.trees:
                landed.doubled += 1
                return
            landed.trees[name] = (rebuild_tree(news.tree), news.tally)
            return
        self.tasks.remove(task)
        landed.tool_attempts += news.tool_attempts
        landed.worker_seconds.append(news.seconds)
        for key, value in news.usage.items():
            landed.usage[key] = landed.usage.get(key, 0.0) + value
        missing = task.ticket.without(set(landed.trees)).trees
        if missing:
            raise EngineError(f"a worker said that it was done, but these trees did not arrive: {sorted(missing)[:5]}")

    def _lose(self, task: _Task, error: Exception) -> None:
        """Hand out again what a lost worker owes, once."""
        self.tasks.remove(task)
        left = task.ticket.without(set(self.landed.trees))
        twice = sorted(left.trees & self.requeued)
        if twice:
            raise EngineError(
                f"{len(twice)} trees were lost with two workers, {twice[0]} first ({first_line(error)}). Look for "
                "what ends them (memory?), then go on with resume=true"
            ) from error
        self.requeued |= left.trees
        self.landed.requeued += len(left.trees)
        self.pool.lose(task.seat, error)
        self.tickets.extend(split_ticket(left, max(1, len(self.pool.seats))))
