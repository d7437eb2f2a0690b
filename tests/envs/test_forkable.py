"""Forkable: snapshots and forks of environments that never heard of them."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import pickle
import random
import socket
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import (
    Autoreset,
    NormalizeObservation,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformObservation,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs import Forkable, ForkSnapshot
from turntree.envs.check import check_fork
from turntree.errors import ConfigError, EpisodeReplayError, SnapshotError

Env = gymnasium.Env[Any, Any]
CLASSIC = ["FrozenLake-v1", "CartPole-v1", "Blackjack-v1", "MountainCar-v0", "CliffWalking-v1", "Pendulum-v1"]
SMALL = ["CartPole-v1", "Blackjack-v1", "MountainCar-v0"]  # without large tables
SPACE = gymnasium.spaces.Discrete(1000)


class Base(Env):
    """An environment whose observation is the sum of its actions and draws."""

    observation_space = SPACE
    action_space = SPACE
    total = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.total = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.total += int(action) + int(self.np_random.integers(10))
        return self.total, float(self.total), False, False, {}


def play(env: Env, actions: list[int]) -> list[Any]:
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        info.get("episode", {}).pop("t", None)
        seen.append((np.asarray(observation).tolist(), float(reward), terminated, truncated, repr(info)))
        if terminated or truncated:
            break
    return seen


# -- the environments of Gymnasium ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), [*((name, "auto") for name in CLASSIC), *((n, "deepcopy") for n in SMALL)])
def test_every_law_holds_for_gymnasiums_own_environments(name: str, how: Any) -> None:
    env = Forkable(RecordEpisodeStatistics(gymnasium.make(name)), how)
    laws = check_fork(env, turns=4, process=name == "CartPole-v1", laws=LAWS)
    assert {"restore", "isolation", "threads", "json", "version", "reseed"} <= set(laws)
    assert env.method == ("replay" if how == "auto" else "deepcopy")


LAWS = ["determinism", "value", "restore", "isolation", "threads", "info", "reseed", "reset", "pickle", "json",
        "version", "process"]  # fmt: skip


def test_taxi_is_restored_and_forked() -> None:
    made = functools.partial(gymnasium.make, "Taxi-v4", is_rainy=True, fickle_passenger=True)
    laws = ["restore", "isolation", "reseed", "json"]
    assert check_fork(Forkable(made()), turns=3, laws=laws) == tuple(laws)
    env = Forkable(made(), how="deepcopy")
    env.reset(seed=2)
    snapshot = env.snapshot()
    expected = play(env, [0, 1, 2, 3])
    env.restore(snapshot)
    fork = env.fork()
    play(fork, [3, 2])
    assert play(env, [0, 1, 2, 3]) == expected


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs ale-py (extra dev)")
def test_an_ale_game_is_restored_with_the_emulators_random_state() -> None:
    gymnasium.register_envs(importlib.import_module("ale_py"))
    env = Forkable(RecordEpisodeStatistics(gymnasium.make("ALE/Pong-v5", obs_type="ram", frameskip=(2, 6))))
    assert (env.method, env.why) == ("state", "AtariEnv has clone_state() and restore_state()")
    actions = [2, 3, 2, 0, 3, 3, 2, 2]
    checked = ["restore", "reseed", "pickle"]
    assert check_fork(env, actions=actions[:3], laws=checked) == tuple(sorted(checked, key=LAWS.index))
    env.reset(seed=5)
    snapshot = env.snapshot()
    with pytest.raises(SnapshotError, match=r"ALEState, which has no JSON form"):
        env.encode_snapshot(snapshot)
    restored = pickle.loads(pickle.dumps(snapshot))
    first = play(env, actions)
    env.restore(restored)
    assert play(env, actions) == first
    runs = []
    for seed in (1, 1, 2):
        env.restore(snapshot, seed=seed)
        runs.append(play(env, actions))
    assert runs[0] == runs[1] != runs[2]


def test_text_environments_use_their_own_snapshots() -> None:
    env = Forkable(TimeLimit(gymnasium.make("turntree/SearchQA-v0"), 3))
    assert (env.method, env.why) == ("state", "SearchQAEnv has snapshot() and restore()")
    actions = ["<search>a</search>", "nothing", "<search>b</search>"]
    laws = check_fork(env, actions=actions)
    assert {"restore", "isolation", "threads", "json", "process", "growth"} <= set(laws)


# -- choosing -------------------------------------------------------------------------------------------------


class WithState(Base):
    def get_state(self) -> dict[str, int]:
        return {"total": self.total}

    def set_state(self, state: dict[str, int]) -> None:
        self.total = state["total"]


class TwoArguments(Base):
    def get_state(self) -> int:
        return self.total

    def set_state(self, qpos: int, qvel: int) -> None:
        raise AssertionError("never called")


class GloballyRandom(Base):
    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.total += random.randrange(10**9)
        return self.total, 0.0, False, False, {}


@pytest.mark.parametrize(
    ("make", "method", "why"),
    [
        (WithState, "state", "WithState has get_state() and set_state()"),
        (TwoArguments, "replay", "TwoArguments has no state methods, and two episodes of 8 equal actions were equal"),
        (Base, "replay", "Base has no state methods, and two episodes of 8 equal actions were equal"),
        (GloballyRandom, "deepcopy", "GloballyRandom has no state methods, and a replay is not exact: turn 1 came out "
                                     "differently the second time"),
    ],
)  # fmt: skip
def test_it_says_what_it_chose_and_why(make: Callable[[], Env], method: str, why: str) -> None:
    env = Forkable(make())
    assert (env.method, env.why) == (method, why)
    assert f"Forkable[{method}: {why}]" in repr(env)
    if make is not GloballyRandom:
        assert "restore" in check_fork(env, process=False)


def test_a_spec_that_says_nondeterministic_is_not_replayed() -> None:
    gymnasium.register("test/Nondeterministic-v0", entry_point=lambda **_: Base(), nondeterministic=True)
    try:
        assert "nondeterministic=True" in Forkable(gymnasium.make("test/Nondeterministic-v0")).why
    finally:
        del gymnasium.registry["test/Nondeterministic-v0"]


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"how='state': Base has none of the method pairs snapshot/restore, "):
        Forkable(Base(), how="state")
    with pytest.raises(ConfigError, match="expected how='auto'"):
        Forkable(Base(), how="copy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="already Forkable"):
        Forkable(TimeLimit(Forkable(Base()), 3))
    with pytest.raises(SnapshotError, match="call reset"):
        Forkable(Base()).snapshot()
    with pytest.raises(SnapshotError, match="expected a ForkSnapshot, found int"):
        Forkable(Base()).restore(3)  # type: ignore[arg-type]


# -- wrappers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["replay", "deepcopy"])
def test_wrappers_count_on_from_where_the_snapshot_was_taken(how: Any) -> None:
    env = Forkable(RecordEpisodeStatistics(TimeLimit(gymnasium.make("CartPole-v1"), 5)), how)
    env.reset(seed=3)
    play(env, [0, 1])
    snapshot = env.snapshot()
    first = play(env, [0, 1, 0])
    assert (first[-1][3], "'l': 5" in first[-1][4]) == (True, True)
    returns = list(env.get_wrapper_attr("return_queue"))
    env.reset(seed=9)
    play(env, [1, 1, 1])
    env.restore(snapshot)
    assert list(env.get_wrapper_attr("return_queue")) == []
    assert env.get_wrapper_attr("_elapsed_steps") == 2
    fork = env.fork()
    assert play(env, [0, 1, 0]) == first
    assert fork.get_wrapper_attr("_elapsed_steps") == 2
    assert play(fork, [0, 1, 0]) == first
    assert list(env.get_wrapper_attr("return_queue")) == list(fork.get_wrapper_attr("return_queue")) == returns
    assert fork.get_wrapper_attr("return_queue") is not env.get_wrapper_attr("return_queue")


@pytest.mark.parametrize("how", ["replay", "deepcopy"])
def test_wrappers_with_functions_and_running_means(how: Any) -> None:
    def made() -> Forkable:
        inner = TransformObservation(gymnasium.make("CartPole-v1"), lambda x: x * 2, None)
        return Forkable(Autoreset(NormalizeObservation(inner)), how)

    env = made()
    env.reset(seed=0)
    for _ in range(30):  # the running mean has seen more than this episode
        env.step(0)
    snapshot = env.snapshot()
    expected = play(env, [0, 1, 1, 0])
    fork = env.fork()
    play(fork, [1, 1, 1])
    env.restore(snapshot)
    assert play(env, [0, 1, 1, 0]) == expected
    fork.restore(pickle.loads(pickle.dumps(snapshot)))
    assert play(fork, [0, 1, 1, 0]) == expected
    with pytest.raises(SnapshotError, match=r"^env\.env\.obs_rms is a gymnasium\.\S+RunningMeanStd, which has no JSON"):
        env.encode_snapshot(snapshot)


def test_reset_options_reach_through_outer_wrappers() -> None:
    env = RecordEpisodeStatistics(Forkable(Base()))
    env.reset(seed=1)
    play(env, [1])
    inner: Any = env.env
    data = json.loads(json.dumps(inner.encode_snapshot(inner.snapshot())))
    expected = play(env, [2, 3])
    env.reset(options={"snapshot": data})
    assert play(env, [2, 3]) == expected
    with pytest.raises(ConfigError, match="snapshot' alone"):
        env.reset(options={"snapshot": data, "more": 1})


@settings(deadline=None, max_examples=25)
@given(
    how=st.sampled_from(["replay", "deepcopy"]),
    seed=st.integers(0, 2**32 - 1),
    before=st.lists(st.integers(0, 1), max_size=6),
    mine=st.lists(st.integers(0, 1), max_size=6),
    theirs=st.lists(st.integers(0, 1), max_size=6),
)
def test_laws_4_and_5(how: Any, seed: int, before: list[int], mine: list[int], theirs: list[int]) -> None:
    env = Forkable(RecordEpisodeStatistics(TimeLimit(gymnasium.make("CartPole-v1"), 10)), how)
    env.reset(seed=seed)
    play(env, before)
    snapshot = env.snapshot()
    left, right = env.fork(), env.fork()
    expected = play(left, mine)
    play(right, theirs)
    assert play(env, mine) == expected
    right.restore(snapshot)
    assert play(right, mine) == expected


# -- replay ---------------------------------------------------------------------------------------------------


def test_an_episode_without_a_seed_is_replayed_too() -> None:
    env = Forkable(gymnasium.make("Blackjack-v1", natural=True), how="replay")
    env.reset(seed=4)
    env.reset()
    snapshot = env.snapshot()
    expected = play(env, [1, 0]), env.reset()
    env.reset()
    env.restore(snapshot)
    assert (play(env, [1, 0]), env.reset()) == expected


def test_a_replay_that_comes_out_differently_is_an_error() -> None:
    class Tampered(Base):
        drift = 0

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            observation, *_, info = super().step(action)
            return observation + self.drift, 0.0, False, False, info

    inner = Tampered()
    env = Forkable(inner, how="replay")
    env.reset(seed=1)
    play(env, [1, 2, 3])
    snapshot = env.snapshot()
    env.restore(snapshot)
    inner.drift = 1
    with pytest.raises(EpisodeReplayError, match=r"the observation of step 1 differs from the record.*how='deepcopy'"):
        env.restore(snapshot)
    with pytest.raises(SnapshotError, match="call reset"):
        env.snapshot()


def test_a_new_seed_is_part_of_the_record() -> None:
    env = Forkable(Base(), how="replay")
    env.reset(seed=1)
    play(env, [1, 1])
    snapshot = env.snapshot()
    runs = []
    for seed in (7, 7, 8):
        env.restore(snapshot, seed=seed)
        branch = env.snapshot()
        runs.append(play(env, [1] * 8))
        env.restore(branch)
        assert play(env, [1] * 8) == runs[-1]
    assert runs[0] == runs[1] != runs[2]


# -- handles --------------------------------------------------------------------------------------------------


class Handles(Base):
    """Everything that cannot be copied, none of it in the way."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()
        self.events = {"done": threading.Event()}
        self.pool = ThreadPoolExecutor(1)
        self.log = logging.getLogger("handles")
        self.rule = lambda x: x + 1
        self.file = (folder / "numbers.txt").open("rb")
        self.cache = sqlite3.connect(folder / "cache.db")
        self.memory = sqlite3.connect(":memory:", check_same_thread=False)
        self.memory.execute("CREATE TABLE heard (word INTEGER)")
        self.session: Any = type("Session", (), {})()
        self.session.socket = socket.socket()

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        with self.lock:
            self.memory.execute("INSERT INTO heard VALUES (?)", (int(action),))
            (heard,) = self.memory.execute("SELECT sum(word) FROM heard").fetchone()
        line = self.file.read(2)
        observation, *rest, info = super().step(self.pool.submit(self.rule, action).result())
        return observation, *rest, {**info, "heard": heard, "line": line}  # type: ignore[return-value]

    def close(self) -> None:
        self.pool.shutdown()
        for handle in (self.file, self.cache, self.memory, self.session.socket):
            handle.close()


