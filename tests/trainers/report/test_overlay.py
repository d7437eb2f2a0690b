"""Several runs on one page: groups by everything but the seed, means with intervals over seeds, fair warnings."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from tests.trainers.report.made_runs import PASSPORT, made_run
from tests.trainers.report.test_run_page import Page, loads_nothing
from turntree.errors import ConfigError
from turntree.trainers.report.history import Curve, RunHistory
from turntree.trainers.report.overlay import find_runs, group_runs, mean_curve, mismatches, warnings
from turntree.trainers.report.overlay_page import write_runs_page
from turntree.trainers.stats import student_mean


def histories(*folders: Path) -> list[RunHistory]:
    return [RunHistory.read(folder) for folder in folders]


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path: Path) -> None:
    folders = [
        made_run(tmp_path / f"{name}-seed{seed}", f"algorithm={name}", f"seed={seed}", f"model.path=worlds-{seed}/m")
        for seed in (1, 2, 12)
        for name in ("grpo", "at2po")
    ]
    groups = group_runs(histories(*folders))
    assert [group.label for group in groups] == ["grpo", "at2po"]
    assert [group.seeds for group in groups] == [[1, 2, 12]] * 2
    assert not list(warnings(groups, mismatches(groups)))


def test_a_number_that_is_not_the_seed_stays(tmp_path: Path) -> None:
    folders = [made_run(tmp_path / f"r{seed}", f"seed={seed}", "env.questions=nq-1.jsonl") for seed in (1, 2)]
    (group,) = group_runs(histories(*folders))
    assert group.options["env.questions"] == "nq-1.jsonl"


def test_labels_say_what_differs_and_ignore_puts_together(tmp_path: Path) -> None:
    a = made_run(tmp_path / "a", "algorithm=grpo", "algorithm.kl_coef=0.1", "seed=1")
    b = made_run(tmp_path / "b", "algorithm=grpo", "algorithm.kl_coef=0.2", "seed=2")
    labels = [group.label for group in group_runs(histories(a, b))]
    assert labels == ["grpo kl_coef=0.1", "grpo kl_coef=0.2"]
    assert len(group_runs(histories(a, b), ignore=["algorithm.kl_coef"])) == 1
    assert len(group_runs(histories(a, b), ignore=["algorithm"])) == 1
    with pytest.raises(ConfigError, match="--ignore nonsense"):
        group_runs(histories(a, b), ignore=["nonsense"])


def test_a_run_of_an_older_version_counts_with_the_defaults(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a", "seed=1"), made_run(tmp_path / "b", "seed=2")
    saved = (b / "config.yaml").read_text(encoding="utf-8")
    older = saved.replace("  epochs: 1\n", "")
    assert older != saved
    (b / "config.yaml").write_text(older, encoding="utf-8")
    assert len(group_runs(histories(a, b))) == 1


def test_the_interval_is_students_at_equal_budgets() -> None:
    x = np.array([0.0, 100.0, 200.0])
    one = Curve({"tokens": x}, np.array([0.0, 1.0, 2.0]))
    two = Curve({"tokens": x * 1.5}, np.array([0.0, 3.0, 6.0]))
    mean = mean_curve([one, two, None], "tokens", smooth=False)
    assert mean is not None
    assert mean.x[[0, -1]].tolist() == [0.0, 200.0], "as far as both went"
    at = mean.at(150.0)
    assert at.mean == pytest.approx((1.5 + 3.0) / 2)
    half = 12.706 * np.std([1.5, 3.0], ddof=1) / np.sqrt(2)
    assert [at.low, at.high] == pytest.approx([2.25 - half, 2.25 + half], rel=1e-4)
    assert np.isnan(mean.at(250.0).mean)
    assert mean_curve([one, two], "calls", smooth=False) is None
    alone = mean_curve([one], "tokens", smooth=False)
    assert alone is not None
    assert alone.low is None


def test_student_mean() -> None:
    found = student_mean([1.0, 2.0, 3.0])
    assert [found.low, found.high] == pytest.approx([2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5])
    assert np.isnan(student_mean([1.0]).low)
    assert student_mean([]).n == 0
    with pytest.raises(ConfigError):
        student_mean([1.0], confidence=2)


def test_what_should_be_equal_and_is_not_is_said(tmp_path: Path) -> None:
    other = copy.deepcopy(PASSPORT)
    other["data"]["sha256"] = "bbb"
    a = made_run(tmp_path / "a", "algorithm=grpo", "seed=1")
    b = made_run(tmp_path / "b", "algorithm=at2po", "seed=1", "sampling.temperature=0.7", passport=other)
    c = made_run(tmp_path / "c", "algorithm=grpo", "seed=1", "trainer.steps=9")
    groups = group_runs(histories(a, b, c), ignore=["trainer.steps"])
    found = mismatches(groups)
    assert [(m.where, m.key) for m in found if m.weight == "breaks"] == [("validation", "data.sha256")]
    said = "\n".join(warnings(groups, found))
    expected = (
        "validate differently (data.sha256)",
        "options outside the algorithm: sampling.temperature",
        "grpo: seed 1 is there more than once",
        "not finished (step 4 of 9)",
        "no interval over seeds",
    )
    assert not [words for words in expected if words not in said]


def test_the_page(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        made_run(tmp_path / f"runs/grpo-{seed}", "algorithm=grpo", f"seed={seed}", level=0.1 + seed / 100, rate=150.0)
        made_run(tmp_path / f"runs/at2po-{seed}", "algorithm=at2po", f"seed={seed}", level=0.3 + seed / 50)
    out = tmp_path / "all.html"
    troubles = write_runs_page(find_runs([tmp_path / "runs"]), out)
    assert troubles == []
    html = out.read_text(encoding="utf-8")
    loads_nothing(html)
    said = " ".join(" ".join(Page(html).text).split())
    assert "6 runs in 2 groups" in said
    assert "at 400 tokens" in said
    assert "74% [69.0%, 79.0%]" in said, "mean of at2po's ends over seeds: 0.74 and 4.303 * 0.02 / sqrt(3)"
    assert html.count('class="band"') > 8
    with pytest.raises(ConfigError, match="named twice"):
        find_runs([tmp_path / "runs/grpo-1", tmp_path / "runs"])
    with pytest.raises(ConfigError, match="expected a run folder"):
        find_runs([tmp_path / "runs/grpo-1/validation"])
