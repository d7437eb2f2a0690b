"""Words and numbers of explanations."""

from __future__ import annotations

from collections.abc import Iterable

from turntree.trainers.credit.base import FloatArray, Std, all_equal, deviation
from turntree.trainers.tree import Group, Node


def num(x: float) -> str:
    """Four decimals, never ``-0.0000``; a float's rounding, which is not always numpy's."""
    return f"{round(float(x), 4) + 0.0:.4f}"


def signed(x: float) -> str:
    return f"{round(float(x), 4) + 0.0:+.4f}"


def nums(xs: Iterable[float]) -> str:
    return " ".join(num(x) for x in xs)


def names(group: Group) -> dict[Node, str]:
    """``tree 0, 1.0`` for the first child of the second turn from the first tree's root."""
    return {
        node: f"tree {tree.index}, {'.'.join(str(i) for i in node.path) or 'root'}"
        for tree in group.trees
        for node in tree.nodes()
    }


def fraction(reward: float, rewards: FloatArray, std: Std, eps: float, result: float) -> str:
    """``(r - mean) / (std + eps) = result`` with numbers in it."""
    if all_equal(rewards):
        return f"{'one reward' if rewards.size < 2 else 'equal rewards'}: {num(result)}"
    top = f"{reward:g} - {num(rewards.mean())}"
    if std == "none":
        return f"{top} = {num(result)}"
    return f"({top}) / ({num(deviation(rewards, std))} + {eps:g}) = {num(result)}"
