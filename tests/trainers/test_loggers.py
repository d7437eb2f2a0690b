"""Trackers beside metrics.jsonl: what they write can be read back, what they are told holds no secret."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turntree.errors import ConfigError
from turntree.trainers.compose import compose
from turntree.trainers.loggers import check_names, check_packages, flatten, open_trackers, redact
from turntree.trainers.run_folder import MetricsLog, RunFolder

CONFIG = {"seed": 3, "algorithm": {"name": "at2po"}, "search": {"args": {"api_key": "very-secret", "url": "http://x"}}}


def write(
    run: RunFolder, names: list[str], steps: range, *, resume_step: int | None = None, arguments: Any = None
) -> None:
    trackers = open_trackers(names, run.path, arguments=arguments, config=CONFIG, resume_step=resume_step)
    with MetricsLog(run.metrics_file, trackers=trackers, resume_step=resume_step) as log:
        for step in steps:
            log.write(step, {"tree/em": step / 10, "text": "no number", "gap": math.nan})


def test_csv_holds_the_numbers_also_after_a_resume(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    write(run, ["csv"], range(1, 4))
    write(run, ["csv"], range(2, 3), resume_step=1)
    assert (run.path / "csv/scalars/tree/em.csv").read_text() == "1,0.1\n2,0.2\n"
    assert "nan" in (run.path / "csv/scalars/gap.csv").read_text()
    (told,) = (run.path / "csv/texts").iterdir()
    assert "algorithm.name: at2po" in told.read_text()
    assert "very-secret" not in told.read_text()


def stored(file: Path) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format after a head of seven bytes, in blocks of 32 KiB."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the extra wandb")
def test_wandb_writes_into_the_run_folder_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted_server: Any
) -> None:
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", scripted_server.url.removesuffix("/retrieve"))
    run = RunFolder.create(tmp_path / "run", {})
    write(run, ["wandb"], range(1, 4))
    write(run, ["wandb"], range(2, 4), resume_step=1)
    first, second = sorted((run.path / "wandb").glob("offline-run-*"))
    identity = json.loads((run.path / "wandb/turntree.json").read_text())["id"]
    assert {f.name.rpartition("-")[2] for f in (first, second)} == {identity}, "a resumed run goes on under its id"
    assert not scripted_server.requests, "nobody was asked"

    history: dict[int, dict[str, Any]] = {}
    raw = b"".join(stored(next(first.glob("*.wandb"))))
    for data in stored(next(first.glob("*.wandb"))):
        record = records.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            history[row["_step"]] = row
    assert [history[s]["tree/em"] for s in (1, 2, 3)] == [0.1, 0.2, 0.3]
    assert b"at2po" in raw
    assert b"very-secret" not in raw
    assert not [f for f in run.path.rglob("*") if f.is_file() and b"very-secret" in f.read_bytes()]


def test_missing_packages_and_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    hidden = ("wandb", "mlflow", "trackio")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in hidden else real(name, *a))
    check_packages(["tensorboard", "csv"])
    with pytest.raises(ConfigError, match=r"wandb needs the package wandb: pip install 'turntree\[wandb\]'"):
        open_trackers(["wandb"], tmp_path)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        check_packages(["mlflow"])
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        check_names(["tensorbord"], {})
    with pytest.raises(ConfigError, match="twice"):
        check_names(["csv", "csv"], {})
    with pytest.raises(ConfigError, match="no such logger"):
        check_names(["csv"], {"wandb": {}})
    with pytest.raises(ConfigError, match="expected arguments"):
        check_names(["csv"], {"csv": "x"})


def test_options_reach_the_schema() -> None:
    assert compose([]).trainer.loggers == ["tensorboard"]
    config = compose(["trainer.loggers=[csv,wandb]", "trainer.logger_args.wandb.project=mine"])
    assert config.trainer.loggers == ["csv", "wandb"]
    assert config.trainer.logger_args == {"wandb": {"project": "mine"}}
    assert compose(["trainer.loggers=[]"]).trainer.loggers == []
    with pytest.raises(ConfigError, match="not known"):
        compose(["trainer.loggers=[wand]"])


class Wreck:
    """A logger whose server goes away after one step."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.seen, self.told = arguments, [], {}
        Wreck.last = self

    last: Wreck
    seen: list[int]
    told: dict[str, Any]

    def log_hparams(self, config: dict[str, Any]) -> None:
        self.told = config

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.seen.append(step)
        if step > 1:
            raise ConnectionError("gone")

    def close(self) -> None:
        raise AssertionError("what failed is left alone")


def test_a_logger_of_ones_own_that_fails_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("users_logger")
    module.Wreck = Wreck  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_logger", module)
    run = RunFolder.create(tmp_path / "run", {})
    with caplog.at_level(logging.WARNING):
        write(run, ["users_logger:Wreck"], range(1, 4), arguments={"users_logger:Wreck": {"room": 1}})
    assert Wreck.last.seen == [1, 2]
    assert Wreck.last.arguments == {"room": 1}
    assert Wreck.last.told["search.args.api_key"] == "(hidden)"
    assert len([r for r in caplog.records if "users_logger:Wreck failed" in r.message]) == 1


def test_a_logger_that_cannot_be_opened_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="csv could not be opened"):
        open_trackers(["csv"], tmp_path, arguments={"csv": {"nonsense": 1}})


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("api_key", "abc", "(hidden)"),
        ("X-API-Key", "abc", "(hidden)"),
        ("Authorization", "Bearer abc", "(hidden)"),
        ("password", "", ""),
        ("token", 7, 7),
        ("api_key_env", "OPENAI_API_KEY", "OPENAI_API_KEY"),
        ("max_tokens_key", "max_tokens", "max_tokens"),
        ("url", "https://me:pw@host/v1", "https://(hidden)@host/v1"),
        ("url", "http://host/search?key=abc&q=1", "http://host/search?key=(hidden)&q=1"),
        ("note", "Bearer abcdefghijkl", "Bearer (hidden)"),
        ("note", "sk-abcdefghijklmnopqrst", "(hidden)"),
        ("path", "/data/worlds/dev/questions.jsonl", "/data/worlds/dev/questions.jsonl"),
    ],
)
def test_redact(key: str, value: object, shown: object) -> None:
    assert redact({"a": [{key: value}]}) == {"a": [{key: shown}]}


def test_flatten() -> None:
    assert dict(flatten({"a": {"b": {"c": 1}}, "d": {}, "e": [1]})) == {"a.b.c": 1, "d": {}, "e": [1]}
