"""``turntree report``, the report of a real run, and the table that it prints while it goes on."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.progress import Progress

from tests.trainers.report.made_runs import made_run
from turntree.cli import cli
from turntree.trainers.config import RunConfig
from turntree.trainers.report.tables import steps_table

METRICS = {"critic/rewards/mean": 0.25, "tree/reward/em": 0.5, "num_turns/mean": 2.0, "total/generated_tokens": 1234.0}


def report(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["report", *arguments], catch_exceptions=False)
    return done.exit_code, done.output


def test_one_run_and_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        made_run(tmp_path / f"runs/s{seed}", f"seed={seed}")
    assert report("runs/s1") == (0, "report: runs/s1/report.html\n")
    assert report("runs/s1", "runs/s2") == (0, "report of 2 runs: report.html\n")
    code, said = report("runs", "--out", "page.html", "--ignore", "model")
    assert (code, said) == (0, "report of 2 runs: page.html\n")
    assert "2 runs in 1 group<" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_pipe_gets_a_plain_row_a_step() -> None:
    out = io.StringIO()
    show = steps_table(Console(file=out))
    show(1, METRICS)
    show(2, {**METRICS, "critic/rewards/mean": math.nan, "validation/em": 0.75, "validation/f1": 0.9})
    head, first, second = out.getvalue().splitlines()
    assert head.split()[:7] == ["step", "reward", "right", "valid.", "turns", "tokens", "calls"]
    assert first.split()[:6] == ["1", "0.250", "0.500", "-", "2.00", "1,234"]
    assert second.split()[:4] == ["2", "-", "0.500", "0.750"]


def test_a_terminal_gets_rows_above_the_bar_that_fit() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=55, color_system="standard")
    with Progress(console=console, disable=False) as bars:
        show = steps_table(console)
        task = bars.add_task("train", total=2)
        for step in (1, 2):
            show(step, {**METRICS, **({"validation/em": 0.75} if step == 2 else {})})
            bars.update(task, completed=step)
    said = out.getvalue()
    assert "tokens" in said
    assert "entropy" not in said, "columns beyond the width are left out"
    assert "0.750" in said
    assert "\x1b[1m" in said, "validations stand out"


@pytest.mark.slow
def test_a_real_run_is_logged_and_reported(tmp_path: Path, make_config: Callable[..., RunConfig]) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from turntree.trainers.learner import train

    out = tmp_path / "run"
    result = train(make_config("trainer.loggers=[tensorboard,wandb,csv]", f"out={out}"))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    rewards = [event.value for event in events.Scalars("critic/rewards/mean")]
    lines = (out / "csv/scalars/critic/rewards/mean.csv").read_text(encoding="utf-8").splitlines()
    assert [float(line.partition(",")[2]) for line in lines] == pytest.approx(rewards)
    assert len(rewards) == result.progress.step
    assert len(list((out / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert "Sample trees" in (out / "report.html").read_text(encoding="utf-8")