def test_handles_stay_and_their_data_is_restored(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("1\n2\n3\n4\n5\n6\n")
    env = Forkable(Handles(tmp_path), how="deepcopy")
    env.reset(seed=1)
    play(env, [1, 2])
    inner: Any = env.unwrapped
    kept = [inner.lock, inner.pool, inner.rule, inner.file, inner.cache, inner.memory, inner.session.socket]
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    expected = play(env, [3, 4])
    play(env, [500])
    env.restore(snapshot)
    assert play(env, [3, 4]) == expected
    after = [inner.lock, inner.pool, inner.rule, inner.file, inner.cache, inner.memory, inner.session.socket]
    assert all(a is b for a, b in zip(kept, after))
    with pytest.raises(SnapshotError, match=r"fork: env\.unwrapped\.\S+ is a \S+ that a copy .*cannot share"):
        env.fork()
    env.close()


def test_a_fork_made_from_the_spec_has_handles_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("1\n2\n3\n4\n5\n6\n")
    gymnasium.register("test/Handles-v0", entry_point=lambda **_: Handles(tmp_path))
    try:
        env = Forkable(gymnasium.make("test/Handles-v0"), how="deepcopy")
        env.reset(seed=1)
        play(env, [1, 2])
        fork = env.fork()
        expected = play(fork, [3, 4])
        assert play(env, [3, 4]) == expected
        mine, theirs = env.unwrapped, fork.unwrapped
        assert isinstance(mine, Handles)
        assert isinstance(theirs, Handles)
        assert mine.lock is not theirs.lock
        assert mine.memory is not theirs.memory
        env.close()
        fork.close()
    finally:
        del gymnasium.registry["test/Handles-v0"]


def test_a_copy_has_locks_and_databases_of_its_own() -> None:
    class Plain(Base):
        def __init__(self) -> None:
            self.lock, self.again = threading.Lock(), threading.RLock()
            self.db = sqlite3.connect(":memory:", isolation_level=None)
            self.db.execute("CREATE TABLE t (x)")

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            with self.lock, self.again:
                self.db.execute("INSERT INTO t VALUES (?)", (int(action),))
                found = self.db.execute("SELECT count(*), sum(x) FROM t").fetchone()
            return 0, float(sum(found)), False, False, {}

    env = Forkable(Plain(), how="deepcopy")
    env.reset(seed=0)
    play(env, [5])
    fork = env.fork()
    assert play(fork, [7, 7])[-1][1] == 3 + 19
    assert play(env, [1])[-1][1] == 2 + 6
    assert fork.unwrapped.lock is not env.unwrapped.lock  # type: ignore[attr-defined]


class Database(Base):
    """Counts rows that it never commits."""

    def __init__(self, path: str = ":memory:") -> None:
        self.ready = threading.Condition()
        self.db = sqlite3.connect(path)
        self.db.execute("CREATE TABLE t (x)")

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        with self.ready:
            self.db.execute("INSERT INTO t VALUES (?)", (int(action),))
        found = self.db.execute("SELECT count(*), sum(x) FROM t").fetchone()
        return 0, float(sum(found)), False, False, {}


def test_a_database_in_memory_is_restored_again_and_again_with_its_open_transaction() -> None:
    env = Forkable(Database(), how="deepcopy")
    env.reset(seed=0)
    for rows in range(1, 5):
        play(env, [1])
        snapshot = env.snapshot()
        assert play(env, [1])[-1][1] == 2 * rows + 2
        assert play(env.fork(), [5])[-1][1] == 2 * rows + 2 + 6
        env.restore(snapshot)


def test_a_database_with_an_open_query_is_not_waited_for() -> None:
    env = Forkable(Database(), how="deepcopy")
    env.reset(seed=0)
    play(env, [1, 1])
    snapshot = env.snapshot()
    db: sqlite3.Connection = env.unwrapped.db  # type: ignore[attr-defined]
    db.commit()
    reading = db.execute("SELECT x FROM t")
    assert reading.fetchone() == (1,)
    with pytest.raises(SnapshotError, match=r"env\.unwrapped\.db cannot be written .*: a query of it is still open"):
        env.restore(snapshot)
    reading.close()
    env.restore(snapshot)
    assert play(env, [1])[-1][1] == 6


def test_a_database_in_a_file_that_was_written_to_is_not_restored(tmp_path: Path) -> None:
    env = Forkable(Database(str(tmp_path / "rows.db")), how="deepcopy")
    env.reset(seed=0)
    snapshot = env.snapshot()
    env.restore(snapshot)
    play(env, [1])
    with pytest.raises(SnapshotError, match=r"env\.unwrapped\.db is a database in a file.*expected 0 .* found 1\."):
        env.restore(snapshot)


def test_a_copy_of_a_database_with_functions_of_its_own_is_refused() -> None:
    env = Forkable(Database(), how="deepcopy")
    env.unwrapped.db.create_function("twice", 1, lambda x: 2 * x)  # type: ignore[attr-defined]
    env.reset(seed=0)
    with pytest.raises(SnapshotError, match=r"env\.unwrapped\.db has SQL functions of its own \(twice\)"):
        env.fork()


def test_methods_of_a_lock_have_a_json_form() -> None:
    class Locking(Base):
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.take, self.give = self.lock.acquire, self.lock.release

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            self.take()
            self.give()
            return 0, 1.0, False, False, {}

    env = Forkable(Locking(), how="deepcopy")
    env.reset(seed=0)
    data = json.loads(json.dumps(env.encode_snapshot(env.snapshot())))
    env.restore(env.decode_snapshot(data))
    assert play(env, [0])[-1][1] == 1.0
    assert env.unwrapped.take.__self__ is env.unwrapped.lock  # type: ignore[attr-defined]


def test_a_copy_that_breaks_while_replay_is_tried_is_no_error() -> None:
    class OnlyOnce(Base):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            raise RuntimeError("the handle is gone")

    env = Forkable(OnlyOnce())
    assert (env.method, "RuntimeError: the handle is gone" in env.why) == ("replay", True)


class Holding(Base):
    def __init__(self, thing: Any) -> None:
        self.parts = {"tools": [None, thing]}


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        ((x for x in range(3)), "generator"),
        (sqlite3.connect(":memory:").execute("SELECT 1"), "sqlite3.Cursor"),
        (memoryview(b"abc"), "memoryview"),
    ],
    ids=["generator", "cursor", "memoryview"],
)
def test_what_cannot_be_captured_is_named_with_its_path(thing: Any, named: str) -> None:
    env = Forkable(TimeLimit(Holding(thing), 9), how="deepcopy")
    env.reset(seed=0)
    with pytest.raises(SnapshotError, match=rf"env\.unwrapped\.parts\['tools'\]\[1\] is a {named}, .*__fork_ignore__"):
        env.snapshot()


