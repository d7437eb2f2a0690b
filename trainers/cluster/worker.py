"""A rollout worker: one process with a kit, which Ray calls. Nothing here imports Ray, so it runs anywhere."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree import __version__
from turntree.errors import EngineError
from turntree.trainers.cluster.wire import (
    GrownTree,
    Ticket,
    WireGeneration,
    WireRequest,
    WorkDone,
    flatten_tree,
    load_weights,
)
from turntree.trainers.compose import import_object
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Tree

if TYPE_CHECKING:
    from turntree.trainers.cluster.kit import Kit

__all__ = ["RolloutWorker", "Site", "site_here"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where the trainer runs: relative paths, and modules of a user's own, mean the same on workers of its machine."""

    folder: str
    modules: tuple[str, ...]
    version: str = __version__

    def enter(self) -> None:
        """Go there. Raises ``EngineError`` where this process has another turntree than the trainer."""
        if self.version != __version__:
            raise EngineError(
                f"the trainer has turntree {self.version}, this worker {__version__} (on {socket.gethostname()}); "
                "install the same version on every machine"
            )
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        sys.path.extend(p for p in self.modules if p not in sys.path and Path(p).exists())


def site_here() -> Site:
    """The site of this process."""
    return Site(os.getcwd(), tuple(p for p in sys.path if p))


class RolloutWorker:
    """Grows trees and generates, with the weights it was sent last.

    ``maker`` is the import path of a function that makes the :class:`Kit` of ``arguments``.
    """

    def __init__(self, site: Site, maker: str, *arguments: Any) -> None:
        self.site, self.maker, self.arguments = site, maker, arguments

    @cached_property
    def kit(self) -> Kit:
        """Made with the first call, so that what it raises arrives as itself; a constructor would end Ray's actor."""
        self.site.enter()
        make: Any = import_object(self.maker, option="maker")
        kit: Kit = make(*self.arguments)
        return kit

    def ready(self) -> int:
        """The process id, once everything is loaded."""
        self.kit  # noqa: B018
        return os.getpid()

    def load(self, boxes: Sequence[Any], version: int) -> float:
        """Take the weights of ``version``: pull them into this machine, write them into the model, tell the engine.

        ``boxes`` holds one reference, or the packed weights themselves. Returns the seconds this took.
        """
        start = time.monotonic()
        (box,) = boxes
        if self.kit.model is not None:
            load_weights(self.kit.model, _opened(box))
        self.kit.engine.update_weights(version)
        return time.monotonic() - start

    def rollout(self, ticket: Ticket) -> Iterator[GrownTree | WorkDone]:
        """The ticket's trees, each as soon as it is finished, then :class:`WorkDone`."""
        start, before = time.monotonic(), dict(self.kit.usage())
        arrived: queue.SimpleQueue[GrownTree | WorkDone | BaseException] = queue.SimpleQueue()

        def on_counted(tree: Tree, tally: Tally) -> None:
            arrived.put(GrownTree(flatten_tree(tree), tally))

        def work() -> None:
            try:
                attempts = self.kit.grow(ticket, on_counted).stats.tool_attempts
                usage = {key: value - before.get(key, 0.0) for key, value in self.kit.usage().items()}
                arrived.put(WorkDone(attempts, time.monotonic() - start, usage))
            except BaseException as error:  # handed to whoever iterates
                arrived.put(error)

        thread = threading.Thread(target=work, name="rollout", daemon=True)
        thread.start()
        while True:
            news = arrived.get()
            if isinstance(news, BaseException):
                thread.join()
                raise news
            yield news
            if isinstance(news, WorkDone):
                return

    def generate(self, requests: Sequence[WireRequest]) -> list[WireGeneration | Exception]:
        """One generation a request, in order, or the exception that it met where the engine can tell them apart."""
        asked = [request.request() for request in requests]
        arriving: Any = getattr(self.kit.engine, "as_completed", None)
        if arriving is None:
            return [WireGeneration.of(generation) for generation in self.kit.engine.generate(asked)]
        found: dict[int, WireGeneration | Exception] = {}
        for place, reply in arriving(asked):
            found[place] = reply if isinstance(reply, Exception) else WireGeneration.of(reply)
        if len(found) != len(asked):
            raise EngineError(f"{type(self.kit.engine).__name__} answered {len(found)} of {len(asked)} requests")
        return [found[place] for place in range(len(asked))]

    def close(self) -> None:
        """Let go of what the kit holds outside this process."""
        self.kit.close()


def _opened(box: Any) -> Any:
    if isinstance(box, dict):
        return box
    import ray

    return ray.get(box)
