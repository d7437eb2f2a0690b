"""Two processes on one run folder: the second one is refused, and a dead one holds nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from turntree.errors import CheckpointError
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.run_lock import only_writer
from turntree.trainers.scoring import score

_HOLDER = """
import os, pathlib, sys
from turntree.trainers.run_lock import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:  # outlives the process that is killed
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    os.wait()
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """By another process, which has a child of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-c", _HOLDER, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate(timeout=30)


def test_one_process_at_a_time(tmp_path: Path, bed: Any, make_config: Callable[..., RunConfig]) -> None:
    """A scheduler that starts a job twice, each with resume=true: metrics of one went to a file that was replaced."""
    config = make_config("trainer.steps=1", "trainer.eval_every=0", "resume=true", f"out={tmp_path / 'run'}")
    train(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with held(tmp_path / "run") as holder:
        with pytest.raises(CheckpointError, match="another process works in"):
            train(config)
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
        holder.kill()
        holder.wait(30)
        assert train(config).progress.step == 1


def test_one_process_at_a_time_evaluates(tmp_path: Path, bed: Any, make_config: Callable[..., RunConfig]) -> None:
    """Two would each replace the other's journal, and the rows of one be lost."""
    config = make_config("eval.limit=2", f"env.test_questions={bed.world}")
    with held(tmp_path / "results"), pytest.raises(CheckpointError, match="another process works in"):
        score(config, tmp_path / "results")
    assert [f.name for f in (tmp_path / "results").iterdir()] == [".lock"]
    assert score(config, tmp_path / "results")["n"] > 0


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with only_writer(tmp_path):
        pass


@pytest.mark.parametrize("changed", ["questions.jsonl", "corpus.jsonl"])
def test_other_questions_or_passages_under_the_same_name_are_refused(
    tmp_path: Path, bed: Any, make_config: Callable[..., RunConfig], changed: str
) -> None:
    """Options name files. A run whose data changed went on, and its passport said that it always had those."""
    world = tmp_path / "world"
    shutil.copytree(bed.world, world)
    options = (
        f"env.questions={world / 'questions.jsonl'}",
        "trainer.eval_every=0",
        f"out={tmp_path / 'run'}",
    )
    train(make_config(*options, "trainer.steps=1"))
    passport = tmp_path / "run" / "passport.json"
    before, rows = passport.read_bytes(), (world / changed).read_text(encoding="utf-8").splitlines(keepends=True)
    (world / changed).write_text("".join(rows[::-1]), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"expected the questions and the corpus that the run .* began with"):
        train(make_config(*options, "trainer.steps=2", "resume=true"))
    assert passport.read_bytes() == before
    (world / changed).write_text("".join(rows), encoding="utf-8")
    assert train(make_config(*options, "trainer.steps=2", "resume=true")).progress.step == 2
    passport.write_text("{}")  # of an older version, or damaged: nothing to compare with
    assert train(make_config(*options, "trainer.steps=3", "resume=true")).progress.step == 3
    assert json.loads(passport.read_bytes())["data"]["sha256"]
