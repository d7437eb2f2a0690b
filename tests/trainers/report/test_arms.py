"""The table of a comparison: intervals over questions and seeds, differences, and the three files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.trainers.report.arms import MEASURES, Arm, Comparison, nested_mean
from turntree.trainers.stats import share_interval

BUDGET = {
    "algorithm": "grpo",
    "rl_steps": 3,
    "prompts_per_step": 2,
    "trajectories_per_prompt": 4,
    "max_generated_tokens": 9000,
    "sft_steps": 5,
    "sft_demonstrations": 7,
    "max_turns": 4,
}


def arm(name: str, seed: int, em: list[float], **more: float) -> Arm:
    values: dict[str, list[float | None]] = {measure: list(em) for measure in MEASURES}
    used = {"prompt_tokens": 30.0, "completion_tokens": 10.0, "cost": 0.5} if name == "rltr" else {}
    return Arm(name, seed, [f"q{i}" for i in range(len(em))], values, {"generated_tokens": 1000 * seed, **more}, used)


@pytest.fixture
def compared() -> Comparison:
    arms = [
        arm("rl", 1, [0.0, 1.0, 0.0, 0.0]),
        arm("rltr", 1, [1.0, 1.0, 0.0, 1.0]),
        arm("rl", 2, [0.0, 0.0]),
        arm("rltr", 2, [1.0, 0.0]),
    ]
    return Comparison(tuple(arms), BUDGET)


groups = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=2, max_size=4)


@given(groups)
def test_a_nested_interval_holds_its_mean_and_what_it_was_made_of(data: list[list[float]]) -> None:
    found = nested_mean(data, resamples=200)
    low, high = min(map(min, data)), max(map(max, data))
    assert found.mean == pytest.approx(np.mean([np.mean(g) for g in data]))
    assert low - 1e-9 <= found.low <= found.high <= high + 1e-9
    assert found.n == sum(map(len, data))
    assert nested_mean(data, resamples=200) == found


def test_seeds_that_differ_widen_the_interval() -> None:
    alike, apart = nested_mean([[0.0, 1.0] * 50] * 3), nested_mean([[0.0] * 100, [0.5] * 100, [1.0] * 100])
    assert alike.mean == apart.mean == 0.5
    assert apart.high - apart.low > alike.high - alike.low


def test_one_seed_is_as_an_evaluation() -> None:
    assert nested_mean([[1.0, 0.0, 0.0]], share=True) == share_interval([1.0, 0.0, 0.0])
    assert nested_mean([]).n == 0


def test_differences_are_paired_by_question(compared: Comparison) -> None:
    found = compared.difference("rltr", "rl", "em")
    assert found is not None
    assert (found["mean"], found["n"], found["wins"], found["losses"]) == (pytest.approx(3 / 6), 6, 3, 0)
    assert compared.difference("rltr", "sft", "em") is None


def test_the_three_files_say_the_same(compared: Comparison, tmp_path: Path) -> None:
    compared.save(tmp_path)
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["seeds"] == [1, 2]
    assert document["budget"] == BUDGET
    assert document["arms"]["rltr"]["em"]["mean"] == pytest.approx((0.75 + 0.5) / 2)
    assert [one["seed"] for one in document["arms"]["rltr"]["per_seed"]] == [1, 2]
    with (tmp_path / "comparison.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["arm"], second["arm"], second["seeds"], second["questions"]) == ("rl", "rltr", "1 2", "6")
    assert float(second["em"]) == pytest.approx(document["arms"]["rltr"]["em"]["mean"])
    assert float(second["summarizer_tokens"]) == pytest.approx(80 / 6)
    assert float(second["training_generated_tokens"]) == 1500
    text = (tmp_path / "comparison.md").read_text()
    assert "| RLTR " in text
    assert "0.625 [" in text
    assert "seeds 1, 2" in text
    assert "at most 9,000 tokens" in text
    assert "rltr - rl" in text


def test_what_was_not_measured_is_no_zero(tmp_path: Path) -> None:
    one = arm("direct", 0, [0.0, 1.0])
    one.values["completeness"] = [None, None]
    found = Comparison((one,), BUDGET)
    found.save(tmp_path)
    assert json.loads((tmp_path / "comparison.json").read_text())["arms"]["direct"]["completeness"]["mean"] is None
    (row,) = found.rows()
    assert row["completeness"] is None
    assert "| - " in found.markdown()
