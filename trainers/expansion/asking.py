"""Asking a rule of anybody's, and refusing places where no tree can grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from turntree.errors import ConfigError
from turntree.trainers.expansion.rule import Expansion, ExpansionRule
from turntree.trainers.tree import Node, Tree

__all__ = ["ask_rule"]


def ask_rule(rule: ExpansionRule, tree: Tree, k: int, rng: np.random.Generator) -> Sequence[Expansion]:
    """Up to ``k`` places that the rule names, all of which can be grown from.

    Raises ``ConfigError`` for anything else: no list of ``Expansion``, more places than were asked for, a node of
    another tree, a leaf, or a node that must not be branched from.
    """
    picks: Any = rule(tree, k, rng)
    # A node has a parent as well: taken for an Expansion, it would grow elsewhere than was meant.
    if not isinstance(picks, Sequence) or not all(map(_is_expansion, picks)):
        raise ConfigError(
            f"the expansion rule {rule!r} must return a list of Expansion objects, with nodes as parent and picked, "
            f"found {_kinds(picks)}"
        )
    if len(picks) > k:
        raise ConfigError(f"the expansion rule was asked for at most {k} places and returned {len(picks)}")
    for pick in picks:
        _check(pick, tree, rule)
    return picks


def _check(pick: Expansion, tree: Tree, rule: ExpansionRule) -> None:
    if not tree.holds(pick.parent) or pick.parent.is_leaf or not pick.parent.branchable:
        raise ConfigError(
            f"the expansion rule {rule!r} chose node {pick.parent.path} (status {pick.parent.status}, "
            f"branchable {pick.parent.branchable}); it must choose open, branchable nodes of the tree it was given"
        )
    if not tree.holds(pick.picked):
        raise ConfigError(
            f"the expansion rule {rule!r} picked node {pick.picked.path} of another tree; it must pick nodes of the "
            "tree it was given"
        )


def _is_expansion(pick: object) -> bool:
    return isinstance(pick, Expansion) and isinstance(pick.parent, Node) and isinstance(pick.picked, Node)


def _kinds(picks: Any) -> str:
    """What a rule returned, in the words of its types: the text of a node is that of its whole tree."""
    if not isinstance(picks, Sequence):
        return type(picks).__name__
    wrong = next(pick for pick in picks if not _is_expansion(pick))
    found = f"{type(picks).__name__} with {type(wrong).__name__}"
    if isinstance(wrong, Expansion):
        found += f" of {type(wrong.parent).__name__} and {type(wrong.picked).__name__}"
    return found
