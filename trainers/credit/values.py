"""Values of nodes mixed upwards from their leaves, and the turn-level credit of AT2PO made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np

from turntree.trainers.credit.base import (
    EPS,
    Advantages,
    FloatArray,
    Singleton,
    all_equal,
    check,
    count_leaves,
    explained,
    normalise,
    per_node,
    rewards_of,
    scored_children,
)
from turntree.trainers.credit.flat import explain_grpo, grpo
from turntree.trainers.credit.text import names, num
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


def _mixture(children: Sequence[Node], leaves_below: Mapping[Node, int], value: Value, weights: Weights) -> FloatArray:
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
            mixture = _mixture(children, below, value, weights)
            values[node] = float(mixture @ np.array([values[c] for c in children]))
    return values


def _difference(node: Node, values: Mapping[Node, float], advantage: TurnAdvantage) -> float:
    v = values[node]
    if node.parent is None or advantage == "node_value":
        return v
    local, wide = v - values[node.parent], v - values[node.root]
    return {"diff_parent": local, "diff_global": wide, "diff_localglobal": local + wide}[advantage]


# Explanations


def _mixed(
    node: Node, values: Mapping[Node, float], below: Mapping[Node, int], *, value: Value, weights: Weights
) -> str:
    children = scored_children(node, below)
    if not children:
        return f"{num(values[node])} (leaf, r {node.reward:g})"
    mixture = _mixture(children, below, value, weights)
    terms = " + ".join(f"{num(w)} x {num(values[c])}" for w, c in zip(mixture, children, strict=True))
    return f"{terms} = {num(values[node])}"


def _value_lines(
    group: Group,
    values: Mapping[Node, float],
    advantage: Callable[[Node], float],
    *,
    value: Value,
    weights: Weights,
    formula: str,
) -> list[str]:
    name, leaves = names(group), group.scored_leaves()
    below, rewards = count_leaves(leaves), rewards_of(leaves)
    lines = [f"V(n) = sum of w_c V(c) over its children, w {weights if value == 'child' else value}; A = {formula}"]
    for node in (n for n in name if n in values):
        lines.append(f"  V({name[node]}) = {_mixed(node, values, below, value=value, weights=weights)}")
        if node.parent is not None:
            lines.append(f"    A = {num(advantage(node))}")
    if rewards.size:
        spread = f"mean {num(rewards.mean())}, population std {num(rewards.std())}"
        lines.append(f"  leaves: r {rewards.tolist()}, {spread}")
    return lines


def _explain_at2po(
    group: Group,
    *,
    weights: Weights = "linear",
    value: Value = "child",
    advantage: TurnAdvantage = "node_value",
    normalise_leaves: bool = True,
    singleton: Singleton = "zero",
    eps: float = EPS,
) -> list[str]:
    if advantage == "vanilla":
        return explain_grpo(group, singleton=singleton, eps=eps)
    values = at2po_values(
        group, weights=weights, value=value, normalise_leaves=normalise_leaves, singleton=singleton, eps=eps
    )
    of = partial(_difference, values=values, advantage=advantage)
    return _value_lines(group, values, of, value=value, weights=weights, formula=advantage)


# Rules


@explained(_explain_at2po)
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
        if advantage != "node_value" and all_equal(rewards_of(group.scored_leaves())):
            return dict.fromkeys(values, 0.0)  # exactly, whatever rounding the mixtures of raw rewards leave
        return {n: _difference(n, values, advantage) for n in values}

    return per_node(groups, of)


@explained(partial(_explain_at2po, weights="softmax", singleton="raw"))
def at2po_reference(groups: Sequence[Group]) -> Advantages:
    """:func:`at2po` as published: softmax child weights, and the raw reward of a group of one."""
    return at2po(groups, weights="softmax", singleton="raw")


def _depth_means(values: Mapping[Node, float]) -> dict[int, float]:
    levels: dict[int, list[float]] = {}
    for node, v in values.items():
        levels.setdefault(node.depth, []).append(v)
    return {depth: float(np.mean(level)) for depth, level in sorted(levels.items())}


def _explain_at2po_centred(
    group: Group, *, weights: Weights = "linear", value: Value = "child", eps: float = EPS
) -> list[str]:
    values = at2po_values(group, weights=weights, value=value, eps=eps)
    means = _depth_means(values)
    lines = _value_lines(
        group,
        values,
        lambda n: values[n] - means[n.depth],
        value=value,
        weights=weights,
        formula="V(n) - mean of V over the nodes of its depth",
    )
    return [*lines, *(f"  mean of V at depth {depth}: {num(mean)}" for depth, mean in means.items() if depth)]


@explained(_explain_at2po_centred)
def at2po_centred(
    groups: Sequence[Group], *, weights: Weights = "linear", value: Value = "child", eps: float = EPS
) -> Advantages:
    """A(n) = V(n) - mean of V over all nodes at the depth of n in the group's trees, each node once.

    V as in :func:`at2po`. Removes what all turns of one depth share, which is most of V's variance and says nothing
    about the turn. A turn that is alone at its depth gets 0, and so does a group of one leaf.
    """

    def of(group: Group) -> dict[Node, float]:
        values = at2po_values(group, weights=weights, value=value, eps=eps)
        means = _depth_means(values)
        return {n: v - means[n.depth] for n, v in values.items()}

    return per_node(groups, of)
