"""Every planted fault is caught by the suite, under the name of the law that it breaks."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import pytest

from turntree.envs import FrozenDict, Snapshot, Step, TurnCore, TurnEnv
from turntree.envs.check import ForkLawError, check_fork

ACTIONS = ["a", "bb", "ccc", "dddd"]


@dataclass(frozen=True)
class Notes:
    """An episode that repeats what was said; ``said`` is a tuple, or whatever a fault puts there."""

    said: Any = ()
    task: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


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
    def fork(self) -> TurnEnv[Notes]:
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


FAULTS: list[tuple[Callable[[], gymnasium.Env[Any, Any]], set[str]]] = [
    (lambda: Env(SharedList()), {"value", "restore", "isolation"}),
    (lambda: Env(HiddenCounter()), {"restore"}),
    (lambda: Env(GlobalRandomness()), {"determinism"}),
    (lambda: Env(LossyEncoding()), {"json"}),
    (lambda: Env(NotJson()), {"json"}),
    (lambda: Env(LiveHandle()), {"pickle"}),
    (lambda: Env(Reseeding()), {"reseed"}),
    (UnrestoredRandomness, {"restore"}),
    (MissingLastObservation, {"restore"}),
    (CachedInfo, {"info", "isolation", "restore", "determinism"}),
    (CopiedHistory, {"cost"}),
    (SharedFork, {"isolation"}),
    (SnapshotSteps, {"determinism", "value", "restore"}),
    (KeepsEpisodeAfterReset, {"restore", "reset"}),
]


@pytest.mark.parametrize(("make", "laws"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_faults_are_caught(make: Callable[[], gymnasium.Env[Any, Any]], laws: set[str]) -> None:
    with pytest.raises(ForkLawError) as caught:
        check_fork(make(), actions=ACTIONS, process=False)
    assert str(caught.value).partition(":")[0] in laws, str(caught.value)


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
    assert set(laws) == {
        "determinism", "value", "restore", "isolation", "info", "reseed", "reset", "pickle", "json", "cost", "process",
    }  # fmt: skip


def test_an_environment_without_snapshots_is_named() -> None:
    with pytest.raises(ForkLawError, match="interface: CartPoleEnv has no snapshot"):
        check_fork(gymnasium.make("CartPole-v1"))


def test_an_environment_that_cannot_travel_says_what_to_do() -> None:
    env = Env()
    env.core.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ForkLawError, match="process=False"):
        check_fork(env, actions=ACTIONS)
