"""Tree-GRPO: credit of trajectories relative to their prompt and to their own tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turntree.trainers.credit.base import (
    EPS,
    Advantages,
    FloatArray,
    Singleton,
    check,
    normalise,
    per_leaf,
    rewards_of,
)
from turntree.trainers.tree import Group

Estimator = Literal["sum", "inter", "intra", "2norm"]


def _intra(group: Group, values: FloatArray, *, singleton: Singleton, eps: float) -> FloatArray:
    """``values`` ``[leaves of the group]`` normalised within each tree."""
    parts, start = [], 0
    for tree in group.trees:
        stop = start + len(tree.scored_leaves())
        parts.append(normalise(values[start:stop], singleton=singleton, eps=eps))
        start = stop
    return np.concatenate(parts) if parts else np.zeros(0)


def _tree_grpo(group: Group, *, estimator: Estimator, singleton: Singleton, eps: float) -> FloatArray:
    rewards = rewards_of(group.scored_leaves())
    inter = normalise(rewards, singleton=singleton, eps=eps)
    if estimator == "inter":
        return inter
    if estimator == "2norm":
        return _intra(group, inter, singleton=singleton, eps=eps)
    intra = _intra(group, rewards, singleton=singleton, eps=eps)
    return intra if estimator == "intra" else inter + intra


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


def tree_grpo_reference(groups: Sequence[Group]) -> Advantages:
    """:func:`tree_grpo` as published: a group or tree with one leaf keeps its raw reward."""
    return tree_grpo(groups, singleton="raw")
