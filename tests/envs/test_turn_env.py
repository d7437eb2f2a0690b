"""An environment author writes one small core; Gymnasium, snapshots, forks and vector environments follow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics

from turntree.envs import FrozenDict, RandomStream, SearchQAEnv, Snapshot, Step, TurnCore, TurnEnv
from turntree.envs.check import check_fork
from turntree.errors import ConfigError, SnapshotError

# -- a whole task, as a foreign author would write it ---------------------------------------------------------


@dataclass(frozen=True)
class Guessing:
    """The number to find, how many guesses were made, and where the hints' randomness comes from."""

    low: int
    high: int
    secret: int
    stream: RandomStream
    guesses: int = 0


class GuessingCore(TurnCore[Guessing]):
    """Find a number in eight guesses; hints have a random tone."""

    @property
    def fingerprint(self) -> str:
        return "guessing/1"

    def initial(self, task: tuple[int, int], *, seed: int) -> tuple[Guessing, str]:
        low, high = task
        rng, stream = RandomStream(seed).draw()
        secret = int(rng.integers(low, high + 1))
        return Guessing(low, high, secret, stream), f"Guess a number from {low} to {high}."

    def transition(self, state: Guessing, text: str) -> Step[Guessing]:
        rng, stream = state.stream.draw()
        state = replace(state, guesses=state.guesses + 1, stream=stream)
        if text.strip() == str(state.secret):
            return Step(state, "Right.", reward=1.0, terminated=True)
        if state.guesses == 8:
            return self.truncate(state, "turns")
        if not text.strip().isdecimal():
            return Step(state, "Please write a number.", info=FrozenDict({"action": "invalid"}))
        tone = ["Hm, ", "No, ", "¡Ay! ", "唉，"][int(rng.integers(4))]
        return Step(state, tone + ("higher." if int(text) < state.secret else "lower."))

    def truncate(self, state: Guessing, reason: str) -> Step[Guessing]:
        return Step(state, "", truncated=True, info=FrozenDict({"stop_reason": reason}))

    def reseed(self, state: Guessing, seed: int) -> Guessing:
        return replace(state, stream=RandomStream(seed))

    def encode_state(self, state: Guessing) -> dict[str, Any]:
        return {"numbers": [state.low, state.high, state.secret, state.guesses], "stream": state.stream.to_json()}

    def decode_state(self, data: Mapping[str, Any]) -> Guessing:
        low, high, secret, guesses = data["numbers"]
        return Guessing(low, high, secret, RandomStream.from_json(data["stream"]), guesses)


# -------------------------------------------------------------------------------------------------------------


def guessing() -> TurnEnv[Guessing]:
    return TurnEnv(GuessingCore(), [(1, 10), (5, 50), (1, 2)], action_examples=["1", "7", "30"])


@pytest.mark.filterwarnings("ignore:.*does not have a spec.*", "ignore:.*not having a spec.*")
def test_a_small_core_without_tools_passes_both_checkers() -> None:
    check_env(guessing(), skip_render_check=True)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        laws = check_fork(guessing())
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert {"restore", "isolation", "json", "process"} <= set(laws)


def test_siblings_get_independent_randomness_only_with_a_seed() -> None:
    env = guessing()
    env.reset(seed=3, options={"task": (1, 10**6)})
    snapshot = env.snapshot()
    tones = []
    for seed in [None, None, *range(12)]:
        env.restore(snapshot, seed)
        tones.append(env.step("0")[0])
    assert tones[0] == tones[1]
    assert len(set(tones[2:])) > 1


def test_reset_takes_an_index_a_task_or_a_snapshot(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env()
    observation, info = env.reset(options={"index": 1})
    assert "红楼梦" in observation
    assert info == {"task_id": "q2", "task_index": 1}
    row = {"id": "own", "question": "Why?", "golden_answers": ["so"]}
    observation, info = env.reset(options={"task": row})
    assert "Question: Why?" in observation
    assert info["task_id"] == "own"
    env.step("<search>Hamlet</search>")
    snapshot = env.snapshot()
    data = env.encode_snapshot(snapshot)
    env.reset(seed=0)
    for form in (snapshot, data):
        observation, info = env.reset(options={"snapshot": form})
        assert observation == snapshot.observation
        assert info["searches"] == 1
        assert env.snapshot() == snapshot


@pytest.mark.parametrize("index", [-1, 3, "1", 1.0, None])
def test_a_wrong_index_is_refused(make_env: Callable[..., SearchQAEnv], index: object) -> None:
    with pytest.raises(ConfigError, match=r"integer in 0\.\.2"):
        make_env().reset(options={"index": index})


def test_wrong_options_are_refused(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env()
    with pytest.raises(ConfigError, match="one reset option"):
        env.reset(options={"index": 0, "task": None})
    with pytest.raises(ConfigError, match="'task'"):
        env.reset(options={"task": {"question": "no id"}})
    with pytest.raises(SnapshotError, match="expected a Snapshot"):
        env.reset(options={"snapshot": "s"})
    with pytest.raises(ConfigError, match="at least one task"):
        TurnEnv(GuessingCore(), [])


def test_stepping_at_the_wrong_time_says_what_to_do(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env()
    with pytest.raises(ResetNeeded, match=r"call reset\(\) first"):
        env.step("x")
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match="found int"):
        env.step(5)  # type: ignore[arg-type]
    env.step("<answer>x</answer>")
    with pytest.raises(ResetNeeded, match="over"):
        env.step("x")
    finished = env.snapshot()
    env.reset(seed=1)
    env.restore(finished)
    with pytest.raises(ResetNeeded, match="over"):
        env.step("x")


def test_ale_names_are_aliases(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env()
    env.reset(seed=0)
    state: Snapshot = env.clone_state()
    env.step("<search>Hamlet</search>")
    env.restore_state(state)
    assert env.snapshot() == state


def test_snapshots_work_through_wrappers(make_env: Callable[..., SearchQAEnv]) -> None:
    env = RecordEpisodeStatistics(OrderEnforcing(make_env()))
    env.reset(seed=0)
    env.step("<search>Hamlet</search>")
    snapshot = env.get_wrapper_attr("snapshot")()
    fork = env.get_wrapper_attr("fork")()
    expected = env.step("<answer>x</answer>")[:4]
    assert fork.step("<answer>x</answer>")[:4] == expected
    observation, _ = env.reset(options={"snapshot": snapshot})
    assert observation == snapshot.observation
    assert env.step("<answer>x</answer>")[:4] == expected


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_carry_unicode(mode: str) -> None:
    envs = gymnasium.make_vec("turntree/SearchQA-v0", num_envs=2, vectorization_mode=mode, max_turns=2)
    try:
        seeds: Any = [1, 2]
        observations, _ = envs.reset(seed=seeds)
        single = gymnasium.make("turntree/SearchQA-v0", max_turns=2)
        assert observations == (single.reset(seed=1)[0], single.reset(seed=2)[0])
        observations, rewards, _, _, _ = envs.step(("<search>中文👍</search>", "nothing"))
        assert "<information>" in observations[0]
        assert "could be executed" in observations[1]
        assert list(rewards) == [0, 0]
    finally:
        envs.close()
