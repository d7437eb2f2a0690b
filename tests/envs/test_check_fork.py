"""Every planted fault is caught by the suite, under the name of the law that it breaks."""

from __future__ import annotations

import copy
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from turntree.envs import FrozenDict, Snapshot, Step, TurnCore, TurnEnv
from turntree.envs.check import FORK_LAWS, ForkLawError, assert_forkable, check_fork, report_fork
from turntree.envs.forkable import Forkable
from turntree.envs.snapshot import FORMAT_VERSION
from turntree.errors import ConfigError

ACTIONS = ["a", "bb", "ccc", "dddd"]


@dataclass(frozen=True)
class Notes:
    """An episode that repeats what was said; ``said`` is a tuple, or whatever a fault puts there."""

    said: Any = ()
    task: str = ""
    extra: dict[Any, Any] = field(default_factory=dict)


class Echo(TurnCore[Notes]):
    """A sound core."""

    @property
    def fingerprint(self) -> str:
        return "echo"

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        return Notes(task=task), f"Say something about {task}."

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        state = replace(state, said=(*state.said, text))
        return Step(
            state, " ".join(state.said), reward=float(len(state.said)), info=FrozenDict({"said": len(state.said)})
        )

    def truncate(self, state: Notes, reason: str) -> Step[Notes]:
        return Step(state, "", truncated=True)

    def reseed(self, state: Notes, seed: int) -> Notes:
        return state

    def encode_state(self, state: Notes) -> dict[str, Any]:
        return {"said": list(state.said), "task": state.task}

    def decode_state(self, data: Mapping[str, Any]) -> Notes:
        return Notes(said=tuple(data["said"]), task=data["task"])


class Env(TurnEnv[Notes]):
    def __init__(self, core: TurnCore[Notes] | None = None) -> None:
        super().__init__(core or Echo(), ["one", "two", "three", "四"])


# -- faults in cores ------------------------------------------------------------------------------------------


class SharedList(Echo):
    """The state's list is appended to in place, so that every snapshot sees it grow."""

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        return Notes(said=[], task=task), f"Say something about {task}."

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        state.said.append(text)
        return Step(state, " ".join(state.said))


class HiddenCounter(Echo):
    """Something outside of the state decides what is said."""

    count = 0

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        self.count = 0
        return super().initial(task, seed=seed)

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        self.count += 1
        return replace(super().transition(state, text), observation=f"{self.count}: {text}")


class GlobalRandomness(Echo):
    def transition(self, state: Notes, text: str) -> Step[Notes]:
        return replace(super().transition(state, text), observation=str(random.random()))


class LossyEncoding(Echo):
    def encode_state(self, state: Notes) -> dict[str, Any]:
        return {"said": list(state.said)[-1:], "task": state.task}


class NotJson(Echo):
    def encode_state(self, state: Notes) -> dict[str, Any]:
        return {"said": state.said, "task": state.task, "set": {1, 2}}


class LiveHandle(Echo):
    """The state keeps a lock."""

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        return Notes(task=task, extra={"lock": threading.Lock()}), f"Say something about {task}."


class ProcessBound(Echo):
    """The fingerprint is different in every process."""

    @property
    def fingerprint(self) -> str:
        return f"echo-{hash('salted per process')}"


class Reseeding(Echo):
    def reseed(self, state: Notes, seed: int) -> Notes:
        return replace(state, said=(*state.said, str(random.random())))


class ClassAttribute(Echo):
    """What is said is kept by the class."""

    said: ClassVar[list[str]] = []

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        self.said.clear()
        return super().initial(task, seed=seed)

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        self.said.append(text)
        return replace(super().transition(state, text), observation=" ".join(self.said))


SAID: dict[str, int] = {}


class ModuleDict(Echo):
    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        SAID.clear()
        return super().initial(task, seed=seed)

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        SAID[text] = SAID.get(text, 0) + 1
        return replace(super().transition(state, text), reward=float(SAID[text]))


class MutableDefault(Echo):
    def transition(self, state: Notes, text: str, heard: list[str] = []) -> Step[Notes]:  # noqa: B006 - the fault
        heard.append(text)
        return replace(super().transition(state, text), observation=f"{len(heard)} heard")


