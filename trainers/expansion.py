"""Where a tree grows next: expansion rules.

A rule is a function ``rule(tree, k, rng) -> list[Expansion]``: up to ``k`` places to grow, repetition allowed.
It reads the tree, never changes it, and draws from ``rng`` only. A rule may carry an attribute ``needs``:

- ``"finished_round"`` (the default): it is asked between the rounds of a tree, when every trajectory has ended;
- ``"any"``: it may be asked while trajectories of the tree are still running, for one place at a time.

Both papers' conventions map to one. Tree-GRPO picks a node and grows a child of it; AT2PO picks a node and
generates its turn again, which is a new child of its parent (``Expansion.picked`` keeps the node).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from turntree.errors import ConfigError
from turntree.trainers.tree import Node, Tree

__all__ = ["Expansion", "ExpansionRule", "Needs", "chain", "entropy", "needs_of", "random_nodes"]

Needs = Literal["finished_round", "any"]


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
"""``rule(tree, k, rng)``; see the module's description for the optional attribute ``needs``."""


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


def chain(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    """No expansion: trees are their first chains (GRPO and the other chain algorithms)."""
    del tree, k, rng
    return []


def random_nodes(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    """``k`` draws, uniform with replacement, over the root and the other open nodes; each grows a child.

    Tree-GRPO, section "tree search": the root is a candidate, leaves never are, the state is the one after the
    node's observation. Nodes that cannot be branched are left out of the draw.
    """
    candidates = [n for n in tree.nodes() if not n.is_leaf and n.branchable]
    if not candidates:
        return []
    picks = [candidates[i] for i in rng.integers(len(candidates), size=k)]
    return [Expansion(n, n, None, f"1 of {len(candidates)} open nodes, uniform") for n in picks]


def entropy(tree: Tree, k: int, rng: np.random.Generator, *, alpha: float = 0.05) -> list[Expansion]:
    """The ``k`` open nodes of highest penalised entropy; each has its turn generated again.

    AT2PO, "entropy-guided tree expansion", with the penalty of the published code:
    ``score(n) = H(n) - alpha * s(n)``, where ``s`` counts the alternatives already drawn at that decision: the
    siblings of n, or for the root (H = 0) its children beyond the first. Candidates are the root and all open
    nodes breadth first; ties keep that order; with fewer than ``k`` candidates the ranking repeats from its top.
    Scores are not refreshed between the ``k`` picks. A node whose parent cannot be branched is left out.

    Raises ``ConfigError`` when a node has sampled tokens without log-probs, since H would then be meaningless.
    """
    del rng
    scored = [(_penalised(n, alpha), n) for n in tree.nodes() if not n.is_leaf and (n.parent or n).branchable]
    ranked = sorted(scored, key=lambda pair: -pair[0])
    return [_regenerate(node, score, alpha) for score, node in (ranked[i % len(ranked)] for i in range(k) if ranked)]


def _alternatives(node: Node) -> int:
    return max(0, len((node.parent or node).children) - 1)


def _penalised(node: Node, alpha: float) -> float:
    if node.turn_ids and not node.logprobs:
        raise ConfigError(
            f"entropy expansion needs the log-prob of every sampled token, but node {node.path} has "
            f"{len(node.turn_ids)} tokens and no log-probs; use an engine that reports them, or another rule"
        )
    return node.entropy - alpha * _alternatives(node)


def _regenerate(node: Node, score: float, alpha: float) -> Expansion:
    reason = f"H {node.entropy:.4f} - {alpha:g} x {_alternatives(node)} alternatives = {score:.4f}"
    return Expansion(node.parent or node, node, score, reason)
