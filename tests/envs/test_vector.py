"""A vector environment is a plain loop over single environments, with one batch of searches a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs import Question, SearchQAEnv, ToolCall, ToolFailure, ToolResult, TurnVectorEnv, vectorized
from turntree.envs.vector import stack_infos
from turntree.errors import ConfigError, RetrievalError, SnapshotError, ToolError
from turntree.search_backend import Passage

QUESTIONS = [
    Question("a", "Who wrote Hamlet?", ("Shakespeare",)),
    Question("b", "谁写了《红楼梦》？👍", ("曹雪芹",)),
    Question("c", "Is Hamlet a tragedy", ("yes",)),
]
PASSAGES = {"Hamlet": Passage("1", "Hamlet", "By Shakespeare"), "红楼梦": Passage("2", "红楼梦", "曹雪芹写的小说 👍🏽")}
TURNS = st.sampled_from([
    "<search>Hamlet</search>", "<think>想</think><search>红楼梦</search>", "<search>👍</search>", "<search></search>",
    "no action", "", "<answer>曹雪芹</answer>", "<answer>Shakespeare</answer> more", "<think>open <search>x</search>",
]) | st.text(max_size=12)  # fmt: skip
MODES = st.sampled_from(list(AutoresetMode))
Script = list[tuple[str, ...]]
N = 3
SCRIPTS = st.lists(st.tuples(*[TURNS] * N), max_size=7)


class Library:
    """Passages by title; counts its batches and fails for the queries it is told to, so many times."""

    fingerprint = "library"

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.broken: dict[str, int] = {}

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.batches.append(list(queries))
        return [[PASSAGES[q]] if q in PASSAGES else [] for q in queries]


def single(library: Library | None = None, **options: Any) -> SearchQAEnv:
    return SearchQAEnv(
        QUESTIONS, search=library or Library(), max_turns=3, reward="tree_grpo", tool_backoff_s=0.0, **options
    )


def several(library: Library | None = None, n: int = N, **options: Any) -> TurnVectorEnv[Any]:
    mode = options.pop("autoreset_mode", AutoresetMode.DISABLED)
    return TurnVectorEnv(single(library, **options), n, autoreset_mode=mode)


def plain(value: Any) -> Any:
    """Arrays as lists with their type, so that equal means equal."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def by_env(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """The info of one environment, read out of the stacked ones."""
    return {k: plain(v[i]) for k, v in infos.items() if not k.startswith("_") and infos[f"_{k}"][i]}


# -- equal to a plain loop ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**31), script=SCRIPTS, cut=st.sampled_from(["stop", "length"]))
def test_a_step_is_a_loop_of_single_steps_with_one_search(seed: int, script: Script, cut: Any) -> None:
    library = Library()
    envs, loop = several(library, on_length="correct"), [single(on_length="correct") for _ in range(N)]
    observations, infos = envs.reset(seed=seed)
    expected = [env.reset(seed=seed + i) for i, env in enumerate(loop)]
    assert [(observations[i], by_env(infos, i)) for i in range(N)] == expected
    for turns in script:
        actions = [None if env.done else turn for env, turn in zip(loop, turns, strict=True)]
        searches = {c for env, a in zip(loop, actions, strict=True) if a is not None for c in calls_of(env, a, cut)}
        batches = len(library.batches)
        observations, rewards, terminations, truncations, infos = envs.step(actions, finish=[cut] * N)
        assert len(library.batches) == batches + bool(searches)
        assert envs.observation_space.contains(observations)
        assert rewards.dtype == np.float64
        for i, (env, action) in enumerate(zip(loop, actions, strict=True)):
            if action is None:
                assert terminations[i] or truncations[i]
                assert (rewards[i], by_env(infos, i)) == (0.0, {})
            else:
                found = (observations[i], rewards[i], terminations[i], truncations[i], by_env(infos, i))
                assert found == env.step(action, finish=cut)
            assert envs.snapshot(i) == env.snapshot()


def calls_of(env: SearchQAEnv, text: str, finish: Any) -> tuple[ToolCall, ...]:
    return getattr(env.begin(text, finish=finish), "calls", ())


@settings(deadline=None, max_examples=60)
@given(mode=MODES, seed=st.integers(0, 2**31), script=SCRIPTS)
def test_all_modes_of_autoreset_equal_gymnasiums_own_loop(mode: AutoresetMode, seed: int, script: Script) -> None:
    ours, theirs = several(autoreset_mode=mode), SyncVectorEnv([single] * N, autoreset_mode=mode)
    assert plain(ours.reset(seed=seed)) == plain(theirs.reset(seed=seed))
    for turns in script:
        step = ours.step(turns)
        assert plain(step) == plain(theirs.step(turns))
        over = step[2] | step[3]
        if mode is AutoresetMode.DISABLED and over.any():
            options = {"reset_mask": over}
            assert plain(ours.reset(seed=seed, options=options)) == plain(theirs.reset(seed=seed, options=options))
    assert ours.call("snapshot") == theirs.call("snapshot") == ours.snapshots()
    assert ours.metadata["autoreset_mode"] is mode


# -- seeds, options, masks ---------------------------------------------------------------------------------------------


def test_seeds_and_options_for_each_environment() -> None:
    envs = several()
    alone = [single().reset(seed=s)[0] for s in (5, 9)]
    observations, _ = envs.reset(seed=[5, 9, 5])
    assert observations == (alone[0], alone[1], alone[0])
    own = {"id": "own", "question": "Why?", "golden_answers": ["so"]}
    observations, infos = envs.reset(seed=3, options={"per_env": [{"index": 1}, {"task": own}, None]})
    assert "红楼梦" in observations[0]
    assert "Question: Why?" in observations[1]
    assert observations[2] == single().reset(seed=5)[0]
    assert infos["task_id"].tolist()[:2] == ["b", "own"]
    assert infos["task_index"][1] is None
    observations, _ = envs.reset(options={"index": 2})
    assert len(set(observations)) == 1


def test_a_mask_resets_some_and_leaves_the_others() -> None:
    envs = several()
    before, _ = envs.reset(seed=0, options={"index": 0})
    _, _, terminations, _, _ = envs.step(["<answer>x</answer>", "<search>Hamlet</search>", "<answer>y</answer>"])
    kept = envs.snapshot(1)
    options = {"reset_mask": terminations, "index": 0}
    observations, infos = envs.reset(seed=[1, 2, 3], options=options)
    assert options.keys() == {"reset_mask", "index"}, "the caller's options are the caller's"
    assert (observations[0], observations[2]) == (before[0], before[2])
    assert observations[1] == kept.observation
    assert envs.snapshot(1) == kept
    assert infos["_task_id"].tolist() == [True, False, True]
    _, _, terminations, _, _ = envs.step(["no", "no", "no"])
    assert not terminations.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": [1, 2]}, "seed: expected one"),
        ({"seed": "123"}, "seed: expected one"),
        ({"options": {"per_env": [None]}}, "per_env: expected one"),
        ({"options": {"per_env": [{}] * N, "index": 0}}, "move .'index'. into per_env"),
        ({"options": {"reset_mask": np.zeros(N, bool)}}, "reset_mask"),
        ({"options": {"reset_mask": np.ones(N)}}, "reset_mask"),
        ({"options": {"reset_mask": np.ones(N + 1, bool)}}, "reset_mask"),
        ({"options": {"indx": 1}}, "did you mean 'index'"),
    ],
)
def test_wrong_arguments_of_reset_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        several().reset(**arguments)


def test_wrong_steps_change_nothing() -> None:
    envs = several()
    with pytest.raises(ResetNeeded, match=r"call reset\(\) first"):
        envs.step(["x"] * N)
    envs.reset(seed=0)
    envs.step(["<answer>x</answer>", "no", None])
    state, turns = envs.snapshots(), ["<search>Hamlet</search>"] * N
    wrong: list[tuple[Any, type[Exception], str]] = [
        (turns, ResetNeeded, r"environments \[0\] are over"),
        (turns[:2], ConfigError, "actions: expected one for each of 3"),
        ("abc", ConfigError, "actions: expected one for each of 3"),
        ([None, "<search>Hamlet</search>", 5], InvalidAction, "found int"),
    ]
    for actions, kind, message in wrong:
        with pytest.raises(kind, match=message):
            envs.step(actions)
        assert envs.snapshots() == state
    with pytest.raises(ConfigError, match="at least 1"):
        several(n=0)


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_any_snapshot_goes_into_any_environment_and_siblings_are_independent() -> None:
    envs = several()
    envs.reset(seed=0, options={"index": 1})
    envs.step(["<search>红楼梦</search>", "no", "<answer>x</answer>"])
    searched, _, answered = envs.snapshots()
    for i in range(N):
        observation, info = envs.restore(i, searched, seed=i)
        assert "曹雪芹" in observation
        assert info["searches"] == 1
    _, rewards, terminations, _, _ = envs.step(["<answer>曹雪芹</answer>", "<answer>no</answer>", None])
    assert terminations.tolist() == [True, True, False]
    assert rewards[0] > rewards[1]
    assert envs.snapshot(2).state.turns == 1
    forms = [searched, json.loads(json.dumps(envs.envs[0].encode_snapshot(searched))), answered]
    observations, _ = envs.reset(options={"per_env": [{"snapshot": s} for s in forms]})
    assert observations == (searched.observation, searched.observation, answered.observation)
    with pytest.raises(ResetNeeded, match=r"\[2\]"):
        envs.step(["no"] * N)
    foreign = single(top_k=1)
    foreign.reset(seed=0)
    with pytest.raises(SnapshotError, match="fingerprint"):
        envs.restore(0, foreign.snapshot())


def test_a_restored_end_is_over_in_the_flags_too() -> None:
    envs = several(n=1)
    envs.reset(seed=0)
    envs.step(["<answer>x</answer>"])
    over = envs.snapshot(0)
    envs.reset(seed=0)
    envs.restore(0, over)
    _, rewards, terminations, truncations, _ = envs.step([None])
    assert (rewards[0], terminations[0], truncations[0]) == (0.0, True, False)


# -- one batch, and what fails -----------------------------------------------------------------------------------------


def test_equal_searches_are_sent_once_and_every_call_is_counted() -> None:
    library = Library()
    envs = several(library, n=4)
    envs.reset(seed=0)
    envs.step(["<search>Hamlet</search>", "<search>红楼梦</search>", "<search>Hamlet</search>", "none"])
    assert library.batches == [["Hamlet", "红楼梦"]]
    assert (envs.calls.calls, envs.calls.attempts, envs.calls.shared) == ({"search": 3}, {"search": 2}, {"search": 1})


class Bell:
    """A tool outside of the episode: rings, and fails while ``broken``. Every ring counts."""

    effects = "external"
    description = "rings a bell"
    fingerprint = "bell"

    def __init__(self) -> None:
        self.rung: list[str] = []
        self.broken: set[str] = set()

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        fine = [call.argument for call in calls if call.argument not in self.broken]
        self.rung += fine
        return [ToolResult("ding") if c.argument in fine else ToolFailure("timeout", "no sound") for c in calls]


def test_a_failed_call_names_its_environment_and_what_succeeded_is_not_called_again() -> None:
    bell = Bell()
    envs = several(tools={"bell": bell}, tool_retries=0)
    envs.reset(seed=0)
    state, turns = envs.snapshots(), ["<bell>a</bell>", "<bell>b</bell>", "no"]
    bell.broken = {"b"}
    with pytest.raises(ToolError, match=r"environments \[1\] .* timeout: no sound"):
        envs.step(turns)
    assert envs.snapshots() == state
    assert (envs.calls.attempts, envs.calls.failures) == ({"bell": 2}, {"bell": 1})
    bell.broken = set()
    observations, rewards, terminations, truncations, infos = envs.step(turns)
    assert bell.rung == ["a", "b"]
    assert ["ding" in text for text in observations] == [True, True, False]
    assert not any(flags.any() for flags in (rewards, terminations, truncations))
    assert infos["action"].tolist() == ["bell", "bell", "invalid"]
    envs.step(["<bell>a</bell>", None, None])
    assert bell.rung == ["a", "b", "a"], "a turn that was finished is a new turn when it comes again"


def test_what_a_failed_step_found_is_forgotten_where_an_environment_moved_on() -> None:
    bell = Bell()
    envs = several(n=2, tools={"bell": bell}, tool_retries=0)
    envs.reset(seed=0)
    bell.broken = {"b"}
    with pytest.raises(ToolError):
        envs.step(["<bell>a</bell>", "<bell>b</bell>"])
    envs.reset(seed=0, options={"reset_mask": np.array([True, False])})
    envs.step(["<bell>a</bell>", None])
    assert bell.rung == ["a", "a"]


def test_a_search_that_is_down_is_an_error_and_no_reward() -> None:
    class Down(Library):
        def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
            raise RetrievalError("refused")

    envs = several(Down(), tool_retries=0)
    envs.reset(seed=0)
    state = envs.snapshots()
    with pytest.raises(ToolError, match=r"environments \[0, 2\] .*refused"):
        envs.step(["<search>Hamlet</search>", "no", "<search>Hamlet</search>"])
    assert envs.snapshots() == state


# -- through Gymnasium -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point", None])
def test_make_vec_carries_unicode_in_every_mode(mode: str | None) -> None:
    options: dict[str, Any] = {"questions": QUESTIONS, "corpus": [*PASSAGES.values()], "max_turns": 2}
    by_name = {"autoreset_mode": AutoresetMode.DISABLED}
    if mode in ("sync", "async"):
        options["vector_kwargs"] = by_name
    envs = gymnasium.make_vec("turntree/SearchQA-v0", num_envs=2, vectorization_mode=mode, **options)
    try:
        assert isinstance(envs, TurnVectorEnv) == (mode in ("vector_entry_point", None))
        assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
        assert (envs.spec.id, envs.num_envs) == ("turntree/SearchQA-v0", 2) if envs.spec else False
        seeds: Any = [1, 2]
        observations, _ = envs.reset(seed=seeds, options={"index": 1})
        assert "谁写了《红楼梦》？👍" in observations[0]
        observations, _, _, _, infos = envs.step(("<search>红楼梦</search>", "没有👩‍👩‍👧‍👦"))
        assert "曹雪芹写的小说 👍🏽" in observations[0]
        assert infos["action"].tolist() == ["search", "invalid"]
        _, rewards, terminations, _, infos = envs.step(("<answer>曹雪芹</answer>", "<answer>👍</answer>"))
        assert (rewards.tolist(), terminations.tolist()) == ([1.0, 0.0], [True, True])
        assert infos["answer"].tolist() == ["曹雪芹", "👍"]
    finally:
        envs.close()


def test_async_without_shared_memory_and_snapshots_through_call() -> None:
    options: dict[str, Any] = {"questions": QUESTIONS, "corpus": [*PASSAGES.values()], "max_turns": 3}
    kwargs = {"shared_memory": False, "autoreset_mode": "Disabled"}
    envs: Any = gymnasium.make_vec(
        "turntree/SearchQA-v0", num_envs=2, vectorization_mode="async", vector_kwargs=kwargs, **options
    )
    try:
        envs.reset(seed=0)
        observations = envs.step(("<search>红楼梦</search>", "👍"))[0]
        assert "曹雪芹" in observations[0]
        here = gymnasium.make_vec("turntree/SearchQA-v0", num_envs=2, **options)
        snapshots = [{"snapshot": s} for s in envs.call("snapshot")]
        assert here.reset(options={"per_env": snapshots})[0] == observations
    finally:
        envs.close()


def test_arguments_reach_the_environment_and_unknown_ones_are_refused() -> None:
    envs = gymnasium.make_vec("turntree/SearchQA-v0", num_envs=2, max_turns=7, autoreset_mode="SameStep")
    inner: Any = envs.unwrapped
    assert (inner.envs[1].core.limits.max_turns, inner.autoreset_mode) == (7, AutoresetMode.SAME_STEP)
    assert inner.envs[0].core is inner.envs[1].core
    with pytest.raises(ConfigError, match="did you mean 'max_turns'"):
        gymnasium.make_vec("turntree/SearchQA-v0", num_envs=2, max_turn=7)


def test_wrappers_of_gymnasium_work() -> None:
    envs = DictInfoToList(RecordEpisodeStatistics(several()))
    envs.reset(seed=0)
    infos: Any = envs.step(("<answer>x</answer>", "no", "no"))[-1]
    assert [info["action"] for info in infos] == ["answer", "invalid", "invalid"]
    assert "episode" in infos[0]
    assert "episode" not in infos[1]


def test_sampled_actions_are_actions() -> None:
    envs = several()
    envs.reset(seed=0)
    envs.action_space.seed(4)
    for _ in range(3):
        actions = envs.action_space.sample()
        assert len(envs.step([None if e.done else a for e, a in zip(envs.envs, actions, strict=True)])[0]) == N


def test_an_author_registers_a_vector_environment_in_one_line(make_env: Callable[..., SearchQAEnv]) -> None:
    gymnasium.register("tests/Tiny-v0", entry_point=make_env, vector_entry_point=vectorized(make_env))
    try:
        envs = gymnasium.make_vec("tests/Tiny-v0", num_envs=2, max_turns=2)
        assert envs.reset(seed=0)[0][0] == make_env(max_turns=2).reset(seed=0)[0]
    finally:
        del gymnasium.registry["tests/Tiny-v0"]


def test_infos_of_different_kinds_are_stacked_without_loss() -> None:
    stacked = stack_infos([{"n": 1, "m": 1, "d": {"x": 0.5}}, None, {"n": None, "m": 2, "d": {"y": True}}])
    assert plain(stacked["m"]) == ("<i8", [1, 0, 2])
    assert stacked["n"].tolist() == [1, None, None]
    assert stacked["_n"].tolist() == [True, False, True]
    assert plain(stacked["d"]["x"]) == ("<f8", [0.5, 0.0, 0.0])
    assert stacked["d"]["_y"].tolist() == [False, False, True]
    assert stack_infos([None, {}]) == {}
