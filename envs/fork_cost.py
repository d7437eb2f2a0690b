"""Laws of cost: bytes and calls, not seconds, since they are the same on a busy machine."""

from __future__ import annotations

import functools
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from turntree.envs.fork_laws import Case, ForkLawError, find_actions, play

__all__ = ["cost", "growth"]

_LONGEST = 100
_MIN_LENGTH = 10
_TRIES = 3
_BYTES_PER_TURN = 2.0
_CALLS_PER_TURN = 0.25
_NOISE = 0.01  # of a large environment, whose numbers and tables are not of equal size at every turn
_Figures: TypeAlias = dict[str, list[tuple[int, int]]]
_LEFT_BYTES = 20_480  # by one round of forks; less than that, caches of Python and numpy take until they are full
_FORKS = 40
_ROUNDS = 2


def cost(case: Case) -> str | None:
    """What snapshot, restore and fork allocate and call does not grow with the episode."""
    plan = find_actions(case.env, seed=case.seed, turns=_LONGEST)
    longest = len(plan) - 1
    if longest < _MIN_LENGTH:
        return f"episodes end within {_MIN_LENGTH} turns"
    lengths = (longest // 10, (longest // 10 + longest) // 2, longest)
    replayed = getattr(case.inner, "method", None) == "replay"
    names = ("snapshot",) if replayed else ("snapshot", "restore", "fork")
    _figures(case, plan, lengths[:1])  # what is made at the first use
    found = None
    for _ in range(_TRIES):  # growth is seen every time, noise is not
        found = _grown(_figures(case, plan, lengths), names, lengths)
        if found is None:
            return "restore and fork replay the episode, one step a turn; snapshot() is flat" if replayed else None
    raise ForkLawError(f"cost: {found}")


def _figures(case: Case, plan: Sequence[Any], lengths: Sequence[int]) -> _Figures:
    """Bytes and calls of each operation after so many turns."""
    used: _Figures = {"snapshot": [], "restore": [], "fork": []}
    for length in lengths:
        case.env.reset(seed=case.seed)
        play(case.env, plan[:length])
        put = functools.partial(case.inner.restore, case.inner.snapshot())
        for name, operation in (("snapshot", case.inner.snapshot), ("restore", put), ("fork", case.inner.fork)):
            used[name].append(_measure(operation))
    return used


def _grown(used: _Figures, names: Sequence[str], lengths: Sequence[int]) -> str | None:
    """What grows steadily: from the first length to the second and on to the third.

    A buffer that is made larger ahead of need grows at one of them; a history that is copied at both.
    """
    for name in names:
        figures = used[name]
        for unit, index, spare in (("bytes allocated", 0, _BYTES_PER_TURN), ("calls", 1, _CALLS_PER_TURN)):
            found = [figure[index] for figure in figures]
            noise = _NOISE * found[0] if index == 0 else 0.0
            if all(found[i + 1] - found[i] > max(spare * (lengths[i + 1] - lengths[i]), noise) for i in range(2)):
                return (
                    f"{name}() grows with the episode: expected the same after {', '.join(map(str, lengths))} turns, "
                    f"found {', '.join(map(str, found))} {unit}"
                )
    return None


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
