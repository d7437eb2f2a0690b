"""Many small concurrent searches as few large ones: a queue, and a thread that searches batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.errors import RetrievalError
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["Batch", "Closed", "Late", "MicroBatcher", "Overloaded"]

_log = logging.getLogger(__name__)

Found = Sequence[Sequence[Passage]]


class Overloaded(RetrievalError):
    """The queue is full; nothing was started."""


class Closed(RetrievalError):
    """The server is shutting down; nothing was started."""


class Late(RetrievalError):
    """The search did not end within its time; a result that comes later is dropped."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one search of the backend was: its requests, their distinct queries, how long it took, what failed."""

    requests: int
    queries: int
    seconds: float
    dropped: int
    error: str = ""


@dataclass(slots=True)
class _Job:
    """One request that waits; ``future`` belongs to ``loop`` and is only set from there."""

    queries: tuple[str, ...]
    k: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Found]
    at: float = field(default_factory=time.monotonic)


class MicroBatcher:
    """Batches the searches of an event loop and makes them in a thread of its own, so that the loop never waits.

    A batch holds requests of one ``k``, up to ``max_batch`` queries, and starts ``max_wait_s`` after its first request
    at the latest; while one batch is searched the next one fills. A query that several of its requests ask is searched
    once. At most ``max_queue`` queries wait. When a batch of several requests fails, each is searched alone, so
    that one request's failure is not another's. ``watch`` is called after each batch, in the thread.
    """

    def __init__(
        self,
        backend: SearchBackend,
        *,
        max_batch: int = 64,
        max_wait_s: float = 0.002,
        max_queue: int = 8192,
        watch: Callable[[Batch], None] | None = None,
    ) -> None:
        self.backend = backend
        self._max_batch, self._max_wait, self._max_queue = max_batch, max_wait_s, max_queue
        self._watch = watch
        self._jobs: deque[_Job] = deque()
        self._depth = 0
        self._closed = False
        self._ready = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="search", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Queries that wait to be searched."""
        return self._depth

    @property
    def full(self) -> bool:
        """Whether not even one more query would be taken."""
        return self._depth >= self._max_queue

    @property
    def alive(self) -> bool:
        """Whether searches are taken and made."""
        return not self._closed and self._thread.is_alive()

    async def search(self, queries: Sequence[str], *, k: int, timeout_s: float) -> Found:
        """One list of passages for each query; lists are shared with equal queries and must not be changed.

        Raises :class:`Overloaded`, :class:`Closed`, :class:`Late`, or what the backend raised.
        """
        if not queries:
            return []
        loop = asyncio.get_running_loop()
        job = _Job(tuple(queries), k, loop, loop.create_future())
        self._put(job)
        try:
            return await asyncio.wait_for(job.future, timeout_s)
        except TimeoutError:
            if not job.future.cancelled():
                raise  # the backend's own
            raise Late(f"no result within {timeout_s:g} s; {self._depth} queries wait") from None

    def close(self) -> None:
        """Take nothing more, search what waits, end the thread."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        self._thread.join()

    def _put(self, job: _Job) -> None:
        with self._ready:
            if self._closed:
                raise Closed("the server is shutting down")
            if self._depth + len(job.queries) > self._max_queue:
                raise Overloaded(f"{self._depth} queries wait already, and at most {self._max_queue} may")
            self._jobs.append(job)
            self._depth += len(job.queries)
            # The thread sleeps until there is a first job or a full batch; between the two it keeps its own time.
            if len(self._jobs) == 1 or self._depth >= self._max_batch:
                self._ready.notify()

    def _run(self) -> None:
        while jobs := self._take():
            live = [job for job in jobs if not job.future.cancelled()]
            if live:
                self._search(live, dropped=len(jobs) - len(live))
            elif self._watch:
                self._watch(Batch(0, 0, 0.0, len(jobs)))

    def _take(self) -> list[_Job]:
        """The next batch, in order of arrival; empty when closed and done."""
        with self._ready:
            while not self._jobs:
                if self._closed:
                    return []
                self._ready.wait()
            start = self._jobs[0].at + self._max_wait
            while not self._closed and self._depth < self._max_batch:
                left = start - time.monotonic()
                if left <= 0:
                    break
                self._ready.wait(left)
            return self._pick()

    def _pick(self) -> list[_Job]:
        k, size = self._jobs[0].k, 0
        jobs: list[_Job] = []
        rest: deque[_Job] = deque()
        for job in self._jobs:
            if job.k == k and (not jobs or size + len(job.queries) <= self._max_batch):
                jobs.append(job)
                size += len(job.queries)
            else:
                rest.append(job)
        self._jobs = rest
        self._depth -= size
        return jobs

    def _search(self, jobs: Sequence[_Job], *, dropped: int = 0) -> None:
        start, error = time.monotonic(), ""
        queries = list(dict.fromkeys(query for job in jobs for query in job.queries))
        try:
            found = self._ask(queries, jobs[0].k)
            outcomes: list[tuple[_Job, Any]] = [(job, [found[q] for q in job.queries]) for job in jobs]
        except Exception as failure:  # whatever a backend raises is that request's answer, never the thread's end
            error = type(failure).__name__
            outcomes = [(job, failure) for job in jobs]
        if self._watch:
            self._watch(Batch(len(jobs), len(queries), time.monotonic() - start, dropped, error))
        if error and len(jobs) > 1:
            _log.warning("a batch of %d requests failed (%s); each is searched alone", len(jobs), outcomes[0][1])
            for job in jobs:
                self._search([job])
            return
        self._forget(sum(job.future.cancelled() for job in jobs))
        for loop in {id(job.loop): job.loop for job in jobs}.values():
            mine = [(job, outcome) for job, outcome in outcomes if job.loop is loop]
            try:
                loop.call_soon_threadsafe(_deliver, mine)
            except RuntimeError:  # the loop has ended, and with it whoever waited
                continue

    def _forget(self, late: int) -> None:
        """Requests that stopped waiting while their search ran: their results are dropped here, and counted."""
        if late and self._watch:
            self._watch(Batch(0, 0, 0.0, late))

    def _ask(self, queries: list[str], k: int) -> dict[str, Sequence[Passage]]:
        found: dict[str, Sequence[Passage]] = {}
        for first in range(0, len(queries), self._max_batch):
            part = queries[first : first + self._max_batch]
            lists = self.backend.search(part, k=k)
            if len(lists) != len(part):
                raise RetrievalError(f"expected {len(part)} lists of passages from the backend, found {len(lists)}")
            found.update(zip(part, lists, strict=True))
        return found


def _deliver(outcomes: Sequence[tuple[_Job, Any]]) -> None:
    """In the event loop: give each request its result, unless it stopped waiting."""
    for job, outcome in outcomes:
        if job.future.done():
            continue
        if isinstance(outcome, BaseException):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
