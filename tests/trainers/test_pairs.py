"""Pairs of sibling turns for step-level DPO."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.errors import ConfigError
from turntree.trainers.pairs import Pair, sibling_pairs
from turntree.trainers.tree import Group, Node, Status, Tree

Groups = Callable[..., list[Group]]


def leaf(reward: float | None, *, ids: tuple[int, ...] = (1,), pruned: bool = False) -> Node:
    status: Status = "failed" if reward is None else "answered"
    return Node(turn_ids=ids, status=status, reward=reward, pruned=pruned)


def inner(*children: Node) -> Node:
    node = Node(turn_ids=(2,))
    for ordinal, child in enumerate(children):
        child.ordinal = ordinal
        node.add_child(child)
    return node


def group(*children: Node) -> Group:
    root = inner(*children)
    root.turn_ids = ()
    return Group("q", [Tree(root, "q")])


def paths(pairs: list[Pair]) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
    return [(p.winner.path, p.loser.path, p.margin) for p in pairs]


def test_golden_step_dpo_pairs(golden_dir: Path) -> None:
    for case in json.loads((golden_dir / "step_dpo.json").read_text(encoding="utf-8"))["cases"]:
        children = case["inputs"]["children"]
        pairs = sibling_pairs(group(*(leaf(child["value"]) for child in children)))
        found = [[children[p.winner.ordinal]["id"], children[p.loser.ordinal]["id"]] for p in pairs]
        assert sorted(found) == sorted(case["expected"]["pairs"])


def test_values_are_means_over_the_scored_leaves_below() -> None:
    mixed = inner(leaf(1.0), leaf(0.0), leaf(None), leaf(9.0, pruned=True))
    found = paths(sibling_pairs(group(mixed, leaf(0.25), leaf(None))))
    assert found == [((0,), (1,), 0.25), ((0, 0), (0, 1), 1.0)]


def test_min_margin_is_exclusive() -> None:
    siblings = group(leaf(1.0), leaf(0.5), leaf(0.0))
    assert paths(sibling_pairs(siblings, min_margin=0.5)) == [((0,), (2,), 1.0)]
    assert sibling_pairs(siblings, min_margin=1.0) == []


def test_the_widest_pairs_of_each_parent_are_kept_and_ties_go_in_child_order() -> None:
    siblings = group(leaf(0.5), leaf(0.0), leaf(1.0), leaf(0.5), inner(leaf(0.5), leaf(0.0)))
    one = paths(sibling_pairs(siblings, max_pairs_per_parent=1))
    assert one == [((2,), (1,), 1.0), ((4, 0), (4, 1), 0.5)]
    three = paths(sibling_pairs(siblings, max_pairs_per_parent=3))
    assert three == [((0,), (1,), 0.5), ((2,), (1,), 1.0), ((2,), (4,), 0.75), ((4, 0), (4, 1), 0.5)]


def test_equal_rewards_give_no_pair_however_their_means_round() -> None:
    assert sibling_pairs(group(inner(leaf(0.8), leaf(0.8), leaf(0.8)), leaf(0.8))) == []
    assert sibling_pairs(group(inner(leaf(0.3), inner(leaf(0.3), leaf(0.3))), leaf(0.3))) == []


def test_a_turn_without_tokens_is_in_no_pair() -> None:
    assert sibling_pairs(group(leaf(1.0, ids=()), leaf(0.0))) == []


@given(seed=st.integers(0, 500), limit=st.sampled_from([None, 1, 2]))
def test_pairs_are_ordered_siblings_with_a_positive_margin(random_groups: Groups, seed: int, limit: int | None) -> None:
    for one in random_groups(seed):
        everything = sibling_pairs(one)
        pairs = sibling_pairs(one, max_pairs_per_parent=limit)
        assert set(paths(pairs)) <= set(paths(everything))
        assert all(p.winner.parent is p.loser.parent and p.margin > 0 for p in pairs)
        of_parent: dict[int, list[float]] = {}
        for pair in pairs:
            of_parent.setdefault(id(pair.winner.parent), []).append(pair.margin)
        for pair in everything:
            kept = of_parent[id(pair.winner.parent)]
            assert limit is None or len(kept) <= limit
            assert pair.margin <= max(kept)


@pytest.mark.parametrize(
    "options",
    [{"min_margin": -0.1}, {"min_margin": float("nan")}, {"min_margin": float("inf")}, {"max_pairs_per_parent": 0}],
)
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        sibling_pairs(group(leaf(1.0)), **options)  # type: ignore[arg-type]
