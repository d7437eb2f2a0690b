"""What a run folder gets drawn, with and without validation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.studio.stored import write_run
from turntree.commands.console import say
from turntree.trainers.report.run import list_trees, write_report
from turntree.trainers.run_folder import MetricsLog, RunFolder


def test_a_run_without_validation_gets_the_curve_of_its_rollouts(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"seed": 0})
    with MetricsLog(run.metrics_file) as log:
        write_report(run.path)
        assert not run.curve_file.exists(), "nothing was measured yet"
        log.write(1, {"total/generated_tokens": 100.0, "tree/reward/em": 0.25})
        log.write(2, {"total/generated_tokens": 200.0, "tree/reward/em": float("nan")})  # every group was dropped
        write_report(run.path)
    assert run.curve_file.read_bytes().startswith(b"\x89PNG")


def test_the_list_of_trees_is_a_line_each_and_goes_on_after_a_damaged_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, trees=2, leaves=20, evil=True)
    (folder / "trees" / "step-00000002.jsonl.zst").write_bytes(b"")
    lines = list(list_trees(folder))
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 1", "step 2", "step 3", "step 3"]
    assert "is truncated" in lines[2]
    assert "leaves 20" in lines[0]
    assert max(map(len, lines)) < 300
    assert not any("\n" in line for line in lines)


def test_a_page_of_one_run_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    program = (
        "import sys; from pathlib import Path; from turntree.commands.report import run_report\n"
        f"run_report([Path({str(folder)!r})], out=None, ignore=()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_what_a_terminal_would_obey_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b]0;title\x07b\x9b31m c\nd")
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07b\\x9b31m c\nd\n"
