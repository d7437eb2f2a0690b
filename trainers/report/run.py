"""What is drawn from a run folder: the curve, one rollout tree, the list of stored trees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.errors import DataError
from turntree.trainers.atomic import atomic_file
from turntree.trainers.report.plots import Series, plot_curve
from turntree.trainers.report.selection import interest, step_trees, tree_at
from turntree.trainers.report.viewer import render_tree_html
from turntree.trainers.run_folder import RunFolder, read_metrics
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Tree

__all__ = ["list_trees", "write_curve", "write_report", "write_tree"]

_REWARDS = 16
"""So many rewards of a tree are listed."""
_QUESTION = 120
"""So many characters of its question."""

NAMES = {
    "em": ("EM", "Exact match", "exact match"),
    "f1": ("F1", "F1", "F1"),
    "success": ("success", "Success", "success"),
    "reward": ("reward", "Reward", "reward"),
}
"""How a metric is called in few words, in a title and on an axis."""


def write_report(path: Path) -> None:
    """Write ``curve.png`` (where a step was finished) and ``tree.html`` (where trees were stored)."""
    run = RunFolder.open(path)
    write_curve(run)
    if TreeStore(run.trees).steps():
        write_tree(path, step=None, index=None, out=None)


def write_curve(run: RunFolder) -> None:
    """The task's metric on the validation tasks against generated tokens, with 95 % intervals.

    For question answering that is EM. A run without validation gets the EM of its rollouts, or their score.
    """
    points = list(_validations(run))
    if not points:
        _write_rollout_curve(run)
        return
    metric = points[0].get("metric", "em")
    _, title, axis = NAMES.get(metric, (metric, metric.capitalize(), metric))
    series = Series(
        label="validation",
        x=[p["generated_tokens"] for p in points],
        y=[_number(p[metric]) for p in points],
        low=[_number(p[f"{metric}_low"]) for p in points],
        high=[_number(p[f"{metric}_high"]) for p in points],
    )
    cold = points[0][metric] if points[0]["step"] == 0 else None
    unseen = "questions" if metric == "em" else "tasks"
    plot_curve(run.curve_file, [series], cold_start=cold, title=f"{title} on unseen {unseen}", y_label=axis)


def _write_rollout_curve(run: RunFolder) -> None:
    rows = read_metrics(run.metrics_file)
    keys = {"tree/reward/em": "em", "tree/reward/success": "success", "critic/score/mean": "reward"}
    key = next((key for key in keys if any(key in row for row in rows)), None)
    if key is None:
        return
    _, title, axis = NAMES[keys[key]]
    rows = [row for row in rows if key in row]
    x, y = ([_number(row[name]) for row in rows] for name in ("total/generated_tokens", key))
    plot_curve(run.curve_file, [Series("rollouts", x, y)], title=f"{title} of the training rollouts", y_label=axis)


def _validations(run: RunFolder) -> Iterator[dict[str, Any]]:
    for file in sorted((run.path / "validation").glob("step-*/evaluation.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def _number(value: float | None) -> float:
    """A number of a result file; those that do not exist are null there."""
    return float("nan") if value is None else value


def list_trees(path: Path) -> Iterator[str]:
    """One line a stored tree: step, index, leaves, rewards, question; one that says why where a step cannot be read."""
    store = TreeStore(RunFolder.open(path).trees)
    for step in store.steps():
        try:
            for index, stored in enumerate(store.read(step)):
                yield f"step {step}  --prompt {index}  {_in_a_line(stored.tree)}"
        except DataError as error:
            yield f"step {step}  {error}"


def _in_a_line(tree: Tree) -> str:
    rewards = [f"{leaf.reward:g}" for leaf in tree.scored_leaves()]
    shown = [*rewards[:_REWARDS], *([f"and {len(rewards) - _REWARDS} more"] if len(rewards) > _REWARDS else [])]
    asked = " ".join((tree.task.question if tree.task is not None else tree.root.observation).split())
    question = asked if len(asked) <= _QUESTION else f"{asked[:_QUESTION]}..."
    return f"leaves {len(tree.leaves())}  rewards [{' '.join(shown)}]  {question}"


def write_tree(path: Path, *, step: int | None, index: int | None, out: Path | None) -> Path:
    """Draw one stored tree as HTML and return the file.

    Without ``step`` the newest one; without ``index`` the tree of that step that says most: rewards that differ, then
    the most leaves.

    Raises:
        DataError: the run stored no such tree.
    """
    trees = step_trees(path, step)
    chosen = max(trees, key=lambda t: interest(t.tree.scored_leaves())) if index is None else tree_at(trees, index)
    title = f"Rollout tree of step {chosen.step}"
    html = render_tree_html(chosen.tree, advantages=chosen.advantages, title=title)
    target = out or RunFolder(path).tree_file
    with atomic_file(target) as handle:
        handle.write(html.encode())
    return target
