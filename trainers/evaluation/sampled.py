"""Numbers of questions that were played several times: samples, and trees beside the best of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turntree.envs.metrics import Normalizer
from turntree.trainers.evaluation.choosing import choose, majority, pass_at_k, powers, within_tokens
from turntree.trainers.evaluation.rows import EvalRow
from turntree.trainers.evaluation.summary import interval_json, mean
from turntree.trainers.stats import bootstrap_mean, paired_difference, share_interval

__all__ = ["sample_summary", "tree_summary"]

Rows = Sequence[EvalRow]


def sample_summary(
    questions: Sequence[Rows], *, metric: str, normalizer: Normalizer = "squad", seed: int = 0
) -> dict[str, Any]:
    """avg@k, pass@k and maj@k of samples, one sequence of rows a question, with intervals over questions.

    avg@k is over all samples; pass@k is the unbiased estimate from all of them, for k = 1, 2, 4, ...; a sample counts
    as right where its score is 1. maj@k asks the first k samples. Failed samples take no part; a question with fewer
    than k others is left out of ``pass@k`` and ``maj@k`` (see ``n``).
    """
    live = [[row for row in rows if not row.failed] for rows in questions]
    scored = [rows for rows in live if rows]
    most = max((len(rows) for rows in questions), default=0)
    out: dict[str, Any] = {
        "samples": most,
        "n": len(scored),
        "failed": sum(row.failed for rows in questions for row in rows),
        "generated_tokens_mean": mean(float(sum(r.generated_tokens for r in rows)) for rows in scored),
    }
    for name in dict.fromkeys((metric, "f1") if metric == "em" else (metric,)):
        read = _reader(name, metric)
        values = [v for rows in scored if (v := mean(x for r in rows if (x := read(r)) is not None)) is not None]
        title = f"avg@{most}" if name == metric else f"avg@{most}_{name}"
        out[title] = _spread(name, values, seed)
    read = _reader(metric, metric)
    for k in powers(most):
        enough = [rows for rows in scored if len(rows) >= k]
        right = [(len(rows), sum(read(row) == 1.0 for row in rows)) for rows in enough]
        out[f"pass@{k}"] = _spread(metric, [pass_at_k(n, c, k) for n, c in right], seed)
        if k > 1 and metric == "em":
            votes = [_voted(rows[:k], read, normalizer) for rows in enough]
            out[f"maj@{k}"] = _spread(metric, votes, seed)
    return out


def tree_summary(
    trees: Sequence[Rows],
    samples: Sequence[Rows],
    *,
    how: Sequence[str],
    metric: str,
    normalizer: Normalizer = "squad",
    seed: int = 0,
) -> dict[str, Any]:
    """A leaf of each tree, beside a sample of each question, chosen in the same ways.

    ``trees`` and ``samples`` hold the rows of the same questions in the same order. The best of samples is given twice:
    of as many samples as the tree has leaves (``best_of_leaves``), and of those that fit into the tokens that the tree
    took (``best_of_tokens``). ``tree_minus_tokens`` is the paired difference at equal tokens. ``any`` is the share of
    trees with a right leaf, which no choice can exceed.
    """
    pairs = [(tree, flat) for tree, flat in zip(trees, samples, strict=True) if _alive(tree) and _alive(flat)]
    budgets: dict[str, Callable[[Rows, Rows], Rows]] = {
        "tree": lambda tree, flat: tree,
        "best_of_leaves": lambda tree, flat: flat[: len(tree)],
        "best_of_tokens": lambda tree, flat: within_tokens(flat, tree[0].spent_tokens or 0),
    }
    read = _reader(metric, metric)
    out: dict[str, Any] = {"n": len(pairs), "failed": len(trees) - len(pairs)}
    chosen: dict[tuple[str, str], list[float]] = {}
    for name, take in budgets.items():
        taken = [rows for tree, flat in pairs if (rows := take(tree, flat)) is not None]
        spent = [float(_spent(rows, shared=name == "tree")) for rows in taken]
        out[name] = {
            "leaves": mean(float(len(rows)) for rows in taken),
            "generated_tokens": mean(spent),
            "any": interval_json(
                bootstrap_mean([float(any(read(r) == 1.0 for r in rows)) for rows in taken], seed=seed)
            ),
        }
        for choice in how:
            picked = [_picked(rows, choice, normalizer) for rows in taken]
            out[name][choice] = _scores(picked, metric, seed)
            chosen[name, choice] = [float(read(row) or 0.0) for row in picked]
    out["tree_minus_tokens"] = {}
    for choice in how:
        found = paired_difference(chosen["best_of_tokens", choice], chosen["tree", choice], seed=seed)
        counts = {"wins": found.wins, "losses": found.losses, "ties": found.ties}
        out["tree_minus_tokens"][choice] = {**interval_json(found.difference), **counts}
    return out


def _alive(rows: Rows) -> bool:
    return any(not row.failed for row in rows)


def _spent(rows: Rows, *, shared: bool) -> int:
    return (rows[0].spent_tokens or 0) if shared else sum(row.generated_tokens for row in rows)


def _picked(rows: Rows, how: str, normalizer: Normalizer) -> EvalRow:
    """The chosen row; the first one, failed as it is, where a short budget held no other."""
    place = choose(rows, how, normalizer=normalizer)
    return rows[0] if place is None else rows[place]


def _scores(rows: Rows, metric: str, seed: int) -> Mapping[str, Any]:
    names = ("em", "f1") if metric == "em" else (metric,)
    values = {name: [float(_reader(name, metric)(row) or 0.0) for row in rows] for name in names}
    return {name: _spread(name, found, seed) for name, found in values.items()}


def _reader(name: str, metric: str) -> Callable[[EvalRow], float | None]:
    return lambda row: row.score if name == metric else getattr(row, name)


def _voted(rows: Rows, read: Callable[[EvalRow], float | None], normalizer: Normalizer) -> float:
    place = majority(rows, normalizer=normalizer)
    return 0.0 if place is None else float(read(rows[place]) or 0.0)


def _spread(name: str, values: Sequence[float], seed: int) -> dict[str, Any]:
    """Mean and interval; Wilson's where an EM is 0 or 1 everywhere, of which a bootstrap could make a point."""
    if name == "em" and all(value in (0.0, 1.0) for value in values):
        return interval_json(share_interval(values))
    return interval_json(bootstrap_mean(values, seed=seed))
