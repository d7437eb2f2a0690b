"""Values of nodes mixed upwards from their leaves, and the turn-level credit of AT2PO made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from turntree.trainers.credit.base import (
    EPS,
    Advantages,
    FloatArray,
    Singleton,
    check,
    count_leaves,
    normalise,
    per_node,
    rewards_of,
    scored_children,
)
from turntree.trainers.credit.flat import grpo
from turntree.trainers.tree import Group, Node

Weights = Literal["linear", "softmax"]
Value = Literal["child", "child_mean", "leaf_mean"]
TurnAdvantage = Literal["node_value", "diff_parent", "diff_global", "diff_localglobal", "vanilla"]


def child_weights(entropies: Sequence[float], *, weights: Weights = "linear") -> FloatArray:
    """Weights ``[children]`` of a node's children, from their entropies in nats; they add up to 1.

    ``linear`` (AT2PO, paper): H_c / sum H, uniform where all entropies are 0. ``softmax`` (published code):
    exp(H_c) / sum exp(H).
    """
    check("weights", weights, ("linear", "softmax"))
    h = np.asarray(entropies, dtype=np.float64)
    # A mean negative log-prob below 0 is rounding of the engine.
    w = np.exp(h - h.max()) if weights == "softmax" else np.maximum(h, 0.0)
    total = w.sum()
    shares: FloatArray = w / total if total > 0.0 else np.full(h.size, 1.0 / h.size)
    return shares


def mixture_of(
    children: Sequence[Node], leaves_below: Mapping[Node, int], value: Value, weights: Weights
) -> FloatArray:
    """The weight of each child's value in its parent's."""
    if value == "child":
        return child_weights([c.entropy for c in children], weights=weights)
    counts = np.array([leaves_below[c] if value == "leaf_mean" else 1 for c in children], dtype=np.float64)
    shares: FloatArray = counts / counts.sum()
    return shares


def at2po_values(
    group: Group,
    *,
    weights: Weights = "linear",
    value: Value = "child",
    normalise_leaves: bool = True,
    singleton: Singleton = "zero",
    eps: float = EPS,
) -> dict[Node, float]:
    """The value V of every node that leads to a scored leaf, the roots included; see :func:`at2po`."""
    check("value", value, ("child", "child_mean", "leaf_mean"))
    leaves = group.scored_leaves()
    rewards = rewards_of(leaves)
    if normalise_leaves:
        rewards = normalise(rewards, std="population", singleton=singleton, eps=eps)
    below = count_leaves(leaves)
    values = dict(zip(leaves, rewards.tolist(), strict=True))
    for tree in group.trees:
        for node in reversed(tree.nodes()):  # breadth first, backwards: children before their parents
            if node in values or node not in below:
                continue
            children = scored_children(node, below)
            mixture = mixture_of(children, below, value, weights)
            values[node] = float(mixture @ np.array([values[c] for c in children]))
    return values


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def difference(node: Node, values: Mapping[Node, float], advantage: TurnAdvantage) -> float:
    v = values[node]
    if node.parent is None or advantage == "node_value":
        return v
    local, wide = v - values[node.parent], v - values[_root_of(node)]
    return {"diff_parent": local, "diff_global": wide, "diff_localglobal": local + wide}[advantage]


def at2po(
    groups: Sequence[Group],
    *,
    weights: Weights = "linear",
    value: Value = "child",
    advantage: TurnAdvantage = "node_value",
    normalise_leaves: bool = True,
    singleton: Singleton = "zero",
    eps: float = EPS,
) -> Advantages:
    """AT2PO, turn-level credit: A(n) = V(n) for every turn n, the same in all trajectories through it.

    Leaves: V = (r - mean) / (population std + eps) over the prompt. Inner nodes: V(n) = sum_c w_c V(c) over the
    children c, with :func:`child_weights` (``value="child"``), equal weights (``"child_mean"``), or as the mean over
    all leaves below (``"leaf_mean"``). ``advantage``: ``node_value`` V(n) (the paper), ``diff_parent``
    V(n) - V(parent), ``diff_global`` V(n) - V(root), ``diff_localglobal`` their sum, ``vanilla`` plain :func:`grpo`.

    With ``normalise_leaves=False`` leaves keep raw rewards, and ``node_value`` is then no longer relative to a group.
    ``diff_parent`` gives exactly 0 to a turn without siblings.
    """
    check("advantage", advantage, ("node_value", "diff_parent", "diff_global", "diff_localglobal", "vanilla"))
    if advantage == "vanilla":
        return grpo(groups, singleton=singleton, eps=eps)

    def of(group: Group) -> dict[Node, float]:
        values = at2po_values(
            group, weights=weights, value=value, normalise_leaves=normalise_leaves, singleton=singleton, eps=eps
        )
        return {n: difference(n, values, advantage) for n in values}

    return per_node(groups, of)


def at2po_reference(groups: Sequence[Group]) -> Advantages:
    """:func:`at2po` as published: softmax child weights, and the raw reward of a group of one."""
    return at2po(groups, weights="softmax", singleton="raw")
