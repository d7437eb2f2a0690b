"""D09: validation drops nothing and changes no order: 101 questions in batches of 16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turntree.trainers.scoring import score


def test_d09_all_rows_in_file_order(make_config: Any, bed: Any, tmp_path: Path) -> None:
    lines = (bed.world / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{**json.loads(lines[i % len(lines)]), "id": f"q{i}"} for i in range(101)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = make_config(
        f"env.test_questions={questions}", f"search.corpus={bed.world / 'corpus.jsonl'}", "env.max_turns=1",
        "eval.batch=16", "sampling.max_turn_tokens=2",
    )  # fmt: skip
    seen: list[int] = []
    document = score(config, tmp_path / "out", report=lambda done, total: seen.append(done))
    assert document["n"] == 101
    assert seen == [16, 32, 48, 64, 80, 96, 101]
    written = (tmp_path / "out" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in written] == [f"q{i}" for i in range(101)]
