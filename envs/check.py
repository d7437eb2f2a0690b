"""A conformance suite for environments with snapshots, in the manner of Gymnasium's ``check_env``."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import gymnasium

from turntree.envs import fork_cost, fork_laws, fork_process
from turntree.envs.fork_laws import Case, ForkLawError, Law, find_actions, forker
from turntree.errors import ConfigError

__all__ = [
    "FORK_LAWS",
    "ForkLawError",
    "ForkReport",
    "LawResult",
    "assert_forkable",
    "check_fork",
    "forker",
    "report_fork",
]

Env: TypeAlias = gymnasium.Env[Any, Any]


@dataclass(frozen=True, slots=True)
class LawResult:
    """How one law fared. ``detail``: the first difference where it fails, the reason where it is skipped."""

    law: str
    status: Literal["holds", "fails", "skipped"]
    detail: str = ""

    @property
    def hint(self) -> str:
        """What to look for where the law fails."""
        return FORK_LAWS[self.law][1]


@dataclass(frozen=True, slots=True)
class ForkReport:
    """The results of every law; printed, it is a table with what to look for."""

    env: str
    results: tuple[LawResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no law fails."""
        return not self.failures

    @property
    def failures(self) -> tuple[LawResult, ...]:
        return tuple(result for result in self.results if result.status == "fails")

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the laws that were checked and hold."""
        return tuple(result.law for result in self.results if result.status == "holds")

    def to_json(self) -> dict[str, Any]:
        """JSON-able data: the environment and a row for each law."""
        rows = [{"law": r.law, "status": r.status, "detail": r.detail} for r in self.results]
        return {"env": self.env, "ok": self.ok, "laws": rows}

    def __str__(self) -> str:
        lines = [self.env]
        for result in self.results:
            lines.append(f"  {result.law:12} {result.status:8} {FORK_LAWS[result.law][0]}")
            if result.detail:
                lines.append(f"    {result.detail}")
            if result.status == "fails":
                lines.append(f"    look for: {result.hint}")
        return "\n".join(lines)


FORK_LAWS: dict[str, tuple[str, str]] = {
    "interface": (
        "the environment has the methods of snapshots",
        "nothing: wrap it, turntree.envs.Forkable(env), or derive it from TurnEnv",
    ),
    "determinism": (
        "the same seed gives the same episode",
        "global randomness (random, numpy.random), the clock, id() and hash(), the order of sets, a counter, cache or "
        "class attribute that reset() does not clear, a default argument that is written to",
    ),
    "value": (
        "taking a snapshot changes nothing, and nothing changes a snapshot",
        "state that snapshot() hands out instead of a copy: a list that is appended to, a dict, an array written to",
    ),
    "restore": (
        "continuing equals the original: observations, rewards, flags, info, random state",
        "what restore() does not set: a hidden counter, a cache, np_random, an iterator, a class attribute, a variable "
        "of the module, the counter of a wrapper outside of the layer that takes snapshots",
    ),
    "isolation": (
        "forks, their parent and siblings never influence each other",
        "objects that fork() shares: lists, dicts, iterators, generators, class attributes, variables of the module, "
        "default arguments",
    ),
    "threads": (
        "forks stepped in threads at the same time do as alone",
        "shared buffers and caches without a lock, handles bound to the thread that opened them",
    ),
    "info": (
        "what a caller writes into a returned info or observation changes nothing",
        "dicts, lists and arrays of the state that step() and reset() return without a copy",
    ),
    "reseed": (
        "restore(snapshot, seed) is deterministic",
        "random generators that restore() does not derive from the seed",
    ),
    "reset": (
        "a reset after a restore is a fresh one",
        "what restore() sets and reset() does not clear",
    ),
    "pickle": (
        "a snapshot survives pickling",
        "live handles inside the snapshot (locks, sockets, connections, functions)",
    ),
    "json": (
        "a snapshot survives JSON",
        "tuples that come back as lists, integer keys that come back as texts, fields that are left out, sets and "
        "arrays that are no JSON",
    ),
    "version": (
        "a snapshot of another format or environment is refused with SnapshotError",
        "a restore() or decode_snapshot() that does not look at version and fingerprint",
    ),
    "cost": (
        "what snapshot, restore and fork cost does not grow with the episode",
        "a history that is copied: share it (turntree.envs.History)",
    ),
    "growth": (
        "forks and snapshots that are dropped leave nothing behind",
        "registries, caches and class attributes that keep every fork or snapshot",
    ),
    "process": (
        "another process continues a snapshot the same way",
        "a fingerprint, order or cache that depends on hash(), id(), the environment's variables or the working folder",
    ),
}
"""Every law: what must hold, and what to look for where it does not. In the order in which they are checked."""

_LAWS: dict[str, Law] = {
    "determinism": fork_laws.determinism,
    "value": fork_laws.value,
    "restore": fork_laws.restore,
    "isolation": fork_laws.isolation,
    "threads": fork_laws.threads,
    "info": fork_laws.info,
    "reseed": fork_laws.reseed,
    "reset": fork_laws.reset,
    "pickle": fork_laws.pickled,
    "json": fork_laws.as_json,
    "version": fork_laws.version,
    "cost": fork_cost.cost,
    "growth": fork_cost.growth,
}


def check_fork(
    env: Env,
    *,
    actions: Sequence[Any] | None = None,
    seed: int = 123,
    turns: int = 6,
    laws: Iterable[str] | None = None,
    process: bool = True,
    timeout_s: float = 60.0,
) -> tuple[str, ...]:
    """Check that ``env`` keeps the laws of snapshots and forks; returns the names of the laws that hold.

    ``env`` may be wrapped; one of its layers needs ``snapshot``, ``restore``, ``fork``, ``encode_snapshot`` and
    ``decode_snapshot``: a :class:`turntree.envs.TurnEnv`, or any environment inside :class:`turntree.envs.Forkable`.
    ``actions``: the episode to play (default: up to ``turns`` draws of the action space, preferring those that do not
    end the episode). ``laws``: names of :data:`FORK_LAWS` (default: all). ``process=False`` leaves out the law that
    needs a second process, which rebuilds ``env`` from its spec or by pickling, within ``timeout_s`` seconds.

    A law that does not apply is left out of the result: ``json`` where the state has no JSON form and says so with
    ``SnapshotError``, ``cost`` where episodes end within 10 turns or are replayed.

    Raises :class:`ForkLawError` for the first law that does not hold, ``ConfigError`` for an unknown law.
    """
    kept = []
    for result in _results(env, actions, seed, turns, laws, process, timeout_s):
        if result.status == "fails":
            raise ForkLawError(f"{result.law}: {result.detail}; look for: {result.hint}")
        if result.status == "holds" and result.law != "interface":
            kept.append(result.law)
    return tuple(kept)


def report_fork(
    env: Env,
    *,
    actions: Sequence[Any] | None = None,
    seed: int = 123,
    turns: int = 6,
    laws: Iterable[str] | None = None,
    process: bool = True,
    timeout_s: float = 60.0,
) -> ForkReport:
    """Like :func:`check_fork`, but checks every law and reports; raises nothing for a law that does not hold."""
    return ForkReport(repr(env), tuple(_results(env, actions, seed, turns, laws, process, timeout_s)))


def assert_forkable(env: Env, **options: Any) -> None:
    """The form for tests: an ``AssertionError`` with the whole report unless every law holds.

    ``options`` are those of :func:`report_fork`. One test for each law::

        @pytest.mark.parametrize("law", FORK_LAWS)
        def test_forks(law: str) -> None:
            assert_forkable(make_env(), laws=[law])
    """
    report = report_fork(env, **options)
    if not report.ok:
        raise AssertionError(str(report))


def _results(
    env: Env,
    actions: Sequence[Any] | None,
    seed: int,
    turns: int,
    laws: Iterable[str] | None,
    process: bool,
    timeout_s: float,
) -> Iterable[LawResult]:
    wanted = _wanted(laws, process)
    if forker(env) is None:
        missing = [name for name in fork_laws.REQUIRED if not callable(getattr(env.unwrapped, name, None))]
        yield LawResult("interface", "fails", f"{type(env.unwrapped).__name__} has no {', '.join(missing)}")
        return
    case = _tried("interface", lambda: _case(env, actions, seed, turns))
    if isinstance(case, LawResult):
        yield case
        return
    if "interface" in wanted:
        yield LawResult("interface", "holds")
    known: dict[str, Law] = {**_LAWS, "process": functools.partial(fork_process.process, timeout_s=timeout_s)}
    for name in wanted:
        if name in known:
            yield _result(name, known[name], case)


def _wanted(laws: Iterable[str] | None, process: bool) -> list[str]:
    names = list(FORK_LAWS) if laws is None else list(laws)
    for name in names:
        if name not in FORK_LAWS:
            near = difflib.get_close_matches(name, FORK_LAWS, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"unknown law {name!r}{meant} The laws are {', '.join(FORK_LAWS)}")
    return [name for name in FORK_LAWS if name in names and (process or name != "process")]


def _case(env: Env, actions: Sequence[Any] | None, seed: int, turns: int) -> Case:
    plan = list(actions) if actions is not None else find_actions(env, seed=seed, turns=turns)
    return Case(env, seed=seed, actions=plan)


def _result(name: str, law: Law, case: Case) -> LawResult:
    outcome = _tried(name, lambda: law(case))
    if isinstance(outcome, LawResult):
        return outcome
    return LawResult(name, "holds") if outcome is None else LawResult(name, "skipped", outcome)


def _tried(name: str, act: Callable[[], Any]) -> Any:
    """What ``act`` gives, or the failure of the law: whatever an environment raises breaks the law."""
    try:
        return act()
    except ForkLawError as error:
        return LawResult(name, "fails", str(error).removeprefix(f"{name}: "))
    except Exception as error:
        return LawResult(name, "fails", f"{type(error).__name__}: {error}")
