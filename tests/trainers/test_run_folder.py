"""The run folder: refuses to overwrite, keeps whole lines, and a resumed log equals an uninterrupted one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from turntree.errors import CheckpointError, DataError
from turntree.trainers.loggers import open_trackers
from turntree.trainers.run_folder import MetricsLog, RunFolder, read_metrics

# The folder -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    path: Path = Path("a/b")
    layers: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Config:
    name: str = "问题"
    inner: Inner = field(default_factory=Inner)
    limit: int | None = None


CONFIG = {"name": "问题", "inner": {"path": "a/b", "layers": [1, 2]}, "limit": None}


@pytest.mark.parametrize("config", [Config(), CONFIG, OmegaConf.create(CONFIG)])
def test_configuration_of_any_kind_is_saved_as_readable_yaml(tmp_path: Path, config: Any) -> None:
    run = RunFolder.create(tmp_path / "deep" / "run", config)
    assert "name: 问题" in run.config_file.read_text(encoding="utf-8")
    assert RunFolder.open(run.path).load_config() == CONFIG


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {"seed": 1})
    with pytest.raises(CheckpointError, match="resume=true"):
        RunFolder.create(tmp_path / "run", {"seed": 2})
    resumed = RunFolder.create(tmp_path / "run", {"seed": 2}, resume=True)
    assert resumed.load_config() == {"seed": 1}
    resumed.save_config({"seed": 2})
    assert resumed.load_config() == {"seed": 2}


def test_resume_starts_a_run_where_there_is_none(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path / "run", {}, resume=True).exists


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints"])
def test_foreign_files_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        RunFolder.create(tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_what_a_launcher_writes_first_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "train.log").touch()
    assert RunFolder.create(tmp_path, {}).exists


def test_a_start_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    RunFolder(tmp_path).save_config({"half": "done"})
    assert RunFolder.create(tmp_path, {"seed": 1}).load_config() == {"seed": 1}


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        RunFolder.create(tmp_path / "run", {})


def test_only_runs_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        RunFolder.open(tmp_path)
    run = RunFolder.create(tmp_path, {})
    (tmp_path / "run.json").write_text('{"schema": 99}')
    with pytest.raises(CheckpointError, match="schema 99, this version reads 1"):
        RunFolder.open(run.path)
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(CheckpointError, match="damaged"):
        RunFolder.create(run.path, {}, resume=True)


def test_summary(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, {})
    with pytest.raises(CheckpointError, match="not finished"):
        run.read_summary()
    run.write_summary({"em": np.float64(0.5), "nan": math.nan, "n": 3, "by_hops": {2: [math.inf, 1.0]}})
    assert run.read_summary() == {"em": 0.5, "nan": None, "n": 3, "by_hops": {"2": [None, 1.0]}}


# Metrics --------------------------------------------------------------------------------------------------------------


def test_one_json_object_a_line_flushed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {"loss": torch.tensor(0.5), "em": np.float32(0.25), "n": np.int64(3), "ok": True, "name": "甲"})
        assert read_metrics(path) == [{"step": 1, "loss": 0.5, "em": 0.25, "n": 3, "ok": True, "name": "甲"}]
    log.close()
    with pytest.raises(DataError, match="closed"):
        log.write(2, {})


def test_numbers_that_json_lacks_are_null_and_flagged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {"a": math.nan, "b": -math.inf, "c": torch.tensor(math.inf), "d": 1.0, "e": None})
    (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": None,
        "d": 1.0,
        "e": None,
        "nonfinite": {"a": "nan", "b": "-inf", "c": "inf"},
    }


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, torch.ones(2), object()])
def test_only_scalars(tmp_path: Path, value: object) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        with pytest.raises(DataError, match="'bad'"):
            log.write(1, {"good": 1, "bad": value})
    assert path.read_bytes() == b""


def test_names_of_the_log_itself_are_refused(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        with pytest.raises(DataError, match="step"):
            log.write(1, {"step": 2})


finite = st.floats(allow_nan=False, allow_infinity=False)
metrics = st.dictionaries(
    st.text(max_size=8).filter(lambda key: key not in ("step", "nonfinite")), finite | st.text(max_size=5), max_size=3
)


@settings(max_examples=40, deadline=None)
@given(st.lists(metrics, min_size=1, max_size=6), st.data())
def test_a_resumed_log_equals_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    saved = data.draw(st.integers(0, len(rows)))
    reached = data.draw(st.integers(saved, len(rows)))
    with MetricsLog(folder / "whole.jsonl") as log:
        for step, row in enumerate(rows, start=1):
            log.write(step, row)
    with MetricsLog(folder / "resumed.jsonl") as log:
        for step, row in enumerate(rows[:reached], start=1):
            log.write(step, row)
    cut = (folder / "resumed.jsonl").read_bytes()
    # Half of one more line, as after a power failure.
    (folder / "resumed.jsonl").write_bytes(cut + b'{"step": 1, "los')
    with MetricsLog(folder / "resumed.jsonl", resume_step=saved) as log:
        for step, row in enumerate(rows[saved:], start=saved + 1):
            log.write(step, row)
    assert (folder / "resumed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    assert read_metrics(folder / "whole.jsonl") == [{"step": i, **row} for i, row in enumerate(rows, start=1)]


@pytest.mark.parametrize("line", ["not json", "[2]", '{"step": "2"}', '{"step": NaN}', '{"stop": 2}', '{"step": null}'])
def test_damaged_lines_are_numbered(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)
    with pytest.raises(DataError, match="line 2"):
        MetricsLog(path, resume_step=1)
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("content", ["a: [\n", "\x00", "- a\n- b\n", "a: ${nothing}\n"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    run = RunFolder.create(tmp_path / "run", {"seed": 1})
    run.config_file.write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        run.load_config()


def test_a_damaged_summary_or_mark_is_named(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    run.summary_file.write_text("[1")
    with pytest.raises(CheckpointError, match=r"summary\.json is damaged .*delete it"):
        run.read_summary()
    (run.path / "run.json").write_text("nope")
    with pytest.raises(CheckpointError, match=r"run\.json is damaged .*expected"):
        RunFolder.open(run.path)


WRITER = """
import signal
import sys
from pathlib import Path
from turntree.trainers.run_folder import MetricsLog

# A job in the background of a shell starts with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with MetricsLog(Path(sys.argv[1])) as log:
    try:
        for step in range(1, 20_000):
            log.write(step, {"text": "x" * 5000})
            if step == 20:
                print("started", flush=True)
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_log_has_whole_lines(tmp_path: Path, kind: signal.Signals) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    os.kill(writer.pid, kind)
    writer.communicate(timeout=60)
    if kind is signal.SIGINT:  # the kernel may stop a write of several pages for a SIGKILL
        assert path.read_bytes().endswith(b"}\n")
    assert len(read_metrics(path)) >= 20
    assert [row["step"] for row in read_metrics(path)] == list(range(1, len(read_metrics(path)) + 1))


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_holds_the_same_numbers_also_after_a_resume(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    with MetricsLog(run.metrics_file, trackers=open_trackers(["tensorboard"], run.path)) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": float(step), "name": "text", "flag": True, "none": None})
    trackers = open_trackers(["tensorboard"], run.path, resume_step=1)
    with MetricsLog(run.metrics_file, trackers=trackers, resume_step=1) as log:
        log.write(2, {"loss": 20.0})
    assert scalars(run.path / "tensorboard", "loss") == [(1, 1.0), (2, 20.0)]
    assert [row["loss"] for row in read_metrics(run.metrics_file)] == [1.0, 20.0]
