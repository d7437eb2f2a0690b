"""From curves to budgets: tokens and calls to an exact match, relative to chain GRPO, with paired bootstraps.

Curves of an arm are averaged over seeds, and the budget is where the averaged curve first gets to the exact match, so
that a seed that does not get there is not thrown away. Arms are resampled by the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from _algorithms_store import Trace
from _common import Figure

from turntree.trainers.report.plots import Series
from turntree.trainers.seeds import derive_rng

__all__ = ["ArmResult", "Compared", "Interval3", "compare", "figures", "markdown", "series", "smoothed"]

FloatArray = npt.NDArray[np.float64]
Unit = Literal["tokens", "calls"]

POINTS = 400
RESAMPLES = 2_000
LAST = 0.1
"""The final exact match is the mean over this last share of the budget."""
NEARLY = 0.95
"""Share of the baseline's final exact match: curves that have levelled off cross the whole of it by chance."""
ROUNDING = 1e-9
"""What a mean over a plateau may lie above the plateau."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """An arm in its chosen setting on fresh seeds; ``traces`` by seed."""

    name: str
    setting: str
    rate: float
    traces: Mapping[int, Trace]


@dataclass(frozen=True, slots=True)
class Interval3:
    """A value and 95 % of its bootstrap, nan without one; infinite where the exact match is not reached."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "undefined"
        if math.isinf(self.value):
            return f"not reached [{self.low:.2f}, ∞]" if math.isfinite(self.low) else "not reached"
        high = "∞" if math.isinf(self.high) else f"{self.high:.2f}"
        return f"{self.value:.2f}" if math.isnan(self.low) else f"{self.value:.2f} [{self.low:.2f}, {high}]"


UNDEFINED = Interval3(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Compared:
    """An arm beside the baseline. ``to_final``: budget to the baseline's final exact match over the baseline's own, in
    tokens and in calls, undefined where that has not risen; ``to_nearly``: tokens to ``NEARLY`` of it; ``to_half``:
    tokens to an exact match of 0.5 over the baseline's."""

    arm: ArmResult
    seeds: int
    start: float
    final: Interval3
    mean: Interval3
    to_final: Interval3
    to_final_calls: Interval3
    to_nearly: Interval3
    to_half: Interval3


def smoothed(result: ArmResult, width: float) -> ArmResult:
    """Curves that are measured with noise, each point the mean of those within half of ``width`` tokens."""

    def one(trace: Trace) -> Trace:
        at = np.asarray(trace.tokens, float)
        near = np.abs(at[:, None] - at[None]) <= width / 2
        means = (near @ np.asarray(trace.em)) / near.sum(1)
        return replace(trace, em=tuple(means.tolist()))

    return replace(result, traces={seed: one(trace) for seed, trace in result.traces.items()})


def on_grid(traces: Sequence[Trace], budget: float, unit: Unit) -> FloatArray:
    """Exact match of each curve at ``POINTS + 1`` equally spaced budgets from 0, ``[seeds, POINTS + 1]``."""
    at = np.linspace(0.0, budget, POINTS + 1)
    return np.stack([np.interp(at, getattr(t, unit), t.em) for t in traces])


def crossing(curves: FloatArray, targets: FloatArray, budget: float) -> FloatArray:
    """Where each of ``curves`` ``[R, POINTS + 1]`` first gets to its target ``[R]``; infinite if it does not."""
    above = curves >= targets[:, None]
    first = above.argmax(1)
    rows = np.arange(len(curves))
    before = np.maximum(first - 1, 0)
    rise = curves[rows, first] - curves[rows, before]
    share = np.where(rise > 0, (targets - curves[rows, before]) / np.where(rise > 0, rise, 1.0), 0.0)
    at = (before + np.where(first > 0, share, 0.0)) * budget / POINTS
    return np.where(above.any(1), at, np.inf)


def compare(results: Sequence[ArmResult], *, baseline: str, budget: float, target: float = 0.5) -> list[Compared]:
    """Every arm beside the one named ``baseline``, on the seeds that both have. ``budget`` is in sampled tokens."""
    reference = next(r for r in results if r.name == baseline)
    return [_compared(r, reference, budget, target) for r in results]


def _compared(arm: ArmResult, reference: ArmResult, budget: float, target: float) -> Compared:
    seeds = sorted(set(arm.traces) & set(reference.traces))
    if not seeds:
        raise ValueError(
            f"{arm.name} has seeds {sorted(arm.traces)} and {reference.name} {sorted(reference.traces)}: expected some "
            "that both have; run them on the same ones"
        )
    own, other = ([r.traces[s] for s in seeds] for r in (arm, reference))
    weights = _resampled(len(seeds))
    tokens = [weights @ on_grid(t, budget, "tokens") for t in (own, other)]
    most = max(max(t.calls) for t in (*own, *other)) or 1
    calls = [weights @ on_grid(t, most, "calls") for t in (own, other)]
    last = round(POINTS * (1 - LAST))
    # A plateau gets to its own mean, whatever way that is rounded.
    goal = tokens[1][:, last:].mean(1) - ROUNDING
    half = np.full(len(weights), target)
    learnt = bool(goal[0] > tokens[1][0, 0])
    return Compared(
        arm=arm,
        seeds=len(seeds),
        start=float(np.mean([t.em[0] for t in own])),
        final=_interval(tokens[0][:, last:].mean(1), enough=len(seeds) > 1),
        mean=_interval(tokens[0].mean(1), enough=len(seeds) > 1),
        to_final=_ratio(tokens, goal, budget) if learnt else UNDEFINED,
        to_final_calls=_ratio(calls, goal, most) if learnt else UNDEFINED,
        to_nearly=_ratio(tokens, NEARLY * goal, budget) if learnt else UNDEFINED,
        to_half=_ratio(tokens, half, budget),
    )


def _resampled(seeds: int) -> FloatArray:
    """Weights of seeds ``[1 + RESAMPLES, seeds]``: the plain mean first, then bootstrap samples."""
    rng = derive_rng("algorithms", "bootstrap", seeds)
    draws = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES) / seeds
    return np.concatenate([np.full((1, seeds), 1 / seeds), draws])


