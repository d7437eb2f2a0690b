"""Work that threads do for a rollout, and what came of it, which only the rollout's own thread ever sees."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Inbox"]

T = TypeVar("T")


class Inbox:
    """Threads put results in, their owner takes them out: everything that changes a tree runs in one thread.

    A context manager; leaving it starts nothing more, and waits for what is running.
    """

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self.pending = 0

    def submit(self, pool: str, threads: int, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run ``work`` in the pool of this name, of at most ``threads``; :meth:`take` hands the result to ``then``."""
        if pool not in self._pools:
            self._pools[pool] = ThreadPoolExecutor(threads, f"turntree-{pool}")
        self.pending += 1
        future = self._pools[pool].submit(work)
        future.add_done_callback(lambda done: self._arrived.put((done, then)))

    def take(self, wait_s: float | None = 0.0) -> int:
        """Hand out all that has arrived and return how much. Waits up to ``wait_s`` for the first (None: for ever).

        Raises what ``work`` raised.
        """
        taken = 0
        while self.pending:
            try:
                future, then = self._next(wait_s, first=not taken)
            except queue.Empty:
                break
            self.pending -= 1
            taken += 1
            then(future.result())
        return taken

    def _next(self, wait_s: float | None, *, first: bool) -> tuple[Future[Any], Callable[[Any], None]]:
        if not first or wait_s == 0:
            return self._arrived.get_nowait()
        return self._arrived.get(timeout=wait_s)

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        self._pools.clear()
