"""Expansion rules: the published choices, and what no rule may pick."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turntree.errors import ConfigError
from turntree.trainers.expansion import Expansion, chain, entropy, needs_of, random_nodes
from turntree.trainers.tree import Node, Tree


def build(nodes: list[dict[str, Any]]) -> tuple[Tree, dict[str, Node]]:
    made: dict[str, Node] = {}
    for n in nodes:
        node = Node(status="answered" if n["leaf"] else "open", entropy=n["entropy"])
        made[str(n["id"])] = node
        if n["parent"] is not None:
            parent = made[str(n["parent"])]
            node.ordinal = len(parent.children)
            parent.add_child(node)
    return Tree(made[str(nodes[0]["id"])]), made


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sample() -> tuple[Tree, dict[str, Node]]:
    return build(
        [
            {"id": 0, "parent": None, "leaf": False, "entropy": 0.0},
            {"id": 1, "parent": 0, "leaf": False, "entropy": 1.0},
            {"id": 2, "parent": 1, "leaf": True, "entropy": 9.0},
            {"id": 3, "parent": 0, "leaf": False, "entropy": 0.5},
            {"id": 4, "parent": 3, "leaf": True, "entropy": 9.0},
        ]
    )


def test_golden_at2po_expansion_select(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "at2po_expansion_select.json").read_text())["cases"]
    assert cases
    for case in cases:
        tree, made = build(case["inputs"]["nodes"])
        ids = {node: i for i, node in made.items()}
        expected = case["expected"]
        picks = entropy(tree, case["inputs"]["K"], rng())
        assert [ids[p.picked] for p in picks] == [str(i) for i in expected["selected"]]
        everything = entropy(tree, len(expected["candidates_bfs"]), rng())
        assert {ids[p.picked] for p in everything} == set(expected["candidates_bfs"])
        for p in everything:
            assert p.score == pytest.approx(expected["score"][ids[p.picked]], abs=1e-6)
            assert p.parent is (p.picked.parent or p.picked)


def test_golden_at2po_rollout_sim_selections(golden_dir: Path) -> None:
    """The published rollout's own choices, iteration by iteration (one segment a node)."""
    cases = json.loads((golden_dir / "at2po_rollout_sim.json").read_text())["cases"]
    compared = 0
    for case in cases:
        segments = Counter(generated["node"] for generated in case["generation_log"])
        if max(segments.values()) > 1:  # a node of two segments, which this library never makes
            continue
        root = "sample_0_root"
        order = [root, *dict.fromkeys(g["node"] for g in case["generation_log"])]
        records = {n["uid"]: n for n in case["nodes"]}
        chains = case["M"]
        for i, selected in enumerate(case["selected_per_iteration"]):
            # Branches of later iterations carry higher numbers: leave out what did not exist yet.
            limit = chains + i * case["K"]
            known = [u for u in order if u == root or int(u.split("_b")[1].split("_")[0]) < limit]
            tree, made = build([{**records[u], "id": u} for u in known])
            ids = {node: uid for uid, node in made.items()}
            assert [ids[p.picked] for p in entropy(tree, case["K"], rng())] == selected
            compared += 1
    assert compared


def test_chain_never_expands() -> None:
    assert chain(sample()[0], 5, rng()) == []


def test_random_nodes_is_uniform_over_open_nodes_with_replacement() -> None:
    tree, made = sample()
    picks = random_nodes(tree, 6000, rng(1))
    counts = Counter(id(p.parent) for p in picks)
    assert set(counts) == {id(made[i]) for i in ("0", "1", "3")}
    assert all(abs(c - 2000) < 200 for c in counts.values())
    assert all(p.parent is p.picked for p in picks)


def test_random_nodes_depends_on_its_generator_only() -> None:
    tree, _ = sample()
    first, again, other = (random_nodes(tree, 20, rng(s)) for s in (3, 3, 4))
    assert [p.parent.path for p in first] == [p.parent.path for p in again]
    assert [p.parent.path for p in first] != [p.parent.path for p in other]


def test_nodes_that_cannot_be_branched_are_never_grown() -> None:
    tree, made = sample()
    made["1"].branchable = False
    grown = random_nodes(tree, 200, rng()) + entropy(tree, 6, rng())
    assert all(p.parent.branchable for p in grown)
    assert made["1"] not in [p.parent for p in grown]
    # The turn of node 1 may be generated again: that resumes the root, before the call that left traces.
    assert made["1"] in [p.picked for p in entropy(tree, 6, rng())]
    made["0"].branchable = False
    assert [p.parent for p in random_nodes(tree, 5, rng())] == [made["3"]] * 5
    assert entropy(tree, 6, rng()) == []


def test_entropy_penalty_is_a_parameter() -> None:
    tree, made = sample()
    assert [p.picked for p in entropy(tree, 3, rng(), alpha=2.0)] == [made[i] for i in ("1", "3", "0")]
    scores = [p.score for p in entropy(tree, 3, rng(), alpha=2.0)]
    assert scores == pytest.approx([-1.0, -1.5, -2.0])


def test_ties_keep_breadth_first_order_and_short_rankings_repeat() -> None:
    tree, made = sample()
    for node in made.values():
        node.entropy = 0.0
    assert [p.picked for p in entropy(tree, 5, rng(), alpha=0.0)] == [made[i] for i in ("0", "1", "3", "0", "1")]


def test_entropy_refuses_tokens_without_log_probs() -> None:
    tree, made = sample()
    made["1"].turn_ids = (1, 2)
    with pytest.raises(ConfigError, match="log-prob"):
        entropy(tree, 1, rng())


def test_needs_are_read_through_partial() -> None:
    def anytime(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
        return random_nodes(tree, k, rng)

    anytime.needs = "any"  # type: ignore[attr-defined]
    assert needs_of(random_nodes) == "finished_round"
    assert needs_of(functools.partial(entropy, alpha=0.1)) == "finished_round"
    assert needs_of(functools.partial(anytime)) == "any"
    anytime.needs = "always"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="finished_round"):
        needs_of(anytime)
