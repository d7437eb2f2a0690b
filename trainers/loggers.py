"""Trackers beside ``metrics.jsonl``: TensorBoard events, and TorchRL's loggers by name.

A tracker never stops a run: it is opened before anything is trained, where it may refuse, and one that fails later is
reported once and left alone. Configurations reach it with secrets taken out.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.atomic import atomic_file, write_json
from turntree.trainers.options import did_you_mean

__all__ = ["LOGGERS", "Tracker", "check_names", "check_packages", "flatten", "open_trackers", "redact"]

_log = logging.getLogger(__name__)

LOGGERS = ("tensorboard", "wandb", "csv", "mlflow", "trackio")
"""Names that ``trainer.loggers`` knows; anything else is the import path of a logger of TorchRL's kind."""

_PACKAGES = {"wandb": "pip install 'turntree[wandb]'", "mlflow": "pip install mlflow", "trackio": "pip install trackio"}

_HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"^key$|(?:^|_)(?:(?:api|access|private|secret)_?keys?|tokens?|secrets?|passw(?:or)?d|passphrase|auth|authorization"
    r"|bearer|credentials?|cookies?)$",
    re.IGNORECASE,
)
_TEXT = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/\s@]+@"
    r"|(?P<query>[?&](?:api_?key|key|access_token|token|secret|password|signature|sig)=)[^&#\s]+"
    r"|\b(?P<word>Bearer|Basic)\s+[\w.~+/=-]{8,}"
    r"|\b(?:sk|hf|ghp|gho|glpat|xoxb)[-_][\w-]{16,}",
    re.IGNORECASE,
)


class Tracker(Protocol):
    """Where the numbers of each step go, too."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of one step; NaN and infinities may be among them."""

    def close(self) -> None:
        """Everything is written."""


# -- secrets ----------------------------------------------------------------------------------------------------------


def redact(value: Any, key: str = "") -> Any:
    """A configuration without its secrets, for pages and trackers.

    Texts under names such as ``api_key``, ``token`` or ``Authorization`` are hidden, and so are passwords in addresses
    and what looks like a key anywhere. Numbers, and names of environment variables (``api_key_env``), stay.
    """
    if isinstance(value, Mapping):
        return {str(k): redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, key) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET.search(key.replace("-", "_")):
        return _HIDDEN
    return _TEXT.sub(lambda m: _hidden(m.groupdict()), value)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of every option; empty mappings are values."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _hidden(found: Mapping[str, str | None]) -> str:
    if found["scheme"]:
        return f"{found['scheme']}{_HIDDEN}@"
    return f"{found['query'] or (found['word'] + ' ' if found['word'] else '')}{_HIDDEN}"


# -- opening ----------------------------------------------------------------------------------------------------------


def check_names(names: Sequence[str], arguments: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for loggers that are unknown or named twice, and for arguments of others."""
    for name in names:
        if name not in LOGGERS and ":" not in name:
            raise ConfigError(
                f"trainer.loggers: {name!r} is not known; expected some of {list(LOGGERS)} or the import path of a "
                f"logger, package.module:name.{did_you_mean(name, LOGGERS)}"
            )
    if len(set(names)) != len(names):
        raise ConfigError(f"trainer.loggers={list(names)} names a logger twice; name each once")
    for name, given in arguments.items():
        if name not in names:
            raise ConfigError(
                f"trainer.logger_args.{name}: trainer.loggers={list(names)} has no such logger; add it there, or leave "
                "its arguments out"
            )
        if not isinstance(given, Mapping):
            raise ConfigError(f"trainer.logger_args.{name}={given!r}: expected arguments, such as {{project: mine}}")


def check_packages(names: Sequence[str]) -> None:
    """Raise ``ConfigError``, with the command that installs it, where a logger's package is missing."""
    for name in names:
        if name in _PACKAGES and importlib.util.find_spec(name) is None:
            raise ConfigError(f"trainer.loggers={name} needs the package {name}: {_PACKAGES[name]}")


def open_trackers(
    names: Sequence[str],
    folder: Path,
    *,
    arguments: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    resume_step: int | None = None,
) -> list[Tracker]:
    """Open the loggers of a run whose files go below ``folder``.

    Args:
        names: see :data:`LOGGERS`.
        arguments: keyword arguments by logger.
        config: what the trackers are told about the run; :func:`redact` is applied.
        resume_step: the run goes on after this step (None: it starts).

    Raises:
        ConfigError: a logger is unknown, lacks its package, or cannot be opened.
    """
    arguments = arguments or {}
    check_names(names, arguments)
    check_packages(names)
    opened: list[Tracker] = []
    try:
        for name in names:
            opened.append(_open(name, folder, dict(arguments.get(name, {})), resume_step))
            if isinstance(opened[-1], _TorchRL) and config is not None:
                opened[-1].describe(redact(config))
    except BaseException:
        for tracker in opened:
            tracker.close()
        raise
    return opened


def _open(name: str, folder: Path, arguments: dict[str, Any], resume_step: int | None) -> Tracker:
    try:
        if name == "tensorboard":
            return _TensorBoard(folder / "tensorboard", resume_step, **arguments)
        if ":" in name:
            from turntree.envs.loading import import_object

            make: Callable[..., Any] = import_object(name, what="trainer.loggers")
        else:
            make = _BUILT_IN[name]
            arguments = _defaults(name, folder, resume_step) | arguments
        return _TorchRL(name, make(**arguments))
    except TurnTreeError:
        raise
    except Exception as error:  # a tracker's package may fail in any way
        raise ConfigError(
            f"trainer.loggers: {name} could not be opened: {type(error).__name__}: {error}. Mend that, or leave it out "
            "of trainer.loggers: metrics.jsonl is written in any case"
        ) from error


def _defaults(name: str, folder: Path, resume_step: int | None) -> dict[str, Any]:
    """What a logger is called with unless ``trainer.logger_args`` says otherwise; its files stay in the run folder."""
    place = folder.resolve()
    if name == "csv":
        if resume_step is not None:
            _cut(place / "csv", resume_step)
        return {"exp_name": "csv", "log_dir": str(place)}
    if name == "wandb":
        # Nothing leaves the machine unless asked for; packages and paths of the machine are nobody's business.
        mode = os.environ.get("WANDB_MODE") or "offline"
        identity = _identity(place / "wandb" / "turntree.json", fresh=resume_step is None)
        return {"exp_name": place.name, "log_dir": str(place), "project": "turntree", "id": identity, "mode": mode,
                "log_env_packages": False}  # fmt: skip
    if name == "mlflow":
        uri = f"sqlite:///{place / 'mlflow.db'}"
        return {"exp_name": place.name, "tracking_uri": uri, "artifact_location": (place / "mlflow").as_uri()}
    return {"exp_name": place.name, "project": "turntree"}


def _identity(file: Path, *, fresh: bool) -> str:
    """The run's id, kept beside W&B's files so that a resumed run continues the one that is there."""
    if file.is_file() and not fresh:
        return str(json.loads(file.read_bytes())["id"])
    identity = uuid.uuid4().hex[:8]
    write_json(file, {"id": identity})
    return identity


def _cut(folder: Path, step: int) -> None:
    """Drop the lines of later steps, as ``metrics.jsonl`` does."""
    for file in folder.glob("scalars/**/*.csv"):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= step]
        if len(kept) != len(lines):
            with atomic_file(file) as handle:
                handle.write("".join(kept).encode())