def _ratio(pair: Sequence[FloatArray], goal: FloatArray, budget: float) -> Interval3:
    """Where only the baseline does not get there, its whole budget counts for it: the ratio is then an upper bound.

    Who is there from the start needs a step of the grid: two such are equal, not 0 / 0.
    """
    own, other = (np.maximum(crossing(curves, goal, budget), budget / POINTS) for curves in pair)
    return _interval(own / np.minimum(other, budget), enough=_seeds_vary(pair))


def _seeds_vary(pair: Sequence[FloatArray]) -> bool:
    return any(bool((curves != curves[0]).any()) for curves in pair)


def _interval(values: FloatArray, *, enough: bool = True) -> Interval3:
    low, high = np.quantile(values[1:], [0.025, 0.975], method="nearest") if enough else (math.nan, math.nan)
    return Interval3(float(values[0]), float(low), float(high))


HEADINGS = (
    "arm", "shape", "rate", "seeds", "final EM", "mean EM", "tokens to the baseline's final EM", "calls to it",
    "tokens to 95 % of it", "tokens to EM 0.5",
)  # fmt: skip


def markdown(rows: Sequence[Compared]) -> str:
    """The table as Markdown; budgets are ratios to the baseline."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    for r in rows:
        cells = (r.arm.name, r.arm.setting, f"{r.arm.rate:g}", r.seeds, r.final, r.mean, r.to_final, r.to_final_calls,
                 r.to_nearly, r.to_half)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def figures(prefix: str, rows: Sequence[Compared]) -> Iterator[Figure]:
    """The table as figures of the JSON file. A budget that is not reached is infinite there, hence null."""
    readings: dict[str, tuple[Callable[[Compared], Interval3], Literal["higher", "lower"], str]] = {
        "final EM": (lambda r: r.final, "higher", "EM"),
        "mean EM": (lambda r: r.mean, "higher", "EM"),
        "tokens to the baseline's final EM": (lambda r: r.to_final, "lower", ""),
        "calls to the baseline's final EM": (lambda r: r.to_final_calls, "lower", ""),
        "tokens to 95 % of the baseline's final EM": (lambda r: r.to_nearly, "lower", ""),
        "tokens to EM 0.5": (lambda r: r.to_half, "lower", ""),
    }
    for r in rows:
        label = f"{prefix} {r.arm.name} {r.arm.setting}"
        for name, (read, better, unit) in readings.items():
            found = read(r)
            yield Figure(f"{label}: {name}", found.value, unit, better)
            yield Figure(f"{label}: {name}, 95 % from", found.low, unit, better)
            yield Figure(f"{label}: {name}, 95 % to", found.high, unit, better)
        yield Figure(f"{label}: learning rate", r.arm.rate, "", "lower")
        yield Figure(f"{label}: seeds", r.seeds, "", "higher")


def series(rows: Sequence[ArmResult], *, budget: float, points: int = 20) -> list[Series]:
    """Mean curves over seeds with 95 % bands, for a picture."""
    drawn = []
    for r in rows:
        curves = on_grid(list(r.traces.values()), budget, "tokens")[:, :: POINTS // points]
        x = np.linspace(0.0, budget, POINTS + 1)[:: POINTS // points].tolist()
        means = _resampled(len(curves)) @ curves
        low, high = np.quantile(means[1:], [0.025, 0.975], axis=0)
        drawn.append(Series(r.name, x, means[0].tolist(), low.tolist(), high.tolist()))
    return drawn
