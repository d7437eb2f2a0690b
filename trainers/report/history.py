"""What a report reads from a run folder: its numbers over the budget, its validations, what it was made with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from turntree.errors import DataError
from turntree.trainers.loggers import flatten, redact
from turntree.trainers.run_folder import RunFolder, read_metrics

__all__ = ["AXES", "Axis", "Curve", "RunHistory", "trailing_mean"]

Axis = Literal["tokens", "calls", "time", "step"]
"""A budget that curves are drawn over, or the step."""

AXES: dict[Axis, tuple[str, str, str]] = {
    "tokens": ("generated tokens", "Tokens", "total/generated_tokens"),
    "calls": ("tool calls", "Tool calls", "total/tool_calls"),
    "time": ("wall time", "Wall time", "total/seconds"),
    "step": ("steps", "Steps", "step"),
}
"""What a curve may be drawn over: its name, its word on a button, and the metric that counts it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A number of one run over its steps, all of shape (n,); ``low`` and ``high`` bound an interval or are None.

    ``x``: by axis, the budget used when the number was measured; an axis that the run did not count is missing.
    """

    x: Mapping[Axis, np.ndarray]
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    @property
    def last(self) -> float:
        """The last finite value; NaN without any."""
        finite = self.y[np.isfinite(self.y)]
        return float(finite[-1]) if finite.size else math.nan


@dataclass(frozen=True)
class RunHistory:
    """One run, read once. ``config`` holds no secrets; ``evaluations`` are other results in the folder, by name."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    validations: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    passport: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(path: str | Path) -> RunHistory:
        """Read a run folder, also one that is being written.

        Raises:
            CheckpointError: ``path`` is no run folder.
            DataError: one of its files is damaged.
        """
        run = RunFolder.open(path)
        rows = read_metrics(run.metrics_file) if run.metrics_file.exists() else []
        documents = sorted((run.path / "validation").glob("step-*/evaluation.json"))
        others = sorted(file for file in run.path.glob("*/evaluation.json"))
        passport = run.path / "passport.json"
        return RunHistory(
            folder=run.path,
            config=redact(run.load_config()),
            rows=rows,
            validations=sorted(map(_document, documents), key=lambda d: int(d.get("step", 0))),
            evaluations={file.parent.name: _document(file) for file in others},
            passport=_document(passport) if passport.is_file() else {},
        )

    @property
    def name(self) -> str:
        """The folder's name; with its parent's where it is that of an arm or a stage."""
        folder = self.folder.resolve()
        return f"{folder.parent.name}/{folder.name}"

    @property
    def seed(self) -> int:
        found = self.config.get("seed", 0)
        try:
            return int(found)
        except (TypeError, ValueError):
            raise DataError(
                f"{self.folder}/config.yaml: expected a whole number as seed, found {found!r:.80}"
            ) from None

    @cached_property
    def options(self) -> dict[str, Any]:
        """``{dotted key: value}`` of the configuration, without empty mappings."""
        return {key: value for key, value in flatten(self.config) if value != {}}

    @property
    def last(self) -> dict[str, Any]:
        """The newest line of metrics; empty before the first step."""
        return self.rows[-1] if self.rows else {}

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run was to make."""
        section = "trainer" if "critic/score/mean" in self.last or not self.rows else "sft"
        found = self.options.get(f"{section}.steps")
        return None if found is None else int(found)

    @property
    def complete(self) -> bool:
        """Whether the run reached one of its limits."""
        limit = self.options.get("trainer.max_generated_tokens")
        spent = self.last.get("total/generated_tokens") or 0
        planned = self.planned_steps
        return bool(self.rows) and (planned is None or self.step >= planned or (limit is not None and spent >= limit))

    @property
    def metric(self) -> str | None:
        """What validations measure; None without any."""
        return str(self.validations[-1].get("metric", "em")) if self.validations else None

    def curve(self, *keys: str) -> Curve | None:
        """The first of ``keys`` that was measured, at the steps that have it; None where none was."""
        for key in keys:
            rows = [row for row in self.rows if key in row]
            y = np.array([_number(row[key]) for row in rows])
            if np.isfinite(y).any():
                return Curve(self._budget(rows), y)
        return None

    def validation_curve(self) -> Curve | None:
        """The metric on the validation questions with its interval over questions; step 0 is before training."""
        if self.metric is None:
            return None
        by_step = {int(row["step"]): row for row in self.rows}
        zero = {"step": 0, **{key: 0.0 for _, _, key in AXES.values() if key != "step"}}
        known = {0: zero, **by_step}
        found = [document for document in self.validations if int(document.get("step", 0)) in known]
        columns = (f"{self.metric}{end}" for end in ("", "_low", "_high"))
        y, low, high = (np.array([_number(document.get(c)) for document in found]) for c in columns)
        if not np.isfinite(y).any():
            return None
        return Curve(self._budget([known[int(document.get("step", 0))] for document in found]), y, low, high)

    def _budget(self, rows: Sequence[Mapping[str, Any]]) -> dict[Axis, np.ndarray]:
        found: dict[Axis, np.ndarray] = {}
        for axis, (_, _, key) in AXES.items():
            values = np.array([_number(row.get(key)) for row in rows])
            if np.isfinite(values).all():
                found[axis] = values
        return found

    def troubles(self) -> Iterator[str]:
        """What somebody who reads the run should know, in words."""
        if not self.rows:
            yield "No step was finished."
            return
        if not self.complete:
            yield f"The run is not finished: step {self.step} of {self.planned_steps}."
        skipped = int(self.last.get("total/skipped_updates") or 0)
        if skipped:
            yield f"{skipped} updates were skipped because the gradient was not finite."
        bad = [row for row in self.rows if {"actor/loss", "actor/grad_norm", "loss"} & set(row.get("nonfinite", {}))]
        if bad:
            yield f"Loss or gradient was not finite in {len(bad)} steps, first in step {bad[0]['step']}."
        failed = sum(_number(row.get("budget/failed", 0)) for row in self.rows)
        leaves = sum(_number(row.get("budget/trajectories", 0)) for row in self.rows)
        if failed and leaves:
            yield f"{failed:,.0f} of {leaves:,.0f} trajectories failed ({failed / leaves:.1%}); they taught nothing."
        foreign = self.last.get("actions/unparsed_frac")
        if foreign is not None and foreign > 0.1:
            yield f"{foreign:.0%} of the last step's turns look like calls in another dialect."
        yield from self._alarms()
        gap = self.last.get("mismatch/mean")
        if gap is not None and gap > 0.05:
            yield f"Engine and trainer differ by {gap:.3f} nats a token in the last step."

    def _alarms(self) -> Iterator[str]:
        """Of the collapse watch, and why a run gave up."""
        for key in dict.fromkeys(key for row in self.rows for key in row if key.startswith("alarm/")):
            rang = [int(row["step"]) for row in self.rows if row.get(key)]
            if rang:
                steps = f"step {rang[0]}" if len(rang) == 1 else f"{len(rang)} steps from {rang[0]} on"
                yield f"The alarm for {key.removeprefix('alarm/')} rang in {steps}."
        for place in sorted(self.folder.glob("diagnosis/step-*")):
            yield f"The run gave up because gradients were not finite: see {place.relative_to(self.folder)}."


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values among the last ``window``, at each place, shape (n,)."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - max(1, window), 0)
    n = counts[ends] - counts[starts]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n > 0, (sums[ends] - sums[starts]) / n, np.nan)


def _document(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is damaged ({error}); remove it, or its folder, and go on") from error
    if not isinstance(found, dict):
        raise DataError(f"{file}: expected a JSON object, found a {type(found).__name__}")
    return found


def _number(value: Any) -> float:
    """A number of a result file; what is none, or does not exist, is NaN."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
