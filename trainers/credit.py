"""Credit: from the rewards of leaves to one advantage per turn of every trajectory.

Pure functions over the groups of a rollout, in float64. A group holds all trees of one prompt; statistics never
cross groups, whatever names they carry. Leaves without a reward (failed or pruned) are no part of any statistic,
and child weights are renormalised over the children that lead to a scored leaf.

Equal rewards give exactly zero. One scored leaf gives zero too (``singleton="zero"``), or its raw reward as in
the published code (``"raw"``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from turntree.errors import ConfigError, DataError
from turntree.trainers.tree import Group, Node, Tree

__all__ = [
    "Advantages",
    "CreditRule",
    "SIGNALS",
    "TokenTable",
    "at2po",
    "at2po_reference",
    "at2po_values",
    "child_weights",
    "credit_needs",
    "drop_small_groups",
    "explain",
    "grpo",
    "normalise",
    "tree_grpo",
    "tree_grpo_reference",
]

FloatArray: TypeAlias = npt.NDArray[np.float64]
Std = Literal["unbiased", "population", "none"]
Singleton = Literal["zero", "raw"]
Baseline = Literal["mean", "leave_one_out"]
Estimator = Literal["sum", "inter", "intra", "2norm"]
Weights = Literal["linear", "softmax"]
Value = Literal["child", "child_mean", "leaf_mean"]
TurnAdvantage = Literal["node_value", "diff_parent", "diff_global", "diff_localglobal", "vanilla"]

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch of groups.

    ``values[g][l]`` belongs to leaf ``groups[g].scored_leaves()[l]`` and has one float64 per turn of its
    trajectory (``per="turn"``) or per sampled token of it, turn after turn (``per="token"``).

    ``returns``: targets of the value function, per sampled token whatever ``per`` is; only from rules that take
    values. ``weights``: per turn, factors of the declared weight omega; 0 leaves a turn out of the batch (None: 1).
    """

    per: Literal["turn", "token"]
    values: tuple[tuple[FloatArray, ...], ...]
    returns: tuple[tuple[FloatArray, ...], ...] | None = None
    weights: tuple[tuple[FloatArray, ...], ...] | None = None


CreditRule: TypeAlias = Callable[..., Advantages]
"""``rule(groups, **options) -> Advantages``.

A rule may carry an attribute ``needs``, a tuple of keyword arguments that it wants to be given, each a mapping from
nodes to float64 arrays with one entry per sampled token of the node's turn:

- ``"values"``: V of the state before the token is sampled, from the value head;
- ``"token_rewards"``: rewards of single tokens beside the leaf's own, such as -beta KL. For a rule that does not
  name them they are added to the rewards of the leaves.
"""

TokenTable: TypeAlias = Mapping[Node, FloatArray]
SIGNALS = ("values", "token_rewards")


def credit_needs(rule: CreditRule) -> tuple[str, ...]:
    """The signals that ``rule`` wants, see :data:`CreditRule`. Raises ``ConfigError`` for an unknown one."""
    needs: Any = getattr(rule, "needs", None)
    if needs is None and isinstance(rule, functools.partial):
        return credit_needs(rule.func)
    found = tuple(needs or ())
    if not set(found) <= set(SIGNALS):
        raise ConfigError(f"credit rule {rule!r}: needs must be some of {SIGNALS}, found {needs!r}")
    return found


# Shared arithmetic


def _check(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"credit: {option} must be one of {', '.join(allowed)}; found {value!r}")


