"""``report.html`` of one run: curves over the budget, trees, samples, configuration, passport; one file, no script."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.trainers.atomic import atomic_file
from turntree.trainers.config import documented_options
from turntree.trainers.loggers import flatten
from turntree.trainers.report.charts import CHARTS, axis_switch, card, metric_chart, run_lines
from turntree.trainers.report.history import AXES, Axis, RunHistory
from turntree.trainers.report.html import document, table, text
from turntree.trainers.report.run import NAMES
from turntree.trainers.report.selection import interest
from turntree.trainers.report.svg import Line, bars, count, duration, plain, share
from turntree.trainers.report.tree_facts import TreeFacts, tree_facts
from turntree.trainers.report.viewer import legend, render_tree
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import StoredTree, TreeStore

__all__ = ["render_run", "write_page", "write_run_page"]

_log = logging.getLogger(__name__)

_STYLES = ("tree.css", "report.css")

_SAMPLE_LEAVES = 64
"""A larger tree is a page of its own (``turntree view --html``)."""


def write_run_page(folder: Path, *, out: Path | None = None) -> Path:
    """Write the report of a run folder and return the file, by default its ``report.html``.

    Raises:
        CheckpointError: ``folder`` is no run.
        DataError: what it holds is damaged.
    """
    target = out or RunFolder(folder).report_file
    page = render_run(RunHistory.read(folder))
    with atomic_file(target) as handle:
        handle.write(page.encode())
    return target


def write_page(folder: Path) -> None:
    """:func:`write_run_page` at the end of a run, which is worth more than its report: what fails is a warning."""
    try:
        write_run_page(folder)
    except Exception as error:
        _log.warning("report.html was not written (%s: %s); try turntree report", type(error).__name__, error)


def render_run(run: RunHistory) -> str:
    """The page as HTML text. The same files give the same text."""
    axes: list[Axis] = [axis for axis in AXES if axis == "step" or _counts(run, axis)]
    inputs, labels = axis_switch(axes)
    curves = list(_curves(run, axes))
    trees = list(_trees(RunFolder(run.folder)))
    parts = [("Curves", "".join(curves)), *trees, *_results(run), ("Configuration", _config(run)), *_passport(run)]
    sections = [(name, body) for name, body in parts if body]
    links = "".join(f'<a href="#{_anchor(name)}">{text(name)}</a>' for name, _ in sections)
    blocks = "".join(
        f'<section class="block" id="{_anchor(name)}"><h2>{text(name)}</h2>{body}</section>' for name, body in sections
    )
    body = f"{inputs}<main>{_head(run)}<nav>{links}{labels if curves else ''}</nav>{blocks}</main>"
    return document(body, title=f"{run.name} - run report", styles=_STYLES)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _counts(run: RunHistory, axis: Axis) -> bool:
    return any(row.get(AXES[axis][2]) for row in run.rows)


# -- head -------------------------------------------------------------------------------------------------------------


def _head(run: RunHistory) -> str:
    state = "finished" if run.complete else "not finished"
    planned = f" of {run.planned_steps}" if run.planned_steps is not None else ""
    about = [
        run.options.get("algorithm.name"),
        f"seed {run.seed}",
        f"step {run.step}{planned}",
        run.options.get("env.id"),
        "/".join(Path(str(run.options.get("model.path") or "")).parts[-2:]),
    ]
    chips = "".join(f"<li>{text(item)}</li>" for item in about if item)
    tiles = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}{f'<small>{text(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in _tiles(run)
    )
    troubles = "".join(f"<li>{text(trouble)}</li>" for trouble in run.troubles())
    watch = f'<ul class="watch" role="note">{troubles}</ul>' if troubles else ""
    return (
        f'<header><p class="over">turntree run report</p><h1>{text(run.name)}'
        f'<span class="state {"good" if run.complete else "bad"}">{state}</span></h1>'
        f'<ul class="chips">{chips}</ul><dl class="tiles">{tiles}</dl>{watch}</header>'
    )


def _tiles(run: RunHistory) -> Iterator[tuple[str, str, str]]:
    """``(name, value, note)`` of the numbers that come first."""
    curve = run.validation_curve()
    if curve is not None and run.metric is not None and curve.low is not None and curve.high is not None:
        form = metric_chart(run.metric).form
        name = NAMES.get(run.metric, (run.metric,))[0]
        yield f"validation {name}", form(curve.y[-1]), f"[{form(curve.low[-1])}, {form(curve.high[-1])}]"
        if len(curve.y) > 1 and run.validations[0].get("step") == 0:
            gain = curve.y[-1] - curve.y[0]
            size = f"{100 * abs(gain):.1f}" if form is share else form(abs(gain))
            unit = "points, " if form is share else ""
            yield "gain", ("+" if gain >= 0 else "\u2212") + size, f"{unit}from {form(curve.y[0])}"
    last = run.last
    reward = run.curve("critic/rewards/mean")
    if reward is not None:
        yield "reward of rollouts", plain(reward.last), "last step"
    loss = run.curve("loss")
    if loss is not None:
        yield "loss", plain(loss.last), "last step"
    for name in ("generated tokens", "tool calls", "trajectories"):
        total = last.get(f"total/{name.replace(' ', '_')}")
        if total is not None:
            yield name, count(total), ""
    if "total/seconds" in last:
        updates = int(last.get("total/updates") or 0)
        yield "wall time", duration(last["total/seconds"] or 0.0), f"{updates:,} updates"


# -- curves -----------------------------------------------------------------------------------------------------------


def _curves(run: RunHistory, axes: Sequence[Axis]) -> Iterator[str]:
    main = _validation(run, axes)
    for name, charts in CHARTS.items():
        cards = [card(chart, lambda axis, c=chart: list(run_lines(c, run, axis)), axes) for chart in charts]  # type: ignore[misc]
        if name == "Rollouts":
            cards.insert(0, main)
        if any(cards):
            yield f'<h3>{text(name)}</h3><div class="charts">{"".join(cards)}</div>'


def _validation(run: RunHistory, axes: Sequence[Axis]) -> str:
    curve = run.validation_curve()
    if curve is None or run.metric is None:
        return ""
    cold = ("before training", float(curve.y[0])) if run.validations[0].get("step") == 0 else None

    def lines(axis: Axis) -> list[Line]:
        if axis not in curve.x:
            return []
        return [Line("validation", curve.x[axis], curve.y, curve.low, curve.high, marked=True)]

    return card(metric_chart(run.metric), lines, axes, reference=cold)


# -- trees ------------------------------------------------------------------------------------------------------------


def _trees(run: RunFolder) -> Iterator[tuple[str, str]]:
    store = TreeStore(run.trees)
    steps = store.steps()
    if not steps:
        return
    ends = dict.fromkeys((steps[0], steps[-1]))
    stored = {step: list(store.read(step)) for step in ends}
    facts = {step: tree_facts([item.tree for item in items]) for step, items in stored.items() if items}
    if not facts:
        return
    yield "Trees", _tree_table(facts) + _tree_shapes(facts[next(reversed(facts))], next(reversed(facts)))
    samples = [_sample(title, item, first=i == 0) for i, (title, item) in enumerate(_samples(stored))]
    marks = f'<p class="legend">{legend(advantages=True)}</p>' if samples else ""
    yield "Sample trees", marks + "".join(samples)


def _tree_table(facts: Mapping[int, TreeFacts]) -> str:
    rows = [
        ("trees", [f"{f.trees:,}" for f in facts.values()]),
        ("leaves a tree", [plain(f.leaves / f.trees) for f in facts.values()]),
        ("turns a trajectory", [plain(f.depth) for f in facts.values()]),
        ("mean reward", [_or_dash(f.reward, plain) for f in facts.values()]),
        ("trees whose leaves disagree", [_or_dash(f.disagree, share) for f in facts.values()]),
        ("sampled tokens", [count(f.generated_tokens) for f in facts.values()]),
        ("rows over unique tokens", [f"{_or_dash(f.shared, plain)}\u00d7" for f in facts.values()]),
    ]
    return table(["", *(f"step {step}" for step in facts)], ([text(name), *map(text, cells)] for name, cells in rows))


def _tree_shapes(facts: TreeFacts, step: int) -> str:
    leaves = max(facts.leaves, 1)
    shapes = (
        ("How trajectories end", [(s, n, f"{n:,} ({n / leaves:.0%})") for s, n in facts.statuses.items()], 0),
        ("Turns of a trajectory", [(str(d), n, f"{n:,}") for d, n in facts.depths.items()], 5),
        ("Branchings by depth", [("root" if d == 0 else str(d), n, f"{n:,}") for d, n in facts.branchings.items()], 2),
        ("Entropy by depth, nats", [(str(d), e, f"{e:.2f}") for d, e in facts.entropies.items()], 3),
    )
    cards = "".join(
        f'<figure class="chart"><figcaption><b>{name}</b><span>step {step}</span></figcaption>'
        f"{bars([(n, float(v), s) for n, v, s in rows], colour=colour)}</figure>"
        for name, rows, colour in shapes
        if rows
    )
    return f'<div class="charts small">{cards}</div>'


def _samples(stored: Mapping[int, Sequence[StoredTree]]) -> Iterator[tuple[str, StoredTree]]:
    """Up to four trees that say most: rewards that differ, at the start and at the end; all right; all wrong."""
    steps = [step for step, items in stored.items() if items]
    last = [item for item in stored[steps[-1]] if len(item.tree.leaves()) <= _SAMPLE_LEAVES]
    if not last:
        return
    taken = max(last, key=lambda item: interest(item.tree.scored_leaves()))
    yield f"Step {steps[-1]}: the one whose trajectories say most", taken
    others = [item for item in last if item is not taken and item.tree.scored_leaves()]
    right = [item for item in others if min(leaf.reward or 0.0 for leaf in item.tree.scored_leaves()) > 0]
    wrong = [item for item in others if max(leaf.reward or 0.0 for leaf in item.tree.scored_leaves()) <= 0]
    for name, found in (("every trajectory was rewarded", right), ("no trajectory was rewarded", wrong)):
        if found:
            yield f"Step {steps[-1]}: {name}", max(found, key=lambda item: len(item.tree.leaves()))
    first = [item for item in stored[steps[0]] if len(item.tree.leaves()) <= _SAMPLE_LEAVES]
    if len(steps) > 1 and first:
        same = [item for item in first if item.tree.task == taken.tree.task and item.tree.task is not None]
        best = max(same or first, key=lambda item: interest(item.tree.scored_leaves()))
        yield f"Step {steps[0]}, for comparison", best


def _sample(title: str, item: StoredTree, *, first: bool) -> str:
    tree = item.tree
    asked = tree.task.question if tree.task is not None else " ".join(tree.root.observation.split())[:160]
    accepted = tree.task.golden_answers if tree.task is not None else ()
    gold = "".join(f'<span class="gold" dir="auto">{text(answer)}</span>' for answer in accepted)
    answers = f'<p class="answers"><span class="key">accepted</span>{gold}</p>' if gold else ""
    return (
        f'<details class="sample"{" open" if first else ""}><summary><span class="over">{text(title)}</span>'
        f'<span class="asked" dir="auto">{text(asked)}</span></summary>{answers}'
        f"{render_tree(tree, advantages=item.advantages)}</details>"
    )


def _or_dash(value: float, form: Any) -> str:
    return str(form(value)) if math.isfinite(value) else "\u2013"


# -- results, configuration, passport ---------------------------------------------------------------------------------


def _results(run: RunHistory) -> Iterator[tuple[str, str]]:
    if not run.evaluations:
        return
    rows = []
    for name, found in run.evaluations.items():
        metric = str(found.get("metric", "em"))
        keys = dict.fromkeys([metric, *(["f1"] if metric == "em" else []), "reward"])
        rows.append([text(name), text(found.get("n", "")), *(_measured(found, key) for key in [*keys, "f1"][:3])])
    yield "Evaluations", table(["", "n", "metric", "F1 or reward", "reward"], rows)


def _measured(found: Mapping[str, Any], key: str) -> str:
    value, low, high = (found.get(f"{key}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return "\u2013"
    bounds = f" <small>[{low:.3f}, {high:.3f}]</small>" if low is not None and high is not None else ""
    return f"<span>{text(NAMES.get(key, (key,))[0])}</span> {value:.3f}{bounds}"


def _config(run: RunHistory) -> str:
    defaults = {key: default for key, default, _ in documented_options()}
    docs = {key: doc for key, _, doc in documented_options()}
    changed = [(k, v) for k, v in run.options.items() if k not in defaults or v != defaults[k]]
    same = [(k, v) for k, v in run.options.items() if k in defaults and v == defaults[k]]
    return (
        f'{_options(changed, docs)}<details class="more"><summary>{len(same)} options at their defaults</summary>'
        f"{_options(same, docs)}</details>"
    )


def _options(options: Iterable[tuple[str, Any]], docs: Mapping[str, str]) -> str:
    cells = "".join(
        f'<div><dt title="{text(docs.get(key, ""))}">{text(key)}</dt><dd>{text(_written(value))}</dd></div>'
        for key, value in options
    )
    return f'<dl class="options">{cells}</dl>' if cells else ""


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "''" if value == "" else str(value)


def _passport(run: RunHistory) -> Iterator[tuple[str, str]]:
    """Of the training, and of the last validation where there is one."""
    found = [("training", run.passport)]
    found += [("validation", run.validations[-1].get("passport") or {})] if run.validations else []
    parts = [f"<h3>{name}</h3>{_options(flatten(_filled(one)), {})}" for name, one in found if one]
    if parts:
        yield "Passport", "".join(parts)


def _filled(passport: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in passport.items() if value not in ({}, "", None)}
