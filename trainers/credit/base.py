"""What every credit rule is made of: the contracts, and arithmetic in float64 over the scored leaves of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from turntree.errors import ConfigError, DataError
from turntree.trainers.tree import Group, Node

FloatArray: TypeAlias = npt.NDArray[np.float64]

Std = Literal["unbiased", "population", "none"]
Singleton = Literal["zero", "raw"]
Baseline = Literal["mean", "leave_one_out"]

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

An attribute ``explain`` (:data:`Explainer`) prints its arithmetic, see :func:`explain`.
"""

Explainer: TypeAlias = Callable[..., list[str]]
"""``explain(group, **options) -> lines`` of text, the options (and signals) being those of the rule it belongs to."""

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


R = TypeVar("R", bound=CreditRule)


def explained(explainer: Explainer, *, needs: tuple[str, ...] = ()) -> Callable[[R], R]:
    """Gives a credit rule its ``explain`` and ``needs``."""

    def mark(rule: R) -> R:
        setattr(rule, "explain", explainer)  # noqa: B010 - a function's own attribute, which types cannot express
        setattr(rule, "needs", needs)  # noqa: B010
        return rule

    return mark


def check(option: str, value: str, allowed: Sequence[str]) -> None:
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
    check("std", std, ("unbiased", "population", "none"))
    check("singleton", singleton, ("zero", "raw"))
    check("baseline", baseline, ("mean", "leave_one_out"))
    rewards = finite(np.asarray(values, dtype=np.float64))
    if rewards.size == 1 and singleton == "raw":
        return rewards / (1.0 if std == "none" else 1.0 + eps)
    if all_equal(rewards):
        return np.zeros_like(rewards)
    if baseline == "leave_one_out":
        return _leave_one_out(rewards, std=std, eps=eps)
    centred = rewards - rewards.mean()
    scaled: FloatArray = centred if std == "none" else centred / (deviation(rewards, std) + eps)
    return scaled


def finite(rewards: FloatArray) -> FloatArray:
    if not np.isfinite(rewards).all():
        raise DataError(f"credit: every reward must be finite, found {rewards.tolist()}; fail such leaves instead")
    return rewards


def all_equal(rewards: FloatArray) -> bool:
    """Compared, not computed: the rounded mean of equal numbers leaves a residue that a division could blow up."""
    return rewards.size < 2 or bool(rewards.max() == rewards.min())


def deviation(rewards: FloatArray, std: Std) -> float:
    if all_equal(rewards):
        return 0.0
    return float(rewards.std(ddof=1 if std == "unbiased" else 0))


def _leave_one_out(rewards: FloatArray, *, std: Std, eps: float) -> FloatArray:
    out = np.empty_like(rewards)
    for i, reward in enumerate(rewards):
        others = np.delete(rewards, i)
        scale = 0.0 if std == "none" else deviation(others, std)
        out[i] = (reward - others.mean()) / (scale if scale > eps else 1.0)
    return out


def rewards_of(leaves: Sequence[Node]) -> FloatArray:
    return finite(np.array([leaf.reward for leaf in leaves], dtype=np.float64))


def per_leaf(groups: Sequence[Group], advantage: Callable[[Group], FloatArray]) -> Advantages:
    """One number a leaf, the same for all turns of its trajectory."""
    return Advantages(
        "turn",
        tuple(
            tuple(np.full(leaf.depth, a) for leaf, a in zip(group.scored_leaves(), advantage(group), strict=True))
            for group in groups
        ),
    )


def per_node(groups: Sequence[Group], advantage: Callable[[Group], Mapping[Node, float]]) -> Advantages:
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


def scored_children(node: Node, leaves_below: Mapping[Node, int]) -> list[Node]:
    return [c for c in node.children if leaves_below.get(c)]


def sum_leaves(leaves: Sequence[Node], numbers: FloatArray) -> dict[Node, float]:
    """Sum of the leaves' ``numbers`` at or below each node that leads to one of them, the roots included."""
    sums: dict[Node, float] = {}
    for leaf, number in zip(leaves, numbers.tolist(), strict=True):
        node: Node | None = leaf
        while node is not None:
            sums[node] = sums.get(node, 0.0) + number
            node = node.parent
    return sums


def count_leaves(leaves: Sequence[Node]) -> dict[Node, int]:
    """Number of the leaves at or below each node that leads to one of them, the roots included."""
    return {node: round(n) for node, n in sum_leaves(leaves, np.ones(len(leaves))).items()}
