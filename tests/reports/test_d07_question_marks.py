"""An empty question is a row error with its place; loading never touches the punctuation of a question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turntree.envs.datasets import load_questions
from turntree.errors import DataError


@pytest.mark.parametrize("question", ["", "  ", None, 7])
def test_d07_empty_question_is_a_row_error(tmp_path: Path, question: object) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{"id": "a", "question": "fine?", "golden_answers": ["x"]}, {"question": question, "golden_answers": ["x"]}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(DataError, match=r"q\.jsonl, line 2: expected a question"):
        load_questions(path)


@pytest.mark.parametrize("question", ["谁写了《红楼梦》？", "Who wrote it", "Name it."])
def test_d07_questions_are_kept_as_they_are(tmp_path: Path, question: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"id": "a", "question": question, "golden_answers": ["x"]}), encoding="utf-8")
    assert load_questions(path)[0].question == question
