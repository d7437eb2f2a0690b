"""Several runs together: those that differ in their seed only are a group, with a mean and an interval over seeds."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.config import documented_options
from turntree.trainers.report.history import Axis, Curve, RunHistory, trailing_mean
from turntree.trainers.stats import Interval, student_mean

if TYPE_CHECKING:
    from turntree.trainers.evaluation.passport import Passport

__all__ = ["Mean", "Mismatch", "RunGroup", "find_runs", "group_runs", "mean_curve", "mismatches", "warnings"]

#: What may differ between the runs of a group: it changes no number that they are compared by.
_BOOKKEEPING = (
    "seed",
    "out",
    "resume",
    "trainer.loggers",
    "trainer.logger_args",
    "trainer.save_every",
    "trainer.keep_checkpoints",
    "trainer.store_sample",
    "trainer.store_max_mb",
    "trainer.check_packed",
    "trainer.threads",
)

#: Where things lie; what is in them is hashed in passports.
_PLACES = ("model.path", "env.questions", "env.dev_questions", "env.test_questions", "env.dev_corpus", "search.corpus")

#: Options that are the comparison itself, or of other commands than train.
_HARMLESS = ("algorithm.", "rltr.", "coldstart.", "eval.")

_GRID = 120


@dataclass(frozen=True)
class RunGroup:
    """Runs that are equal but for their seed. ``options``: what they share, without paths that hold the seed."""

    label: str
    runs: tuple[RunHistory, ...]
    options: dict[str, Any]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]


@dataclass(frozen=True)
class Mean:
    """The mean curve of a group on a common grid, arrays of shape (n,); ``singles`` are the runs' own ``(x, y)``."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    singles: tuple[tuple[np.ndarray, np.ndarray], ...]

    def at(self, x: float) -> Interval:
        """Mean over seeds where ``x`` of the budget is used; NaN where a seed did not get there."""
        values = [_at(a, b, x) for a, b in self.singles]
        return student_mean(values) if all(map(math.isfinite, values)) else Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something that differs between runs. ``values``: what was found, with the groups that have it.

    ``weight``: ``breaks`` (other questions or other scoring), ``explains`` (it may be what makes the difference),
    ``notes`` (everything else).
    """

    where: Literal["configuration", "training", "validation"]
    key: str
    values: Mapping[str, tuple[str, ...]]
    weight: str

    @property
    def within(self) -> bool:
        """Whether one group has several of the values."""
        return max(Counter(group for groups in self.values.values() for group in groups).values()) > 1


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among ``paths``: each is one, or a folder that holds some.

    Raises:
        ConfigError: a path is neither, or a run is named twice.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / "run.json").is_file() else sorted(file.parent for file in path.glob("*/run.json"))
        if not inside:
            raise ConfigError(f"{path}: expected a run folder, or a folder with some; found no run.json in there")
        found += inside
    twice = [str(p) for p, n in Counter(path.resolve() for path in found).items() if n > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice; its seed would count twice")
    return found


# -- groups -----------------------------------------------------------------------------------------------------------


def group_runs(runs: Sequence[RunHistory], *, ignore: Sequence[str] = ()) -> list[RunGroup]:
    """Put runs together that are equal but for their seed, in the order in which they came.

    Options that are missing (an older version wrote the run) count as their defaults. In texts, the run's own folder,
    ``seed<N>`` and a ``-<N>`` at the end of a name are masked. ``ignore``: further options, or sections, that may
    differ within a group.

    Raises:
        ConfigError: ``ignore`` names no option.
    """
    defaults = {key: value for key, value, _ in documented_options() if value != {}}
    known = {part for key in [*defaults, *(k for run in runs for k in run.options)] for part in _prefixes(key)}
    unknown = [key for key in ignore if key not in known]
    if unknown:
        raise ConfigError(
            f"--ignore {unknown[0]}: expected an option such as trainer.steps, or a section such as model"
        )
    left_out = {*_BOOKKEEPING, *ignore}
    full = [{k: v for k, v in {**defaults, **run.options}.items() if not left_out & set(_prefixes(k))} for run in runs]
    # What runs of several seeds say alike holds no seed, whatever number is in it.
    seeds: dict[tuple[str, str], set[int]] = {}
    for run, options in zip(runs, full, strict=True):
        for key, value in options.items():
            seeds.setdefault((key, str(value)), set()).add(run.seed)
    kept = [
        {k: v if len(seeds[k, str(v)]) > 1 else _masked(v, run) for k, v in options.items()}
        for run, options in zip(runs, full, strict=True)
    ]
    groups: dict[str, list[int]] = {}
    for i, options in enumerate(kept):
        groups.setdefault(json.dumps(options, sort_keys=True, default=str), []).append(i)
    labels = _labels([kept[members[0]] for members in groups.values()])
    return [
        RunGroup(label, tuple(runs[i] for i in members), kept[members[0]])
        for label, members in zip(labels, groups.values(), strict=True)
    ]


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _masked(value: Any, run: RunHistory) -> Any:
    if isinstance(value, list):
        return [_masked(item, run) for item in value]
    if not isinstance(value, str):
        return value
    for own in (str(run.config.get("out") or ""), str(run.folder), str(run.folder.resolve())):
        value = value.replace(own, "RUN") if len(own) > 1 else value
    return re.sub(rf"(seed[-_=]?|(?<=\w)[-_]){run.seed}(?=[/_.-]|$)", r"\1*", value)


def _labels(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short and different: the algorithm, then what differs until all do."""
    shown = [[_word(group.get("algorithm.name", "run"))] for group in groups]
    keys = dict.fromkeys(key for group in groups for key in group)
    differing = [k for k in keys if len({json.dumps(g.get(k), sort_keys=True, default=str) for g in groups}) > 1]
    differing.sort(key=lambda key: key.count("/") + len(key.split(".")))
    for key in differing:
        labels = [tuple(words) for words in shown]
        again = Counter(labels)
        if max(again.values()) == 1:
            break
        for i, group in enumerate(groups):
            told = {json.dumps(g.get(key), default=str) for g, label in zip(groups, labels) if label == labels[i]}
            if len(told) > 1:
                shown[i].append(f"{key.rpartition('.')[2]}={_word(group.get(key))}")
    return [" ".join(words) for words in shown]


