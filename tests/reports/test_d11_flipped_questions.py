"""D11: two evaluations with another number of passages: which questions flipped, how, and what was made differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turntree.commands import run_compare
from turntree.trainers.scoring import score


def test_d11_why_two_results_differ(
    make_config: Any, bed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in (("a", ["search.top_k=1"]), ("b", ["search.top_k=3", "sampling.eval_temperature=1.0"])):
        score(make_config(f"env.test_questions={bed.world}", *options), tmp_path / name)
    sides = [str(tmp_path / "a"), str(tmp_path / "b")]
    run_compare(sides, metrics=("em",), flips=50, seed=0, resamples=500, out=tmp_path / "out", as_json=False)
    text = capsys.readouterr().out
    assert "24 questions in common" in text
    assert "made differently: search.top_k: 1 | 3" in text
    assert "| em " in text
    flips = (tmp_path / "out" / "flips.jsonl").read_text(encoding="utf-8").splitlines()
    assert f"{len(flips)} questions flipped" in text
    assert text.count("\nA: ") == text.count("\nB: ") - 1 == len(flips), "each with both trajectories"
