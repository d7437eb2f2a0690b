"""Two rules for turntree: grow where the fewest trajectories passed, and give shared turns less credit.

turntree train algorithm.expansion=least_visited:least_visited algorithm.credit=least_visited:rarity ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from turntree.trainers.credit import Advantages
from turntree.trainers.expansion import Expansion
from turntree.trainers.tree import Group, Node, Tree


def visits(leaves: Sequence[Node]) -> Counter[Node]:
    """How many of the trajectories that end in ``leaves`` pass through each turn."""
    return Counter(node for leaf in leaves for node in leaf.trajectory())


def least_visited(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    """A new child for each of the k open turns with the fewest trajectories, each pick counted at once."""
    counts = visits(tree.leaves())
    counts[tree.root] = len(tree.leaves())
    places = [n for n in tree.nodes() if not n.is_leaf and n.branchable]
    picks = []
    for _ in range(k if places else 0):
        node = min(places, key=lambda n: (counts[n], rng.random()))  # equal counts: at random
        picks.append(Expansion(node, node, float(counts[node]), f"visited {counts[node]} times"))
        counts[node] += 1
    return picks


def rarity(groups: Sequence[Group], *, power: float = 0.5) -> Advantages:
    """A(l, t) = (r(l) - mean r) / visits(t)^power: what many trajectories share gets less from each of them."""
    values = []
    for group in groups:
        leaves = group.scored_leaves()
        counts, rewards = visits(leaves), np.array([leaf.reward for leaf in leaves], dtype=np.float64)
        centred = rewards - rewards.mean() if len(set(rewards)) > 1 else 0 * rewards  # equal rewards: exactly 0
        rows = [np.array([counts[n] for n in leaf.trajectory()], dtype=np.float64) ** -power for leaf in leaves]
        values.append(tuple(c * row for c, row in zip(centred, rows, strict=True)))
    return Advantages("turn", tuple(values))
