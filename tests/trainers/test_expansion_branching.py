"""ARPO and AEPO: the published decisions, and the published loop replayed by a rule that is asked between rounds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import ConfigError
from turntree.trainers.build import growth_plan
from turntree.trainers.config import AlgorithmConfig
from turntree.trainers.expansion import (
    Expansion,
    aepo,
    aepo_branch,
    arpo,
    arpo_branch,
    initial_rollouts,
    truncated_entropy,
    ucb,
)
from turntree.trainers.seeds import derive_rng
from turntree.trainers.tree import Node, Tree

VOCABULARY = 1000


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# The formulas --------------------------------------------------------------------------------------------------------


@pytest.fixture
def golden(golden_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((golden_dir / "arpo_aepo_branching.json").read_text())
    return found


def test_golden_truncated_entropy(golden: dict[str, Any]) -> None:
    assert golden["entropy"]
    for case in golden["entropy"]:
        found = truncated_entropy(case["top10_logprobs_per_token"], vocab_size=golden["vocab_size"])
        assert found == pytest.approx(case["normalised"], abs=1e-6)
        assert found * math.log(golden["vocab_size"]) == pytest.approx(case["first20_pooled_sum_entropy"], abs=1e-6)


def test_a_candidate_without_probability_adds_nothing_to_the_entropy() -> None:
    half = math.log(0.5)
    assert truncated_entropy([[half, half, -math.inf]], vocab_size=2) == pytest.approx(1.0)


def test_golden_branch_decisions(golden: dict[str, Any]) -> None:
    assert golden["decisions"]
    for case in golden["decisions"]:
        u, delta = case["u"], case["H_now"] - case["H_init"]
        options = {name: case[name] for name in ("entropy_weight", "branch_probability")}
        x, branch = aepo_branch(u, delta, case["consecutive_branches"], **options)
        assert x == pytest.approx(case["aepo"]["prob"], abs=1e-6)
        assert branch == case["aepo"]["branch"]
        y, branch = arpo_branch(u, delta, **options)
        assert y == pytest.approx(case["arpo"]["prob"], abs=1e-6)
        assert branch == case["arpo"]["branch"]


def test_golden_initial_rollouts(golden: dict[str, Any]) -> None:
    assert golden["dynamic_initial_rollouts"]
    for case in golden["dynamic_initial_rollouts"]:
        assert initial_rollouts(case["H_root"], case["H_tool_avg"], case["n"]) == case["initial_rollouts"]


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.integers(1, 64))
def test_initial_rollouts_stay_in_range(root: float, tool: float, total: int) -> None:
    assert 1 <= initial_rollouts(root, tool, total) <= total


@given(st.floats(0, 1), st.floats(-2, 2))
def test_without_penalty_both_branch_with_the_same_probability(u: float, delta: float) -> None:
    """1 - u is as uniform as u; the two decisions are each other's mirror."""
    options = {"entropy_weight": 0.2, "branch_probability": 0.5}
    x, branches = aepo_branch(1 - u, delta, 0, **options)
    if abs(x - 0.5) > 1e-9:
        assert arpo_branch(u, delta, **options)[1] == branches


# A world whose turns depend on their path only -----------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What the policy would sample at any path."""

    seed: int
    depth: int

    def turn(self, path: tuple[int, ...]) -> Node:
        draw = derive_rng(self.seed, path)
        ends = len(path) >= self.depth or draw.random() < 0.3
        tokens = int(draw.integers(1, 30))
        return Node(
            ordinal=path[-1],
            turn_ids=tuple(range(tokens)),
            logprobs=(-1.0,) * tokens,
            entropies=tuple(draw.exponential(3.0, tokens).tolist()),
            status="answered" if ends else "open",
            reward=1.0 if ends else None,
            action="answer" if ends else "invalid" if draw.random() < 0.2 else "search",
        )

    def entropy(self, path: tuple[int, ...]) -> float:
        return math.fsum(self.turn(path).entropies[:20]) / math.log(VOCABULARY)

    def chain(self, parent: Node, ordinal: int) -> None:
        """Grow a trajectory from ``parent`` to its end."""
        node = parent.add_child(self.turn((*parent.path, ordinal)))
        while not node.is_leaf:
            node = node.add_child(self.turn((*node.path, 0)))