def test_auto_replays_what_cannot_be_captured() -> None:
    env = Forkable(Holding(x for x in range(3)))
    assert "could not be tried beforehand" in env.why
    env.reset(seed=0)
    play(env, [1, 2])
    snapshot = env.snapshot()
    expected = play(env, [3])
    env.restore(snapshot)
    assert play(env, [3]) == expected


def test_what_a_class_says_is_no_state_stays() -> None:
    class Tool:
        __fork_ignore__ = ("stream",)

        def __init__(self) -> None:
            self.stream = (x for x in range(3))
            self.used = 0

    class Ignoring(Base):
        __fork_ignore__ = ("calls",)

        def __init__(self) -> None:
            self.calls = list("abc")
            self.tool = Tool()

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            self.calls.append("call")
            self.tool.used += 1
            return super().step(action)

    inner = Ignoring()
    env = Forkable(inner, how="deepcopy")
    env.reset(seed=0)
    snapshot = env.snapshot()
    stream = inner.tool.stream
    play(env, [1, 2])
    env.restore(snapshot)
    assert (len(inner.calls), inner.tool.used) == (5, 0)
    assert inner.tool.stream is stream
    fork: Any = env.fork().unwrapped
    assert fork.calls is inner.calls
    assert fork.tool is not inner.tool
    assert fork.tool.stream is stream


