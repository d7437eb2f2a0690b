"""Histories share their past; snapshots are values that survive pickle and JSON."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import History, RandomStream, SearchQAEnv, Snapshot
from turntree.errors import SnapshotError


@given(st.lists(st.integers()))
def test_history_is_the_list_of_what_was_appended(items: list[int]) -> None:
    history: History[int] = History()
    for item in items:
        history = history.append(item)
    assert list(history) == items
    assert len(history) == len(items)
    assert history == History(items)
    assert list(history.newest_first()) == items[::-1]
    assert pickle.loads(pickle.dumps(history)) == history
    assert history.append(1) != history


def test_history_forks_share_their_past_and_never_change() -> None:
    past = History("abc")
    left, right = past.append("l"), past.append("r")
    assert list(past) == ["a", "b", "c"]
    assert (list(left), list(right)) == (["a", "b", "c", "l"], ["a", "b", "c", "r"])
    assert left != right
    assert copy.deepcopy(left) is left
    with pytest.raises(AttributeError, match="immutable"):
        left._item = "x"


def test_a_long_history_does_not_recurse() -> None:
    turns = 50 * sys.getrecursionlimit()
    history = History(range(turns))
    twin = History(range(turns))
    assert history == twin
    assert len(pickle.loads(pickle.dumps(history))) == turns
    del history, twin


def test_random_stream_is_a_value() -> None:
    stream = RandomStream(7)
    first, after = stream.draw()
    again, _ = stream.draw()
    other, _ = after.draw()
    value = first.random()
    assert value == again.random()
    assert value != other.random()
    assert RandomStream.from_json(json.loads(json.dumps(after.to_json()))) == after


def test_a_snapshot_of_a_long_episode_survives_pickle_and_json(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env(max_turns=3000)
    env.reset(seed=1)
    for turn in range(1500):
        env.step(f"<search>Hamlet {turn}</search>")
    snapshot = env.snapshot()
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert env.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(snapshot)))) == snapshot


@given(
    turns=st.lists(st.text() | st.sampled_from(["<search>Hamlet</search>", "<answer>曹雪芹</answer>"]), max_size=6),
    question=st.text(min_size=1).filter(lambda text: bool(text.strip())),
)
def test_json_round_trip_is_exact_for_any_text(turns: list[str], question: str) -> None:
    from turntree.envs import Question
    from turntree.search_backend.bm25 import BM25Backend
    from turntree.search_backend.passage import Passage

    task = Question("x", question, ("a", "ß"))
    env = SearchQAEnv([task], search=BM25Backend.from_passages([Passage("1", "Hamlet", "by 曹雪芹")]), max_turns=8)
    env.reset(seed=0)
    done = False
    for text in turns:
        if not done:
            _, _, terminated, truncated, _ = env.step(text)
            done = terminated or truncated
    snapshot = env.snapshot()
    assert env.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(snapshot)))) == snapshot


def test_another_version_or_environment_is_refused(make_env: Callable[..., SearchQAEnv]) -> None:
    env, other = make_env(), make_env(max_turns=9)
    env.reset(seed=0)
    snapshot = env.snapshot()
    with pytest.raises(SnapshotError, match=r"expected snapshot format version 1, found 99; take the snapshot again"):
        env.restore(replace(snapshot, version=99))
    with pytest.raises(SnapshotError, match="fingerprint") as caught:
        other.restore(snapshot)
    assert env.core.fingerprint in str(caught.value)
    assert other.core.fingerprint in str(caught.value)
    with pytest.raises(SnapshotError, match="fingerprint"):
        other.decode_snapshot(env.encode_snapshot(snapshot))


@pytest.mark.parametrize("wrong", [None, [], {}, {"version": 1}, {"version": "1"}])
def test_what_is_not_a_snapshot_is_refused(make_env: Callable[..., SearchQAEnv], wrong: object) -> None:
    env = make_env()
    env.reset(seed=0)
    with pytest.raises(SnapshotError):
        Snapshot.from_json(wrong, env.core)  # type: ignore[arg-type]
    with pytest.raises(SnapshotError):
        env.restore(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["task", "history", "stream", "searches"])
def test_a_damaged_state_is_refused(make_env: Callable[..., SearchQAEnv], key: str) -> None:
    env = make_env()
    env.reset(seed=0)
    data = env.encode_snapshot(env.snapshot())
    data["state"][key] = object()
    with pytest.raises(SnapshotError, match="SearchQA"):
        env.decode_snapshot(data)
    for field in ("info", "np_random"):
        with pytest.raises(SnapshotError, match="expected an object"):
            env.decode_snapshot(env.encode_snapshot(env.snapshot()) | {field: 5})
    del data["state"][key]
    with pytest.raises(SnapshotError, match="SearchQA"):
        env.decode_snapshot(data)


def test_there_is_no_snapshot_before_a_reset(make_env: Callable[..., SearchQAEnv]) -> None:
    with pytest.raises(SnapshotError, match=r"call reset\(\) first"):
        make_env().snapshot()
