"""What is drawn from a run folder: the curve, one rollout tree, the list of stored trees."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turntree.trainers.atomic import atomic_file
from turntree.trainers.report.plots import Series, plot_curve
from turntree.trainers.report.selection import interest, step_trees, tree_at
from turntree.trainers.report.viewer import render_tree_html
from turntree.trainers.run_folder import RunFolder, read_metrics
from turntree.trainers.store import TreeStore

__all__ = ["list_trees", "step_note", "write_curve", "write_report", "write_tree"]


def step_note(metrics: Mapping[str, float]) -> str:
    """A step in a few words, for progress bars and piped output."""
    parts = [
        f"reward {metrics['critic/rewards/mean']:.3f}",
        f"turns {metrics['num_turns/mean']:.2f}",
        f"entropy {metrics['tree/entropy']:.3f}",
        f"tokens {metrics['total/generated_tokens']:,.0f}",
    ]
    if "validation/em" in metrics:
        parts.append(f"validation EM {metrics['validation/em']:.3f}")
    return "  ".join(parts)


def write_report(path: Path) -> None:
    """Write ``curve.png`` (where a step was finished) and ``tree.html`` (where trees were stored)."""
    run = RunFolder.open(path)
    write_curve(run)
    if TreeStore(run.trees).steps():
        write_tree(path, step=None, index=None, out=None)


def write_curve(run: RunFolder) -> None:
    """EM on the validation questions against generated tokens, with 95 % intervals.

    A run without validation gets the EM of its rollouts.
    """
    points = list(_validations(run))
    if not points:
        _write_rollout_curve(run)
        return
    series = Series(
        label="validation",
        x=[p["generated_tokens"] for p in points],
        y=[_number(p["em"]) for p in points],
        low=[_number(p["em_low"]) for p in points],
        high=[_number(p["em_high"]) for p in points],
    )
    cold = points[0]["em"] if points[0]["step"] == 0 else None
    plot_curve(run.curve_file, [series], cold_start=cold, title="Exact match on unseen questions")


def _write_rollout_curve(run: RunFolder) -> None:
    rows = [row for row in read_metrics(run.metrics_file) if "tree/reward/em" in row]
    if rows:
        x, y = ([_number(row[key]) for row in rows] for key in ("total/generated_tokens", "tree/reward/em"))
        plot_curve(run.curve_file, [Series("rollouts", x, y)], title="Exact match of the training rollouts")


def _validations(run: RunFolder) -> Iterator[dict[str, Any]]:
    for file in sorted((run.path / "validation").glob("step-*/evaluation.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def _number(value: float | None) -> float:
    """A number of a result file; those that do not exist are null there."""
    return float("nan") if value is None else value


def list_trees(path: Path) -> Iterator[str]:
    """One line a stored tree: step, index, leaves, rewards, question."""
    store = TreeStore(RunFolder.open(path).trees)
    for step in store.steps():
        for index, stored in enumerate(store.read(step)):
            rewards = " ".join(f"{leaf.reward:g}" for leaf in stored.tree.scored_leaves())
            question = stored.tree.task.question if stored.tree.task is not None else ""
            yield f"step {step}  --prompt {index}  leaves {len(stored.tree.leaves())}  rewards [{rewards}]  {question}"


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
