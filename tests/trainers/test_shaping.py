"""Rewards before credit: DAPO's overlong penalty, KL in the reward, groups that carry a signal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import ConfigError
from turntree.trainers.packing import column, pack_groups, table
from turntree.trainers.shaping import Overlong, add_part, charge, has_signal, kl_token_rewards
from turntree.trainers.tree import Group, Node, Tree

Groups = Callable[..., list[Group]]


def leaf_of(reward: float, *lengths: int) -> Node:
    node = Node(observation_ids=(1,))
    for length in lengths:
        child = Node(turn_ids=(2,) * length, logprobs=(-1.0,) * length, observation_ids=(3,) * 50)
        node = node.add_child(child)
    node.status, node.reward = "answered", reward
    return node


def group_of(*leaves: Node) -> Group:
    roots = [leaf.trajectory()[0].parent for leaf in leaves]
    return Group("q", [Tree(root, index=i) for i, root in enumerate(roots) if root is not None])


def test_golden_overlong_penalty_is_the_references_down_to_its_floor(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "dapo_shaping.json").read_text())["overlong"]
    assert cases
    for case in cases:
        rule = Overlong(case["max_resp_len"], case["buffer_len"], case["penalty_factor"])
        expected = max(case["overlong_reward"], -case["penalty_factor"])
        assert rule.penalty(case["length"]) == pytest.approx(expected, abs=1e-6)


def test_golden_groups_that_are_kept(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "dapo_shaping.json").read_text())["filter_groups"]
    assert cases
    for case in cases:
        assert has_signal(group_of(*(leaf_of(r, 1) for r in case["rewards"]))) is case["keep"]


def test_a_group_of_one_is_kept() -> None:
    assert has_signal(group_of(leaf_of(0.0, 1)))


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 3))
def test_overlong_penalty_falls_and_stays_within_its_factor(tokens: int, buffer: int, factor: float) -> None:
    rule = Overlong(max(tokens, buffer), buffer, factor)
    values = [rule.penalty(length) for length in range(rule.tokens + 20)]
    assert values[0] == 0 or buffer == rule.tokens
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert values[-1] == -factor


def test_only_sampled_tokens_count_as_length() -> None:
    leaf = leaf_of(1.0, 6, 6)  # 12 sampled tokens, 100 of the environment
    Overlong(tokens=16, buffer=8, factor=0.5).apply([group_of(leaf)])
    assert leaf.reward == 1.0 - 0.5 * (12 - 8) / 8
    assert leaf.info["task_reward"] == 1.0
    assert dict(leaf.info["shaping"]) == {"overlong": -0.25}


def test_parts_add_up_and_the_score_stays() -> None:
    leaf = leaf_of(0.5, 1)
    add_part(leaf, "overlong", -0.25)
    add_part(leaf, "kl", -0.125)
    assert (leaf.reward, leaf.info["task_reward"]) == (0.125, 0.5)
    assert dict(leaf.info["shaping"]) == {"overlong": -0.25, "kl": -0.125}


def test_a_part_that_tokens_carry_is_noted_only() -> None:
    leaf = leaf_of(0.5, 1)
    add_part(leaf, "kl", -0.125, by_token=True)
    assert (leaf.reward, leaf.info["task_reward"]) == (0.5, 0.5)
    assert dict(leaf.info["shaping"]) == {"kl": -0.125}


@pytest.mark.parametrize(("tokens", "buffer"), [(10, 11), (10, 0), (0, 0)])
def test_impossible_overlong_limits_are_refused(tokens: int, buffer: int) -> None:
    with pytest.raises(ConfigError, match="buffer"):
        Overlong(tokens, buffer)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 40, 10_000]), st.sampled_from(["k1", "k2", "k3"]))
def test_kl_in_the_reward_counts_sampled_tokens_only(random_groups: Groups, seed: int, budget: int, kind: str) -> None:
    groups = random_groups(seed)
    packs = pack_groups(groups, max_pack_tokens=budget)
    for pack in packs:
        tokens = table(pack, "tokens")
        old = column(pack, "tokens", "sampler_logp")
        # Environment tokens hold nonsense: they must not matter.
        nonsense = torch.where(column(pack, "tokens", "loss_mask"), 0.0, -50.0)
        tokens.set("old_logp", old + nonsense)
        tokens.set("ref_logp", old - 0.5)
    rewards = kl_token_rewards(packs, groups, coef=0.1, kind=kind)
    per_token = {"k1": 0.5, "k2": 0.125, "k3": np.exp(-0.5) + 0.5 - 1}[kind]
    for node, values in rewards.items():
        np.testing.assert_allclose(values, np.full(len(node.turn_ids), -0.1 * per_token), atol=1e-6)
    before = {leaf: leaf.reward for group in groups for leaf in group.scored_leaves()}
    charge(groups, rewards)
    for leaf, reward in before.items():
        count = sum(len(n.turn_ids) for n in leaf.trajectory())
        assert reward is not None
        assert leaf.reward == pytest.approx(reward - 0.1 * per_token * count, abs=1e-5)
