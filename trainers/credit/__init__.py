"""Credit: from the rewards of leaves to one advantage per turn of every trajectory.

Pure functions over the groups of a rollout, in float64. A group holds all trees of one prompt; statistics never
cross groups, whatever names they carry. Leaves without a reward (failed or pruned) are no part of any statistic,
and child weights are renormalised over the children that lead to a scored leaf.

Equal rewards give exactly zero. One scored leaf gives zero too (``singleton="zero"``), or its raw reward as in
the published code (``"raw"``).
"""

from turntree.trainers.credit.base import (
    SIGNALS,
    Advantages,
    CreditRule,
    TokenTable,
    credit_needs,
    drop_small_groups,
    normalise,
)
from turntree.trainers.credit.explanation import explain
from turntree.trainers.credit.flat import grpo
from turntree.trainers.credit.trees import tree_grpo, tree_grpo_reference
from turntree.trainers.credit.values import at2po, at2po_reference, at2po_values, child_weights

__all__ = [
    "Advantages",
    "CreditRule",
    "SIGNALS",
    "TokenTable",
    "at2po",
    "at2po_reference",
    "at2po_values",
    "child_weights",
    "credit_needs",
    "drop_small_groups",
    "explain",
    "grpo",
    "normalise",
    "tree_grpo",
    "tree_grpo_reference",
]
