"""One sandbox as its supervisor sees it: interpreters that run cells, fork, and are killed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turntree.envs.sandbox.capture import Capture
from turntree.envs.sandbox.inside import wire
from turntree.envs.sandbox.notify import Gate
from turntree.envs.sandbox.options import SandboxOptions
from turntree.errors import ToolError

__all__ = ["CellResult", "Ends", "Interpreter", "Sandbox", "open_ends"]

Ending = Literal["done", "cpu", "wall", "gone"]

_START_S = 20.0
_FORK_S = 2.0
_LOOK_S = 0.05  # between two looks at the processor time of a running cell
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CellResult:
    """What became of a cell. ``ending``: ``done``; ``cpu`` or ``wall``, a limit; ``gone``, the interpreter ended."""

    text: str
    ending: Ending


@dataclass(frozen=True, slots=True)
class Ends:
    """The supervisor's ends of an interpreter's channel and output, and those that are handed to the other side."""

    channel: socket.socket
    output: int
    given: tuple[int, int]

    def hand_over(self) -> None:
        """Close what the other side has now."""
        wire.close_all(self.given)

    def close(self) -> None:
        self.channel.close()
        wire.close_all([self.output])


def open_ends() -> Ends:
    """A channel and a pipe for an interpreter's output."""
    mine, theirs = wire.pair()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    mine.setblocking(False)
    return Ends(mine, reading, (theirs.detach(), writing))


