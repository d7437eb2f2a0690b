"""Report F17: a run hung when its data ended before its workers did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turntree.trainers.run_folder import read_metrics


@pytest.mark.parametrize("schedule", ["fixed", pytest.param("overlap", marks=pytest.mark.slow)])
def test_f17_fewer_questions_than_places_and_a_last_part(bed: Any, tmp_path: Path, schedule: str) -> None:
    lines = (bed.world / "questions.jsonl").read_text(encoding="utf-8").split("\n")[:3]
    (tmp_path / "few.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = [
        *bed.args, f"env.questions={tmp_path / 'few.jsonl'}", f"search.corpus={bed.world / 'corpus.jsonl'}",
        "trainer.prompts_per_step=2", "trainer.steps=3", "trainer.max_concurrent_trees=64",
        f"trainer.schedule={schedule}", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    code = f"import sys; sys.path.insert(0, {str(bed.rules)!r}); from turntree.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["budget/prompts"] for row in rows] == [2, 2, 2]
    assert all(row["budget/trajectories"] > 0 and row["budget/failed"] == 0 for row in rows)
