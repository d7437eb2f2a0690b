"""Live interpreters by the cells that they have executed: to go on from, and to fork where two go on from one."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

from turntree.envs.sandbox.builders import Builder
from turntree.envs.sandbox.options import SandboxOptions
from turntree.envs.sandbox.sandbox import CellResult, Interpreter, Sandbox
from turntree.envs.sandbox.walls import choose_walls
from turntree.errors import ReplayError, ToolError

__all__ = ["Cell", "Pool", "PoolCounts", "pool_of"]

Cell = tuple[str, str]
"""The code of a cell that was executed, and the text that it gave."""

_PATIENCE_S = 0.05  # for a sandbox in which a sibling runs; past it, executing the cells again is taken to be quicker
_LENIENCE = 4.0  # how much longer a cell may take that is executed again: it is known to end


class PoolCounts:
    """What was done: sandboxes ``opened``, interpreters ``forked``, ``continued`` in place, cells ``replayed``."""

    def __init__(self) -> None:
        self.opened = self.forked = self.continued = self.replayed = 0


class Pool:
    """Executes cells after a history of cells; from any thread.

    An interpreter whose state is that of the history is forked and goes on, so that it stays for siblings; where its
    state cannot be forked it goes on itself; where there is none, a fresh one executes the history first, and what
    each cell gives must be what it gave before. All three ways give the same results.

    At most ``options.workers`` cells run at a time; ``options.live`` interpreters are kept, those used last.
    """

    def __init__(self, options: SandboxOptions, builder: Builder) -> None:
        self.options = options
        self.counts = PoolCounts()
        self._builder = builder
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(options.workers or _cores())
        self._kept: OrderedDict[Interpreter, str] = OrderedDict()  # to its key, the one used last at the end

    def run(self, history: Sequence[Cell], code: str) -> CellResult:
        """Execute ``code`` after ``history``.

        Raises ``ReplayError`` when the history does not give again what it gave, ``ToolError`` when there is no
        interpreter to be had.
        """
        with self._slots:
            kept = self._take(history)
            if kept is not None:
                result = self._go_on(kept, history, code)
                if result.ending != "gone":
                    return result
            # Whether the code ended its interpreter or something outside did shows in one that nobody knows.
            return self._go_on(self._replay(history), history, code)

    def _go_on(self, interpreter: Interpreter, history: Sequence[Cell], code: str) -> CellResult:
        """Execute the cell in an interpreter that stands after ``history``; gives up its sandbox's lock."""
        try:
            result = self._execute(interpreter, code, len(history) + 1)
            if result.ending == "done":
                self._keep(interpreter, _key([*history, (code, result.text)]))
            return result
        except BaseException:
            interpreter.close()
            raise
        finally:
            _tidy(interpreter.sandbox, died=not interpreter.alive)
            interpreter.sandbox.lock.release()
            self._evict(keep=self.options.live)

    def _execute(self, interpreter: Interpreter, code: str, number: int, *, lenience: float = 1.0) -> CellResult:
        return interpreter.run(
            code,
            number=number,
            cpu_s=self.options.cpu_s * lenience,
            wall_s=self.options.wall_s * lenience,
            output_chars=self.options.output_chars,
        )

    def close(self) -> None:
        """Kill all interpreters that are not running a cell; those that are die with their cell."""
        with self._lock:
            kept, self._kept = list(self._kept), OrderedDict()
        for sandbox in {interpreter.sandbox for interpreter in kept}:
            with sandbox.lock:
                sandbox.close()
        self._builder.close()

    # -- finding an interpreter --------------------------------------------------------------------------------------

    def _take(self, history: Sequence[Cell]) -> Interpreter | None:
        """A live interpreter after ``history`` that nobody else knows; its sandbox's lock is held."""
        key = _key(history)
        with self._lock:
            found = [interpreter for interpreter, its in reversed(self._kept.items()) if its == key]
        for interpreter in found:
            if not interpreter.sandbox.lock.acquire(timeout=_PATIENCE_S):
                continue
            taken = self._from(interpreter, key)
            if taken is not None:
                return taken
            _tidy(interpreter.sandbox)
            interpreter.sandbox.lock.release()
        return None

    def _from(self, interpreter: Interpreter, key: str) -> Interpreter | None:
        """A twin of the interpreter, or itself where it cannot have one; None where it is gone."""
        with self._lock:
            if self._kept.get(interpreter) != key:
                return None
        if not interpreter.runs():
            interpreter.close()
            self._forget(interpreter)
            return None
        if interpreter.forkable():
            twin = interpreter.fork()
            if twin is None:  # whatever it did instead of forking, it does not go on doing it
                for each in list(interpreter.sandbox.interpreters):
                    self._forget(each)
                self._forget(interpreter)
                interpreter.sandbox.close()
                return None
            self.counts.forked += 1
            with self._lock:
                self._kept.move_to_end(interpreter)
            return twin
        self._forget(interpreter)
        self.counts.continued += interpreter.alive
        return interpreter if interpreter.alive else None

    def _replay(self, history: Sequence[Cell]) -> Interpreter:
        """A fresh interpreter that executed ``history``; its sandbox's lock is held."""
        sandbox = self._open()
        self.counts.opened += 1
        sandbox.lock.acquire()
        try:
            for number, (code, expected) in enumerate(history, 1):
                result = self._execute(sandbox.first, code, number, lenience=_LENIENCE)
                self.counts.replayed += 1
                if result.ending != "done" or result.text != expected:
                    raise ReplayError(_difference(number, len(history), expected, result))
        except BaseException:
            sandbox.close()
            sandbox.lock.release()
            raise
        return sandbox.first

    def _open(self) -> Sandbox:
        """A new sandbox; where the machine has no more room for one, those that nobody uses make it."""
        try:
            return self._builder.open()
        except (ToolError, OSError):
            if not self._evict(keep=0):
                raise
        return self._builder.open()

    # -- keeping interpreters ----------------------------------------------------------------------------------------

    def _keep(self, interpreter: Interpreter, key: str) -> None:
        if _has_files(interpreter):  # others in the sandbox would see them
            for other in interpreter.sandbox.interpreters - {interpreter}:
                self._forget(other)
                other.close()
        with self._lock:
            self._kept[interpreter] = key

    def _forget(self, interpreter: Interpreter) -> None:
        with self._lock:
            self._kept.pop(interpreter, None)

    def _evict(self, *, keep: int) -> int:
        """Kill those used longest ago until there are so few; those in sandboxes that are busy are spared. How many."""
        with self._lock:
            oldest = list(self._kept)[: max(len(self._kept) - keep, 0)]
        killed = 0
        for interpreter in oldest:
            if interpreter.sandbox.lock.acquire(blocking=False):
                self._forget(interpreter)
                interpreter.close(wait=False)
                _tidy(interpreter.sandbox)
                interpreter.sandbox.lock.release()
                killed += 1
        return killed


