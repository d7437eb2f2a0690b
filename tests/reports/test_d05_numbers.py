"""D05: numbers that the official normaliser confuses are right beside it, and an evaluation says where they differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.scorers import SCORERS
from turntree.trainers.evaluation.rows import EvalRow
from turntree.trainers.evaluation.summary import disagreements
from turntree.trainers.scoring import score


@pytest.mark.parametrize(("gold", "said"), [("35", "3.5"), ("5", "-5"), ("10", "1.0")])
def test_d05_both_results_are_there(gold: str, said: str) -> None:
    assert SCORERS["search_r1"](said, [gold])["em"] == 1.0, "as published"
    assert SCORERS["unicode"](said, [gold])["em"] == 0.0


def test_d05_an_evaluation_counts_where_they_differ(make_config: Any, bed: Any, tmp_path: Path) -> None:
    config = make_config(f"env.test_questions={bed.world}", "eval.limit=2", "eval.scorers=[unicode,cover]")
    assert score(config, tmp_path)["em_disagreements"] == {"unicode": 0, "cover": 0}
    scores = {"unicode/em": 0.0, "unicode/f1": 0.0, "cover/em": 1.0}
    facts: dict[str, Any] = {"em": 1.0, "f1": 1.0, "sub_em": 1.0, "reward": 1.0, "success": None, "score": 1.0}
    episode: dict[str, Any] = {"status": "answered", "stop_reason": "answer", "format_valid": True, "turns": 1,
                               "searches": 0, "generated_tokens": 1, "supporting_found": None, "hops": None,
                               "type": None}  # fmt: skip
    row = EvalRow("q", "?", ["35"], "3.5", **facts, **episode, scores=scores)
    assert disagreements([row, replace(row, em=0.0)]) == {"unicode": 1, "cover": 1}
