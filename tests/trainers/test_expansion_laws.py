"""What holds for every expansion rule on every tree."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.trainers.expansion import (
    ExpansionRule,
    aepo,
    arpo,
    chain,
    entropy,
    guided,
    needs_of,
    random_nodes,
    ucb,
    value_variance,
)
from turntree.trainers.tree import Node, Status, Tree

RULES: dict[str, ExpansionRule] = {
    "chain": chain,
    "random_nodes": random_nodes,
    "entropy": entropy,
    "value_variance": value_variance,
    "guided": guided,
    "ucb": ucb,
    "arpo": functools.partial(arpo, vocab_size=100, entropy_weight=2.0),
    "aepo": functools.partial(aepo, vocab_size=100, entropy_weight=2.0, beam_size=3, penalty="tree"),
    "aepo_dynamic": functools.partial(aepo, vocab_size=100, dynamic=True, rollouts=9),
}

Ending = st.sampled_from(["answered", "answered", "truncated", "failed"])


@st.composite
def trees(draw: st.DrawFn, ending: st.SearchStrategy[str] = Ending) -> Tree:
    """Trees of up to four levels: failed, pruned and truncated leaves, turns without tokens, external calls."""
    root = Node(branchable=draw(st.booleans()) or draw(st.booleans()))
    level = [root]
    for depth in range(draw(st.integers(0, 4))):
        following: list[Node] = []
        for parent in level:
            for ordinal in range(draw(st.integers(1, 3))):
                node = parent.add_child(_turn(draw, ordinal, parent.branchable, last=depth == 3, ending=ending))
                following.extend([node] if not node.is_leaf else [])
        level = following
    for node in level:
        if node is not root:
            node.add_child(_turn(draw, 0, node.branchable, last=True, ending=ending))
    return Tree(root, seed=draw(st.integers(0, 2**40)))


def _turn(draw: st.DrawFn, ordinal: int, branchable: bool, *, last: bool, ending: st.SearchStrategy[str]) -> Node:
    noise = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), max_size=3))
    status: Any = draw(ending) if last or draw(st.booleans()) else "open"
    scored = status in ("answered", "truncated")
    return Node(
        ordinal=ordinal,
        turn_ids=tuple(range(len(noise))),
        logprobs=tuple(-x for x in noise),
        entropies=tuple(noise),
        entropy=sum(noise) / len(noise) if noise else 0.0,
        status=status,
        reward=draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0])) if scored else None,
        pruned=scored and draw(st.integers(0, 4)) == 0,
        action=draw(st.sampled_from(["search", "search", "invalid"])),
        branchable=branchable and (draw(st.booleans()) or draw(st.booleans())),
    )


def ask(rule: ExpansionRule, tree: Tree, k: int, seed: int) -> list[tuple[Any, ...]]:
    picks = rule(tree, k, np.random.default_rng(seed))
    return [(p.parent.path, p.picked.path, p.score, p.reason) for p in picks]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40, deadline=None)
@given(tree=trees(), k=st.integers(1, 7), seed=st.integers(0, 2**32))
def test_rules_keep_their_contract(name: str, tree: Tree, k: int, seed: int) -> None:
    """At most k places, all open and branchable nodes of this tree; a pure function of tree and generator."""
    rule, nodes = RULES[name], {id(n) for n in tree.nodes()}
    before = copy.deepcopy(tree)
    picks = rule(tree, k, np.random.default_rng(seed))
    assert len(picks) <= k
    for pick in picks:
        assert not pick.parent.is_leaf
        assert pick.parent.branchable
        assert {id(pick.parent), id(pick.picked)} <= nodes
        assert pick.score is None or np.isfinite(pick.score)
        assert pick.reason
    assert ask(rule, tree, k, seed) == [(p.parent.path, p.picked.path, p.score, p.reason) for p in picks]
    assert ask(rule, before, k, seed) == ask(rule, tree, k, seed), "the tree was changed"
    assert [repr_of(n) for n in tree.nodes()] == [repr_of(n) for n in before.nodes()]


def repr_of(node: Node) -> tuple[Any, ...]:
    return (node.path, node.status, node.reward, node.entropy, node.entropies, node.branchable, node.pruned)


@pytest.mark.parametrize("name", [n for n in RULES if n not in ("chain", "random_nodes")])
@given(tree=trees(), k=st.integers(1, 7))
@settings(max_examples=20, deadline=None)
def test_only_random_nodes_draws_from_the_generator(name: str, tree: Tree, k: int) -> None:
    assert ask(RULES[name], tree, k, 0) == ask(RULES[name], tree, k, 1)


@pytest.mark.parametrize("name", [n for n in RULES if n != "chain"])
@settings(max_examples=30, deadline=None)
@given(tree=trees(st.just("failed")), k=st.integers(1, 7))
def test_trees_without_a_scored_leaf_are_still_grown(name: str, tree: Tree, k: int) -> None:
    tree.root.branchable = True
    assert not tree.scored_leaves()
    assert RULES[name](tree, k, np.random.default_rng(0))


@pytest.mark.parametrize("name", [n for n in RULES if n != "chain"])
@pytest.mark.parametrize("status", ["answered", "truncated", "failed", None])
def test_one_turn_prompts_branch_at_the_root(name: str, status: Status | None) -> None:
    """Also a root alone, before anything was sampled."""
    root = Node()
    if status is not None:
        reward = None if status == "failed" else 1.0
        root.add_child(
            Node(turn_ids=(1,), logprobs=(-1.0,), entropies=(1.0,), entropy=1.0, status=status, reward=reward)
        )
    picks = RULES[name](Tree(root), 3, np.random.default_rng(0))
    assert {p.parent.path for p in picks} == {()}
    root.branchable = False
    assert RULES[name](Tree(root), 3, np.random.default_rng(0)) == []


def test_all_rules_are_asked_between_rounds() -> None:
    """A rule that is asked any time makes trees that depend on which trajectory ends first."""
    assert {needs_of(rule) for rule in RULES.values()} == {"finished_round"}