def test_shared_references_stay_shared() -> None:
    class Twice(Base):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            result = super().reset(seed=seed)
            self.rng = self.np_random
            self.left = self.right = [1]
            return result

    env = Forkable(Twice(), how="deepcopy")
    env.reset(seed=0)
    snapshot = env.snapshot()
    fork = env.fork()
    fork.restore(env.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(snapshot)))))
    env.restore(snapshot)
    for inner in (env.unwrapped, fork.unwrapped):
        assert isinstance(inner, Twice)
        assert inner.left is inner.right
        assert inner.rng is inner.np_random


def test_snapshots_of_another_environment_are_refused() -> None:
    env = Forkable(TimeLimit(Base(), 5))
    env.reset(seed=0)
    snapshot = env.snapshot()
    for other in (Forkable(TimeLimit(Base(), 6)), Forkable(Base()), Forkable(TimeLimit(Base(), 5), how="deepcopy")):
        with pytest.raises(SnapshotError, match="fingerprint"):
            other.restore(snapshot)
    with pytest.raises(SnapshotError, match="version 1, found 2"):
        env.restore(replace(snapshot, version=2))
    forms: list[Any] = [
        {},
        [],
        {**env.encode_snapshot(snapshot), "last": 3},
        {**env.encode_snapshot(snapshot), "seeds": 3},
    ]
    for broken in forms:
        with pytest.raises(SnapshotError):
            env.decode_snapshot(broken)
    Forkable(TimeLimit(Base(), 5)).restore(snapshot)


def test_ales_names() -> None:
    env = Forkable(Base())
    env.reset(seed=0)
    state = env.clone_state()
    assert isinstance(state, ForkSnapshot)
    expected = play(env, [1, 2])
    env.restore_state(state)
    assert play(env, [1, 2]) == expected
