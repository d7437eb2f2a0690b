"""Credit of whole trajectories: one number a leaf, relative to the leaves of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from turntree.trainers.credit.base import (
    EPS,
    Advantages,
    Baseline,
    Singleton,
    Std,
    normalise,
    per_leaf,
    rewards_of,
)
from turntree.trainers.tree import Group


def grpo(
    groups: Sequence[Group],
    *,
    std: Std = "unbiased",
    singleton: Singleton = "zero",
    baseline: Baseline = "mean",
    eps: float = EPS,
) -> Advantages:
    """GRPO (DeepSeekMath, Eq. 3): A(l) = (r(l) - mean) / (std + eps) over all leaves of the prompt.

    ``std="none"`` is Dr. GRPO; with ``baseline="leave_one_out"`` it is RLOO.
    """
    return per_leaf(
        groups,
        lambda g: normalise(rewards_of(g.scored_leaves()), std=std, singleton=singleton, baseline=baseline, eps=eps),
    )
