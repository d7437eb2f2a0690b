"""Credit of turns from the mean reward below them, against a baseline from the rest of the tree.

The roots of a group all hold the prompt, so they are one state here: the first turns of all its trees are siblings,
and the mean over all leaves of the group is the value of every root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turntree.errors import ConfigError
from turntree.trainers.credit.base import (
    Advantages,
    check,
    count_leaves,
    explained,
    per_node,
    rewards_of,
    scored_children,
    sum_leaves,
)
from turntree.trainers.credit.text import names, num
from turntree.trainers.tree import Group, Node

Prior = Literal["batch", "group"]


@dataclass(frozen=True, slots=True)
class _Means:
    """Rewards of a group, summed and counted below every node that leads to a scored leaf."""

    group: Group
    sums: dict[Node, float]
    counts: dict[Node, int]

    def mean(self, node: Node) -> float:
        return self.sums[node] / self.counts[node]

    def siblings(self) -> list[list[Node]]:
        """Turns by the state they were sampled from, parents before their children."""
        first = [c for tree in self.group.trees for c in scored_children(tree.root, self.counts)]
        inner = [scored_children(n, self.counts) for tree in self.group.trees for n in tree.nodes()[1:]]
        return [turns for turns in (first, *inner) if turns]


def _means(group: Group, offset: float) -> _Means:
    """Means of rewards less ``offset``.

    With the lowest reward for an offset no difference of means changes, and those of equal rewards are exactly 0.
    """
    leaves = group.scored_leaves()
    return _Means(group, sum_leaves(leaves, rewards_of(leaves) - offset), count_leaves(leaves))


def _pool(groups: Sequence[Group]) -> tuple[float, float]:
    """The lowest reward of all scored leaves, and how far their mean is above it."""
    rewards = np.concatenate([np.zeros(0), *(rewards_of(g.scored_leaves()) for g in groups)])
    low = float(rewards.min()) if rewards.size else 0.0
    return low, float((rewards - low).mean()) if rewards.size else 0.0


def _exact_means(group: Group) -> _Means:
    return _means(group, _pool([group])[0])


# Sibling baseline


def _other_mean(turns: Sequence[Node], i: int, means: _Means) -> float:
    """The mean value of a turn's siblings; its own, if it has none."""
    others = [means.mean(s) for j, s in enumerate(turns) if j != i]
    return float(np.mean(others)) if others else means.mean(turns[i])


def _sibling_baseline(group: Group) -> dict[Node, float]:
    means = _exact_means(group)
    return {
        turn: means.mean(turn) - _other_mean(turns, i, means)
        for turns in means.siblings()
        for i, turn in enumerate(turns)
    }


def _explain_sibling_baseline(group: Group) -> list[str]:
    name, means, credit = names(group), _means(group, 0.0), _sibling_baseline(group)
    lines = ["A(n) = V(n) - mean of V over its siblings; V(n) = mean reward of the leaves below"]
    for turns in means.siblings():
        for i, turn in enumerate(turns):
            against = num(_other_mean(turns, i, means)) if len(turns) > 1 else "no sibling"
            lines.append(f"  A({name[turn]}) = {num(means.mean(turn))} - {against} = {num(credit[turn])}")
    return lines


@explained(_explain_sibling_baseline)
def sibling_baseline(groups: Sequence[Group]) -> Advantages:
    """A(n) = V(n) - mean of V over the other turns sampled from the same state; V(n) = mean reward below n.

    A turn without siblings gets 0. The first turns of all trees of a group are siblings.
    """
    return per_node(groups, _sibling_baseline)


# Shrunk leave-one-out


def _baselines(means: _Means, *, kappa: float, prior: float) -> dict[Node, float]:
    out: dict[Node, float] = {}
    for turns in means.siblings():
        parent = turns[0].parent
        above = prior if parent is None else out.get(parent, prior)
        total, n = sum(means.sums[t] for t in turns), sum(means.counts[t] for t in turns)
        for turn in turns:
            weight = n - means.counts[turn] + kappa
            out[turn] = (total - means.sums[turn] + kappa * above) / weight if weight > 0.0 else above
    return out


def _shrunk_loo(group: Group, *, pool: tuple[float, float], kappa: float) -> dict[Node, float]:
    low, prior = pool
    means = _means(group, low)
    return {turn: means.mean(turn) - b for turn, b in _baselines(means, kappa=kappa, prior=prior).items()}


def _explain_shrunk_loo(group: Group, *, kappa: float = 3.0, prior: Prior = "batch") -> list[str]:
    name, (low, above) = names(group), _pool([group])
    means = _means(group, 0.0)
    baselines = _baselines(means, kappa=kappa, prior=low + above)
    credit = _shrunk_loo(group, pool=(low, above), kappa=kappa)
    lines = [
        "A(n) = S/N - b(n), b(n) = (S_parent - S + kappa b_parent) / (N_parent - N + kappa)",
        f"  S, N: reward sum and number of leaves below; kappa {kappa:g}; b of the prompt {num(low + above)}, "
        + ("the mean reward of the batch (here this group alone)" if prior == "batch" else "the mean of the group"),
    ]
    for turns in means.siblings():
        total, n = sum(means.sums[t] for t in turns), sum(means.counts[t] for t in turns)
        for turn in turns:
            parent = turns[0].parent
            upper = baselines.get(parent, low + above) if parent is not None else low + above
            top = f"({total:g} - {means.sums[turn]:g} + {kappa:g} x {num(upper)})"
            b = f"{top} / ({n} - {means.counts[turn]} + {kappa:g}) = {num(baselines[turn])}"
            lines += [f"  b({name[turn]}) = {b}", f"    A = {num(means.mean(turn))} - b = {num(credit[turn])}"]
    return lines


