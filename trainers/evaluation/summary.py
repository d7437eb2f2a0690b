"""Means over questions with 95 % intervals: bootstrap in general, Wilson's for shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turntree.trainers.evaluation.rows import ANSWERS, NUMBERS, SHARES, EvalRow
from turntree.trainers.stats import Interval, bootstrap_means, share_interval

__all__ = ["MEASURES", "breakdown", "disagreements", "interval_json", "intervals", "mean", "summarize"]

#: What is measured of every question besides its scores, and whether it is a share.
MEASURES: dict[str, tuple[Callable[[EvalRow], float | None], bool]] = {
    "turns": (lambda row: float(row.turns), False),
    "searches": (lambda row: float(row.searches), False),
    "generated_tokens": (lambda row: float(row.generated_tokens), False),
    "observation_tokens": (lambda row: float(row.observation_tokens), False),
    "format_valid": (lambda row: float(row.format_valid), True),
    "finished": (lambda row: float(row.prediction is not None or row.status == "answered"), True),
    "supporting_found": (lambda row: row.supporting_found, False),
    "supporting_all": (lambda row: row.supporting_all, True),
}

_OLD_NAMES = {"turns", "searches", "generated_tokens", "observation_tokens", "format_valid"}


def summarize(rows: Sequence[EvalRow], *, metric: str, seed: int) -> dict[str, Any]:
    """Means over the scored questions with 95 % intervals; ``failed`` questions are not scored.

    Wilson's intervals for shares and a bootstrap for everything else. Numbers that do not exist are NaN or None.
    """
    scored = [row for row in rows if not row.failed]
    out: dict[str, Any] = {"n": len(scored), "failed": len(rows) - len(scored), "metric": metric}
    names = dict.fromkeys((*(n for n in (*ANSWERS, "success", "reward") if _has(n, metric, rows)), metric))
    further = sorted({name for row in scored for name in row.scores})
    parts = sorted({name for row in scored for name in row.parts} - {*names, *NUMBERS})
    found = intervals(scored, (*names, *MEASURES, *further, *parts), metric=metric, seed=seed)
    for name in names:
        out |= _spread(name, found[name])
    if unscored := sum(bool(row.unscored) for row in scored):
        out["unscored"] = unscored
    for name in parts:
        out |= {**_spread(name, found[name]), f"{name}_n": found[name].n}
    for name in MEASURES:
        key = f"{name}_mean" if name in _OLD_NAMES else name
        out |= _spread(name, found[name], mean_name=key) if found[name].n else {key: None}
    for name in further:
        out |= _spread(name, found[name])
    if differ := disagreements(scored):
        out["em_disagreements"] = differ
    out["answered_share"] = out["finished"]
    hops = sorted({row.hops for row in scored if row.hops is not None})
    out["em_by_hops"] = {str(h): mean(row.em or 0.0 for row in scored if row.hops == h) for h in hops}
    return out


def breakdown(
    rows: Sequence[EvalRow], *, metric: str, seed: int, names: Sequence[str] = ("em", "f1", "sub_em")
) -> dict[str, dict[str, Any]]:
    """``by_hops`` and ``by_type``: of each kind of question the scores and the recall of supporting passages."""
    scored = [row for row in rows if not row.failed]
    keys: dict[str, Callable[[EvalRow], Any]] = {"by_hops": lambda row: row.hops, "by_type": lambda row: row.type}
    shown = tuple(dict.fromkeys((*names, metric, "supporting_found", "supporting_all")))
    out: dict[str, dict[str, Any]] = {}
    for title, key in keys.items():
        kinds = sorted({str(k) for row in scored if (k := key(row)) is not None})
        out[title] = {}
        for kind in kinds:
            some = [row for row in scored if key(row) is not None and str(key(row)) == kind]
            found = intervals(some, shown, metric=metric, seed=seed)
            cells = {name: interval_json(interval) for name, interval in found.items() if interval.n}
            out[title][kind] = {"n": len(some), **cells}
    return out


def intervals(rows: Sequence[EvalRow], names: Iterable[str], *, metric: str, seed: int) -> dict[str, Interval]:
    """The mean of each measure (a metric, a measure, a part, or ``scorer/metric``) over the rows that have it."""
    values = {
        name: [value for row in rows if not row.failed and (value := read(row, name, metric=metric)) is not None]
        for name in names
    }
    others = [name for name in values if not _is_share(name)]
    drawn = dict(zip(others, bootstrap_means([values[name] for name in others], seed=seed), strict=True))
    return {name: drawn[name] if name in drawn else share_interval(found) for name, found in values.items()}


def _is_share(name: str) -> bool:
    return name in SHARES or (name in MEASURES and MEASURES[name][1]) or name.endswith(("/em", "/sub_em"))


def read(row: EvalRow, name: str, *, metric: str = "em") -> float | None:
    """One number of a row; None where it has none."""
    if name in NUMBERS:
        found: float | None = getattr(row, name)
        return found
    if name in MEASURES:
        return MEASURES[name][0](row)
    if name in row.scores:
        return row.scores[name]
    return row.score if name == metric else row.parts.get(name)


def disagreements(rows: Sequence[EvalRow]) -> dict[str, int]:
    """Of each further scorer with an EM, the questions where it and the row's own EM differ."""
    found: dict[str, int] = {}
    for row in rows:
        for name, value in row.scores.items():
            if name.endswith("/em") and row.em is not None:
                scorer = name.removesuffix("/em")
                found[scorer] = found.get(scorer, 0) + (value != row.em)
    return found


def interval_json(interval: Interval) -> dict[str, Any]:
    """Mean and bounds; null where they do not exist."""
    plain = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {**{key: None if value != value else value for key, value in plain.items()}, "n": interval.n}


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _has(name: str, metric: str, rows: Sequence[EvalRow]) -> bool:
    if name in ANSWERS and metric in ANSWERS:
        return True
    return name == metric or any(getattr(row, name) is not None for row in rows)


def _spread(name: str, interval: Interval, *, mean_name: str = "") -> dict[str, float]:
    return {mean_name or name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
