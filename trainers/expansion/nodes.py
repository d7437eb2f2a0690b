"""Rules of the chain algorithms, of Tree-GRPO and of AT2PO."""

from __future__ import annotations

import numpy as np

from turntree.trainers.expansion.rule import Expansion, branch_points, mean_nll
from turntree.trainers.tree import Node, Tree

__all__ = ["chain", "entropy", "random_nodes"]


def chain(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    """No expansion: trees are their first chains (GRPO and the other chain algorithms)."""
    del tree, k, rng
    return []


def random_nodes(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    """``k`` draws, uniform with replacement, over the root and the other open nodes; each grows a child.

    Tree-GRPO, section "tree search": the root is a candidate, leaves never are, the state is the one after the
    node's observation. Nodes that cannot be branched are left out of the draw.
    """
    candidates = list(branch_points(tree))
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
    return mean_nll(node) - alpha * _alternatives(node)


def _regenerate(node: Node, score: float, alpha: float) -> Expansion:
    reason = f"H {node.entropy:.4f} - {alpha:g} x {_alternatives(node)} alternatives = {score:.4f}"
    return Expansion(node.parent or node, node, score, reason)