def _csv(**arguments: Any) -> Any:
    from torchrl.record.loggers.csv import CSVLogger

    return CSVLogger(**arguments)


def _wandb(**arguments: Any) -> Any:
    import wandb
    from torchrl.record.loggers.wandb import WandbLogger

    # TorchRL's offline=True would change WANDB_MODE of the whole process.
    if arguments.pop("offline", False):
        arguments["mode"] = "offline"
    settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
    return WandbLogger(**{"settings": settings, **arguments})


def _mlflow(**arguments: Any) -> Any:
    from torchrl.record.loggers.mlflow import MLFlowLogger

    return MLFlowLogger(**arguments)


def _trackio(**arguments: Any) -> Any:
    from torchrl.record.loggers.trackio import TrackioLogger

    return TrackioLogger(**arguments)


_BUILT_IN: dict[str, Callable[..., Any]] = {"csv": _csv, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


# -- trackers ---------------------------------------------------------------------------------------------------------


class _Guarded:
    """What fails after a tracker was opened is said once; then it is left alone."""

    name = "tensorboard"
    failed = False

    def _try(self, action: Callable[[], Any]) -> None:
        if self.failed:
            return
        try:
            action()
        except Exception as error:  # a server that went away, a full disk: the run goes on
            self.failed = True
            _log.warning("logger %s failed and gets nothing more: %s: %s", self.name, type(error).__name__, error)


class _TensorBoard(_Guarded):
    """TensorBoard's events; a resumed run hides those of later steps (TorchRL's logger cannot)."""

    def __init__(self, folder: Path, resume_step: int | None, **arguments: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(**{"log_dir": str(folder), "purge_step": purge, **arguments})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda: self._write(step, metrics))

    def close(self) -> None:
        self._try(self._writer.close)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import summary_pb2

        proto: Any = summary_pb2  # generated code without types
        # One event a step: add_scalar would write one a number, each with its own checksums.
        values = [proto.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        if values:
            self._writer.file_writer.add_summary(proto.Summary(value=values), step)
        self._writer.flush()


class _TorchRL(_Guarded):
    """A logger of TorchRL's."""

    def __init__(self, name: str, logger: Any) -> None:
        self.name, self.logger = name, logger

    def describe(self, config: Mapping[str, Any]) -> None:
        told = dict(config) if self.name == "wandb" else dict(flatten(config))
        self._try(lambda: self.logger.log_hparams(told))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        own = {"override_global_step": True} if self.name == "wandb" else {}
        self._try(lambda: self.logger.log_metrics(dict(metrics), step=step, **own))

    def close(self) -> None:
        self._try(self._close)

    def _close(self) -> None:
        self.logger.close()
        if self.name == "mlflow":  # closing the logger leaves its run open until the process ends
            importlib.import_module("mlflow").end_run()
