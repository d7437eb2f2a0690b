"""Credit: from the rewards of leaves to one advantage per turn (or token) of every trajectory.

Pure functions over the groups of a rollout, in float64. A group holds all trees of one prompt; statistics never
cross groups, whatever names they carry, except in the rules that say so (``reinforce_pp``, ``reinforce_pp_baseline``,
``gae`` and ``shrunk_loo(prior="batch")``). Leaves without a reward (failed or pruned) are no part of any statistic,
and child weights are renormalised over the children that lead to a scored leaf.

Equal rewards give exactly zero under every rule that is relative to the group. One scored leaf gives zero too
(``singleton="zero"``), or its raw reward as in the published code (``"raw"``).
"""

from turntree.trainers.credit.base import (
    SIGNALS,
    Advantages,
    CreditRule,
    Explainer,
    TokenTable,
    credit_needs,
    drop_small_groups,
    explained,
    normalise,
)
from turntree.trainers.credit.baselines import shrunk_loo, sibling_baseline, tree_diff, tree_diff_reference
from turntree.trainers.credit.explanation import explain
from turntree.trainers.credit.flat import arpo, dr_grpo, grpo, opo, rloo
from turntree.trainers.credit.returns import gae, reinforce_pp, reinforce_pp_baseline
from turntree.trainers.credit.selection import rejection_sampling
from turntree.trainers.credit.trees import tree_grpo, tree_grpo_reference
from turntree.trainers.credit.values import at2po, at2po_centred, at2po_reference, at2po_values, child_weights

__all__ = [
    "SIGNALS",
    "Advantages",
    "CreditRule",
    "Explainer",
    "TokenTable",
    "arpo",
    "at2po",
    "at2po_centred",
    "at2po_reference",
    "at2po_values",
    "child_weights",
    "credit_needs",
    "dr_grpo",
    "drop_small_groups",
    "explain",
    "explained",
    "gae",
    "grpo",
    "normalise",
    "opo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rejection_sampling",
    "rloo",
    "shrunk_loo",
    "sibling_baseline",
    "tree_diff",
    "tree_diff_reference",
    "tree_grpo",
    "tree_grpo_reference",
]
