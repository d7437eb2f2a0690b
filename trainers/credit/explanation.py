"""The arithmetic of credit rules on one small group, as text."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from turntree.trainers.credit.base import Advantages, CreditRule, Explainer, FloatArray, count_leaves, credit_needs
from turntree.trainers.credit.text import names, signed
from turntree.trainers.credit.trees import tree_grpo
from turntree.trainers.tree import Group, Node, Tree


def _unwrapped(rule: CreditRule, options: dict[str, Any]) -> tuple[CreditRule, dict[str, Any]]:
    """The rule below any ``functools.partial``, with all keyword arguments."""
    while isinstance(rule, functools.partial):
        options = {**rule.keywords, **options}
        rule = rule.func
    return rule, options


def _zeros(group: Group) -> dict[Node, FloatArray]:
    return {node: np.zeros(len(node.turn_ids)) for tree in group.trees for node in tree.nodes()}


def _row(leaf: Node, row: FloatArray, advantages: Advantages) -> str:
    if advantages.per == "turn":
        return "  ".join(signed(a) for a in row)
    turns = np.split(row, np.cumsum([len(n.turn_ids) for n in leaf.trajectory()])[:-1])
    return " | ".join(" ".join(signed(a) for a in turn) for turn in turns)


def _share(weight: float, leaves: int) -> str:
    return f"{weight:g}" if leaves == 1 or weight == 0.0 else f"{weight:g}/{leaves}"


def _omega(leaf: Node, weights: FloatArray, counts: dict[Node, int]) -> str:
    each = ", ".join(f"{w:g}" for w in weights)
    once = ", ".join(_share(w, counts[n]) for n, w in zip(leaf.trajectory(), weights, strict=True))
    return f"omega {each} per_leaf; {once} once"


def _table(group: Group, advantages: Advantages) -> list[str]:
    leaves, name = group.scored_leaves(), names(group)
    counts, weights = count_leaves(leaves), advantages.weights
    per = advantages.per
    lines = [f"advantage of each {per}, one line a trajectory, and omega of each turn (shared_turns per_leaf; once):"]
    for i, (leaf, row) in enumerate(zip(leaves, advantages.values[0], strict=True)):
        omega = _omega(leaf, np.ones(leaf.depth) if weights is None else weights[0][i], counts)
        lines.append(f"  {name[leaf]} (r {leaf.reward:g}): {_row(leaf, row, advantages)}   {omega}")
    return lines


def explain(source: Group | Tree, rule: CreditRule = tree_grpo, **options: Any) -> str:
    """The arithmetic of ``rule`` on one small group or tree, as text.

    The formula with its numbers at every node (values, weights, advantages), the advantages of each trajectory, and
    the weight omega of each turn under both settings of ``shared_turns``. ``options`` are the rule's keyword
    arguments; values and token rewards that it needs and that are not among them are taken as 0, and said to be.
    A group is all there is: statistics over a whole rollout are those of this group.

    A rule of your own prints its formula if it has an attribute ``explain``, a function of the group and the rule's
    options that returns lines of text; without one the tables are printed alone.
    """
    group = source if isinstance(source, Group) else Group(source.prompt_uid, [source])
    missing = [name for name in credit_needs(rule) if name not in _unwrapped(rule, options)[1]]
    given = options | dict.fromkeys(missing, _zeros(group))
    inner, everything = _unwrapped(rule, given)
    explainer: Explainer | None = getattr(rule, "explain", None) or getattr(inner, "explain", None)
    lines = [f"{getattr(inner, '__name__', inner)}: group {group.uid!r}, {len(group.scored_leaves())} scored leaves"]
    lines += [f"taken as 0, since not given: {', '.join(missing)}"] if missing else []
    lines += explainer(group, **everything) if explainer is not None else []
    return "\n".join([*lines, *_table(group, rule([group], **given))])
