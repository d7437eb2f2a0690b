"""The journal: what was written stays, once, whoever dies."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.errors import CheckpointError, DataError
from turntree.trainers.append import AppendFile
from turntree.trainers.coldstart import Key
from turntree.trainers.coldstart.journal import Journal

FACTS = {"seed": 1}


def row(key: Key, **more: object) -> dict[str, object]:
    return {"question_id": key.question, "sample": key.sample, **more}


def test_rows_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    keys = [Key("b", 1), Key("a", 0), Key("b", 0), Key("old", 3)]
    with Journal(tmp_path, FACTS) as journal:
        for key in keys:
            journal.append(key, row(key, text="é\ud800\u2028"))
        with pytest.raises(DataError, match="played already"):
            journal.append(keys[0], row(keys[0]))
        journal.settle([Key("b", 0), Key("b", 1), Key("c", 0), Key("a", 0)])
    lines = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [(r["question_id"], r["sample"]) for r in lines] == [("b", 0), ("b", 1), ("a", 0), ("old", 3)]
    assert lines[0]["text"] == "é\ud800\u2028"
    with Journal(tmp_path, FACTS) as journal:
        assert len(journal) == 4
        assert all(key in journal for key in keys)
        assert journal.read(Key("old", 3)) == row(Key("old", 3), text="é\ud800\u2028")


@given(st.integers(0, 400))
def test_a_line_that_was_cut_anywhere_goes_and_the_others_stay(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "rows.jsonl"
    lines = [json.dumps({"n": n, "pad": "x" * 20 * n}) + "\n" for n in range(6)]
    whole = "".join(lines).encode()
    path.write_bytes(whole[:cut])
    file = AppendFile(path)
    kept = [found["n"] for _, _, found in file.lines()]
    assert kept == list(range(whole[:cut].count(b"\n")))
    file.append({"n": "new"})
    file.close()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [*kept, "new"]


def test_another_configuration_and_damage_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path, FACTS) as journal:
        journal.append(Key("a", 0), row(Key("a", 0)))
    with pytest.raises(CheckpointError, match="seed: 1 there, 2 now"):
        Journal(tmp_path, {"seed": 2})
    (tmp_path / "trajectories.jsonl").write_text('{"question_id": "a", "sample": 0}\nnot json\n')
    with pytest.raises(CheckpointError, match=r"line 2 is damaged: expected a JSON object a line.*delete that line"):
        Journal(tmp_path, FACTS)
    (tmp_path / "trajectories.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(CheckpointError, match="line 1 is damaged"):
        Journal(tmp_path, FACTS)
    (tmp_path / "journal.json").unlink()
    with pytest.raises(CheckpointError, match=r"journal\.json is missing"):
        Journal(tmp_path, FACTS)


HOLD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_never_write_one_folder(tmp_path: Path) -> None:
    with Journal(tmp_path, FACTS):
        pass
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another process plays in"):
            Journal(tmp_path, FACTS)
        other.kill()  # as hard as a process can end
        other.wait(timeout=30)
    with Journal(tmp_path, FACTS) as journal:
        assert not len(journal)


def test_a_full_disk_leaves_whole_rows_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(tmp_path / "rows.jsonl")
    file.append({"n": 1})
    write, calls = os.pwrite, 0

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:3], offset)

    monkeypatch.setattr("turntree.trainers.append.os.pwrite", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*rows\.jsonl: No space left.*resume=true"):
        file.append({"n": 2})
    monkeypatch.undo()
    file.append({"n": 3})
    assert [found["n"] for _, _, found in file.lines()] == [1, 3]
    file.close()