def normalise(
    values: Sequence[float] | FloatArray,
    *,
    std: Std = "unbiased",
    singleton: Singleton = "zero",
    baseline: Baseline = "mean",
    eps: float = EPS,
) -> FloatArray:
    """Rewards ``[n]`` minus their baseline, over their standard deviation, ``[n]``.

    ``baseline="mean"``: (r - mean) / (std + eps). ``"leave_one_out"``: mean and deviation are those of the other
    rewards, and a deviation at or below ``eps`` does not scale at all. Equal rewards give exactly 0. One reward
    gives 0 (``singleton="zero"``) or itself, over 1 + eps where a deviation is asked for (``"raw"``).
    """
    _check("std", std, ("unbiased", "population", "none"))
    _check("singleton", singleton, ("zero", "raw"))
    _check("baseline", baseline, ("mean", "leave_one_out"))
    rewards = np.asarray(values, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise DataError(f"credit: every reward must be finite, found {rewards.tolist()}; fail such leaves instead")
    if rewards.size == 1 and singleton == "raw":
        return rewards / (1.0 if std == "none" else 1.0 + eps)
    if rewards.size < 2 or rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    if baseline == "leave_one_out":
        return _leave_one_out(rewards, std=std, eps=eps)
    centred = rewards - rewards.mean()
    scaled: FloatArray = centred if std == "none" else centred / (_deviation(rewards, std) + eps)
    return scaled


def _deviation(rewards: FloatArray, std: Std) -> float:
    # Compared first: the rounded mean of equal numbers would leave a residue that a division could blow up.
    if rewards.size < 2 or rewards.max() == rewards.min():
        return 0.0
    return float(rewards.std(ddof=1 if std == "unbiased" else 0))


def _leave_one_out(rewards: FloatArray, *, std: Std, eps: float) -> FloatArray:
    out = np.empty_like(rewards)
    for i, reward in enumerate(rewards):
        others = np.delete(rewards, i)
        scale = 0.0 if std == "none" else _deviation(others, std)
        out[i] = (reward - others.mean()) / (scale if scale > eps else 1.0)
    return out


def _rewards(leaves: Sequence[Node]) -> FloatArray:
    return np.array([leaf.reward for leaf in leaves], dtype=np.float64)


def _per_leaf(groups: Sequence[Group], advantage: Callable[[Group], FloatArray]) -> Advantages:
    """One number a leaf, the same for all turns of its trajectory."""
    return Advantages(
        "turn",
        tuple(
            tuple(np.full(leaf.depth, a) for leaf, a in zip(group.scored_leaves(), advantage(group), strict=True))
            for group in groups
        ),
    )


def _per_node(groups: Sequence[Group], advantage: Callable[[Group], Mapping[Node, float]]) -> Advantages:
    """One number a node, the same in every trajectory through it."""
    values = []
    for group in groups:
        of = advantage(group)
        values.append(tuple(np.array([of[n] for n in leaf.trajectory()]) for leaf in group.scored_leaves()))
    return Advantages("turn", tuple(values))


def drop_small_groups(groups: Sequence[Group], minimum: int = 2) -> tuple[list[Group], list[Group]]:
    """Groups with at least ``minimum`` scored leaves, and the others: too few leaves say nothing relative."""
    kept = [g for g in groups if len(g.scored_leaves()) >= minimum]
    return kept, [g for g in groups if len(g.scored_leaves()) < minimum]


# Chains


def grpo(
    groups: Sequence[Group],
    *,
    std: Std = "unbiased",
    singleton: Singleton = "zero",
    baseline: Baseline = "mean",
    eps: float = EPS,
) -> Advantages:
    """GRPO (DeepSeekMath, Eq. 3): A(l) = (r(l) - mean) / (std + eps) over all leaves of the prompt.

    ``std="none"`` is Dr. GRPO; with ``baseline="leave_one_out"`` it is RLOO.
    """
    return _per_leaf(
        groups,
        lambda g: normalise(_rewards(g.scored_leaves()), std=std, singleton=singleton, baseline=baseline, eps=eps),
    )


# Tree-GRPO


def _intra(group: Group, values: FloatArray, *, singleton: Singleton, eps: float) -> FloatArray:
    """``values`` ``[leaves of the group]`` normalised within each tree."""
    parts, start = [], 0
    for tree in group.trees:
        stop = start + len(tree.scored_leaves())
        parts.append(normalise(values[start:stop], singleton=singleton, eps=eps))
        start = stop
    return np.concatenate(parts) if parts else np.zeros(0)


def _tree_grpo(group: Group, *, estimator: Estimator, singleton: Singleton, eps: float) -> FloatArray:
    rewards = _rewards(group.scored_leaves())
    inter = normalise(rewards, singleton=singleton, eps=eps)
    if estimator == "inter":
        return inter
    if estimator == "2norm":
        return _intra(group, inter, singleton=singleton, eps=eps)
    intra = _intra(group, rewards, singleton=singleton, eps=eps)
    return intra if estimator == "intra" else inter + intra


def tree_grpo(
    groups: Sequence[Group], *, estimator: Estimator = "sum", singleton: Singleton = "zero", eps: float = EPS
) -> Advantages:
    """Tree-GRPO: A(l) = A_inter(l) + A_intra(l), the same for all turns of the trajectory of leaf l.

    A_inter = (r - mean_P) / (std_P + eps) over all leaves of the prompt; A_intra = (r - mean_T) / (std_T + eps)
    over the leaves of the leaf's own tree; deviations are unbiased. ``estimator`` takes only one of the two, or
    ``"2norm"``: A_inter normalised once more within each tree.
    """
    _check("estimator", estimator, ("sum", "inter", "intra", "2norm"))
    return _per_leaf(groups, lambda g: _tree_grpo(g, estimator=estimator, singleton=singleton, eps=eps))


def tree_grpo_reference(groups: Sequence[Group]) -> Advantages:
    """:func:`tree_grpo` as published: a group or tree with one leaf keeps its raw reward."""
    return tree_grpo(groups, singleton="raw")


# AT2PO


def child_weights(entropies: Sequence[float], *, weights: Weights = "linear") -> FloatArray:
    """Weights ``[children]`` of a node's children, from their entropies in nats; they add up to 1.

    ``linear`` (AT2PO, paper): H_c / sum H, uniform where all entropies are 0. ``softmax`` (published code):
    exp(H_c) / sum exp(H).
    """
    _check("weights", weights, ("linear", "softmax"))
    h = np.asarray(entropies, dtype=np.float64)
    # A mean negative log-prob below 0 is rounding of the engine.
    w = np.exp(h - h.max()) if weights == "softmax" else np.maximum(h, 0.0)
    total = w.sum()
    shares: FloatArray = w / total if total > 0.0 else np.full(h.size, 1.0 / h.size)
    return shares


def _scored_children(node: Node, leaves_below: Mapping[Node, int]) -> list[Node]:
    return [c for c in node.children if leaves_below.get(c)]


def _count_leaves(leaves: Sequence[Node]) -> dict[Node, int]:
    """Scored leaves below each node that has any, the leaves themselves and the roots included."""
    counts: dict[Node, int] = {}
    for leaf in leaves:
        node: Node | None = leaf
        while node is not None:
            counts[node] = counts.get(node, 0) + 1
            node = node.parent
    return counts


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
    _check("value", value, ("child", "child_mean", "leaf_mean"))
    leaves = group.scored_leaves()
    rewards = _rewards(leaves)
    if normalise_leaves:
        rewards = normalise(rewards, std="population", singleton=singleton, eps=eps)
    below = _count_leaves(leaves)
    values = dict(zip(leaves, rewards.tolist(), strict=True))
    for tree in group.trees:
        for node in reversed(tree.nodes()):  # breadth first, backwards: children before their parents
            if node in values or node not in below:
                continue
            children = _scored_children(node, below)
            mixture = _mixture(children, below, value, weights)
            values[node] = float(mixture @ np.array([values[c] for c in children]))
    return values


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _difference(node: Node, values: Mapping[Node, float], advantage: TurnAdvantage) -> float:
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
    _check("advantage", advantage, ("node_value", "diff_parent", "diff_global", "diff_localglobal", "vanilla"))
    if advantage == "vanilla":
        return grpo(groups, singleton=singleton, eps=eps)

    def of(group: Group) -> dict[Node, float]:
        values = at2po_values(
            group, weights=weights, value=value, normalise_leaves=normalise_leaves, singleton=singleton, eps=eps
        )
        return {n: _difference(n, values, advantage) for n in values}

    return _per_node(groups, of)


def at2po_reference(groups: Sequence[Group]) -> Advantages:
    """:func:`at2po` as published: softmax child weights, and the raw reward of a group of one."""
    return at2po(groups, weights="softmax", singleton="raw")


# Explanations


def _name(node: Node) -> str:
    return "root" if node.parent is None else ".".join(str(i) for i in node.path)


def _fraction(reward: float, rewards: FloatArray, std: Std, eps: float, result: float) -> str:
    """``(r - mean) / (std + eps) = result`` with numbers in it."""
    if rewards.size < 2 or rewards.max() == rewards.min():
        return f"{'one reward' if rewards.size < 2 else 'equal rewards'}: {result:.4f}"
    top = f"({reward:g} - {rewards.mean():.4f})"
    if std == "none":
        return f"{top} = {result:.4f}"
    return f"{top} / ({_deviation(rewards, std):.4f} + {eps:g}) = {result:.4f}"


def _explain_grpo(group: Group, **options: Any) -> list[str]:
    std, eps = options.get("std", "unbiased"), options.get("eps", EPS)
    leaves = group.scored_leaves()
    rewards = _rewards(leaves)
    results = normalise(rewards, **options)
    lines = [f"A(l) = (r - mean) / (std + eps) over {len(leaves)} leaves, std {std}"]
    for i, (leaf, a) in enumerate(zip(leaves, results, strict=True)):
        if options.get("baseline") == "leave_one_out":
            others = np.delete(rewards, i).mean() if len(leaves) > 1 else 0.0
            lines.append(f"  A({_name(leaf)}): {rewards[i]:g} against {others:.4f} of the others = {a:.4f}")
        else:
            lines.append(f"  A({_name(leaf)}) = {_fraction(rewards[i], rewards, std, eps, a)}")
    return lines


def _explain_tree_grpo(group: Group, **options: Any) -> list[str]:
    estimator = options.pop("estimator", "sum")
    eps = options.get("eps", EPS)
    rewards = _rewards(group.scored_leaves())
    inter = normalise(rewards, **options)
    base = inter if estimator == "2norm" else rewards
    formula = {"sum": "A_inter + A_intra", "inter": "A_inter", "intra": "A_intra", "2norm": "A_inter, then per tree"}
    lines = [f"A(l) = {formula[estimator]}, std unbiased"]
    start = 0
    for tree in group.trees:
        leaves = tree.scored_leaves()
        own = base[start : start + len(leaves)]
        for j, (leaf, intra) in enumerate(zip(leaves, normalise(own, **options), strict=True)):
            i = start + j
            total = {"sum": inter[i] + intra, "inter": inter[i], "intra": intra, "2norm": intra}[estimator]
            lines += [
                f"  A(tree {tree.index}, {_name(leaf)}) = {total:.4f}",
                f"    inter: {_fraction(rewards[i], rewards, 'unbiased', eps, inter[i])}",
                f"    intra: {_fraction(own[j], own, 'unbiased', eps, intra)}",
            ]
        start += len(leaves)
    return lines


def _explain_at2po(group: Group, **options: Any) -> list[str]:
    advantage: TurnAdvantage = options.pop("advantage", "node_value")
    if advantage == "vanilla":
        return _explain_grpo(group, **{k: v for k, v in options.items() if k in ("singleton", "eps")})
    values = at2po_values(group, **options)
    weights, value = options.get("weights", "linear"), options.get("value", "child")
    rewards, below = _rewards(group.scored_leaves()), _count_leaves(group.scored_leaves())
    lines = [f"V(n) = sum of w_c V(c) over its children, w {weights if value == 'child' else value}; A = {advantage}"]
    for tree in group.trees:
        for node in (n for n in tree.nodes() if n in values):
            lines.append(f"  V(tree {tree.index}, {_name(node)}) = {_sum(node, values, below, value, weights)}")
            if node.parent is not None:
                lines.append(f"    A = {_difference(node, values, advantage):.4f}")
    return [*lines, f"  leaves: r {rewards.tolist()}, mean {rewards.mean():.4f}, population std {rewards.std():.4f}"]


def _sum(node: Node, values: Mapping[Node, float], below: Mapping[Node, int], value: Value, weights: Weights) -> str:
    children = _scored_children(node, below)
    if not children:
        return f"{values[node]:.4f} (leaf, r {node.reward:g})"
    mixture = _mixture(children, below, value, weights)
    terms = " + ".join(f"{w:.4f} x {values[c]:.4f}" for w, c in zip(mixture, children, strict=True))
    return f"{terms} = {values[node]:.4f}"


def _table(group: Group, advantages: Advantages) -> list[str]:
    rows = iter(advantages.values[0])
    lines = ["advantage of each turn, one line a trajectory:"]
    for tree in group.trees:
        for leaf in tree.scored_leaves():
            numbers = "  ".join(f"{a:+.4f}" for a in next(rows))
            lines.append(f"  tree {tree.index}, {_name(leaf)} (r {leaf.reward:g}): {numbers}")
    return lines


def explain(source: Group | Tree, rule: CreditRule = tree_grpo, **options: Any) -> str:
    """The arithmetic of ``rule`` on one small group or tree, as text: every statistic, node value and advantage.

    Knows the formulas of this module's rules; of any other rule it prints the advantages.
    """
    group = source if isinstance(source, Group) else Group(source.prompt_uid, [source])
    explainers: dict[CreditRule, tuple[Callable[..., list[str]], dict[str, Any]]] = {
        grpo: (_explain_grpo, {}),
        tree_grpo: (_explain_tree_grpo, {}),
        tree_grpo_reference: (_explain_tree_grpo, {"singleton": "raw"}),
        at2po: (_explain_at2po, {}),
        at2po_reference: (_explain_at2po, {"weights": "softmax", "singleton": "raw"}),
    }
    explainer, preset = explainers.get(rule, (lambda _, **__: [], {}))
    title = f"{getattr(rule, '__name__', rule)}: group {group.uid!r}, {len(group.scored_leaves())} scored leaves"
    formula = explainer(group, **(preset | options))
    return "\n".join([title, *formula, *_table(group, rule([group], **options))])
