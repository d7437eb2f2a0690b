"""One clock and one source of chance for every run of the same cells.

Both live in the interpreter and start at the same values, so that re-executing cells gives what they gave before. The
clock begins at a fixed moment and goes on by a microsecond a reading, and by what is slept.
"""

from __future__ import annotations

# Those that wait for other threads keep the real clock: they are imported before it is replaced.
import concurrent.futures.thread  # noqa: F401
import datetime
import hashlib
import itertools
import os
import queue  # noqa: F401
import random
import resource
import selectors
import socket
import subprocess  # noqa: F401
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

__all__ = ["EPOCH_NS", "freeze", "random_state", "set_random_state"]

EPOCH_NS = 1_735_689_600 * 10**9
"""Where the clock starts: 2025-01-01 00:00 UTC, in nanoseconds."""

_TICK_NS = 1000
_SEED = 0
_PROCESS = 2


class _Clock:
    """Nanoseconds since the start."""

    def __init__(self) -> None:
        self.elapsed = 0

    def read(self) -> int:
        self.elapsed += _TICK_NS
        return self.elapsed

    def now(self) -> int:
        return EPOCH_NS + self.read()

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self.elapsed += int(seconds * 10**9)


def freeze() -> None:
    """Replace the clocks, the chance and the names of this process; once, before any code runs."""
    clock = _Clock()
    _freeze_time(clock)
    _freeze_dates(clock)
    _freeze_waiting(clock)
    _freeze_chance()
    _freeze_names()


def random_state() -> Any:
    """The state of the ``random`` module's generator, which Python seeds anew in a fork."""
    return _global().getstate()


def set_random_state(state: Any) -> None:
    _global().setstate(state)


def _global() -> random.Random:
    found: random.Random = getattr(random, "_inst")  # noqa: B009 - a private name, which is what is seeded
    return found


def _set(module: Any, **values: Any) -> None:
    for name, value in values.items():
        if hasattr(module, name):
            setattr(module, name, value)


def _freeze_time(clock: _Clock) -> None:
    gmtime, strftime, asctime = time.gmtime, time.strftime, time.asctime

    def utc(seconds: float | None = None) -> time.struct_time:
        return gmtime(clock.now() / 1e9 if seconds is None else seconds)

    def formatted(pattern: str, when: Any = None) -> str:
        return strftime(pattern, utc() if when is None else when)

    def text(when: Any = None) -> str:
        return asctime(utc() if when is None else when)

    def since(_: Any = None) -> float:
        return clock.read() / 1e9

    def since_ns(_: Any = None) -> int:
        return clock.read()

    def of(which: int) -> int:
        return clock.now() if which == time.CLOCK_REALTIME else clock.read()

    relative = ("monotonic", "perf_counter", "process_time", "thread_time")
    _set(time, **dict.fromkeys(relative, since), **dict.fromkeys((f"{name}_ns" for name in relative), since_ns))
    _set(time, time=lambda: clock.now() / 1e9, time_ns=clock.now, sleep=clock.sleep)
    _set(time, clock_gettime=lambda which: of(which) / 1e9, clock_gettime_ns=of)
    _set(time, gmtime=utc, localtime=utc, strftime=formatted, asctime=text)
    _set(time, ctime=lambda seconds=None: text(utc(seconds)))
    _set(os, times=lambda: os.times_result((0.0, 0.0, 0.0, 0.0, since())))


def _freeze_dates(clock: _Clock) -> None:
    """``datetime.now()`` and the like ask the system's clock from C; a subclass asks ours. ``date.today()`` does."""
    real: Any = datetime.datetime

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, real)

    class Moment(real, metaclass=Kind):  # type: ignore[misc]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            zone = datetime.UTC if tz is None else tz
            found = cls.fromtimestamp(clock.now() // 1000 / 1e6, zone)
            return found.replace(tzinfo=None) if tz is None else found

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now()

        @classmethod
        def today(cls) -> Any:
            return cls.now()

        def __repr__(self) -> str:
            return f"datetime.{super().__repr__()}"

    Moment.__name__ = Moment.__qualname__ = "datetime"
    Moment.__module__ = "datetime"
    datetime.datetime = Moment  # type: ignore[misc]


def _freeze_waiting(clock: _Clock) -> None:
    """Event loops wait by our clock: at once, unless a thread may come before."""

    def waiting(real: Callable[..., Any]) -> Callable[..., Any]:
        def select(self: Any, timeout: float | None = None) -> Any:
            if timeout is None or timeout <= 0:
                return real(self, timeout)
            ready = real(self, 0)
            if not ready and threading.active_count() > 1:
                ready = real(self, timeout)
            if not ready:
                clock.sleep(timeout)
            return ready

        return select

    for name in ("EpollSelector", "PollSelector", "SelectSelector"):
        kind = getattr(selectors, name, None)
        if kind is not None:
            kind.select = waiting(kind.select)


def _freeze_chance() -> None:
    drawn = itertools.count()

    def urandom(size: int, _flags: int = 0) -> bytes:
        blocks = (hashlib.sha256(f"{_SEED}/{next(drawn)}".encode()).digest() for _ in range(-(-size // 32)))
        return b"".join(blocks)[:size]

    _set(os, urandom=urandom, getrandom=urandom)
    _set(random, _urandom=urandom)
    _set(uuid, _generate_time_safe=None, _UuidCreate=None, getnode=lambda: 0x0200_0000_0001)
    uuid1: Callable[..., uuid.UUID] = uuid.uuid1
    _set(uuid, uuid1=lambda node=None, clock_seq=None: uuid1(node or 0x0200_0000_0001, clock_seq or 0))
    seed = random.Random.seed

    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, int.from_bytes(urandom(32), "big") if a is None else a, version)

    setattr(random.Random, "seed", seeded)  # noqa: B010 - a method is replaced on purpose
    random.seed(_SEED)
    _set(tempfile, _name_sequence=None)


def _freeze_names() -> None:
    """What differs from process to process or from machine to machine."""
    _set(os, getpid=lambda: _PROCESS, getppid=lambda: 1, cpu_count=lambda: 1, process_cpu_count=lambda: 1)
    _set(os, sched_getaffinity=lambda _pid: {0}, getloadavg=lambda: (0.0, 0.0, 0.0))
    used = resource.struct_rusage((0.0, 0.0, *[0] * 14))
    _set(resource, getrusage=lambda _who: used)
    sysconf, memory = os.sysconf, ("SC_AVPHYS_PAGES", os.sysconf_names.get("SC_AVPHYS_PAGES"))
    _set(os, sysconf=lambda name: sysconf("SC_PHYS_PAGES" if name in memory else name))  # what is free changes
    _set(socket, gethostname=lambda: "sandbox")
