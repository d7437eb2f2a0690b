"""Which numbers a report draws, and how: one card a number, over each of the budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turntree.trainers.report.history import AXES, Axis, Curve, RunHistory, trailing_mean
from turntree.trainers.report.html import text
from turntree.trainers.report.run import NAMES
from turntree.trainers.report.svg import Format, Line, count, duration, line_chart, plain, share

__all__ = ["CHARTS", "Chart", "axis_switch", "card", "metric_chart", "run_lines", "x_format"]


@dataclass(frozen=True, slots=True)
class Chart:
    """One card: a title, what it says, and its metrics by their word in the legend.

    A metric may be several keys with bars between, of which the first that was measured counts.
    """

    title: str
    about: str
    keys: Mapping[str, str]
    form: Format = plain
    from_zero: bool = False

    def curves(self, run: RunHistory) -> dict[str, Curve]:
        """By word in the legend, those that the run has."""
        found = {name: run.curve(*keys.split("|")) for name, keys in self.keys.items()}
        return {name: curve for name, curve in found.items() if curve is not None}


CHARTS: dict[str, tuple[Chart, ...]] = {
    "Rollouts": (
        Chart("Reward", "mean over scored leaves", {"reward": "critic/rewards/mean"}),
        Chart(
            "Right answers",
            "share of the rollouts' scored leaves",
            {"right": "tree/reward/em|tree/reward/success"},
            share,
            from_zero=True,
        ),
        Chart("Turns", "model turns of a trajectory", {"turns": "num_turns/mean"}, from_zero=True),
        Chart("Length", "tokens after the prompt, observations included", {"tokens": "response_length/mean"}, count),
        Chart("Answered", "share of scored leaves that answered", {"answered": "tree/answered"}, share, from_zero=True),
        Chart("Entropy", "mean negative log-prob over turns, nats", {"entropy": "tree/entropy"}, from_zero=True),
    ),
    "Trees": (
        Chart(
            "Groups that teach", "share whose rewards differ", {"mixed": "tree/mixed_groups"}, share, from_zero=True
        ),
        Chart(
            "Sibling variance",
            "variance of reward among the children of a node",
            {"variance": "tree/sibling_reward_variance"},
            from_zero=True,
        ),
        Chart(
            "Tokens that are trained on",
            "each once, and as one row a leaf",
            {"unique": "tree/unique_tokens", "rows": "tree/row_tokens"},
            count,
            from_zero=True,
        ),
    ),
    "Updates": (
        Chart("Loss", "what was minimised", {"loss": "actor/loss|loss"}),
        Chart("Gradient norm", "before clipping", {"norm": "actor/grad_norm"}, from_zero=True),
        Chart("Clipped", "share of occurrences that clip", {"clipped": "actor/pg_clipfrac"}, share, from_zero=True),
        Chart("KL to the old policy", "mean of old - current log-prob", {"KL": "actor/ppo_kl"}),
        Chart("Engine against trainer", "abs difference of log-probs, nats", {"gap": "mismatch/mean"}, from_zero=True),
    ),
    "Costs of a step": (
        Chart("Generated tokens", "all of the engine's", {"tokens": "budget/generated_tokens"}, count, from_zero=True),
        Chart("Tool calls", "of turns that were answered", {"calls": "budget/tool_calls"}, count, from_zero=True),
        Chart(
            "Seconds",
            "by stage",
            {"rollout": "timing_s/gen", "scoring": "timing_s/score", "update": "timing_s/update_actor"},
            duration,
            from_zero=True,
        ),
    ),
}  # fmt: skip
"""By section, in the order in which they are read."""


def metric_chart(metric: str) -> Chart:
    """The card of a validation metric."""
    title = NAMES.get(metric, (metric, metric.capitalize(), metric))[1]
    form = share if metric in _SHARES else plain
    return Chart(f"{title} on validation", "with 95 % intervals", {}, form, from_zero=True)


_SHARES = ("em", "f1", "success", "sub_em", "completeness")


def x_format(axis: Axis) -> Format:
    """How the budget of an axis is written."""
    return duration if axis == "time" else count


def axis_switch(axes: Sequence[Axis]) -> tuple[str, str]:
    """``(inputs, labels)``: radio inputs for the start of the page, and their labels; no script is needed.

    The style shows what is of the chosen axis (``class="by by-tokens"``) and hides the others.
    """
    inputs = "".join(
        f'<input type="radio" name="axis" id="axis-{axis}" class="switch"{" checked" if i == 0 else ""}>'
        for i, axis in enumerate(axes)
    )
    labels = "".join(f'<label for="axis-{axis}">{text(AXES[axis][1])}</label>' for axis in axes)
    return inputs, f'<div class="axes" role="group" aria-label="budget axis"><span>over</span>{labels}</div>'


def card(
    chart: Chart,
    lines: Callable[[Axis], Sequence[Line]],
    axes: Sequence[Axis],
    *,
    reference: tuple[str, float] | None = None,
    large: bool = False,
) -> str:
    """The card of a chart over every axis; empty where nothing can be drawn. ``lines(axis)`` gives what is drawn."""
    drawn: list[str] = []
    shown: Sequence[Line] = ()
    for axis in axes:
        found = lines(axis)
        picture = line_chart(
            found,
            x_label=AXES[axis][0],
            x_format=x_format(axis),
            y_format=chart.form,
            from_zero=chart.from_zero,
            reference=reference,
            large=large,
        )
        if picture:
            shown = found
            drawn.append(f'<div class="by by-{axis}">{picture}</div>')
    if not drawn:
        return ""
    legend = "".join(_entry(line, chart.form) for line in shown)
    return (
        f'<figure class="chart"><figcaption><b>{text(chart.title)}</b><span>{text(chart.about)}</span></figcaption>'
        f'<ul class="names">{legend}</ul>{"".join(drawn)}</figure>'
    )


def _entry(line: Line, form: Format) -> str:
    finite = line.y[np.isfinite(line.y)]
    last = f" <b>{text(form(float(finite[-1])))}</b>" if finite.size else ""
    return f'<li class="c{line.colour % 7}"><i></i>{text(line.label)}{last}</li>'


def run_lines(chart: Chart, run: RunHistory, axis: Axis) -> Iterator[Line]:
    """The lines of one run: a trailing mean over a twentieth of the steps, the values themselves faint below."""
    for colour, (name, curve) in enumerate(chart.curves(run).items()):
        if axis not in curve.x:
            continue
        x, window = curve.x[axis], max(1, len(curve.y) // 20)
        faint = ((x, curve.y),) if window > 1 else ()
        yield Line(name, x, trailing_mean(curve.y, window), faint=faint, colour=colour)
