"""What an expansion rule is, and what all rules share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from turntree.errors import ConfigError
from turntree.trainers.tree import Node, Tree

__all__ = ["Expansion", "ExpansionRule", "Needs", "branch_points", "mean_nll", "needs_of"]

Needs = Literal["finished_round", "any"]
"""Whether a rule ranks the nodes of finished rounds, or takes any node at any time."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """One trajectory to grow: a new child of ``parent``, which must be open and branchable.

    ``picked`` is the node that the rule chose, ``score`` what it was ranked by (None: no ranking), ``reason`` one
    line for reports.
    """

    parent: Node
    picked: Node
    score: float | None
    reason: str


ExpansionRule: TypeAlias = Callable[[Tree, int, np.random.Generator], list[Expansion]]
"""``rule(tree, k, rng)``; see the description of ``turntree.trainers.expansion`` for the attribute ``needs``."""


def needs_of(rule: ExpansionRule) -> Needs:
    """When ``rule`` may be asked. Raises ``ConfigError`` for an unknown word."""
    needs: Any = getattr(rule, "needs", None)
    if needs is None and isinstance(rule, functools.partial):
        return needs_of(rule.func)
    if needs is None:
        return "finished_round"
    if needs not in ("finished_round", "any"):
        raise ConfigError(f"expansion rule {rule!r}: needs must be 'finished_round' or 'any', found {needs!r}")
    return cast(Needs, needs)


def branch_points(tree: Tree) -> Iterator[Node]:
    """The root and all other open nodes whose state can be resumed, breadth first."""
    return (node for node in tree.nodes() if not node.is_leaf and node.branchable)


def mean_nll(node: Node) -> float:
    """Mean negative log-prob of the turn's sampled tokens in nats; 0 for the root and for an empty turn.

    Raises ``ConfigError`` when the node has sampled tokens without log-probs: 0 would then be meaningless.
    """
    if node.turn_ids and not node.logprobs:
        raise ConfigError(
            f"this needs the log-prob of every sampled token, but node {node.path} has {len(node.turn_ids)} tokens and "
            "no log-probs; use an engine that reports them, or another expansion rule"
        )
    return node.entropy