def _word(value: Any) -> str:
    said = "null" if value is None else str(value)
    return said if len(said) <= 32 else f"\u2026{said[-31:]}"


# -- curves -----------------------------------------------------------------------------------------------------------


def mean_curve(curves: Sequence[Curve | None], axis: Axis, *, smooth: bool) -> Mean | None:
    """The mean over a group's runs, each read at the same budgets by linear interpolation, with Student's interval.

    It spans what all runs have used. A single run keeps its own interval, if it has one. ``smooth``: each run's values
    are first its mean over the last twentieth of its steps. None without a run that counts the axis.
    """
    singles: list[tuple[np.ndarray, np.ndarray]] = []
    own: Curve | None = None
    for curve in curves:
        if curve is None or axis not in curve.x:
            continue
        y = trailing_mean(curve.y, max(1, len(curve.y) // 20)) if smooth else curve.y
        finite = np.isfinite(y)
        if finite.any():
            singles.append((curve.x[axis][finite], y[finite]))
            own = curve
    if not singles or own is None:
        return None
    if len(singles) == 1:
        x, y = singles[0]
        bounded = own.low is not None and own.high is not None and len(own.y) == len(y)
        low, high = (own.low, own.high) if bounded else (None, None)
        return Mean(x, y, low, high, tuple(singles))
    start, end = max(x[0] for x, _ in singles), min(x[-1] for x, _ in singles)
    if end < start:
        return None
    grid = np.unique(np.concatenate([x[(x >= start) & (x <= end)] for x, _ in singles] + [np.array([start, end])]))
    if len(grid) > _GRID:
        grid = np.linspace(start, end, _GRID)
    rows = np.stack([np.interp(grid, x, y) for x, y in singles])
    found = [student_mean(column) for column in rows.T]
    mean, low, high = (np.array([getattr(one, name) for one in found]) for name in ("mean", "low", "high"))
    return Mean(grid, mean, low, high, tuple(singles))


def _at(x: np.ndarray, y: np.ndarray, place: float) -> float:
    return float(np.interp(place, x, y)) if x[0] <= place <= x[-1] * (1 + 1e-9) else math.nan


# -- what differs -----------------------------------------------------------------------------------------------------


def mismatches(groups: Sequence[RunGroup]) -> list[Mismatch]:
    """What differs between runs beside algorithm and seed, the gravest first."""
    found = [*_config_mismatches(groups), *_passport_mismatches(groups)]
    order = ("breaks", "explains", "notes")
    return sorted(found, key=lambda m: (order.index(m.weight), m.where, m.key))


def _config_mismatches(groups: Sequence[RunGroup]) -> Iterator[Mismatch]:
    hashed = all(_passport(run, "training") is not None for group in groups for run in group.runs)
    for key in dict.fromkeys(k for group in groups for k in group.options):
        values = _by_value((group.label, group.options.get(key)) for group in groups)
        if len(values) > 1:
            harmless = key.startswith(_HARMLESS) or (key in _PLACES and hashed)
            yield Mismatch("configuration", key, values, "notes" if harmless else "explains")


def _passport_mismatches(groups: Sequence[RunGroup]) -> Iterator[Mismatch]:
    """Each run against the first one; what seeds change (weights in the course of training) is left out."""
    from turntree.trainers.evaluation.passport import differences

    for where in ("training", "validation"):
        found = [(group.label, _passport(run, where)) for group in groups for run in group.runs]
        known = [(label, passport) for label, passport in found if passport is not None]
        weights: dict[str, str] = {}
        for _, passport in known[1:]:
            weights |= {d.key: d.weight for d in differences(known[0][1], passport)}
        for key, weight in weights.items():
            if key in ("seed", "model.path") or (where == "validation" and key == "model.weights"):
                continue
            values = _by_value((label, _entry(passport, key)) for label, passport in known)
            # The training questions are the algorithm's business; the validation's decide what is compared.
            yield Mismatch(where, key, values, "explains" if where == "training" and weight == "breaks" else weight)


def _passport(run: RunHistory, where: str) -> Passport | None:
    last = run.validations[-1].get("passport") if run.validations else None
    data = run.passport if where == "training" else last
    if not data:
        return None
    # Here, since it brings torch: the page of one run needs none.
    from turntree.trainers.evaluation.passport import Passport

    try:
        return Passport.from_json(data)
    except TurnTreeError:  # of a newer version: it cannot be compared
        return None


def _entry(passport: Passport, key: str) -> Any:
    value: Any = passport.to_json()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _by_value(pairs: Iterable[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for label, value in pairs:
        found.setdefault("null" if value is None else str(value), {})[label] = None
    return {value: tuple(labels) for value, labels in found.items()}


def warnings(groups: Sequence[RunGroup], found: Sequence[Mismatch]) -> Iterator[str]:
    """What makes the comparison less than it looks, in words."""
    broken = [m for m in found if m.weight == "breaks"]
    if own := [m.key for m in broken if m.within]:
        yield f"Seeds have validations of their own ({', '.join(own)} differ): intervals hold that difference, too."
    if others := [m.key for m in broken if not m.within]:
        yield f"Groups validate differently ({', '.join(others)}): scores are not of the same questions and rules."
    options = [m.key for m in found if m.where == "configuration" and m.weight == "explains"]
    if options:
        more = f" and {len(options) - 6} more" if len(options) > 6 else ""
        yield f"Groups differ in options outside the algorithm: {', '.join(options[:6])}{more}."
    for group in groups:
        twice = [seed for seed, n in Counter(group.seeds).items() if n > 1]
        if twice:
            yield f"{group.label}: seed {twice[0]} is there more than once; its interval may be too narrow."
        for run in group.runs:
            if not run.complete:
                yield f"{run.name} is not finished (step {run.step} of {run.planned_steps})."
    if len({tuple(sorted(group.seeds)) for group in groups}) > 1:
        seeds = "; ".join(f"{group.label}: {', '.join(map(str, sorted(group.seeds)))}" for group in groups)
        yield f"Groups have different seeds ({seeds})."
    if len(groups) > 1 and any(len(group.runs) == 1 for group in groups):
        yield "Groups of one run have no interval over seeds; theirs, if any, is over questions."
    metrics = {run.metric for group in groups for run in group.runs if run.metric is not None}
    if len(metrics) > 1:
        yield f"Runs validate by different metrics ({', '.join(sorted(metrics))}); only the first is drawn."