class SharedIterator(Echo):
    """Answers come from an iterator, whose place is no part of the state."""

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        self.answers = (f"answer {i}" for i in range(1000))
        return super().initial(task, seed=seed)

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        return replace(super().transition(state, text), observation=next(self.answers))


class CachedObject(Echo):
    """A result is kept for the next time, and marked as known."""

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        self.known: dict[str, str] = {}
        return super().initial(task, seed=seed)

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        observation = f"{text}, as before" if text in self.known else text
        self.known[text] = text
        return replace(super().transition(state, text), observation=observation)


class Clock(Echo):
    def transition(self, state: Notes, text: str) -> Step[Notes]:
        return replace(super().transition(state, text), info=FrozenDict({"at": time.perf_counter()}))


class Drift(Echo):
    """A sum that goes on, with a rounding error for every turn that was ever played."""

    def initial(self, task: str, *, seed: int) -> tuple[Notes, str]:
        self.total = 1e15
        return super().initial(task, seed=seed)

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        self.total += 0.1
        return replace(super().transition(state, text), reward=len(text) + (self.total - 1e15) * 1e-9)


class TuplesToLists(Echo):
    """What was said is hashed: a list in the place of the tuple cannot be."""

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        hash(state.said)
        return super().transition(state, text)

    def decode_state(self, data: Mapping[str, Any]) -> Notes:
        return Notes(said=data["said"], task=data["task"])


class IntegerKeys(Echo):
    """Turns are numbered by the keys of a dict, which JSON makes texts."""

    def transition(self, state: Notes, text: str) -> Step[Notes]:
        state = replace(state, extra={**state.extra, len(state.extra) + 1: text})
        return replace(super().transition(state, text), observation=state.extra.get(1, "?"))

    def encode_state(self, state: Notes) -> dict[str, Any]:
        return {**super().encode_state(state), "extra": state.extra}

    def decode_state(self, data: Mapping[str, Any]) -> Notes:
        return replace(super().decode_state(data), extra=dict(data["extra"]))


# -- faults in environments -----------------------------------------------------------------------------------


class UnrestoredRandomness(Env):
    def restore(self, snapshot: Snapshot, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        kept = self.np_random
        result = super().restore(snapshot, seed)
        self._np_random = kept
        return result


class MissingLastObservation(Env):
    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), observation="")


class CachedInfo(Env):
    """One info dict for the whole life of the environment, and it matters."""

    shared: dict[str, Any]

    def step(self, action: str, *, finish: Any = "stop") -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action, finish=finish)
        self.shared.update(info)
        return observation, reward, terminated, truncated, self.shared

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(**options)
        self.shared = dict(info)
        return observation, self.shared


