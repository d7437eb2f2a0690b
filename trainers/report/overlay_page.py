"""The page of several runs: mean curves with intervals over seeds, a table of final values, what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from turntree.trainers.atomic import atomic_file
from turntree.trainers.report.charts import CHARTS, Chart, axis_switch, card, metric_chart
from turntree.trainers.report.history import AXES, Axis, Curve, RunHistory
from turntree.trainers.report.html import document, table, text
from turntree.trainers.report.overlay import Mean, Mismatch, RunGroup, group_runs, mean_curve, mismatches, warnings
from turntree.trainers.report.run import NAMES
from turntree.trainers.report.svg import Format, Line, count, duration, plain, share
from turntree.trainers.stats import Interval, student_mean

__all__ = ["render_runs", "write_runs_page"]

_STYLES = ("tree.css", "report.css")


def write_runs_page(folders: Sequence[Path], out: Path, *, ignore: Sequence[str] = ()) -> list[str]:
    """Write the page of the runs in ``folders`` to ``out`` and return its warnings.

    Raises:
        CheckpointError: a folder is no run.
        DataError: what it holds is damaged.
        ConfigError: ``ignore`` names no option.
    """
    groups = group_runs([RunHistory.read(folder) for folder in folders], ignore=ignore)
    found = mismatches(groups)
    with atomic_file(out) as handle:
        handle.write(render_runs(groups, found).encode())
    return list(warnings(groups, found))


def render_runs(groups: Sequence[RunGroup], found: Sequence[Mismatch]) -> str:
    """The page as HTML text. The same runs give the same text."""
    runs = [run for group in groups for run in group.runs]
    axes: list[Axis] = [a for a in AXES if a == "step" or all(r.last.get(AXES[a][2]) is not None for r in runs)]
    inputs, labels = axis_switch(axes)
    parts = [
        ("Results", _results(groups)),
        ("Curves", "".join(_curves(groups, axes))),
        ("Differences", _differences(found, len(groups))),
        ("Runs", _runs(groups)),
    ]
    sections = [(name, body) for name, body in parts if body]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name, _ in sections)
    blocks = "".join(
        f'<section class="block" id="{name.lower()}"><h2>{name}</h2>{body}</section>' for name, body in sections
    )
    head = _head(groups, list(warnings(groups, found)))
    body = f"{inputs}<main>{head}<nav>{links}{labels}</nav>{blocks}</main>"
    return document(body, title=f"{len(runs)} runs - report", styles=_STYLES)


def _head(groups: Sequence[RunGroup], troubles: Sequence[str]) -> str:
    runs = sum(len(group.runs) for group in groups)
    chips = "".join(
        f'<li class="c{i % 7}"><i class="swatch"></i>{text(group.label)} '
        f"<small>{len(group.runs)} {'seed' if len(group.runs) == 1 else 'seeds'}</small></li>"
        for i, group in enumerate(groups)
    )
    listed = "".join(f"<li>{text(trouble)}</li>" for trouble in troubles)
    watch = f'<ul class="watch" role="note">{listed}</ul>' if listed else ""
    what = f"{runs} runs in {len(groups)} group{'s' if len(groups) != 1 else ''}"
    return (
        f'<header><p class="over">turntree report</p><h1>{what}</h1><ul class="chips">{chips}</ul>'
        '<p class="note">Runs that are equal but for their seed are a group. Lines are means over seeds, bands their '
        "95 % intervals by Student's t; thin lines are single seeds. A group of one run shows its interval over "
        f"validation questions.</p>{watch}</header>"
    )


# -- results ----------------------------------------------------------------------------------------------------------


def _metric(groups: Sequence[RunGroup]) -> str | None:
    return next((run.metric for group in groups for run in group.runs if run.metric is not None), None)


def _validations(group: RunGroup, metric: str | None) -> list[Curve | None]:
    return [run.validation_curve() if run.metric == metric else None for run in group.runs]


def _results(groups: Sequence[RunGroup]) -> str:
    metric = _metric(groups)
    form = metric_chart(metric).form if metric is not None else plain
    title = NAMES.get(metric, (metric,))[0] if metric is not None else ""
    spent = [r.last.get("total/generated_tokens") for g in groups for r in g.runs]
    common = min((float(s) for s in spent if s is not None), default=math.nan) if all(spent) else math.nan
    head = ["group", "seeds"]
    head += [f"validation {title}, end", f"at {count(common)} tokens", f"best {title}"] if metric is not None else []
    rewarded = any(run.curve("critic/rewards/mean") is not None for group in groups for run in group.runs)
    outcome = "critic/rewards/mean" if rewarded else "loss"
    head += ["reward of rollouts, end" if rewarded else "loss, end", "generated tokens", "tool calls", "wall time"]
    rows = []
    for i, group in enumerate(groups):
        cells = [f'<span class="c{i % 7}"><i class="swatch"></i>{text(group.label)}</span>', _seeds(group)]
        if metric is not None:
            cells += _validated(group, metric, common, form)
        ends = mean_curve([run.curve(outcome) for run in group.runs], "step", smooth=True)
        cells.append(_shown(student_mean([float(y[-1]) for _, y in ends.singles]), plain) if ends else "\u2013")
        for key, unit in (("generated_tokens", count), ("tool_calls", count), ("seconds", duration)):
            cells.append(_total(group.runs, f"total/{key}", unit))
        rows.append(cells)
    note = (
        "Intervals are over seeds; totals show the least and the most. A run ends where its budget is used up: where "
        "budgets differ, compare the column of the largest budget that all have reached (linear between validations). "
        "The best of a run's validations was chosen on the same questions, which flatters it."
    )
    return f'<p class="note">{note}</p>{table(head, rows)}'


def _validated(group: RunGroup, metric: str, common: float, form: Format) -> list[str]:
    """Cells of the validation metric: at the end, at the common budget, at its best."""
    curves = [curve for curve in _validations(group, metric) if curve is not None]
    if not curves:
        return ["\u2013"] * 3
    ends = student_mean([curve.last for curve in curves])
    if len(curves) == 1 and curves[0].low is not None and curves[0].high is not None:
        ends = Interval(ends.mean, float(curves[0].low[-1]), float(curves[0].high[-1]), 1)
    mean = mean_curve(curves, "tokens", smooth=False)
    there = mean.at(common) if mean is not None and math.isfinite(common) else None
    best = student_mean([float(max(curve.y[curve.y == curve.y])) for curve in curves])
    return [_shown(ends, form), _shown(there, form), _shown(best, form)]


def _seeds(group: RunGroup) -> str:
    seeds = ", ".join(str(seed) for seed in sorted(group.seeds)[:6])
    more = ", \u2026" if len(group.runs) > 6 else ""
    return f"{len(group.runs)} <small>{seeds}{more}</small>"


def _total(runs: Sequence[RunHistory], key: str, form: Format) -> str:
    """The mean of a total, and its least and most."""
    found = [float(run.last[key]) for run in runs if run.last.get(key) is not None]
    if len(found) < len(runs):
        return "\u2013"
    spread = f" <small>{text(form(min(found)))} \u2013 {text(form(max(found)))}</small>" if len(found) > 1 else ""
    return f"{text(form(fmean(found)))}{spread}"


def _shown(interval: Interval | None, form: Format) -> str:
    if interval is None or not math.isfinite(interval.mean):
        return "\u2013"
    if not math.isfinite(interval.low):
        return text(form(interval.mean))
    return f"{text(form(interval.mean))} <small>[{text(form(interval.low))}, {text(form(interval.high))}]</small>"


# -- curves -----------------------------------------------------------------------------------------------------------


def _curves(groups: Sequence[RunGroup], axes: Sequence[Axis]) -> Iterator[str]:
    metric = _metric(groups)
    main = ""
    if metric is not None:
        main = card(metric_chart(metric), lambda axis: list(_validation_lines(groups, metric, axis)), axes, large=True)
    reward = CHARTS["Rollouts"][0]
    yield f'<div class="charts large">{main}{_card(reward, groups, axes, large=True)}</div>'
    for name, charts in CHARTS.items():
        cards = [_card(chart, groups, axes) for chart in charts if chart is not reward]
        if any(cards):
            yield f'<h3>{text(name)}</h3><div class="charts">{"".join(cards)}</div>'


def _validation_lines(groups: Sequence[RunGroup], metric: str, axis: Axis) -> Iterator[Line]:
    for colour, group in enumerate(groups):
        mean = mean_curve(_validations(group, metric), axis, smooth=False)
        if mean is not None:
            yield _line(group, mean, colour, metric_chart(metric))


def _card(chart: Chart, groups: Sequence[RunGroup], axes: Sequence[Axis], *, large: bool = False) -> str:
    """One number of all groups; of a chart with several only the first, since colours are groups here."""
    keys = next(iter(chart.keys.values())).split("|")
    curves = [[run.curve(*keys) for run in group.runs] for group in groups]
    word = next(iter(chart.keys)) if len(chart.keys) > 1 else ""

    def lines(axis: Axis) -> list[Line]:
        means = [(i, mean_curve(found, axis, smooth=True)) for i, found in enumerate(curves)]
        return [_line(groups[i], mean, i, chart) for i, mean in means if mean is not None]

    about = f"{word}; {chart.about}" if word else chart.about
    return card(Chart(chart.title, about, chart.keys, chart.form, chart.from_zero), lines, axes, large=large)


def _line(group: RunGroup, mean: Mean, colour: int, chart: Chart) -> Line:
    """Bands end where the number does: Student's interval knows no bounds."""
    low, high = mean.low, mean.high
    if low is not None and high is not None:
        low = np.maximum(low, 0.0) if chart.from_zero else low
        high = np.minimum(high, 1.0) if chart.form is share else high
    faint = mean.singles if len(mean.singles) > 1 else ()
    return Line(group.label, mean.x, mean.y, low, high, faint=faint, colour=colour)


