"""Laws 4 and 5 over arbitrary episodes: forks are isolated, and restore equals the original."""

from __future__ import annotations

import json
import pickle
from typing import Any

import gymnasium
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs import Question, SearchQAEnv
from turntree.envs.check import check_fork
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend

BACKEND = BM25Backend.from_passages([
    Passage("1", "Hamlet", "A tragedy by Shakespeare"),
    Passage("2", "红楼梦", "曹雪芹写的小说"),
])  # fmt: skip
QUESTIONS = [Question("a", "Who wrote Hamlet?", ("Shakespeare",)), Question("b", "谁写了《红楼梦》？", ("曹雪芹",))]
TURNS = st.lists(
    st.sampled_from([
        "<think>t</think><search>Hamlet</search>", "<search>红楼梦</search>", "<search></search>", "no action",
        "<think>open <search>Shakespeare</search>", "<answer>曹雪芹</answer>", "<answer>Shakespeare</answer> more",
    ])
    | st.text(max_size=20),
    max_size=6,
)  # fmt: skip


def make(**options: Any) -> SearchQAEnv:
    return SearchQAEnv(QUESTIONS, search=BACKEND, max_turns=5, reward="tree_grpo", **options)


def play(env: gymnasium.Env[Any, Any], turns: list[str]) -> list[Any]:
    """Everything that can be seen, until the episode ends."""
    inner: Any = env.unwrapped
    seen = []
    for turn in turns:
        if inner.snapshot().done:
            break
        *step, info = env.step(turn)
        info.pop("episode", None)  # a wrapper's stopwatch
        seen.append((*step, info, inner.encode_snapshot(inner.snapshot())))
    return seen


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), before=TURNS, mine=TURNS, theirs=TURNS)
def test_law_4_stepping_a_fork_never_changes_parent_or_sibling(
    seed: int, before: list[str], mine: list[str], theirs: list[str]
) -> None:
    plain, wrapped = make(), RecordEpisodeStatistics(make())
    for env in (plain, wrapped):
        inner: Any = env.unwrapped
        env.reset(seed=seed)
        play(env, before)
        state = inner.encode_snapshot(inner.snapshot())
        wild, sibling = env.get_wrapper_attr("fork")(), env.get_wrapper_attr("fork")()
        expected = play(env.get_wrapper_attr("fork")(), mine)
        play(wild, theirs)
        wild.reset(seed=seed + 1)
        assert inner.encode_snapshot(inner.snapshot()) == state
        assert play(sibling, mine) == expected
        assert play(env, mine) == expected


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), before=TURNS, between=TURNS, after=TURNS)
def test_law_5_restore_equals_the_original(seed: int, before: list[str], between: list[str], after: list[str]) -> None:
    env = make()
    env.reset(seed=seed)
    play(env, before)
    snapshot = env.snapshot()
    expected = play(env, after), env.reset()
    forms = [
        snapshot,
        pickle.loads(pickle.dumps(snapshot)),
        env.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(snapshot)))),
    ]
    for form in forms:
        play(env, between)
        observation, _ = env.restore(form)
        assert observation == snapshot.observation
        assert (play(env, after), env.reset()) == expected
        fresh = make()
        fresh.reset(options={"snapshot": form})
        assert (play(fresh, after), fresh.reset()) == expected


def test_law_4_and_5_through_wrappers_and_a_process() -> None:
    env = OrderEnforcing(gymnasium.make("turntree/SearchQA-v0", questions=QUESTIONS, search=BACKEND))
    assert "process" in check_fork(env, actions=["<search>Hamlet</search>", "x", "<answer>y</answer>"])