Decide = Callable[[float, float, int], bool]
OPTIONS: dict[str, float] = {"entropy_weight": 0.2, "branch_probability": 0.5}


def lock_step(world: World, *, chains: int, total: int, beam: int, seed: int, decide: Decide) -> set[tuple[int, ...]]:
    """The published loop: all live chains take a turn, then each may be copied; when none lives, one starts anew.

    Each chain is (path of its last turn, path of its first own turn, copies in a row). Returns all paths sampled.
    """
    sampled: set[tuple[int, ...]] = set()
    live: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [((i,), (i,), 0) for i in range(chains)]
    count, next_root = chains, chains
    while live:
        sampled.update(path for path, _, _ in live)
        onward: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        copies: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        for path, head, consecutive in live:
            turn = world.turn(path)
            if turn.is_leaf:
                continue
            delta = world.entropy(path) - world.entropy(head)
            made = 0
            if turn.action != "invalid":
                for u in derive_rng(seed, path, "arpo").random(beam - 1):
                    if count < total and decide(float(u), delta, consecutive):
                        made, count = made + 1, count + 1
            row = consecutive + 1 if made else 0
            onward.append(((*path, 0), head, row))
            copies.extend(((*path, 1 + i), (*path, 1 + i), row) for i in range(made))
        live = onward + copies
        if not live and count < total:
            live, count, next_root = [((next_root,), (next_root,), 0)], count + 1, next_root + 1
    return sampled


