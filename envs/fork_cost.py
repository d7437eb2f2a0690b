"""Laws of cost: bytes and calls, not seconds, since they are the same on a busy machine."""

from __future__ import annotations

import functools
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from turntree.envs.fork_laws import Case, ForkLawError, find_actions, play

__all__ = ["cost", "growth"]

_LENGTHS = (1, 10, 100)
_MIN_LENGTH = 10
_BYTES_PER_TURN = 2.0
_CALLS_PER_TURN = 0.25
_NOISE = 0.01  # of a large environment, whose numbers and tables are not of equal size at every turn
_LEFT_BYTES = 20_480  # by one round of forks; less than that, caches of Python and numpy take until they are full
_FORKS = 40
_ROUNDS = 2


def cost(case: Case) -> str | None:
    """What snapshot, restore and fork allocate and call does not grow with the episode."""
    plan = find_actions(case.env, seed=case.seed, turns=max(_LENGTHS))
    lengths = sorted({min(length, len(plan) - 1) for length in _LENGTHS})
    if lengths[-1] < _MIN_LENGTH:
        return f"episodes end within {_MIN_LENGTH} turns"
    used: dict[str, list[tuple[int, int]]] = {"snapshot": [], "restore": [], "fork": []}
    for length in lengths:
        case.env.reset(seed=case.seed)
        play(case.env, plan[:length])
        put = functools.partial(case.inner.restore, case.inner.snapshot())
        for name, operation in (("snapshot", case.inner.snapshot), ("restore", put), ("fork", case.inner.fork)):
            used[name].append(_measure(operation))
    replayed = getattr(case.inner, "method", None) == "replay"
    for name, figures in used.items():
        if name == "snapshot" or not replayed:
            _flat(name, lengths, figures)
    return "restore and fork replay the episode, one step a turn; snapshot() is flat" if replayed else None


def _flat(name: str, lengths: Sequence[int], figures: Sequence[tuple[int, int]]) -> None:
    """Growth between the second-longest and the longest episode must be (nearly) nothing."""
    turns = lengths[-1] - lengths[-2]
    (bytes_before, calls_before), (bytes_after, calls_after) = figures[-2:]
    spare = max(_BYTES_PER_TURN * turns, _NOISE * bytes_before)
    if bytes_after - bytes_before > spare or calls_after - calls_before > _CALLS_PER_TURN * turns:
        raise ForkLawError(
            f"cost: {name}() grows with the episode: expected the same at {lengths[-2]} and {lengths[-1]} turns, found "
            f"{bytes_before} and {bytes_after} bytes allocated, {calls_before} and {calls_after} calls"
        )


def growth(case: Case) -> None:
    """Forks and snapshots that nobody keeps leave nothing behind."""
    case.go_to(case.middle())
    start = time.perf_counter()
    _fork_and_drop(case, 1)
    # A fork that takes long (an emulator that loads its game) is tried less often.
    forks = _FORKS if time.perf_counter() - start < 0.02 else _FORKS // 8
    with _tracing():
        _fork_and_drop(case, forks)
        left = min(_left_behind(case, forks) for _ in range(_ROUNDS))  # a leak leaves something in every round
    if left > _LEFT_BYTES:
        raise ForkLawError(
            f"growth: expected that a snapshot, a restore and a fork leave nothing behind once they are dropped, found "
            f"{left} bytes after {forks} of each"
        )


def _left_behind(case: Case, forks: int) -> int:
    """Bytes that one round of forks leaves behind."""
    before = _live_bytes()
    _fork_and_drop(case, forks)
    return _live_bytes() - before


def _fork_and_drop(case: Case, times: int) -> None:
    for _ in range(times):
        case.inner.restore(case.inner.snapshot())
        case.inner.fork()


def _live_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _measure(function: Callable[[], Any]) -> tuple[int, int]:
    """Peak bytes allocated and calls made by ``function``, the least of three runs each."""
    return min(_allocated(function) for _ in range(3)), min(_calls(function) for _ in range(3))


def _allocated(function: Callable[[], Any]) -> int:
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _tracing():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            result = function()
            peak = tracemalloc.get_traced_memory()[1]
            del result
            return peak - before
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _tracing() -> Iterator[None]:
    """Trace allocations inside, also where somebody traces already."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        yield
    finally:
        if not tracing:
            tracemalloc.stop()


def _calls(function: Callable[[], Any]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return count
