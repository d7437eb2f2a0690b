"""The collapse watch: what it measures, when it rings, and that it never stops a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.errors import ConfigError
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.tree import Node, Tree
from turntree.trainers.watch import repetition, turn_metrics, watch
from turntree.trainers.watch_config import WatchConfig

MakeConfig = Callable[..., RunConfig]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repetition_is_the_share_of_ngrams_seen_before(ids: list[int], n: int) -> None:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    expected = sum(gram in grams[:i] for i, gram in enumerate(grams))
    found = repetition(ids, n=n)
    if grams:
        assert found == pytest.approx(expected / len(grams))
    else:
        assert math.isnan(found)


@given(st.integers(1, 6), st.integers(2, 30))
def test_a_loop_comes_to_what_the_docstring_says(period: int, times: int) -> None:
    ids = list(range(period)) * times
    grams = len(ids) - 3
    if grams > 0:
        assert repetition(ids, n=4) == pytest.approx(1 - min(period, grams) / grams)


def tree_of(*turns: tuple[tuple[int, ...], str, str]) -> Tree:
    root = Node(observation_ids=(1, 2))
    for ordinal, (ids, action, status) in enumerate(turns):
        made: Any = status
        root.add_child(Node(ordinal=ordinal, turn_ids=ids, action=action, status=made))
    return Tree(root, "q", 0)


def test_turns_are_measured_without_those_of_failed_leaves() -> None:
    tree = tree_of(
        ((1, 2, 3, 4, 5, 6, 7, 8), "search", "open"),
        ((1,) * 8, "invalid", "answered"),
        ((9,), "answer", "answered"),  # too short for an n-gram
        ((1,) * 50, "", "failed"),
        ((), "", "truncated"),
    )
    found = turn_metrics([tree], ngram=4)
    assert found["tree/repetition"] == pytest.approx((0 + 4 / 5) / 2)
    assert found["tree/valid_actions"] == pytest.approx(2 / 3)
    assert all(math.isnan(value) for value in turn_metrics([], ngram=4).values())


GOOD = {"tree/entropy": 1.0, "tree/valid_actions": 0.9, "tree/ratio_max_token": 2.0, "tree/repetition": 0.1}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("entropy", "tree/entropy", 0.09),
        ("ratio", "tree/ratio_max_token", 101.0),
        ("ratio", "tree/ratio_max_token", math.inf),
        ("format", "tree/valid_actions", 0.55),
        ("repetition", "tree/repetition", 0.6),
    ],
)
def test_each_alarm_rings_alone_is_told_once_and_ends(name: str, key: str, value: float) -> None:
    config = WatchConfig()
    first = watch(GOOD, {}, config)
    assert not any(first.alarms.values())
    bad = watch({**GOOD, key: value}, first.memory, config)
    assert [alarm for alarm, on in bad.alarms.items() if on] == [f"alarm/{name}"]
    assert len(bad.messages) == 1
    again = watch({**GOOD, key: value}, bad.memory, config)
    assert again.alarms == bad.alarms
    assert again.messages == ()
    over = watch(GOOD, again.memory, config)
    assert not any(over.alarms.values())
    assert len(watch({**GOOD, key: value}, over.memory, config).messages) == 1
    off: dict[str, Any] = {name: None}
    assert f"alarm/{name}" not in watch({**GOOD, key: value}, first.memory, WatchConfig(**off)).alarms


metric = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, metric)), max_size=6))
def test_any_numbers_give_alarms_and_a_memory_of_plain_finite_numbers(steps: list[dict[str, float]]) -> None:
    memory: dict[str, float] = {}
    for metrics in steps:
        found = watch(metrics, memory, WatchConfig())
        assert set(found.alarms.values()) <= {0.0, 1.0}
        assert len(found.alarms) == 4
        assert all(math.isfinite(value) for value in found.memory.values())
        memory = found.memory


def test_a_run_rings_goes_on_and_remembers_over_a_resume(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = (f"out={tmp_path / 'run'}", "watch.ratio=1", "trainer.epochs=2", "watch.entropy=1")
    with caplog.at_level(logging.WARNING, logger="turntree.trainers.learner"):
        train(make_config(*options))
        told = [record.getMessage() for record in caplog.records if "ratio blow-up" in record.getMessage()]
        assert len(told) == 1
        assert "step 1" in told[0]
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["alarm/ratio"] for row in rows] == [1, 1]
        caplog.clear()
        train(make_config(*options, "trainer.steps=3", "resume=true"))
        assert not [record for record in caplog.records if "ratio blow-up" in record.getMessage()]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    peak = 0.0
    for row in rows:  # with a share of 1 every step below the highest one rings
        peak = max(peak, row["tree/entropy"])
        assert row["alarm/entropy"] == float(row["tree/entropy"] < peak)
    assert len(rows) == 3


@pytest.mark.parametrize("bad", ["watch.entropy=1.5", "watch.ratio=0.5", "watch.ngram=0", "watch.format=-1"])
def test_thresholds_are_checked(make_config: MakeConfig, bad: str) -> None:
    with pytest.raises(ConfigError, match=bad.partition("=")[0]):
        make_config(bad)
