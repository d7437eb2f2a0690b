"""Preference pairs of sibling turns: what step-level DPO trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from turntree.errors import ConfigError
from turntree.trainers.tree import Group, Node, Tree

__all__ = ["Pair", "sibling_pairs"]

_ROUNDING = 1e-9
"""Values closer than this, relative to the larger one, are equal: means of equal rewards may round apart."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two turns sampled from the same state; ``margin`` = value of the winner - value of the loser, positive."""

    winner: Node
    loser: Node
    margin: float


def sibling_pairs(group: Group, *, min_margin: float = 0.0, max_pairs_per_parent: int | None = None) -> list[Pair]:
    """Ordered pairs of siblings whose values differ by more than ``min_margin``.

    A node's value is the mean reward of the scored leaves at or below it: failed and pruned leaves take no part, a
    node without a scored leaf or without a sampled token is in no pair. Of each parent at most
    ``max_pairs_per_parent`` pairs are kept, the widest margins first, ties in child order. Pairs stand tree by tree,
    parents depth first, then in the order of the winners and losers among the children.

    Raises ``ConfigError`` for a negative or not finite ``min_margin``, or a limit below 1.
    """
    if not 0.0 <= min_margin < float("inf"):
        raise ConfigError(f"min_margin must be at least 0 and finite, found {min_margin}")
    if max_pairs_per_parent is not None and max_pairs_per_parent < 1:
        raise ConfigError(f"max_pairs_per_parent must be at least 1, or None for all, found {max_pairs_per_parent}")
    pairs: list[Pair] = []
    for tree in group.trees:
        values = _values(tree)
        for parent in tree.root.walk():
            found = list(_pairs_of(parent, values, min_margin))
            kept = sorted(range(len(found)), key=lambda i: -found[i].margin)[:max_pairs_per_parent]
            pairs += (found[i] for i in sorted(kept))
    return pairs


def _values(tree: Tree) -> dict[int, float]:
    """Mean reward of the scored leaves at or below each node that has any, by ``id(node)``."""
    sums: dict[int, tuple[float, int]] = {}
    for node in reversed(list(tree.root.walk())):  # children before their parents
        own = (node.reward, 1) if node.is_scored and node.reward is not None else (0.0, 0)
        below = [own, *(sums[id(child)] for child in node.children)]
        sums[id(node)] = (sum(total for total, _ in below), sum(count for _, count in below))
    return {key: total / count for key, (total, count) in sums.items() if count}


def _pairs_of(parent: Node, values: Mapping[int, float], min_margin: float) -> Iterator[Pair]:
    children: Sequence[Node] = [c for c in parent.children if c.turn_ids and id(c) in values]
    for winner in children:
        for loser in children:
            a, b = values[id(winner)], values[id(loser)]
            if a - b - min_margin > _ROUNDING * max(abs(a), abs(b)):
                yield Pair(winner, loser, a - b)
