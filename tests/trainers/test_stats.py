"""Intervals: exact on easy cases, the textbook width on large ones, the same for the same seed."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.errors import ConfigError, DataError
from turntree.trainers import stats
from turntree.trainers.stats import bootstrap_mean, bootstrap_means, paired_difference, share_interval


def test_no_values_and_one_value_have_no_interval() -> None:
    nothing, one = bootstrap_mean([]), bootstrap_mean([0.7])
    assert nothing.n == 0
    assert math.isnan(nothing.mean)
    assert (one.n, one.mean) == (1, 0.7)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert str(nothing) == "no values"
    assert str(one) == "0.700 (n=1, no interval)"


def test_equal_values_have_a_point_interval() -> None:
    interval = bootstrap_mean([1.0] * 50)
    assert (interval.mean, interval.low, interval.high) == (1.0, 1.0, 1.0)


def test_width_is_the_normal_one_on_large_samples() -> None:
    values = np.random.default_rng(0).integers(2, size=2000).astype(float)
    interval = bootstrap_mean(values)
    half = 1.96 * statistics.stdev(values) / math.sqrt(2000)
    assert interval.high - interval.mean == pytest.approx(half, rel=0.06)
    assert interval.mean - interval.low == pytest.approx(half, rel=0.06)


def test_coverage() -> None:
    """About 95 of 100 intervals hold the true mean."""
    rng = np.random.default_rng(1)
    samples = (rng.random((300, 60)) < 0.3).astype(float)
    held = [bootstrap_mean(s, resamples=600, seed=i) for i, s in enumerate(samples)]
    assert 0.90 <= np.mean([i.low <= 0.3 <= i.high for i in held]) <= 0.985


def test_same_seed_same_interval_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(np.random.default_rng(5).random(30))
    whole = bootstrap_mean(values, seed=3)
    monkeypatch.setattr(stats, "_CELLS", 400)
    assert bootstrap_mean(values, seed=3) == whole
    assert bootstrap_mean(values, seed=4) != whole


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_interval_lies_within_the_values(values: list[float]) -> None:
    interval = bootstrap_mean(values, resamples=50)
    assert interval.low <= interval.high
    assert min(values) - 1e-6 <= interval.low
    assert interval.high <= max(values) + 1e-6


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"), [(1, 10, 0.0179, 0.4042), (0, 60, 0.0, 0.0602), (5, 5, 0.5655, 1.0)]
)
def test_share_interval_is_the_textbook_one(hits: int, n: int, low: float, high: float) -> None:
    interval = share_interval([1.0] * hits + [0.0] * (n - hits))
    assert (interval.mean, interval.n) == (hits / n, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


@given(st.lists(st.booleans(), min_size=2, max_size=300))
def test_share_interval_holds_the_mean_and_is_never_a_point(values: list[bool]) -> None:
    interval = share_interval(values)
    assert 0.0 <= interval.low <= interval.mean <= interval.high <= 1.0
    assert interval.low < interval.high


def test_share_interval_of_rare_hits_holds_the_truth() -> None:
    """Where a bootstrap fails: half of the samples have no hit at all."""
    rng = np.random.default_rng(6)
    samples = (rng.random((400, 60)) < 0.012).astype(float)
    held = [i.low <= 0.012 <= i.high for i in map(share_interval, samples)]
    points = [i.low <= 0.012 <= i.high for i in (bootstrap_mean(s, resamples=200) for s in samples)]
    assert np.mean(held) >= 0.9
    assert np.mean(points) < 0.6


def test_share_interval_edges() -> None:
    assert share_interval([]).n == 0
    assert math.isnan(share_interval([1.0]).low)
    with pytest.raises(DataError, match=r"found 0\.5"):
        share_interval([0.0, 0.5])
    with pytest.raises(ConfigError):
        share_interval([0.0, 1.0], confidence=95.0)


def test_paired_difference_sees_what_separate_intervals_hide() -> None:
    rng = np.random.default_rng(2)
    a = rng.random(100) * 10
    b = a + 0.5 + rng.normal(0, 0.1, 100)
    result = paired_difference(list(a), list(b))
    assert result.significant
    assert result.difference.mean == pytest.approx(0.5, abs=0.05)
    assert bootstrap_mean(a).high > bootstrap_mean(b).low
    assert (result.wins, result.losses, result.ties) == (100, 0, 0)


def test_paired_difference_of_equal_runs_is_nothing() -> None:
    result = paired_difference([0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    assert not result.significant
    assert (result.difference.mean, result.ties) == (0.0, 3)
    assert not paired_difference([], []).significant


@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [[1.0, 2.0]]])
def test_values_must_be_flat_and_finite(values: list[object]) -> None:
    with pytest.raises(DataError):
        bootstrap_mean(values)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    with pytest.raises(DataError, match="2 and 1"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(ConfigError):
        bootstrap_mean([1.0], confidence=95.0)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(0, 3))
def test_columns_together_equal_columns_one_by_one(columns: list[list[float]], seed: int) -> None:
    mixed = [*columns, [1.0, 2.0], [], [4.0]]
    for found, column in zip(bootstrap_means(mixed, resamples=50, seed=seed), mixed, strict=True):
        alone = bootstrap_mean(column, resamples=50, seed=seed)
        assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high), nan_ok=True)
        assert found.n == alone.n


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30), st.integers(0, 3))
def test_an_interval_contains_its_mean(values: list[float], seed: int) -> None:
    for found in (
        bootstrap_means([values], resamples=1000, seed=seed)[0],
        share_interval([float(v > 0) for v in values]),
    ):
        assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