@explained(_explain_shrunk_loo)
def shrunk_loo(groups: Sequence[Group], *, kappa: float = 3.0, prior: Prior = "batch") -> Advantages:
    """A(n) = S/N - b(n), b(n) = (S_parent - S + kappa b_parent) / (N_parent - N + kappa).

    S and N are the sum of rewards and the number of scored leaves below a turn; b of a turn without any leaf but its
    own, at kappa = 0, is b_parent. The baseline never holds the turn's own leaves, except through b of the prompt:

    - ``prior="batch"``: the mean reward of all scored leaves of ``groups``, one number for the whole rollout. Such
      credit is **not** relative to the group: a prompt whose leaves are all right gets positive credit, and the
      other prompts of the rollout matter. It is exactly 0 where all rewards of the rollout are equal.
    - ``prior="group"``: the mean over the group's own leaves, and then groups never mix and equal rewards of a group
      give exactly 0. On chains it is RLOO times (n - 1)(n + kappa) / (n (n - 1 + kappa)).

    Raises ``ConfigError`` for a kappa below 0.
    """
    check("prior", prior, ("batch", "group"))
    if not (np.isfinite(kappa) and kappa >= 0.0):
        raise ConfigError(f"credit: kappa must be a finite number of at least 0, found {kappa!r}")
    whole = _pool(groups)
    return per_node(groups, lambda g: _shrunk_loo(g, pool=whole if prior == "batch" else _pool([g]), kappa=kappa))


# Differences of values, as in TreeRL


def _parent_mean(turns: Sequence[Node], means: _Means) -> float:
    return sum(means.sums[t] for t in turns) / sum(means.counts[t] for t in turns)


def _tree_diff(group: Group) -> dict[Node, float]:
    means = _exact_means(group)
    sets = means.siblings()
    top = _parent_mean(sets[0], means) if sets else 0.0
    out: dict[Node, float] = {}
    for turns in sets:
        above = _parent_mean(turns, means)
        for turn in turns:
            v = means.mean(turn)
            out[turn] = ((v - top) + (v - above)) / math.sqrt(means.counts[turn])
    return out


def _explain_tree_diff(group: Group) -> list[str]:
    name, means, credit = names(group), _means(group, 0.0), _tree_diff(group)
    sets = means.siblings()
    lines = ["A(n) = ((V(n) - V(root)) + (V(n) - V(parent))) / sqrt(leaves below n); V = mean reward of leaves below"]
    for turns in sets:
        top, above = num(_parent_mean(sets[0], means)), num(_parent_mean(turns, means))
        for turn in turns:
            v, n = num(means.mean(turn)), means.counts[turn]
            lines.append(f"  A({name[turn]}) = (({v} - {top}) + ({v} - {above})) / sqrt({n}) = {num(credit[turn])}")
    return lines


@explained(_explain_tree_diff)
def tree_diff(groups: Sequence[Group]) -> Advantages:
    """TreeRL (arXiv 2506.11902, Eq. 4): A(n) = (global + local advantage) / sqrt(leaves below n).

    V(n) is the mean reward of the leaves below n; global is V(n) - V(root), local V(n) - V(parent). No value is
    added on top, unlike in published code: see :func:`tree_diff_reference`.
    """
    return per_node(groups, _tree_diff)


def _tree_diff_reference(group: Group, *, margin: float) -> dict[Node, float]:
    means = _means(group, 0.0)
    out: dict[Node, float] = {}
    for turns in means.siblings():
        above = _parent_mean(turns, means)
        for turn in turns:
            v = means.mean(turn)
            out[turn] = (max(v - above - margin, 0.0) + v) / math.sqrt(means.counts[turn])
    return out


def _explain_tree_diff_reference(group: Group, *, margin: float = 0.1) -> list[str]:
    name, means = names(group), _means(group, 0.0)
    credit = _tree_diff_reference(group, margin=margin)
    lines = ["A(n) = (max(V(n) - V(parent) - margin, 0) + V(n)) / sqrt(leaves below n): not relative to the group"]
    for turns in means.siblings():
        above = num(_parent_mean(turns, means))
        for turn in turns:
            v, n = num(means.mean(turn)), means.counts[turn]
            gain = f"max({v} - {above} - {margin:g}, 0)"
            lines.append(f"  A({name[turn]}) = ({gain} + {v}) / sqrt({n}) = {num(credit[turn])}")
    return lines


@explained(_explain_tree_diff_reference)
def tree_diff_reference(groups: Sequence[Group], *, margin: float = 0.1) -> Advantages:
    """Node scores of the mode ``tree_diff`` in Tree-GRPO's code: (max(V(n) - V(parent) - margin, 0) + V(n)) / sqrt(N).

    There the global advantage lost its baseline and became the value itself, so this is **not** relative to the
    group: equal rewards r give r / sqrt(N), N being the leaves below.
    """
    return per_node(groups, lambda g: _tree_diff_reference(g, margin=margin))