def by_rounds(
    world: World, rule: Callable[..., list[Expansion]], *, chains: int, total: int, k: int, seed: int
) -> Tree:
    tree = Tree(Node(), seed=seed)
    for i in range(chains):
        world.chain(tree.root, i)
    while len(tree.leaves()) < total:
        picks = rule(tree, min(k, total - len(tree.leaves())), rng())
        assert picks
        for pick in picks:
            world.chain(pick.parent, len(pick.parent.children))
    return tree


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(1, 6),
    chains=st.integers(1, 5),
    more=st.integers(0, 12),
    k=st.integers(1, 8),
    beam=st.integers(1, 3),
    penalised=st.booleans(),
)
def test_rounds_make_the_trees_of_the_published_loop(
    seed: int, depth: int, chains: int, more: int, k: int, beam: int, penalised: bool
) -> None:
    world, total = World(seed, depth), chains + more

    def decide(u: float, delta: float, consecutive: int) -> bool:
        if penalised:
            return aepo_branch(u, delta, consecutive, **OPTIONS)[1]
        return arpo_branch(u, delta, **OPTIONS)[1]

    def rule(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
        return (aepo if penalised else arpo)(tree, k, rng, beam_size=beam, vocab_size=VOCABULARY)

    tree = by_rounds(world, rule, chains=chains, total=total, k=k, seed=seed)
    expected = lock_step(world, chains=chains, total=total, beam=beam, seed=seed, decide=decide)
    assert {n.path for n in tree.nodes()} - {()} == expected


# Trees by hand -------------------------------------------------------------------------------------------------------


def turn(ordinal: int, entropy: float, *, tokens: int = 1, ends: bool = False, action: str = "search") -> Node:
    return Node(
        ordinal=ordinal,
        turn_ids=(1,) * tokens,
        logprobs=(-1.0,) * tokens,
        entropies=(entropy,) * tokens,
        status="answered" if ends else "open",
        reward=0.0 if ends else None,
        action=action,
    )


def line(*entropies: float, action: str = "search") -> Tree:
    """One chain of searches of these entropies, and an answer."""
    node = root = Node()
    for entropy in entropies:
        node = node.add_child(turn(0, entropy, action=action))
    node.add_child(turn(0, 0.0, ends=True))
    return Tree(root)


def always(tree: Tree, k: int = 8, **options: Any) -> list[Expansion]:
    """AEPO with draws that never matter: a copy wherever the penalty leaves anything."""
    return aepo(tree, k, rng(), entropy_weight=0.0, branch_probability=0.0, vocab_size=VOCABULARY, **options)


def test_the_shallowest_level_is_copied_first_and_each_turn_once() -> None:
    tree = line(1.0, 1.0, 1.0)
    for depth in (1, 2, 3):
        (pick,) = always(tree)
        assert pick.parent is pick.picked
        assert pick.parent.path == (0,) * depth
        pick.parent.add_child(turn(1, 0.0, ends=True))
    (fresh,) = always(tree)
    assert fresh.parent is tree.root


def test_beam_size_bounds_the_copies_of_a_turn() -> None:
    tree = line(1.0)
    assert [p.parent.path for p in always(tree, beam_size=4)] == [(0,)] * 3
    tree.root.children[0].add_child(turn(1, 0.0, ends=True))
    assert [p.parent.path for p in always(tree, beam_size=4)] == [(0,)] * 2
    assert [p.parent.path for p in always(tree, beam_size=4, k=1)] == [(0,)]
    assert [p.parent.path for p in always(tree, beam_size=1)] == [()]


def test_corrections_are_no_tool_results() -> None:
    assert [p.parent.path for p in always(line(1.0, 1.0, action="invalid"))] == [()]


def test_turns_after_external_calls_are_not_copied() -> None:
    tree = line(1.0, 1.0)
    for node in tree.root.children[0].walk():
        node.branchable = False
    assert [p.parent.path for p in always(tree)] == [()]
    tree.root.branchable = False
    assert always(tree) == []


def test_a_copy_measures_from_its_own_first_turn() -> None:
    """The chain's second turn is as certain as its first; the copy's is, against its own first turn, uncertain."""
    tree = line(4.0, 4.0)
    copy = tree.root.children[0].add_child(turn(1, 0.0))
    copy.add_child(turn(0, 4.0)).add_child(turn(0, 0.0, ends=True))
    options: dict[str, Any] = {"entropy_weight": 1e6, "branch_probability": 0.5, "vocab_size": VOCABULARY}
    tree.root.children[0].children[0].action = "invalid"
    copy.action = "invalid"
    (pick,) = aepo(tree, 8, rng(), **options)
    assert pick.parent.path == (0, 1, 0)
    assert pick.score == 1.0


def test_only_the_first_twenty_tokens_count() -> None:
    tree = line(1.0, 1.0)
    first, second = tree.root.children[0], tree.root.children[0].children[0]
    first.action = "invalid"
    for node, tokens in ((first, 20), (second, 60)):
        node.turn_ids, node.logprobs = (1,) * tokens, (-1.0,) * tokens
        node.entropies = (1.0,) * tokens
    options: dict[str, Any] = {"entropy_weight": 1e6, "vocab_size": VOCABULARY}
    (pick,) = arpo(tree, 8, rng(), branch_probability=1.0, **options)
    assert "+0.0000" in pick.reason
    second.entropies = (1.0,) * 19 + (2.0,) * 41
    (pick,) = arpo(tree, 8, rng(), branch_probability=0.0, **options)
    assert pick.parent is second


@pytest.mark.parametrize(("penalty", "expected"), [("chain", 0), ("tree", 1)])
def test_copies_in_a_row_are_penalised_by_path_or_by_level(penalty: Any, expected: int) -> None:
    """Two chains; the first turn of one was copied. Below the other nothing was, on its own path."""
    root = Node()
    for ordinal in (0, 1):
        top = root.add_child(turn(ordinal, 1.0))
        top.add_child(turn(0, 1.0)).add_child(turn(0, 0.0, ends=True))
    root.children[0].add_child(turn(1, 1.0)).add_child(turn(0, 0.0, ends=True))
    root.children[1].action = "invalid"
    picks = always(Tree(root), penalty=penalty)
    assert [p.parent.path for p in picks] == [(0, 0), (1, 0), (0, 1)], "chains of the level before, then its copies"
    rows = [f"penalty of {c} in a row" for c in (1, expected, 1)]
    assert all(row in p.reason for row, p in zip(rows, picks, strict=True))


def test_a_full_penalty_ends_copying() -> None:
    tree = line(1.0, 1.0)
    options: dict[str, Any] = {"entropy_weight": 9.0, "branch_probability": 1e-9, "vocab_size": VOCABULARY}
    (pick,) = aepo(tree, 8, rng(), decay=1.0, **options)
    pick.parent.add_child(turn(1, 0.0, ends=True))
    assert [p.parent.path for p in aepo(tree, 8, rng(), decay=1.0, **options)] == [()]


# AEPO's first chains -------------------------------------------------------------------------------------------------


def test_dynamic_starts_the_first_chains_that_the_entropies_ask_for() -> None:
    tree = line(1.0, 3.0, 5.0)  # H_tool is the mean of all turns: 1, 3, 5 and the answer's 0
    norm = math.log(VOCABULARY)
    wanted = initial_rollouts(1.0 / norm, 2.25 / norm, 16)
    assert 1 < wanted < 16
    picks = always(tree, k=16, dynamic=True, rollouts=16)
    assert [p.parent for p in picks] == [tree.root] * (wanted - 1)
    for pick in always(tree, k=3, dynamic=True, rollouts=16):
        pick.parent.add_child(turn(len(pick.parent.children), 0.0, ends=True))
    assert len(always(tree, k=16, dynamic=True, rollouts=16)) == wanted - 4
    while len(tree.root.children) < wanted:
        tree.root.add_child(turn(len(tree.root.children), 0.0, ends=True))
    assert [p.parent.path for p in always(tree, k=16, dynamic=True, rollouts=16)] == [(0,)]


def test_dynamic_of_a_one_turn_chain_starts_half() -> None:
    root = Node()
    root.add_child(turn(0, 2.0, ends=True))
    assert len(always(Tree(root), k=99, dynamic=True, rollouts=16)) == 9 - 1


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 1}, "vocab_size"),
        ({"beam_size": 0}, "beam_size"),
        ({"branch_probability": 1.5}, "branch_probability"),
        ({"branch_probability": math.nan}, "branch_probability"),
        ({"entropy_weight": math.inf}, "entropy_weight"),
        ({"decay": -1.0}, "decay"),
        ({"penalty": "prompt"}, "penalty"),
        ({"dynamic": True}, "rollouts"),
        ({"rollouts": 8}, "rollouts"),
        ({"dynamic": True, "rollouts": 0}, "rollouts"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        aepo(line(1.0), 2, rng(), **{"vocab_size": VOCABULARY, **options})
    if not {"decay", "penalty", "dynamic", "rollouts"} & set(options):
        with pytest.raises(ConfigError, match=message):
            arpo(line(1.0), 2, rng(), **{"vocab_size": VOCABULARY, **options})


def test_turns_without_entropies_are_refused_with_what_the_engine_must_give() -> None:
    tree = line(1.0)
    tree.root.children[0].entropies = ()
    for rule in (arpo, aepo):
        with pytest.raises(ConfigError, match="use an engine that reports them"):
            rule(tree, 2, rng(), vocab_size=VOCABULARY)


# In a run ------------------------------------------------------------------------------------------------------------


def test_a_plan_fills_in_the_size_of_the_vocabulary() -> None:
    algorithm = AlgorithmConfig(rounds=1, expansions=2, expansion="turntree.trainers.expansion:arpo")
    tree = line(1.0)
    options: dict[str, Any] = {"entropy_weight": 0.2}
    rule = growth_plan(replace(algorithm, expansion_args=options), vocab_size=77).rule
    assert rule(tree, 2, rng()) == arpo(tree, 2, rng(), vocab_size=77)
    with pytest.raises(ConfigError, match="vocab_size"):  # the user's own value is kept, also a bad one
        growth_plan(replace(algorithm, expansion_args={"vocab_size": 1}), vocab_size=77)
    with pytest.raises(ConfigError, match="vocab_size"):
        growth_plan(algorithm)
    other = replace(algorithm, expansion="turntree.trainers.expansion:ucb")
    assert growth_plan(other, vocab_size=77).rule is ucb
