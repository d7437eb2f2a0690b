"""The folder of one run: its configuration, metrics, checkpoints, rollouts and pictures.

::

    run.json          schema and version; marks the folder as a run
    config.yaml       the composed configuration
    metrics.jsonl     one JSON object a line (:class:`MetricsLog`)
    tensorboard/      the same numbers as TensorBoard events, and other trackers (:mod:`turntree.trainers.loggers`)
    checkpoints/      see :mod:`turntree.trainers.checkpoint`
    trees/            see :mod:`turntree.trainers.store`
    report.html  curve.png  tree.html  summary.json
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import turntree
from turntree.errors import CheckpointError, DataError
from turntree.trainers.append import AppendFile
from turntree.trainers.atomic import atomic_file, write_json, written
from turntree.trainers.loggers import Tracker

__all__ = ["SCHEMA", "MetricsLog", "RunFolder", "SilentLog", "read_metrics"]

SCHEMA = 1
"""Version of the folder's layout."""

_RUN = "run.json"
_TRACES = (_RUN, "metrics.jsonl", "checkpoints", "trees", "summary.json")


class RunFolder:
    """The places inside one run. Make one with :meth:`create` (to write) or :meth:`open` (to read)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.trees = self.path / "trees"
        self.report_file = self.path / "report.html"
        self.curve_file = self.path / "curve.png"
        self.tree_file = self.path / "tree.html"
        self.summary_file = self.path / "summary.json"

    @classmethod
    def create(cls, path: str | Path, config: Any, *, resume: bool = False) -> RunFolder:
        """Start a run in ``path`` and save its ``config`` (a mapping, an OmegaConf node or a dataclass).

        ``resume=True`` continues the run that is there, leaving its ``config.yaml`` alone until
        :meth:`save_config`, or starts one if there is none, so that a job that may be killed can always pass it.
        Raises :class:`CheckpointError` when a run or foreign files are in the way, or nothing can be written.
        """
        run = cls(path)
        if run.exists:
            if not resume:
                raise CheckpointError(
                    f"{run.path} already holds a run: continue it with resume=true, or choose another folder"
                )
            run._check_schema()
            run._check_writable()
            return run
        run._refuse_foreign()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.save_config(config)
            write_json(run.path / _RUN, {"schema": SCHEMA, "turntree": turntree.__version__})
        except OSError as error:
            raise CheckpointError(
                f"expected a folder that can be written at {run.path}, found: {error}; choose another folder (out=...)"
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run, for reading. Raises :class:`CheckpointError` when ``path`` is not one."""
        run = cls(path)
        if not (run.path / _RUN).is_file():
            raise CheckpointError(f"{run.path} is not a run folder: it has no {_RUN}; pass the folder a run wrote")
        run._check_schema()
        return run

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.path / _RUN).is_file()

    def save_config(self, config: Any) -> None:
        """Write ``config.yaml``; environment variables and other interpolations stay unresolved."""
        from omegaconf import OmegaConf

        node = config if OmegaConf.is_config(config) else OmegaConf.create(_plain(config))
        with written(self.config_file), atomic_file(self.config_file) as handle:
            handle.write(OmegaConf.to_yaml(node).encode())

    def load_config(self) -> dict[str, Any]:
        """The saved configuration as plain dicts and lists. Raises :class:`CheckpointError` when it cannot be read.

        Resolvers (``${oc.env:NAME}``) stay texts: what reads a run of somebody else's must not put secrets of this
        machine into pages and exports.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        if not self.config_file.is_file():
            raise CheckpointError(f"{self.config_file} is missing; the folder was not written by a run")
        try:
            found = OmegaConf.to_container(OmegaConf.load(self.config_file), resolve=False)
            loaded: Any = OmegaConf.to_container(OmegaConf.create(_inert(found)), resolve=True)
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            raise CheckpointError(
                f"{self.config_file} cannot be read ({error}); put back the configuration that the run wrote"
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{self.config_file}: expected options by name, found a {type(loaded).__name__}")
        return loaded

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``; numbers that are not finite become null."""
        with written(self.summary_file):
            write_json(self.summary_file, _finite(summary))

    def read_summary(self) -> dict[str, Any]:
        """The summary of a finished run. Raises :class:`CheckpointError` when it has none."""
        if not self.summary_file.is_file():
            raise CheckpointError(f"{self.summary_file} is missing: the run has not finished; go on with resume=true")
        try:
            summary: dict[str, Any] = json.loads(self.summary_file.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{self.summary_file} is damaged ({error}); delete it and run again") from error
        return summary

    def _check_writable(self) -> None:
        """A run that goes on in a folder of another user, or on a read-only disk, must say so before it works."""
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise CheckpointError(
                f"expected a folder that can be written at {self.path}, found a read-only one; nothing was changed. "
                "Mend its permissions, or copy the run elsewhere and resume there"
            )

    def _check_schema(self) -> None:
        try:
            found = json.loads((self.path / _RUN).read_bytes())["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f'{self.path / _RUN} is damaged ({error}); expected {{"schema": {SCHEMA}, ...}} as a run writes it'
            ) from error
        if found != SCHEMA:
            raise CheckpointError(
                f"{self.path} has schema {found}, this version reads {SCHEMA}; use the turntree that wrote it"
            )

    def _refuse_foreign(self) -> None:
        """Only an empty folder, or one with hidden files and logs (Hydra writes those first), may become a run."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file; choose another folder for the run")
        present = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        foreign = [n for n in present if n != "config.yaml" and not n.startswith(".") and not n.endswith(".log")]
        if foreign:
            what = "parts of a broken run" if set(foreign) & set(_TRACES) else "other files"
            raise CheckpointError(f"{self.path} holds {what} ({', '.join(foreign[:5])}); choose another folder")


class MetricsLog:
    """An append-only ``metrics.jsonl``; ``trackers`` get the same numbers and are closed with it.

    Each line is written by one system call, so Ctrl-C leaves whole lines; a kill in the middle of it may leave the
    beginning of one, which readers leave out and the next log cuts off. A line that a full disk has no room for leaves
    nothing behind and raises ``CheckpointError``. ``resume_step``: continue after that step; lines of
    later steps are dropped, so that a resumed run's file equals an uninterrupted one's. Write a step's metrics before
    its checkpoint.
    """

    def __init__(self, path: str | Path, *, trackers: Sequence[Tracker] = (), resume_step: int | None = None) -> None:
        self.path = Path(path)
        with written(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and self.path.exists():
                _drop_after(self.path, resume_step)
            self._file: AppendFile | None = AppendFile(self.path)
        self._trackers = tuple(trackers)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line: ``{"step": step, **metrics}``.

        NaN and infinities become null and are named: ``{"loss": null, "nonfinite": {"loss": "nan"}}``. Values may be
        numpy or torch scalars. Raises :class:`DataError` for anything that is not a scalar.
        """
        if self._file is None:
            raise DataError(f"{self.path} is closed; write metrics before closing the log")
        row: dict[str, Any] = {"step": int(step)}
        nonfinite: dict[str, str] = {}
        if clash := {"step", "nonfinite"} & metrics.keys():
            raise DataError(f"metrics cannot be called {sorted(clash)}: the log uses these names itself; rename them")
        for name, value in metrics.items():
            row[name], word = _split(name, value)
            if word is not None:
                nonfinite[name] = word
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._file.append_lines((json.dumps(row, allow_nan=False) + "\n").encode())
        if self._trackers:
            numbers = _numbers(metrics)
            for tracker in self._trackers:
                tracker.log(step, numbers)

    def close(self) -> None:
        """Close the file and the trackers; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        trackers, self._trackers = self._trackers, ()
        for tracker in trackers:
            tracker.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SilentLog:
    """A log that writes nothing, for the ranks of a run that leave its folder to the first one."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Nothing."""

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing."""


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All lines of a ``metrics.jsonl``, oldest first; a last line without its end (power failure) is left out.

    Raises :class:`DataError`, naming file and line, for anything else that is not a JSON object with a step.
    """
    return [row for row, _ in _rows(Path(path))]


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DataError(f"metrics cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not math.isfinite(row["step"]):
                raise ValueError("a step that is no number")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number} is not a JSON object with a step: {line[:80]!r}; delete the line"
            ) from error
        yield row, line


def _drop_after(path: Path, step: int) -> None:
    kept = [line for row, line in _rows(path) if row["step"] <= step]
    with atomic_file(path) as handle:
        handle.writelines(line + b"\n" for line in kept)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker can draw: numbers, those that are not finite too."""
    found = {name: _scalar(value) for name, value in metrics.items()}
    return {k: v for k, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _scalar(value: Any) -> Any:
    """The Python number inside a numpy or torch scalar; anything else as it is."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError):  # more than one element
        return value


def _split(name: str, value: Any) -> tuple[Any, str | None]:
    """A JSON value and, for a number that JSON has no word for, its name."""
    value = _plain(_scalar(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None, str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value, None
    raise DataError(f"metric {name!r} must be a number, text or None, found a {type(value).__name__}")


def _finite(value: Any) -> Any:
    value = _plain(_scalar(value))
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _inert(value: Any) -> Any:
    """Configuration data in which texts that call a resolver are escaped, so that they stay what they are."""
    if isinstance(value, Mapping):
        return {key: _inert(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_inert(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) and "${" in value and ":" in value else value


def _plain(value: Any) -> Any:
    """Dataclasses, paths, enums and tuples as what YAML and JSON hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    return str(value) if isinstance(value, Path) else value
