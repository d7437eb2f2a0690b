"""Two results side by side: paired differences, a permutation test, and the questions that flipped.

A side is one result, or several of the same kind with other seeds. Questions are matched by set and id, and the value
of a question on a side is its mean over the side's results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turntree.errors import DataError
from turntree.trainers.evaluation.passport import Difference, Passport, differences
from turntree.trainers.evaluation.rows import EvalRow, file_rows
from turntree.trainers.evaluation.summary import MEASURES, read
from turntree.trainers.stats import Interval, draw_counts

__all__ = [
    "Comparison",
    "Flip",
    "Measured",
    "Result",
    "Side",
    "compare",
    "permutation_test",
    "permutation_tests",
    "read_side",
]

Key = tuple[str, str]
"""Set and id of a question."""

_EXACT = 14
_RESAMPLES = 10_000
_CELLS = 4_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """One evaluation as it lies in a folder: rows by question, metric and passport of each set."""

    folder: Path
    rows: Mapping[Key, EvalRow]
    metrics: Mapping[str, str]
    passports: Mapping[str, Passport]


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared: a name, and one result or several of other seeds."""

    name: str
    results: tuple[Result, ...]

    @property
    def questions(self) -> list[Key]:
        """Questions that every result of the side scored, in the order of the first."""
        first, *others = self.results
        return [k for k, row in first.rows.items() if not row.failed and all(_scored(o, k) for o in others)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric over the questions that both sides have it for: means, ``b - a``, and its two-sided p-value."""

    metric: str
    a: float
    b: float
    difference: Interval
    p: float
    wins: int
    losses: int
    ties: int


@dataclass(frozen=True, slots=True)
class Flip:
    """A question that one side answers better; ``a`` and ``b`` are the rows of the first result of each side."""

    key: Key
    score_a: float
    score_b: float
    a: EvalRow
    b: EvalRow

    @property
    def won(self) -> bool:
        """Whether ``b`` is the better one."""
        return self.score_b > self.score_a


@dataclass(frozen=True, slots=True)
class Comparison:
    """``b`` against ``a``: by set ('' : all questions together), flipped questions, and what the passports say."""

    a: str
    b: str
    common: int
    only_a: int
    only_b: int
    measured: Mapping[str, tuple[Measured, ...]]
    flips: tuple[Flip, ...] = ()
    differences: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_side(name: str, folders: Sequence[Path]) -> Side:
    """Read results: folders of ``turntree evaluate``, of one set or of several.

    Raises ``DataError`` where there is no result, or one cannot be read.
    """
    return Side(name, tuple(_result(folder) for folder in folders))


def compare(
    a: Side,
    b: Side,
    *,
    metrics: Sequence[str] = (),
    seed: int = 0,
    resamples: int = _RESAMPLES,
) -> Comparison:
    """``b - a`` on the questions that both scored.

    ``metrics`` (none: the metric, F1, measures of the episodes, and what both rows have besides). Intervals are
    percentile bootstraps over questions, and over results of a side where it has several. Flips are by the metric of
    the task. Raises ``DataError`` where no question is common.
    """
    there = set(b.questions)
    keys = [key for key in a.questions if key in there]
    if not keys:
        raise DataError(
            f"{a.name} and {b.name} have no scored question in common ({len(a.questions)} and {len(b.questions)} of "
            "their own); compare results of the same set"
        )
    sets = list(dict.fromkeys(name for name, _ in keys))
    groups = {"": keys, **({name: [k for k in keys if k[0] == name] for name in sets} if len(sets) > 1 else {})}
    names = list(metrics) or _names(a, b, keys)
    measured = {group: tuple(_measure(a, b, some, names, seed, resamples)) for group, some in groups.items()}
    apart = {name: tuple(_apart(a, b, name)) for name in sets}
    return Comparison(
        a=a.name,
        b=b.name,
        common=len(keys),
        only_a=len(a.questions) - len(keys),
        only_b=len(b.questions) - len(keys),
        measured=measured,
        flips=tuple(_flips(a, b, keys)),
        differences=apart,
        warnings=tuple(_warnings(a, b, apart, keys)),
    )


def permutation_test(differences: Sequence[float], *, seed: int = 0, draws: int = _RESAMPLES) -> float:
    """Two-sided p-value of the paired sign-flip test of mean difference 0 (Fisher's randomisation test).

    Exact over all signs where at most 14 differences are not 0; else from ``draws`` random ones, the observed one
    counted among them, so that it is never 0. Turning the differences round leaves it as it is.
    """
    return permutation_tests(np.asarray(differences, dtype=np.float64)[:, None], seed=seed, draws=draws)[0]


def permutation_tests(differences: NDArray[np.float64], *, seed: int = 0, draws: int = _RESAMPLES) -> list[float]:
    """:func:`permutation_test` of each column, shape [questions, columns]; the columns share the random signs."""
    found: dict[int, float] = {}
    many: list[int] = []
    for column in range(differences.shape[1]):
        data = differences[:, column]
        data = data[data != 0.0]
        if data.size > _EXACT:
            many.append(column)
            continue
        signs = 1.0 - 2.0 * ((np.arange(2**data.size)[:, None] >> np.arange(data.size)) & 1)
        found[column] = float((np.abs(signs @ data) >= abs(float(data.sum())) * (1 - 1e-12)).mean())
    if many:
        found |= dict(zip(many, _random_signs(differences[:, many], seed, draws), strict=True))
    return [found[column] for column in range(differences.shape[1])]


def _random_signs(data: NDArray[np.float64], seed: int, draws: int) -> list[float]:
    observed = np.abs(data.sum(axis=0)) * (1 - 1e-12)
    rng = np.random.default_rng(seed)
    n = len(data)
    rows = max(1, _CELLS // n)
    reached = np.zeros(data.shape[1])
    for start in range(0, draws, rows):
        count = min(rows, draws - start)
        signs = 1.0 - 2.0 * rng.integers(0, 2, size=(count, n), dtype=np.int8)
        reached += (np.abs(signs @ data) >= observed).sum(axis=0)
    return [float(value) for value in (reached + 1) / (draws + 1)]


# -- reading ------------------------------------------------------------------------------------------------------


def _result(folder: Path) -> Result:
    """A folder of one set, or of several in folders of their own."""
    if folder.name == "evaluation.json":
        folder = folder.parent
    documents = [folder] if (folder / "evaluation.json").is_file() else []
    documents = documents or sorted(p.parent for p in folder.glob("*/evaluation.json"))
    if not documents:
        raise DataError(f"{folder}: expected evaluation.json of `turntree evaluate`, found none; name its folder")
    rows: dict[Key, EvalRow] = {}
    metrics: dict[str, str] = {}
    passports: dict[str, Passport] = {}
    for path in documents:
        try:
            document = json.loads((path / "evaluation.json").read_text(encoding="utf-8"))
            passport = Passport.from_json(document.get("passport") or {})
            metric = str(document["metric"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path / 'evaluation.json'} is no document of an evaluation: {error}") from None
        name = str(passport.data.get("dataset") or path.name) if len(documents) > 1 else ""
        rows |= {(name, row.id): row for row in file_rows(path / "evaluation.jsonl")}
        metrics[name], passports[name] = metric, passport
    return Result(folder, rows, metrics, passports)


def _scored(result: Result, key: Key) -> bool:
    row = result.rows.get(key)
    return row is not None and not row.failed


# -- numbers ------------------------------------------------------------------------------------------------------


def _names(a: Side, b: Side, keys: Sequence[Key]) -> list[str]:
    """What both sides measured, the metric first."""
    rows = [side.results[0].rows[keys[0]] for side in (a, b)]
    metric = next(iter(a.results[0].metrics.values()))
    names = [metric, "em", "f1", "sub_em", "success", "reward", *MEASURES]
    names += [name for name in (*rows[0].scores, *rows[0].parts) if name in {**rows[1].scores, **rows[1].parts}]
    return list(dict.fromkeys(names))


def _matrix(side: Side, keys: Sequence[Key], name: str) -> NDArray[np.float64]:
    """Values of one metric, shape [results, questions]; NaN where a row has none."""
    return np.asarray(
        [[_value(result.rows[key], name, result.metrics[key[0]]) for key in keys] for result in side.results]
    )


def _value(row: EvalRow, name: str, metric: str) -> float:
    found = read(row, name, metric=metric)
    return float("nan") if found is None else found


def _measure(
    a: Side, b: Side, keys: Sequence[Key], names: Sequence[str], seed: int, resamples: int
) -> Iterator[Measured]:
    """Every metric that some question has on both sides, in order; those of the same questions share the draws."""
    values = {name: (_matrix(a, keys, name), _matrix(b, keys, name)) for name in names}
    groups: dict[bytes, list[str]] = {}
    for name, (one, two) in values.items():
        there = ~(np.isnan(one).any(axis=0) | np.isnan(two).any(axis=0))
        if there.any():
            groups.setdefault(there.tobytes(), []).append(name)
    found: dict[str, Measured] = {}
    for mask, some in groups.items():
        there = np.frombuffer(mask, dtype=np.bool_)
        one, two = (np.stack([values[name][i][:, there] for name in some], axis=2) for i in (0, 1))
        found |= {m.metric: m for m in _measured(some, one, two, seed, resamples)}
    yield from (found[name] for name in names if name in found)


def _measured(
    names: Sequence[str], a: NDArray[np.float64], b: NDArray[np.float64], seed: int, resamples: int
) -> Iterator[Measured]:
    """``a`` and ``b``: [results, questions, metrics]."""
    first, second = a.mean(axis=0), b.mean(axis=0)
    difference = second - first
    lows, highs = _bounds(a, b, seed, resamples)
    ps = permutation_tests(difference, seed=seed, draws=resamples)
    n = len(difference)
    for i, name in enumerate(names):
        data = difference[:, i]
        wins, losses = int((data > 0).sum()), int((data < 0).sum())
        interval = Interval(float(data.mean()), float(lows[i]), float(highs[i]), n)
        means = float(first[:, i].mean()), float(second[:, i].mean())
        yield Measured(name, *means, interval, ps[i], wins, losses, n - wins - losses)


def _bounds(
    a: NDArray[np.float64], b: NDArray[np.float64], seed: int, resamples: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile bounds of the mean differences, one a metric; NaN for one question.

    Each draw takes questions with replacement, and results too: the same ones of both sides.
    """
    n = a.shape[1]
    if n < 2:
        nothing = np.full(a.shape[2], np.nan)
        return nothing, nothing
    rng = np.random.default_rng((seed, 1))
    means: list[NDArray[np.float64]] = []
    for counts in draw_counts(n, resamples, seed):
        draws = rng.random((len(counts), max(len(a), len(b))))
        means.append(_drawn(b, counts, draws) - _drawn(a, counts, draws))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975], axis=0)
    return low, high


