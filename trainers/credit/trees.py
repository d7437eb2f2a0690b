"""Tree-GRPO: credit of trajectories relative to their prompt and to their own tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from turntree.trainers.credit.base import (
    EPS,
    Advantages,
    FloatArray,
    Singleton,
    check,
    explained,
    normalise,
    per_leaf,
    rewards_of,
)
from turntree.trainers.credit.text import fraction, names, num
from turntree.trainers.tree import Group

Estimator = Literal["sum", "inter", "intra", "2norm"]


def _slices(group: Group) -> list[slice]:
    """Where each tree's leaves stand among those of the group."""
    ends = np.cumsum([0, *(len(tree.scored_leaves()) for tree in group.trees)]).tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _intra(group: Group, values: FloatArray, *, singleton: Singleton, eps: float) -> FloatArray:
    """``values`` ``[leaves of the group]`` normalised within each tree."""
    out = np.zeros_like(values)
    for rows in _slices(group):
        out[rows] = normalise(values[rows], singleton=singleton, eps=eps)
    return out


def _parts(
    group: Group, *, estimator: Estimator, singleton: Singleton, eps: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Inter-tree part, what is normalised within each tree, and the intra-tree part, each ``[leaves]``."""
    rewards = rewards_of(group.scored_leaves())
    inter = normalise(rewards, singleton=singleton, eps=eps)
    base = inter if estimator == "2norm" else rewards
    return inter, base, _intra(group, base, singleton=singleton, eps=eps)


def _total(inter: FloatArray, intra: FloatArray, estimator: Estimator) -> FloatArray:
    return {"sum": inter + intra, "inter": inter, "intra": intra, "2norm": intra}[estimator]


def _tree_grpo(group: Group, *, estimator: Estimator, singleton: Singleton, eps: float) -> FloatArray:
    inter, _, intra = _parts(group, estimator=estimator, singleton=singleton, eps=eps)
    return _total(inter, intra, estimator)


def _explain_tree_grpo(
    group: Group, *, estimator: Estimator = "sum", singleton: Singleton = "zero", eps: float = EPS
) -> list[str]:
    name, leaves = names(group), group.scored_leaves()
    rewards = rewards_of(leaves)
    inter, base, intra = _parts(group, estimator=estimator, singleton=singleton, eps=eps)
    total = _total(inter, intra, estimator)
    formula = {"sum": "A_inter + A_intra", "inter": "A_inter", "intra": "A_intra", "2norm": "A_inter, then per tree"}
    lines = [f"A(l) = {formula[estimator]}, std unbiased"]
    for rows in _slices(group):
        for i in range(rows.start, rows.stop):
            lines += [
                f"  A({name[leaves[i]]}) = {num(total[i])}",
                f"    inter: {fraction(rewards[i], rewards, 'unbiased', eps, inter[i])}",
                f"    intra: {fraction(base[i], base[rows], 'unbiased', eps, intra[i])}",
            ]
    return lines


@explained(_explain_tree_grpo)
def tree_grpo(
    groups: Sequence[Group], *, estimator: Estimator = "sum", singleton: Singleton = "zero", eps: float = EPS
) -> Advantages:
    """Tree-GRPO: A(l) = A_inter(l) + A_intra(l), the same for all turns of the trajectory of leaf l.

    A_inter = (r - mean_P) / (std_P + eps) over all leaves of the prompt; A_intra = (r - mean_T) / (std_T + eps)
    over the leaves of the leaf's own tree; deviations are unbiased. ``estimator`` takes only one of the two, or
    ``"2norm"``: A_inter normalised once more within each tree.
    """
    check("estimator", estimator, ("sum", "inter", "intra", "2norm"))
    return per_leaf(groups, lambda g: _tree_grpo(g, estimator=estimator, singleton=singleton, eps=eps))


@explained(partial(_explain_tree_grpo, singleton="raw"))
def tree_grpo_reference(groups: Sequence[Group]) -> Advantages:
    """:func:`tree_grpo` as published: a group or tree with one leaf keeps its raw reward."""
    return tree_grpo(groups, singleton="raw")
