"""Rules that look at what came of a state: the rewards of the trajectories below it.

Failed, pruned and unscored leaves are in no statistic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

import numpy as np

from turntree.errors import ConfigError
from turntree.trainers.expansion.rule import Expansion, branch_points, mean_nll
from turntree.trainers.tree import Node, Tree

__all__ = ["guided", "ucb", "value_variance"]

Below: TypeAlias = Mapping[Node, Sequence[Node]]
"""The scored leaves below each node that has any, depth first."""


def value_variance(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    """The ``k`` states below which rewards differ most; each grows a child.

    ``score(s)`` is the population variance of the rewards of the scored leaves below s, 0 for fewer than two.
    Candidates are the root and all open, branchable nodes, breadth first; ties keep that order (when nothing differs,
    the root is first); with fewer than ``k`` candidates the ranking repeats from its top.
    """
    del rng
    below = _scored_below(tree)
    scored = [(_variance(_rewards(below.get(s, ()))), s) for s in branch_points(tree)]
    ranked = sorted(scored, key=lambda pair: -pair[0])
    picks = (ranked[i % len(ranked)] for i in range(k) if ranked)
    return [
        Expansion(s, s, score, f"variance {score:.4f} of {len(below.get(s, ()))} rewards below") for score, s in picks
    ]


def guided(
    tree: Tree, k: int, rng: np.random.Generator, *, low: float = 0.0, high: float = 1.0, prior: float = 1.0
) -> list[Expansion]:
    """The states where one more draw tells most about the outcome for its cost; each grows a child.

    ``score(s) = H p (1 - p) / (n (n + 1) c)``:

    - n: the draws at s, its children with a scored leaf below; ``1 / (n (n + 1))`` is how much the variance of a mean
      falls with one more;
    - H: the mean over these draws of their turn's mean negative log-prob, in nats (from any engine);
    - p: the smoothed success rate ``(sum of rewards + prior) / (leaves + 2 prior)`` over the scored leaves below s,
      with
      rewards scaled from ``[low, high]`` to [0, 1] and clipped;
    - c: the relative remaining cost, the mean number of tokens sampled from s to a scored leaf below it, divided by
      that
      of the root (both at least 1).

    A state without a scored leaf below scores 0. Picks are made one by one, each counted as a draw at once, so that
    they spread. Ties keep breadth-first order. Raises ``ConfigError`` for options out of range and for turns without
    log-probs.
    """
    del rng
    if not low < high or not prior > 0:
        raise ConfigError(f"expected low < high and prior above 0, found low={low}, high={high}, prior={prior}")
    below = _scored_below(tree)
    draws = {s: [child for child in s.children if child in below] for s in branch_points(tree)}
    counts = {s: max(1, len(drawn)) for s, drawn in draws.items()}
    gains = {s: _gain(tree, s, drawn, below, low=low, high=high, prior=prior) for s, drawn in draws.items()}
    picks: list[Expansion] = []
    while gains and len(picks) < k:
        score, s = _first_best((gain / (counts[n] * (counts[n] + 1)), n) for n, gain in gains.items())
        picks.append(Expansion(s, s, score, f"H p (1 - p) / c = {gains[s]:.4f} at draw {counts[s] + 1}"))
        counts[s] += 1
    return picks


def ucb(tree: Tree, k: int, rng: np.random.Generator, *, exploration: float = math.sqrt(2.0)) -> list[Expansion]:
    """The states of highest upper confidence bound; each grows a child (UCB1, Auer et al. 2002, over branch points).

    ``score(s) = q(s) + exploration * sqrt(ln N / n(s))``: past success against curiosity. q is the mean reward of the
    scored leaves below s, scaled to [0, 1] by the least and the largest reward of the tree (0.5 where all are equal); n
    is their number and N that of the whole tree. A state without a scored leaf below counts as one visit of mean q of
    the tree. The default of ``exploration`` is UCB1's.

    Picks are made one by one; each counts at once as a visit of s and of all states above it, without changing q, so
    that they spread. Ties keep breadth-first order. The rule needs a finished round although UCB1 may be asked at any
    time: trajectories that still run are no visits yet, and the order in which they end would decide the tree. One pick
    a round (``expansions=1``) gives the sequential algorithm; other trees fill the engine's batches meanwhile.

    Raises ``ConfigError`` for a negative ``exploration``.
    """
    del rng
    if not 0 <= exploration < math.inf:
        raise ConfigError(f"exploration must be finite and at least 0, found {exploration}")
    below = _scored_below(tree)
    rewards = _rewards(below.get(tree.root, ()))
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)

    def mean(leaves: Sequence[Node]) -> float:
        return fmean((r - low) / (high - low) for r in _rewards(leaves)) if leaves and low < high else 0.5

    q = {s: mean(below.get(s, below.get(tree.root, ()))) for s in branch_points(tree)}
    visits = {s: max(1, len(below.get(s, ()))) for s in q}
    total, picks = len(rewards), list[Expansion]()
    while q and len(picks) < k:
        log = math.log(max(1, total))
        score, s = _first_best((mean + exploration * math.sqrt(log / visits[n]), n) for n, mean in q.items())
        picks.append(Expansion(s, s, score, f"q {q[s]:.4f}, {visits[s]} of {total} visits"))
        for above in (s, *_ancestors(s)):
            visits[above] = visits.get(above, 0) + 1
        total += 1
    return picks


def _scored_below(tree: Tree) -> Below:
    below: defaultdict[Node, list[Node]] = defaultdict(list)
    for leaf in tree.scored_leaves():
        for node in (leaf, *_ancestors(leaf)):
            below[node].append(leaf)
    return dict(below)


def _ancestors(node: Node) -> Iterator[Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _rewards(leaves: Sequence[Node]) -> list[float]:
    return [leaf.reward for leaf in leaves if leaf.reward is not None]


def _variance(rewards: Sequence[float]) -> float:
    # Equal rewards must give exactly 0, so that ties are ties.
    return float(np.var(rewards)) if rewards and min(rewards) < max(rewards) else 0.0


def _gain(tree: Tree, s: Node, drawn: Sequence[Node], below: Below, *, low: float, high: float, prior: float) -> float:
    """``H p (1 - p) / c``; 0 for a state that nothing was drawn at."""
    if not drawn:
        return 0.0
    cost = _mean_tokens(s, below) / _mean_tokens(tree.root, below)
    return fmean(map(mean_nll, drawn)) * _doubt(_rewards(below[s]), low, high, prior) / cost


def _doubt(rewards: Sequence[float], low: float, high: float, prior: float) -> float:
    """``p (1 - p)`` of the smoothed success rate."""
    successes = math.fsum(min(1.0, max(0.0, (r - low) / (high - low))) for r in rewards)
    p = (successes + prior) / (len(rewards) + 2 * prior)
    return p * (1 - p)


def _mean_tokens(s: Node, below: Below) -> float:
    """Mean number of tokens sampled from ``s`` to the scored leaves below it, at least 1."""
    depth = s.depth
    return max(1.0, fmean(sum(len(n.turn_ids) for n in leaf.trajectory()[depth:]) for leaf in below[s]))


def _first_best(scored: Iterable[tuple[float, Node]]) -> tuple[float, Node]:
    return max(scored, key=lambda pair: pair[0])
