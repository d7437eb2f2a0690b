"""Confidence intervals: bootstrap for means over questions, Wilson's for shares, Student's for means over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from turntree.errors import ConfigError, DataError

__all__ = [
    "Interval",
    "PairedDifference",
    "bootstrap_mean",
    "bootstrap_means",
    "draw_counts",
    "paired_difference",
    "share_interval",
    "student_mean",
]

_CELLS = 4_000_000
"""Resampled values held in memory at once."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over ``n`` values and its confidence interval.

    Without values everything is NaN; with one value the mean is that value and the bounds are NaN, since one
    value says nothing about the spread.
    """

    mean: float
    low: float
    high: float
    n: int
    confidence: float = 0.95

    def __str__(self) -> str:
        if self.n == 0:
            return "no values"
        if math.isnan(self.low):
            return f"{self.mean:.3f} (n={self.n}, no interval)"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n})"


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """``b - a`` question by question. ``wins``: b is higher; ``losses``: a is."""

    difference: Interval
    wins: int
    losses: int
    ties: int

    @property
    def significant(self) -> bool:
        """Whether the interval of the mean difference leaves out zero."""
        return self.difference.low > 0.0 or self.difference.high < 0.0


def bootstrap_mean(values: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean and percentile-bootstrap interval (Efron 1979) of ``values``, shape (n,).

    The same values, arguments and seed give the same interval. Raises :class:`DataError` when a value is not finite.
    """
    if not 0.0 < confidence < 1.0 or resamples < 1:
        raise ConfigError(f"expected 0 < confidence < 1 and resamples >= 1, found {confidence} and {resamples}")
    data = _checked(values)
    if data.size == 0:
        return Interval(math.nan, math.nan, math.nan, 0, confidence)
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, math.nan, math.nan, 1, confidence)
    means = _resampled_means(data, resamples, np.random.default_rng(seed))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(mean, float(low), float(high), int(data.size), confidence)


def bootstrap_means(
    columns: Sequence[ArrayLike], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> list[Interval]:
    """:func:`bootstrap_mean` of several columns, much faster than one by one: columns of one length share the draws."""
    checked = [_checked(column) for column in columns]
    found: dict[int, Interval] = {}
    for size in {data.size for data in checked}:
        same = [i for i, data in enumerate(checked) if data.size == size]
        if size < 2:
            found |= {i: bootstrap_mean(checked[i], confidence=confidence) for i in same}
            continue
        values = np.stack([checked[i] for i in same], axis=1)
        means = np.concatenate([counts @ values / size for counts in draw_counts(size, resamples, seed)])
        tail = (1.0 - confidence) / 2.0
        lows, highs = np.quantile(means, [tail, 1.0 - tail], axis=0)
        for i, low, high in zip(same, lows, highs, strict=True):
            found[i] = Interval(float(checked[i].mean()), float(low), float(high), size, confidence)
    return [found[i] for i in range(len(checked))]


def draw_counts(size: int, resamples: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """How often each of ``size`` values is drawn, [chunk, size], in ``resamples`` draws with replacement in all."""
    rng = np.random.default_rng(seed)
    rows = max(1, _CELLS // size)
    for start in range(0, resamples, rows):
        count = min(rows, resamples - start)
        places = rng.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        yield np.bincount(places.ravel(), minlength=count * size).reshape(count, size).astype(np.float64)


def share_interval(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Mean of ``values``, shape (n,), each 0 or 1, and its score interval (Wilson 1927).

    Where all values are equal a bootstrap gives a point, as if 0 of 60 proved that nothing is ever right; this gives
    [0, 0.06]. Raises :class:`DataError` for other values.
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"expected 0 < confidence < 1, found {confidence}")
    data = _checked(values)
    if not np.isin(data, (0.0, 1.0)).all():
        raise DataError(
            f"a share is a mean of zeros and ones, found {data[~np.isin(data, (0.0, 1.0))][0]:g} among them"
        )
    n = int(data.size)
    mean = float(data.mean()) if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n, confidence)
    z2 = statistics.NormalDist().inv_cdf((1.0 + confidence) / 2.0) ** 2
    center = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * mean * (1 - mean) / n + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    # Without the two cases rounding would leave the mean itself out at 0 and 1.
    low = 0.0 if mean == 0.0 else center - half
    high = 1.0 if mean == 1.0 else center + half
    return Interval(mean, low, high, n, confidence)


def student_mean(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Mean of ``values``, shape (n,), and Student's t interval (1908): for few values, such as one a seed.

    A bootstrap of so few is too narrow. With one value the bounds are NaN.
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"expected 0 < confidence < 1, found {confidence}")
    data = _checked(values)
    n = int(data.size)
    mean = float(data.mean()) if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n, confidence)
    from scipy.stats import t

    half = float(t.ppf((1.0 + confidence) / 2.0, n - 1)) * float(data.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, confidence)


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> PairedDifference:
    """Compare two runs on the same questions: entry i of ``a`` and of ``b`` belong to question i."""
    first, second = _checked(a), _checked(b)
    if first.size != second.size:
        raise DataError(
            f"a paired comparison needs one value a question from both runs, found {first.size} and {second.size}; "
            "match the questions by id first"
        )
    difference = second - first
    interval = bootstrap_mean(difference, confidence=confidence, resamples=resamples, seed=seed)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return PairedDifference(interval, wins, losses, int(difference.size) - wins - losses)


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not np.isfinite(data).all():
        raise DataError(
            f"expected a flat list of finite numbers, found shape {data.shape} with non-finite or nested values"
        )
    return data


def _resampled_means(data: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Means of ``resamples`` draws with replacement, in chunks of bounded memory; shape (resamples,)."""
    rows = max(1, _CELLS // data.size)
    chunks = [
        data[rng.integers(data.size, size=(min(rows, resamples - start), data.size))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(chunks)