@dataclass
class Interpreter:
    """One process in a sandbox that stands between two cells. Use only while the sandbox's lock is held."""

    sandbox: Sandbox
    ends: Ends
    pid: int
    pidfd: int = -1
    clean: dict[str, str] = field(default_factory=dict)
    alive: bool = True

    def __post_init__(self) -> None:
        self.pidfd = os.pidfd_open(self.pid)
        self.clean = self._descriptors()

    # -- cells -------------------------------------------------------------------------------------------------------

    def run(self, code: str, *, number: int, cpu_s: float, wall_s: float, output_chars: int) -> CellResult:
        """Execute one cell. After any ending but ``done`` the interpreter is dead."""
        capture = Capture(output_chars)
        ending = self._execute(code, number, capture, cpu_s=cpu_s, wall_s=wall_s)
        if ending != "done":
            self.close()
        return CellResult(capture.text(), ending)

    def _execute(self, code: str, number: int, capture: Capture, *, cpu_s: float, wall_s: float) -> Ending:
        if self._drain(capture) or self._pending():
            return "gone"  # something wrote after its cell had ended
        start, used = time.monotonic(), self._cpu()
        self.signal(signal.SIGCONT)  # before there is code that could see it come
        try:
            wire.send(self.ends.channel, {"do": "run", "code": code, "number": number})
        except (wire.Closed, BlockingIOError):
            return "gone"

        def over() -> Ending | None:
            if time.monotonic() - start > wall_s:
                return "wall"
            return "cpu" if self._cpu() - used > cpu_s else None

        message = self.sandbox.wait(
            self.ends.channel, until=over, pidfd=self.pidfd, output=self.ends.output, capture=capture
        )
        if isinstance(message, str):
            return message
        self.signal(signal.SIGSTOP)  # threads that go on, and whoever said too early that the cell was done
        self._drain(capture)
        return "done" if message == {"did": "run"} else "gone"

    def runs(self) -> bool:
        """Whether the process is there."""
        return self.alive and not readable(self.pidfd)

    def signal(self, number: int) -> None:
        """Stop the process, or let it go on."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def _drain(self, capture: Capture) -> bool:
        """Take what is in the pipe; whether there was anything."""
        found = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.ends.output, 1 << 16):
                capture.feed(data)
                found = True
        return found

    def _pending(self) -> bool:
        return readable(self.ends.channel.fileno())

    def _cpu(self) -> float:
        """Seconds of processor time so far, with what answers to its questions took."""
        answers = self.sandbox.gate.spent if self.sandbox.gate else 0.0
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS + answers

    # -- twins -------------------------------------------------------------------------------------------------------

    def forkable(self) -> bool:
        """Whether a fork of the process is a twin in every way: nothing in it or beside it would be shared.

        So it has one thread, the descriptors it began with, no shared memory, and no files.
        """
        if self.sandbox.gate is None or not self.alive:
            return False
        try:
            return (
                len(os.listdir(f"/proc/{self.pid}/task")) == 1
                and self._descriptors() == self.clean
                and not self._shares_memory()
                and not self.has_files()
            )
        except OSError:
            return False

    def has_files(self) -> bool:
        """Whether there is anything in the sandbox's temporary folder."""
        with os.scandir(f"/proc/{self.pid}/root{self.sandbox.home}") as found:
            return next(found, None) is not None

    def _descriptors(self) -> dict[str, str]:
        folder = f"/proc/{self.pid}/fd"
        try:
            return {name: os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
        except OSError:
            return {"unknown": ""}

    def _shares_memory(self) -> bool:
        lines = Path(f"/proc/{self.pid}/maps").read_bytes().splitlines()
        return any(re.fullmatch(rb".w.s", line.split(maxsplit=2)[1]) for line in lines)

    def fork(self) -> Interpreter | None:
        """A twin in the same sandbox, or None where the process did not fork as it was asked to; it is dead then."""
        gate = self.sandbox.gate
        if gate is None or "unknown" in self.clean:
            return None
        ends = open_ends()
        gate.may_fork = self.pid
        try:
            wire.send(self.ends.channel, {"do": "fork"}, ends.given)
            self.signal(signal.SIGCONT)
            ends.hand_over()
            pid = self.sandbox.greeted(ends.channel, "fork", within_s=_FORK_S)[0]
            self.signal(signal.SIGSTOP)
            if pid in {interpreter.pid for interpreter in self.sandbox.interpreters}:
                raise ToolError("a process said that it was its twin, which may run unseen")
            return self.sandbox.add(Interpreter(self.sandbox, ends, pid))
        except (ToolError, OSError):
            ends.close()
            self.close()
            return None
        finally:
            gate.may_fork = 0

    def close(self, *, wait: bool = True) -> None:
        """Kill the process, and ``wait`` until it is gone."""
        if not self.alive:
            return
        self.alive = False
        kill(self.pidfd, within_s=5.0 if wait else 0.0)
        os.close(self.pidfd)
        self.ends.close()
        self.sandbox.interpreters.discard(self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def kill(pidfd: int, *, within_s: float = 5.0) -> None:
    """Kill a process and wait so long until it is gone."""
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    readable(pidfd, within_s=within_s)


def readable(fd: int, *, within_s: float = 0.0) -> bool:
    """Whether there is something to read, or a process has ended; waits so long for it."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(within_s * 1000))


class Sandbox:
    """Namespaces with a keeper, whose end ends everything in them, and interpreters of one lineage.

    ``begin`` has the other side build it around the given descriptors (keeper, channel, output); ``finish`` is called
    when everything inside is gone. One cell runs at a time: whoever uses an interpreter holds ``lock``.
    """

    def __init__(
        self,
        options: SandboxOptions,
        home: str,
        begin: Callable[[list[int]], None],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.options = options
        self.home = home
        self._finish = finish
        self.lock = threading.Lock()
        self.gate: Gate | None = None
        self.interpreters: set[Interpreter] = set()
        self.layers: tuple[str, ...] = ()
        self._keeper, theirs = wire.pair()
        self._keeper.setblocking(False)
        self._pidfd = -1
        ends = open_ends()
        try:
            begin([theirs.fileno(), *ends.given])
            theirs.close()
            ends.hand_over()
            self.first = self._welcome(ends)
        except BaseException:
            theirs.close()
            ends.close()
            self.close()
            raise

    def _welcome(self, ends: Ends) -> Interpreter:
        pid, message, fds = self.greeted(ends.channel, "lock", within_s=_START_S)
        if fds:
            self.gate = Gate(fds[0], self.options.threads)
        self.layers = tuple(str(layer) for layer in message.get("layers", ()))
        self.greeted(ends.channel, "ready", within_s=_START_S)
        self._pidfd = os.pidfd_open(self.greeted(self._keeper, "keep", within_s=_START_S)[0])
        return self.add(Interpreter(self, ends, pid))

    def add(self, interpreter: Interpreter) -> Interpreter:
        self.interpreters.add(interpreter)
        return interpreter

    def greeted(self, channel: socket.socket, word: str, *, within_s: float) -> tuple[int, dict[str, Any], list[int]]:
        """The first message of a process: who wrote it as the kernel says, what, and the descriptors beside it.

        Raises ``ToolError`` when it does not come, or says that something failed.
        """
        end = time.monotonic() + within_s
        fds: list[int] = []
        found = self.wait(channel, until=lambda: "wall" if time.monotonic() > end else None, fds=fds)
        if isinstance(found, dict) and found.get("did") == word and self._writer:
            return self._writer, found, fds
        wire.close_all(fds)
        told = found.get("failed", found) if isinstance(found, dict) else {"wall": "no answer"}.get(found, "it ended")
        raise ToolError(f"a process of a sandbox did not start: {told}")

    def wait(
        self,
        channel: socket.socket,
        *,
        until: Callable[[], Ending | None],
        pidfd: int | None = None,
        output: int | None = None,
        capture: Capture | None = None,
        fds: list[int] | None = None,
    ) -> dict[str, Any] | Ending:
        """The next message of a process; what it writes and what its filter asks is taken care of meanwhile.

        The end of the process (``pidfd``) is watched beside the end of its channel, which lasts while any other
        process still holds a copy of it.
        """
        watched = select.poll()
        for fd in (channel.fileno(), pidfd, output, self.gate.listener if self.gate else None):
            if fd is not None:
                watched.register(fd, select.POLLIN)
        look = time.monotonic() + _LOOK_S
        while True:
            ready = {fd for fd, _ in watched.poll(_LOOK_S * 1000)}
            if self.gate is not None and self.gate.listener in ready:
                self.gate.answer()
            if output in ready and output is not None and capture is not None:
                with contextlib.suppress(BlockingIOError):
                    data = os.read(output, 1 << 16)
                    capture.feed(data)
                    if not data:  # the code closed its output
                        watched.unregister(output)
            if channel.fileno() in ready or pidfd in ready:
                return self._message(channel, fds)
            if not ready or time.monotonic() > look:
                look = time.monotonic() + _LOOK_S
                ending = until()
                if ending is not None:
                    return ending

    def _message(self, channel: socket.socket, fds: list[int] | None) -> dict[str, Any] | Ending:
        try:
            message, beside, self._writer = wire.receive(channel)
        except (wire.Closed, BlockingIOError):
            return "gone"
        if fds is None:
            wire.close_all(beside)
        else:
            fds += beside
        return message

    def close(self) -> None:
        """Kill everything inside."""
        for interpreter in list(self.interpreters):
            interpreter.close(wait=False)
        self._keeper.close()
        if self._pidfd >= 0:
            kill(self._pidfd)  # it is gone when all that are in its namespace are
            os.close(self._pidfd)
            self._pidfd = -1
        if self.gate is not None:
            self.gate.close()
            self.gate = None
        if self._finish is not None:
            self._finish()
