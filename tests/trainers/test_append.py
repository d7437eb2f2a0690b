"""Every file of JSON Lines that the product appends to: a last line that was cut anywhere never spoils the next one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers.evaluation.test_journal import row as eval_row
from turntree.agents.engines.endpoint import Usage
from turntree.errors import CheckpointError
from turntree.trainers.append import AppendFile
from turntree.trainers.coldstart import Key
from turntree.trainers.coldstart.journal import Journal
from turntree.trainers.coldstart.turns import TurnLog
from turntree.trainers.evaluation.journal import Journal as EvalJournal
from turntree.trainers.evaluation.journal import read_journal
from turntree.trainers.run_folder import MetricsLog, read_metrics

TEXT = "é問\U0001f98a\u2028\u202e"
"""Characters of two, three and four bytes, so that a cut falls inside each of them."""


def append_rows(folder: Path, *names: str) -> Path:
    file = AppendFile(folder / "rows.jsonl")
    for name in names:
        file.append({"name": name, "text": TEXT})
    file.close()
    return file.path


def metrics(folder: Path, *names: str) -> Path:
    with MetricsLog(folder / "metrics.jsonl") as log:
        for name in names:
            log.write(1, {"name": name, "text": TEXT})
    return folder / "metrics.jsonl"


def resumed_metrics(folder: Path, *names: str) -> Path:
    with MetricsLog(folder / "metrics.jsonl", resume_step=5) as log:
        for name in names:
            log.write(1, {"name": name, "text": TEXT})
    return folder / "metrics.jsonl"


def trajectories(folder: Path, *names: str) -> Path:
    with Journal(folder, {"seed": 1}) as journal:
        for name in names:
            journal.append(Key(name, 0), {"name": name, "question_id": name, "sample": 0, "text": TEXT})
    return folder / "trajectories.jsonl"


WRITERS = {"append": append_rows, "metrics": metrics, "resumed metrics": resumed_metrics, "trajectories": trajectories}


def names(path: Path) -> list[str]:
    """Every line, whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line)["name"] for line in data.split(b"\n")[:-1]]


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_a_line_cut_at_any_byte(writer: Callable[..., Path], tmp_path: Path) -> None:
    path = writer(tmp_path, "a", "b")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        writer(tmp_path, "c")
        assert names(path) == ["a", "c"], cut
    path.write_bytes(whole)
    writer(tmp_path, "c")
    assert names(path) == ["a", "b", "c"]


def test_journals_of_evaluations_cut_at_any_byte(tmp_path: Path) -> None:
    path, facts = tmp_path / "e.partial.jsonl", {"seed": 1}
    journal = EvalJournal(path, facts, [(eval_row("a"),)])
    journal.write([(eval_row(TEXT),)])
    journal.close()
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        assert list(read_journal(path, facts)) == ["a"]
    found = read_journal(path, facts)
    again = EvalJournal(path, facts, list(found.values()))
    again.write([(eval_row("c"),)])
    again.close()
    assert list(read_journal(path, facts)) == ["a", "c"]


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"facts": 1}', b"\xff\xfe"])
def test_a_damaged_head_does_not_cost_the_rows(tmp_path: Path, header: bytes) -> None:
    path, facts = tmp_path / "e.partial.jsonl", {"seed": 1}
    EvalJournal(path, facts, [(eval_row("a"),)]).close()
    path.write_bytes(header + path.read_bytes()[path.read_bytes().index(b"\n") :])
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"line 1 is damaged.*played again"):
        read_journal(path, facts)
    assert path.read_bytes() == before


@pytest.mark.parametrize("row", [b"{}", b"[]", b"3", b'"x"'])
def test_rows_of_another_kind_are_named(tmp_path: Path, row: bytes) -> None:
    path, facts = tmp_path / "e.partial.jsonl", {"seed": 1}
    EvalJournal(path, facts, [(eval_row("a"),)]).close()
    path.write_bytes(path.read_bytes() + row + b"\n")
    with pytest.raises(CheckpointError, match="line 3"):
        read_journal(path, facts)


def test_the_log_of_turns_cut_at_any_byte(tmp_path: Path) -> None:
    """It is written anew where it is opened; what was paid for stays counted."""
    log = TurnLog(tmp_path)
    log.note(Usage(requests=1))
    log._file.close()
    whole = (tmp_path / "turns.jsonl").read_bytes()
    last = whole[whole[:-1].rindex(b"\n") + 1 :]
    for cut in range(0, len(last), 5):
        (tmp_path / "turns.jsonl").write_bytes(whole + last[:cut])
        again = TurnLog(tmp_path)
        assert again.usage == Usage(requests=1)
        again.close()
        lines = (tmp_path / "turns.jsonl").read_bytes().split(b"\n")
        assert [json.loads(line) for line in lines[:-1]]


def test_metrics_of_a_full_disk_leave_no_part_of_a_line(tmp_path: Path) -> None:
    """By the limit on a file's size, which needs no rights: the writing process gets a part of its line written."""
    import resource
    import signal

    path = metrics(tmp_path, "a")
    size = path.stat().st_size
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = MetricsLog(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"{path}.*resume=true"):
            log.write(1, {"name": "b", "text": TEXT})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    log.write(1, {"name": "c", "text": TEXT})
    log.close()
    assert [row["name"] for row in read_metrics(path)] == ["a", "c"]