class CopiedHistory(Env):
    """Correct, but a snapshot copies the whole past."""

    def snapshot(self) -> Snapshot:
        taken = super().snapshot()
        return replace(taken, state=copy.deepcopy(replace(taken.state, said=list(taken.state.said))))

    def restore(self, snapshot: Snapshot, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return super().restore(replace(snapshot, state=replace(snapshot.state, said=tuple(snapshot.state.said))), seed)


class SharedFork(Env):
    def fork(self) -> Self:
        return self


class SnapshotSteps(Env):
    """Taking a snapshot advances the random state."""

    def snapshot(self) -> Snapshot:
        self.np_random.random()
        return super().snapshot()


class KeepsEpisodeAfterReset(Env):
    """A flag of the restored episode leaks into the next."""

    leaked = False

    def restore(self, snapshot: Snapshot, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.leaked = True
        return super().restore(snapshot, seed)

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(**options)
        return observation, info | ({"leaked": True} if self.leaked and not options.get("options") else {})


class LiveReference(Env):
    """The snapshot is the environment's own dict, which goes on changing."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Any] = {}

    def snapshot(self) -> Snapshot:
        taken = super().snapshot()
        self.live["said"] = taken.state.said
        return replace(taken, state=replace(taken.state, said=self.live))

    def encode_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        return super().encode_snapshot(_plain(snapshot))

    def restore(self, snapshot: Snapshot, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return super().restore(_plain(snapshot), seed)


def _plain(snapshot: Snapshot) -> Snapshot:
    said = snapshot.state.said
    return replace(snapshot, state=replace(snapshot.state, said=said["said"] if isinstance(said, dict) else said))


class KeepsEveryFork(Env):
    """A registry of forks, for debugging."""

    forks: ClassVar[list[Any]] = []

    def fork(self) -> TurnEnv[Notes]:
        twin = super().fork()
        self.forks.append(twin)
        return twin


class BoundToItsThread(Env):
    """A connection that only the thread that opened it may use."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = sqlite3.connect(":memory:")

    def step(self, action: str, *, finish: Any = "stop") -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.connection.execute("SELECT 1")
        return super().step(action, finish=finish)


class TakesAnySnapshot(Env):
    def restore(self, snapshot: Snapshot, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return super().restore(replace(snapshot, version=FORMAT_VERSION, fingerprint=self.core.fingerprint), seed)


class HandsOutItsArray(gymnasium.Env[Any, Any]):
    """The observation is the state itself, so that whoever writes into one writes into the other."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = np.zeros(2)
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state += action + self.np_random.random()
        return self.state, float(self.state.sum()), False, False, {}


class HiddenGenerator(HandsOutItsArray):
    """Random numbers that no seed reaches, behind a sound interface."""

    generator = random.Random(4)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action + self.generator.random())
        return observation.copy(), reward, terminated, truncated, info


def words() -> list[str]:
    return ["a", "bb", "ccc", "dddd"]


# Each fault, and a law that must be named for it. Others may break too.
FAULTS: list[tuple[str, Callable[[], gymnasium.Env[Any, Any]], str]] = [
    ("a shared list", lambda: Env(SharedList()), "isolation"),
    ("a list inside a snapshot", lambda: Env(SharedList()), "value"),
    ("a hidden counter", lambda: Env(HiddenCounter()), "restore"),
    ("state in a class attribute", lambda: Env(ClassAttribute()), "isolation"),
    ("state in a variable of the module", lambda: Env(ModuleDict()), "isolation"),
    ("a default argument that is written to", lambda: Env(MutableDefault()), "determinism"),
    ("an iterator shared by forks", lambda: Env(SharedIterator()), "isolation"),
    ("a cached object", lambda: Env(CachedObject()), "restore"),
    ("global randomness", lambda: Env(GlobalRandomness()), "determinism"),
    ("the clock", lambda: Env(Clock()), "determinism"),
    ("a float that drifts", lambda: Env(Drift()), "restore"),
    ("random state that is not restored", UnrestoredRandomness, "restore"),
    ("a last observation that is not restored", MissingLastObservation, "restore"),
    ("a snapshot that advances the random state", SnapshotSteps, "value"),
    ("a snapshot that is a live reference", LiveReference, "value"),
    ("one info dict for all turns", CachedInfo, "info"),
    ("an observation that is the state", lambda: Forkable(HandsOutItsArray()), "info"),
    ("randomness that no seed reaches", lambda: Forkable(HiddenGenerator(), how="deepcopy"), "determinism"),
    ("a fork that is its parent", SharedFork, "isolation"),
    ("a thread's own handle", BoundToItsThread, "threads"),
    ("a reseed that is random", lambda: Env(Reseeding()), "reseed"),
    ("a flag that outlives the episode", KeepsEpisodeAfterReset, "reset"),
    ("a wrapper's counter that is not restored", lambda: TimeLimit(Env(), 4), "restore"),
    ("a lock in the state", lambda: Env(LiveHandle()), "pickle"),
    ("JSON that leaves out a field", lambda: Env(LossyEncoding()), "json"),
    ("JSON that turns tuples into lists", lambda: Env(TuplesToLists()), "json"),
    ("JSON that turns integer keys into texts", lambda: Env(IntegerKeys()), "json"),
    ("JSON with a set", lambda: Env(NotJson()), "json"),
    ("a version that nobody looks at", TakesAnySnapshot, "version"),
    ("a history that is copied", CopiedHistory, "cost"),
    ("forks that are kept", KeepsEveryFork, "growth"),
]


@pytest.mark.parametrize(("make", "law"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_planted_faults_are_caught(make: Callable[[], gymnasium.Env[Any, Any]], law: str) -> None:
    env = make()
    actions = words() if isinstance(env.unwrapped, TurnEnv) else None
    with pytest.raises(ForkLawError, match=rf"^{law}: .*look for: "):
        check_fork(env, actions=actions, laws=[law])


def test_a_failure_names_the_first_value_that_differs() -> None:
    detail = report_fork(Env(HiddenCounter()), actions=words(), laws=["restore"]).failures[0].detail
    assert detail == "rewound to turn 0: observation of turn 1: expected '1: a', found '5: a'"
    detail = report_fork(Env(IntegerKeys()), actions=words(), laws=["json"]).failures[0].detail
    assert "at ['state']['extra'][1]: expected 'a', found nothing" in detail


def test_a_fault_that_only_another_process_shows() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        check_fork(Env(ProcessBound()), actions=ACTIONS, process=False)
        with pytest.raises(ForkLawError, match=r"^process: .*fingerprint"):
            check_fork(Env(ProcessBound()), actions=ACTIONS)
        with pytest.raises(ForkLawError, match=r"^process: .* no answer within 0\.0"):
            check_fork(Env(), actions=ACTIONS, timeout_s=0.01)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_a_sound_environment_keeps_every_law() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        laws = check_fork(Env())
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert laws == tuple(law for law in FORK_LAWS if law != "interface")


def test_an_environment_without_snapshots_is_named() -> None:
    with pytest.raises(ForkLawError, match=r"interface: CartPoleEnv has no snapshot.*Forkable"):
        check_fork(gymnasium.make("CartPole-v1"))
    report = report_fork(gymnasium.make("CartPole-v1"))
    assert [(result.law, result.status) for result in report.results] == [("interface", "fails")]


def test_an_environment_that_cannot_travel_says_what_to_do() -> None:
    env = Env()
    env.core.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ForkLawError, match="process=False"):
        check_fork(env, actions=ACTIONS, laws=["process"])


def test_a_report_reads_as_a_table() -> None:
    report = report_fork(Env(HiddenCounter()), actions=words(), laws=["reset", "restore"])
    assert str(report).splitlines() == [
        repr(report.env).strip("'"),
        "  restore      fails    continuing equals the original: observations, rewards, flags, info, random state",
        "    rewound to turn 0: observation of turn 1: expected '1: a', found '5: a'",
        f"    look for: {FORK_LAWS['restore'][1]}",
        "  reset        holds    a reset after a restore is a fresh one",
    ]
    assert (report.ok, report.kept) == (False, ("reset",))


@pytest.mark.parametrize("law", ["restore", "threads", "version"])
def test_the_form_for_tests(law: str) -> None:
    assert_forkable(Env(), laws=[law], actions=words())


def test_the_form_for_tests_shows_the_report() -> None:
    with pytest.raises(AssertionError, match=r"(?s)determinism  fails .*look for: global randomness"):
        assert_forkable(Env(GlobalRandomness()), actions=words(), laws=["interface", "determinism"])


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown law 'isolaton'; did you mean 'isolation'"):
        check_fork(Env(), laws=["isolaton"])


@pytest.mark.parametrize("name", [name for name in gymnasium.registry if name.startswith("turntree/")])
def test_every_environment_of_the_library_keeps_the_laws(name: str) -> None:
    assert_forkable(gymnasium.make(name), process=False)
    assert_forkable(Forkable(gymnasium.make(name)), laws=["restore", "isolation", "json"])


class SteppedBuffer(Env):
    """A buffer that is made larger once, ahead of need, as those of Python are."""

    def snapshot(self) -> Snapshot:
        self.buffer = bytearray(4096 if self._state is not None and len(self._state.said) > 20 else 2048)
        return super().snapshot()


def test_a_buffer_that_grows_once_is_no_growing_cost() -> None:
    assert check_fork(SteppedBuffer(), actions=words(), laws=["cost"]) == ("cost",)