# -- what differs, and the runs ---------------------------------------------------------------------------------------

_WORDS = {"breaks": "not comparable", "explains": "may explain it", "notes": "note"}


def _differences(found: Sequence[Mismatch], groups: int) -> str:
    rows = [
        [
            f"{text(m.key)}<small>{text(m.where)}</small>",
            _weight(m),
            "".join(
                f"<div><code>{text(_cut(value))}</code> "
                f"<small>{text('all groups' if len(having) == groups > 1 else ', '.join(having))}</small></div>"
                for value, having in m.values.items()
            ),
        ]
        for m in found
    ]
    return table(["", "", "values, and the groups that have them"], rows) if rows else ""


def _weight(mismatch: Mismatch) -> str:
    if mismatch.within and mismatch.weight == "breaks":
        return '<span class="weight explains">seeds differ</span>'
    return f'<span class="weight {mismatch.weight}">{_WORDS[mismatch.weight]}</span>'


def _cut(value: str, limit: int = 90) -> str:
    return value if len(value) <= limit else f"{value[: limit - 1]}\u2026"


def _runs(groups: Sequence[RunGroup]) -> str:
    rows = [
        [
            f'<span class="c{i % 7}"><i class="swatch"></i>{text(group.label)}</span>',
            str(run.seed),
            f"{run.step}" if run.complete else f"{run.step} of {run.planned_steps}",
            count(float(run.last.get("total/generated_tokens") or 0)),
            text(run.folder),
        ]
        for i, group in enumerate(groups)
        for run in group.runs
    ]
    return table(["group", "seed", "steps", "tokens", "folder"], rows)
