from __future__ import annotations

from pathlib import Path

import pytest

from turntree.errors import CheckpointError
from turntree.trainers.evaluation import journal as module
from turntree.trainers.evaluation.journal import Journal, read_journal
from turntree.trainers.evaluation.rows import EvalRow

FACTS = {"seed": 1}


def row(name: str) -> EvalRow:
    return EvalRow(
        name, "Who?", ["x"], "x", 1.0, 1.0, 1.0, 1.0, None, 1.0, "answered", "answer", True, 1, 0, 3, None, None, None
    )


def test_rows_come_back_and_a_cut_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "e.partial.jsonl"
    journal = Journal(path, FACTS, [(row("a"),)])
    journal.write([(row("b"), row("b"))])
    journal.close()
    assert {key: len(rows) for key, rows in read_journal(path, FACTS).items()} == {"a": 1, "b": 2}
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_journal(path, FACTS)) == ["a"]
    with pytest.raises(CheckpointError, match="seed"):
        read_journal(path, {"seed": 2})


def test_a_kill_while_a_journal_is_taken_up_again_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e.partial.jsonl"
    Journal(path, FACTS, [(row("a"),), (row("b"),)]).close()

    def killed(*args: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_lines", killed)
    with pytest.raises(KeyboardInterrupt):
        Journal(path, FACTS, [(row("a"),)])
    assert list(read_journal(path, FACTS)) == ["a", "b"]
