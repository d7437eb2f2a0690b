"""The arithmetic of credit rules on one small group, as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from turntree.trainers.credit.base import (
    EPS,
    Advantages,
    CreditRule,
    FloatArray,
    Std,
    count_leaves,
    deviation,
    normalise,
    rewards_of,
    scored_children,
)
from turntree.trainers.credit.flat import grpo
from turntree.trainers.credit.trees import tree_grpo, tree_grpo_reference
from turntree.trainers.credit.values import (
    TurnAdvantage,
    Value,
    Weights,
    at2po,
    at2po_reference,
    at2po_values,
    difference,
    mixture_of,
)
from turntree.trainers.tree import Group, Node, Tree


def _name(node: Node) -> str:
    return "root" if node.parent is None else ".".join(str(i) for i in node.path)


def _fraction(reward: float, rewards: FloatArray, std: Std, eps: float, result: float) -> str:
    """``(r - mean) / (std + eps) = result`` with numbers in it."""
    if rewards.size < 2 or rewards.max() == rewards.min():
        return f"{'one reward' if rewards.size < 2 else 'equal rewards'}: {result:.4f}"
    top = f"({reward:g} - {rewards.mean():.4f})"
    if std == "none":
        return f"{top} = {result:.4f}"
    return f"{top} / ({deviation(rewards, std):.4f} + {eps:g}) = {result:.4f}"


def _explain_grpo(group: Group, **options: Any) -> list[str]:
    std, eps = options.get("std", "unbiased"), options.get("eps", EPS)
    leaves = group.scored_leaves()
    rewards = rewards_of(leaves)
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
    rewards = rewards_of(group.scored_leaves())
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
    rewards, below = rewards_of(group.scored_leaves()), count_leaves(group.scored_leaves())
    lines = [f"V(n) = sum of w_c V(c) over its children, w {weights if value == 'child' else value}; A = {advantage}"]
    for tree in group.trees:
        for node in (n for n in tree.nodes() if n in values):
            lines.append(f"  V(tree {tree.index}, {_name(node)}) = {_sum(node, values, below, value, weights)}")
            if node.parent is not None:
                lines.append(f"    A = {difference(node, values, advantage):.4f}")
    return [*lines, f"  leaves: r {rewards.tolist()}, mean {rewards.mean():.4f}, population std {rewards.std():.4f}"]


def _sum(node: Node, values: Mapping[Node, float], below: Mapping[Node, int], value: Value, weights: Weights) -> str:
    children = scored_children(node, below)
    if not children:
        return f"{values[node]:.4f} (leaf, r {node.reward:g})"
    mixture = mixture_of(children, below, value, weights)
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
