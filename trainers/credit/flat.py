"""Credit of whole trajectories: one number a leaf, relative to the leaves of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from turntree.trainers.credit.base import (
    EPS,
    Advantages,
    Baseline,
    FloatArray,
    Singleton,
    Std,
    all_equal,
    check,
    count_leaves,
    explained,
    normalise,
    per_leaf,
    per_node,
    rewards_of,
    sum_leaves,
)
from turntree.trainers.credit.text import fraction, names, num
from turntree.trainers.tree import Group, Node

Shared = Literal["hard", "soft"]


def explain_grpo(
    group: Group,
    *,
    std: Std = "unbiased",
    singleton: Singleton = "zero",
    baseline: Baseline = "mean",
    eps: float = EPS,
) -> list[str]:
    leaves, name = group.scored_leaves(), names(group)
    rewards = rewards_of(leaves)
    results = normalise(rewards, std=std, singleton=singleton, baseline=baseline, eps=eps)
    over = "r - mean" if std == "none" else "(r - mean) / (std + eps)"
    who = f"over {len(leaves)} leaves" if baseline == "mean" else f"of the {max(len(leaves) - 1, 0)} other leaves"
    lines = [f"A(l) = {over} {who}" + ("" if std == "none" else f", std {std}")]
    for i, (leaf, a) in enumerate(zip(leaves, results, strict=True)):
        if baseline == "leave_one_out" and len(leaves) > 1:
            others = num(np.delete(rewards, i).mean())
            lines.append(f"  A({name[leaf]}): {rewards[i]:g} against {others} of the others = {num(a)}")
        else:
            lines.append(f"  A({name[leaf]}) = {fraction(rewards[i], rewards, std, eps, a)}")
    return lines


@explained(explain_grpo)
def grpo(
    groups: Sequence[Group],
    *,
    std: Std = "unbiased",
    singleton: Singleton = "zero",
    baseline: Baseline = "mean",
    eps: float = EPS,
) -> Advantages:
    """GRPO (DeepSeekMath, Eq. 3): A(l) = (r(l) - mean) / (std + eps) over all leaves of the prompt.

    ``std="none"`` is :func:`dr_grpo`; with ``baseline="leave_one_out"`` it is :func:`rloo`.
    """
    return per_leaf(
        groups,
        lambda g: normalise(rewards_of(g.scored_leaves()), std=std, singleton=singleton, baseline=baseline, eps=eps),
    )


@explained(partial(explain_grpo, std="none"))
def dr_grpo(groups: Sequence[Group], *, singleton: Singleton = "zero") -> Advantages:
    """Dr. GRPO (arXiv 2503.20783): A(l) = r(l) - mean over all leaves of the prompt."""
    return grpo(groups, std="none", singleton=singleton)


@explained(partial(explain_grpo, std="none", baseline="leave_one_out"))
def rloo(groups: Sequence[Group], *, singleton: Singleton = "zero") -> Advantages:
    """RLOO (arXiv 2402.14740): A(l) = r(l) - mean of the prompt's other leaves = (r - mean) n / (n - 1)."""
    return grpo(groups, std="none", baseline="leave_one_out", singleton=singleton)


# OPO


def _lengths(leaves: Sequence[Node]) -> FloatArray:
    return np.array([sum(len(n.turn_ids) for n in leaf.trajectory()) for leaf in leaves], dtype=np.float64)


def _opo_baseline(rewards: FloatArray, lengths: FloatArray) -> float:
    return float(np.average(rewards, weights=lengths if lengths.sum() > 0.0 else None))


def _opo(group: Group, *, singleton: Singleton) -> FloatArray:
    leaves = group.scored_leaves()
    rewards = rewards_of(leaves)
    if all_equal(rewards):
        return normalise(rewards, std="none", singleton=singleton)
    out: FloatArray = rewards - _opo_baseline(rewards, _lengths(leaves))
    return out


def _explain_opo(group: Group, *, singleton: Singleton = "zero") -> list[str]:
    leaves, name = group.scored_leaves(), names(group)
    rewards, lengths = rewards_of(leaves), _lengths(leaves)
    lines = [f"A(l) = r - b, b = sum of length x r / sum of lengths over {len(leaves)} leaves"]
    if not all_equal(rewards):
        terms = " + ".join(f"{n:g} x {r:g}" for n, r in zip(lengths, rewards, strict=True))
        lines.append(f"  b = ({terms}) / {lengths.sum():g} = {num(_opo_baseline(rewards, lengths))}")
    for leaf, r, a in zip(leaves, rewards, _opo(group, singleton=singleton), strict=True):
        lines.append(f"  A({name[leaf]}) = {r:g} - b = {num(a)}")
    return lines


@explained(_explain_opo)
def opo(groups: Sequence[Group], *, singleton: Singleton = "zero") -> Advantages:
    """OPO (arXiv 2505.23585): A(l) = r(l) - sum(length r) / sum(length), a trajectory's length in sampled tokens.

    The baseline of least variance if a trajectory's squared gradient grows with its length. Without any token it is
    the plain mean.
    """
    check("singleton", singleton, ("zero", "raw"))
    return per_leaf(groups, lambda g: _opo(g, singleton=singleton))


# ARPO


def _arpo(group: Group, *, std: Std, singleton: Singleton, eps: float) -> dict[Node, float]:
    leaves = group.scored_leaves()
    sums = sum_leaves(leaves, normalise(rewards_of(leaves), std=std, singleton=singleton, eps=eps))
    return {node: sums[node] / n for node, n in count_leaves(leaves).items()}


def _explain_arpo(
    group: Group,
    *,
    shared: Shared = "hard",
    std: Std = "unbiased",
    singleton: Singleton = "zero",
    eps: float = EPS,
) -> list[str]:
    lines = explain_grpo(group, std=std, singleton=singleton, eps=eps)
    if shared == "soft":
        return lines
    name, below = names(group), count_leaves(group.scored_leaves())
    means = _arpo(group, std=std, singleton=singleton, eps=eps)
    lines.append("A(n) = mean of A(l) over the leaves l below turn n")
    turns = [n for n in name if n in below and n.parent is not None and not n.is_leaf]
    return [*lines, *(f"  A({name[n]}) = mean of {below[n]} = {num(means[n])}" for n in turns)]


@explained(_explain_arpo)
def arpo(
    groups: Sequence[Group],
    *,
    shared: Shared = "hard",
    std: Std = "unbiased",
    singleton: Singleton = "zero",
    eps: float = EPS,
) -> Advantages:
    """ARPO (arXiv 2507.19849): GRPO, with the mean of their leaves' advantages for tokens that leaves share.

    ``shared="soft"``: shared tokens keep each leaf's own advantage, which is plain :func:`grpo` (what its published
    code trains with).
    """
    check("shared", shared, ("hard", "soft"))
    if shared == "soft":
        return grpo(groups, std=std, singleton=singleton, eps=eps)
    return per_node(groups, lambda g: _arpo(g, std=std, singleton=singleton, eps=eps))
