"""Numbers of stored trees: their shape, how they ended, what they earned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from turntree.trainers.tree import Tree

__all__ = ["TreeFacts", "tree_facts"]


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """Of the trees of one step.

    ``statuses``, ``depths``, ``branchings``: counts of leaves by status, of leaves by depth, and of children beyond the
    first by the depth of their parent. ``entropies``: mean negative log-prob of turns by depth, nats. ``disagree``:
    share of the trees with two scored leaves or more whose rewards differ. ``shared``: tokens of one row a scored leaf
    over those of the trees, each once. Means of nothing are NaN.
    """

    trees: int
    leaves: int
    turns: int
    reward: float
    disagree: float
    shared: float
    generated_tokens: int
    statuses: dict[str, int]
    depths: dict[int, int]
    branchings: dict[int, int]
    entropies: dict[int, float]

    @property
    def depth(self) -> float:
        """Mean depth of the leaves, in turns."""
        return sum(d * n for d, n in self.depths.items()) / self.leaves if self.leaves else math.nan


def tree_facts(trees: Sequence[Tree]) -> TreeFacts:
    """Count the trees of one step."""
    leaves = [leaf for tree in trees for leaf in tree.leaves()]
    nodes = [node for tree in trees for node in tree.nodes()]
    turns = [node for node in nodes if node.parent is not None]
    scored = [[float(leaf.reward or 0.0) for leaf in tree.scored_leaves()] for tree in trees]
    branchings: Counter[int] = Counter()
    entropies: dict[int, list[float]] = {}
    for node in nodes:
        if len(node.children) > 1:
            branchings[node.depth] += len(node.children) - 1
    for node in turns:
        if node.turn_ids and math.isfinite(node.entropy):
            entropies.setdefault(node.depth, []).append(node.entropy)
    return TreeFacts(
        trees=len(trees),
        leaves=len(leaves),
        turns=len(turns),
        reward=_mean(reward for rewards in scored for reward in rewards),
        disagree=_mean(float(len(set(rewards)) > 1) for rewards in scored if len(rewards) > 1),
        shared=_shared(trees),
        generated_tokens=sum(tree.generated_tokens for tree in trees),
        statuses=dict(Counter(leaf.status for leaf in leaves)),
        depths=dict(sorted(Counter(leaf.depth for leaf in leaves).items())),
        branchings=dict(sorted(branchings.items())),
        entropies={depth: fmean(values) for depth, values in sorted(entropies.items())},
    )


def _shared(trees: Iterable[Tree]) -> float:
    rows, unique = 0, 0
    for tree in trees:
        seen = set()
        for leaf in tree.scored_leaves():
            for node in (tree.root, *leaf.trajectory()):
                size = len(node.turn_ids) + len(node.observation_ids)
                rows += size
                if node not in seen:
                    seen.add(node)
                    unique += size
    return rows / unique if unique else math.nan


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fmean(listed) if listed else math.nan