def _drawn(values: NDArray[np.float64], counts: NDArray[np.float64], draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over drawn questions and drawn results, [draws, metrics]."""
    n = counts.shape[1]
    by_result = np.stack([counts @ one / n for one in values])  # [results, draws, metrics]
    if len(values) == 1:
        return np.asarray(by_result[0], dtype=np.float64)
    chosen = (draws[:, : len(values)] * len(values)).astype(np.int64)  # [draws, results]
    picked = by_result[chosen, np.arange(len(draws))[:, None]]  # [draws, results, metrics]
    return np.asarray(picked.mean(axis=1), dtype=np.float64)


# -- what flipped, what differs ------------------------------------------------------------------------------------


def _flips(a: Side, b: Side, keys: Sequence[Key]) -> list[Flip]:
    """Questions whose scores differ, the largest difference first."""
    found: list[Flip] = []
    for key in keys:
        scores = [
            [row.score for result in side.results if (row := result.rows[key]).score is not None] for side in (a, b)
        ]
        if not scores[0] or not scores[1]:
            continue
        one, two = (float(np.mean([s for s in side if s is not None])) for side in scores)
        if one != two:
            found.append(Flip(key, one, two, a.results[0].rows[key], b.results[0].rows[key]))
    return sorted(found, key=lambda flip: -abs(flip.score_b - flip.score_a))


def _apart(a: Side, b: Side, name: str) -> list[Difference]:
    """What differs between the first results of both sides, in one set."""
    passports = [side.results[0].passports.get(name) for side in (a, b)]
    if passports[0] is None or passports[1] is None or not (passports[0].data and passports[1].data):
        return []  # without a passport nothing is known, which a warning says
    return differences(passports[0], passports[1])


def _warnings(a: Side, b: Side, apart: Mapping[str, Sequence[Difference]], keys: Sequence[Key]) -> list[str]:
    found: list[str] = []
    for name, listed in apart.items():
        where = f"{name}: " if name else ""
        found += [f"{where}not comparable as they are: {d}" for d in listed if d.weight == "breaks"]
        found += [f"{where}made differently: {d}" for d in listed if d.weight == "explains"]
    for side, count in ((a, len(a.questions)), (b, len(b.questions))):
        if count > len(keys):
            found.append(f"{side.name} has {count - len(keys)} scored questions that the other side has not")
        if any(not passport.data for result in side.results for passport in result.passports.values()):
            found.append(f"{side.name} has no passport (an older version made it): it may be of another set or prompt")
        for result in side.results[1:]:
            for name, passport in result.passports.items():
                first = side.results[0].passports.get(name, passport)
                grave = [d for d in differences(first, passport) if d.weight != "notes"]
                found += [f"{side.name}: {result.folder} is no other seed of the first: {d}" for d in grave]
    return found