def _tidy(sandbox: Sandbox, *, died: bool = False) -> None:
    """Close a sandbox in which nobody is left, or in which somebody who ``died`` left files. Its lock is held.

    Others were there before the files: an interpreter is not forked where there are any.
    """
    left = next(iter(sandbox.interpreters), None)
    if left is None or (died and _has_files(left)):
        sandbox.close()


def _has_files(interpreter: Interpreter) -> bool:
    try:
        return interpreter.has_files()
    except OSError:
        return True


def _difference(number: int, cells: int, expected: str, result: CellResult) -> str:
    found = result.text if result.ending == "done" else f"{result.text} (it ended: {result.ending})"
    return (
        f"cell {number} of {cells} did not give again what it gave: expected {expected!r:.200}, found {found!r:.200}. "
        "Something that it shows is not frozen (see docs/code-tool.md), or the snapshot is of another Python or other "
        "packages"
    )


def _key(history: Sequence[Cell]) -> str:
    digest = hashlib.sha256()
    for part in (part for cell in history for part in cell):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_pools: dict[tuple[int, SandboxOptions], Pool] = {}
_pools_lock = threading.Lock()


def pool_of(options: SandboxOptions) -> Pool:
    """This process's pool for these options, made at the first call and closed at exit.

    Raises ``ConfigError`` where code cannot be isolated.
    """
    with _pools_lock:
        key = (os.getpid(), options)  # a forked process shares no interpreters with its parent
        if key not in _pools:
            _pools[key] = Pool(options, choose_walls(options).builder(options))
            atexit.register(_pools[key].close)
        return _pools[key]
