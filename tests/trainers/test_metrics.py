"""The numbers that a run shows, on hand trees and as laws on random ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turntree.envs.task import FrozenDict
from turntree.trainers.credit import Advantages, grpo
from turntree.trainers.metrics import (
    advantage_metrics,
    collected_metrics,
    mismatch_metrics,
    reward_metrics,
    rollout_metrics,
    step_metrics,
    tree_metrics,
    update_metrics,
    value_metrics,
)
from turntree.trainers.packing import column, pack_groups, row_tokens, table, write_advantages
from turntree.trainers.rollout import Rollout, RolloutStats
from turntree.trainers.tree import Group, Node, Tree

Groups = Callable[..., list[Group]]
seeds = st.integers(0, 10_000)


def node(parent: Node, turn: int, *, seen: int = 0, reward: float | None = None, **fields: Any) -> Node:
    """A child of ``turn`` sampled and ``seen`` observed tokens; a leaf if it has a reward or a status."""
    fields.setdefault("status", "open" if reward is None else "answered")
    info = FrozenDict(fields.pop("info", {}))
    child = Node(
        turn_ids=(5,) * turn,
        logprobs=(-0.5,) * turn,
        observation_ids=(6,) * seen,
        ordinal=len(parent.children),
        reward=reward,
        info=info,
        **fields,
    )
    return parent.add_child(child)


@pytest.fixture
def hand() -> Group:
    """Root, a (with leaves a0 and a1), leaf b and the failed leaf c; one wrote in another dialect."""
    root = Node(observation_ids=(1, 2, 3))
    a = node(root, 2, seen=1, entropy=0.5)
    node(a, 1, reward=1.0, entropy=0.2, info={"em": 1.0, "f1": 1.0, "format_valid": True})
    shaped = {
        "stop_reason": "length",
        "task_reward": 0.5,
        "shaping": FrozenDict({"overlong": -0.5}),
        "other_dialect": 1,
    }
    node(a, 3, reward=0.0, entropy=0.4, status="truncated", info=shaped)
    node(root, 2, reward=0.0, entropy=0.1, info={"em": 0.0, "f1": 0.5, "format_valid": True, "stop_reason": "answer"})
    node(root, 1, entropy=0.6, status="failed")
    return Group("q", [Tree(root)])


def test_tokens_branchings_and_entropies_of_a_hand_tree(hand: Group) -> None:
    assert tree_metrics(hand.trees) == pytest.approx(
        {
            "tree/unique_tokens": 3 + 3 + 1 + 3 + 2,
            "tree/row_tokens": (3 + 3 + 1) + (3 + 3 + 3) + (3 + 2),
            "tree/branch_depth/0": 2,
            "tree/branch_depth/1": 1,
            # below the root the means 0.5 and 0, below a the rewards 1 and 0
            "tree/sibling_reward_variance": (0.0625 + 0.25) / 2,
            "tree/entropy": 1.8 / 5,
            "tree/entropy_depth/1": 1.2 / 3,
            "tree/entropy_depth/2": 0.6 / 2,
            "actions/unparsed_frac": 1 / 5,
        }
    )


def test_scores_rewards_and_parts_of_a_hand_tree(hand: Group) -> None:
    assert reward_metrics(hand.scored_leaves()) == pytest.approx(
        {
            "critic/score/mean": 0.5,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "critic/rewards/mean": 1 / 3,
            "critic/rewards/max": 1.0,
            "critic/rewards/min": 0.0,
            # of the two leaves that have it
            "tree/reward/em": 0.5,
            "tree/reward/f1": 0.75,
            "tree/reward/format": 1.0,
            "tree/reward/overlong": -0.5,
        }
    )


def test_lengths_and_counts_of_a_hand_tree(hand: Group) -> None:
    metrics = rollout_metrics(Rollout((hand,), RolloutStats(tool_calls=4, errors=FrozenDict({"ToolError": 1}))))
    expected = {
        "response_length/mean": 4, "response_length/max": 6, "response_length/min": 2,
        "response_length/clip_ratio": 1 / 3,
        "prompt_length/mean": 3, "prompt_length/max": 3, "prompt_length/min": 3,
        "num_turns/mean": 5 / 3, "num_turns/max": 2, "num_turns/min": 1,
        "tree/answered": 2 / 3, "tree/mixed_groups": 1,
        "budget/tool_calls": 4, "budget/failed": 1, "budget/error/ToolError/count": 1,
    }  # fmt: skip
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_groups_are_mixed_by_what_the_task_gave(hand: Group) -> None:
    for leaf, added in zip(hand.scored_leaves(), (-0.9, -0.8, -0.7), strict=True):
        leaf.info = FrozenDict({"task_reward": 1.0, "shaping": FrozenDict({"overlong": added})})
    metrics = rollout_metrics(Rollout((hand,), RolloutStats()))
    assert metrics["tree/mixed_groups"] == 0
    assert metrics["critic/rewards/mean"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # tokens of a0: 0 0 0.5; of a1: 0 0 -0.5 -0.5 -0.5; of b: 0 0
        (None, {"mean": -0.1, "max": 0.5, "min": -0.5, "zero": 3 / 5}),
        (([0.0, 1.0], [1.0, 0.0], [1.0]), {"mean": 0.1, "max": 0.5, "min": 0.0, "zero": 2 / 3}),
    ],
)
def test_advantages_of_a_hand_tree(hand: Group, weights: Any, expected: dict[str, float]) -> None:
    values = (tuple(np.array(row) for row in ([0.0, 0.5], [0.0, -0.5], [0.0])),)
    factors = None if weights is None else (tuple(np.array(row) for row in weights),)
    metrics = advantage_metrics([hand], Advantages("turn", values, weights=factors))
    assert metrics == pytest.approx(
        {
            **{f"critic/advantages/{key}": expected[key] for key in ("mean", "max", "min")},
            "tree/zero_advantage_turns": expected["zero"],
        }
    )


def test_a_turn_of_token_advantages_is_zero_where_all_are(hand: Group) -> None:
    rows = ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0, -1.0, 0.0], [0.0, 0.0])
    metrics = advantage_metrics([hand], Advantages("token", (tuple(np.array(row) for row in rows),)))
    assert metrics["tree/zero_advantage_turns"] == 3 / 5
    assert metrics["critic/advantages/mean"] == pytest.approx(0.1)


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
@example(seed=2345)  # two neighbouring trees of one group begin with the same tokens
def test_tokens_are_those_of_the_packs(random_groups: Groups, seed: int) -> None:
    """Of each tree by itself: trees of one prompt in one pack share the prompt's tokens, which the metric does not."""
    groups = [replace(group, trees=(tree,)) for group in random_groups(seed) for tree in group.trees]
    packs = pack_groups(groups, max_pack_tokens=100_000)
    metrics = tree_metrics([tree for group in groups for tree in group.trees])
    assert metrics["tree/unique_tokens"] == sum(len(table(pack, "tokens")) for pack in packs)
    assert metrics["tree/row_tokens"] == sum(len(row) for pack in packs for row in row_tokens(pack))
    assert metrics["tree/unique_tokens"] <= metrics["tree/row_tokens"]


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_every_trajectory_beyond_the_first_of_a_tree_is_one_branching(random_groups: Groups, seed: int) -> None:
    trees = [tree for group in random_groups(seed) for tree in group.trees]
    found = tree_metrics(trees)
    branchings = sum(value for key, value in found.items() if key.startswith("tree/branch_depth/"))
    assert branchings == sum(len(tree.leaves()) - 1 for tree in trees)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_chains_share_nothing_and_have_no_siblings(random_groups: Groups, seed: int) -> None:
    metrics = tree_metrics([tree for group in random_groups(seed, branch=1) for tree in group.trees])
    assert metrics["tree/unique_tokens"] == metrics["tree/row_tokens"]
    assert metrics["tree/branch_depth/0"] == 0
    assert math.isnan(metrics["tree/sibling_reward_variance"])


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_equal_rewards_give_no_variance_and_only_zero_advantages(random_groups: Groups, seed: int) -> None:
    groups = random_groups(seed, trees=3)
    for leaf in (leaf for group in groups for leaf in group.scored_leaves()):
        leaf.reward = 0.5
    variance = tree_metrics([t for g in groups for t in g.trees])["tree/sibling_reward_variance"]
    assert variance == 0 or not any(len(n.children) > 1 for g in groups for t in g.trees for n in t.nodes())
    assert advantage_metrics(groups, grpo(groups))["tree/zero_advantage_turns"] == 1.0


def test_nothing_is_nan_and_counts_of_nothing_are_zero() -> None:
    metrics = {
        **rollout_metrics(Rollout((), RolloutStats())),
        **advantage_metrics([], Advantages("turn", ())),
        **value_metrics([]),
        **mismatch_metrics([]),
    }
    zeros = {key for key in metrics if key.startswith("budget/")} | {"tree/unique_tokens", "tree/row_tokens"}
    assert zeros == {key for key, value in metrics.items() if value == 0}
    assert all(math.isnan(value) for key, value in metrics.items() if key not in zeros)


def test_engine_against_trainer(hand: Group) -> None:
    packs = pack_groups([hand], max_pack_tokens=100)
    for pack in packs:
        mask = column(pack, "tokens", "loss_mask")
        sampled = torch.arange(int(mask.sum())) < 2
        table(pack, "tokens").set("sampler_logp", torch.full(mask.shape, math.log(0.5)))
        old = torch.full(mask.shape, 7.0)  # no model token: never read
        old[mask] = torch.where(sampled, math.log(0.25), math.log(0.5))
        table(pack, "tokens").set("old_logp", old)
    # two of eight model tokens differ, by 0.25 in probability and log 2 in nats
    assert mismatch_metrics(packs) == pytest.approx(
        {
            "training/rollout_probs_diff_mean": 0.0625,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_probs_diff_std": np.std([0.25, 0.25, 0, 0, 0, 0, 0, 0], ddof=1),
            "rollout_corr/kl": math.log(2) / 4,
            "mismatch/mean": math.log(2) / 4,
            "mismatch/max": math.log(2),
        },
        abs=1e-6,
    )


def test_values_and_returns(hand: Group) -> None:
    packs = pack_groups([hand], max_pack_tokens=100)
    assert value_metrics(packs) == {}
    returns = [np.array(row) for row in ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0])]
    zeros = (tuple(np.zeros(leaf.depth) for leaf in hand.scored_leaves()),)
    write_advantages(packs, Advantages("turn", zeros, returns=(tuple(returns),)))
    for pack in packs:
        table(pack, "tokens").set("value", torch.full((len(table(pack, "tokens")),), 0.25))
    found = value_metrics(packs)
    variance = np.var(np.concatenate(returns), ddof=1)
    assert found == pytest.approx(
        {
            "critic/values/mean": 0.25, "critic/values/max": 0.25, "critic/values/min": 0.25,
            "critic/returns/mean": 0.3, "critic/returns/max": 1.0, "critic/returns/min": 0.0,
            "critic/vf_explained_var": 1 - variance / (variance + 1e-5),
        }
    )  # fmt: skip


def test_names_of_updates() -> None:
    taken = {"loss_objective": 1.0, "loss_kl": 0.25, "clip_fraction": 0.1, "ess_turn": 0.9, "clip_fraction_lower": 0.2,
             "value_loss": 3.0, "grad_norm": 2.0, "of_my_own": 5.0}  # fmt: skip
    assert update_metrics(taken) == {
        "actor/pg_loss": 1.0,
        "actor/loss_kl": 0.25,
        "actor/loss": 1.25,
        "actor/pg_clipfrac": 0.1,
        "actor/pg_clipfrac_lower": 0.2,
        "tree/ess_turn": 0.9,
        "critic/vf_loss": 3.0,
        "actor/grad_norm": 2.0,
        "actor/of_my_own": 5.0,
    }
    assert update_metrics({}) == {}


def test_time_of_a_step() -> None:
    times = {"timing_s/gen": 1.0, "timing_s/score": 0.5, "timing_s/update_actor": 2.5, "tree/row_tokens": 100.0}
    assert step_metrics(times) == {"timing_s/step": 4.0, "perf/throughput": 25.0}
    at_once = step_metrics({**dict.fromkeys(times, 0.0), "tree/row_tokens": 100.0})
    assert at_once["timing_s/step"] == 0.0
    assert math.isnan(at_once["perf/throughput"])


def test_everything_before_the_first_update_is_collected(hand: Group) -> None:
    rollout, advantages = Rollout((hand,), RolloutStats()), grpo([hand])
    packs = pack_groups([hand], max_pack_tokens=100)
    for pack in packs:
        table(pack, "tokens").set("old_logp", column(pack, "tokens", "sampler_logp") - 0.25)
        table(pack, "tokens").set("value", torch.full((len(table(pack, "tokens")),), 0.25))
    parts = (
        rollout_metrics(rollout),
        advantage_metrics([hand], advantages),
        value_metrics(packs),
        mismatch_metrics(packs),
    )
    found = collected_metrics(rollout, packs, advantages)
    assert len(found) == sum(map(len, parts))
    assert found == pytest.approx({key: value for part in parts for key, value in part.items()})
    assert {"critic/values/mean", "rollout_corr/kl", "tree/zero_advantage_turns", "num_turns/mean"} < found.keys()


def test_every_name_of_a_rollout(hand: Group) -> None:
    summaries = ("critic/score", "critic/rewards", "num_turns", "response_length", "prompt_length")
    names = {f"{name}/{key}" for name in summaries for key in ("mean", "max", "min")}
    names |= {f"tree/reward/{part}" for part in ("em", "f1", "format", "overlong")}
    names |= {f"tree/{key}" for key in ("answered", "mixed_groups", "unique_tokens", "row_tokens", "entropy")}
    names |= {"tree/sibling_reward_variance", "response_length/clip_ratio", "actions/unparsed_frac"}
    names |= {
        f"tree/{of}/{depth}" for of, depths in (("branch_depth", "01"), ("entropy_depth", "12")) for depth in depths
    }
    found = rollout_metrics(Rollout((hand,), RolloutStats()))
    assert {key for key in found if not key.startswith("budget/")} == names


def test_a_full_context_is_a_cut_response_too(hand: Group) -> None:
    first, second, third = hand.scored_leaves()
    first.status, first.info = "truncated", FrozenDict({"stop_reason": "context"})
    second.status, second.info = "truncated", FrozenDict({"stop_reason": "turns"})
    third.info = FrozenDict({"stop_reason": "length"})  # it answered all the same
    assert rollout_metrics(Rollout((hand,), RolloutStats()))["response_length/clip_ratio"] == pytest.approx(1 / 3)


def test_parts_of_other_environments(hand: Group) -> None:
    first, *_ = hand.scored_leaves()
    first.info = FrozenDict({"success": True, "em": None, "reward_parts": FrozenDict({"bonus": 2}), "task_reward": 3.0})
    found = reward_metrics([first])
    assert {key: value for key, value in found.items() if "tree/" in key} == {
        "tree/reward/bonus": 2.0,
        "tree/reward/success": 1.0,
    }
    assert found["critic/score/mean"] == found["critic/rewards/mean"] == 3.0


def test_groups_without_a_scored_leaf_are_neither_mixed_nor_equal(hand: Group) -> None:
    failed = Group("f", [Tree(Node(observation_ids=(1,)))])
    node(failed.trees[0].root, 1, status="failed")
    assert rollout_metrics(Rollout((hand, failed), RolloutStats()))["tree/mixed_groups"] == 1.0


def test_a_single_token_has_no_deviation() -> None:
    root = Node(observation_ids=(1,))
    node(root, 1, reward=1.0)
    (pack,) = pack_groups([Group("q", [Tree(root)])], max_pack_tokens=9)
    table(pack, "tokens").set("old_logp", torch.tensor([0.0, -0.75]))
    found = mismatch_metrics([pack])
    assert math.isnan(found["training/rollout_probs_diff_std"])
    assert found["rollout_corr/kl"] == pytest.approx(0.25)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(math.exp(-0.5) - math.exp(-0.75))


def test_packs_without_values_are_left_out(hand: Group) -> None:
    valued, bare = (pack_groups([hand], max_pack_tokens=100)[0] for _ in range(2))
    table(valued, "tokens").set("value", torch.arange(len(table(valued, "tokens"))).float())
    table(valued, "occurrences").set("ret", torch.arange(len(table(valued, "occurrences"))).float() ** 2)
    found = value_metrics([bare, valued])
    token = column(valued, "occurrences", "token").double()
    returns = np.arange(len(token), dtype=np.float64) ** 2
    assert found["critic/values/mean"] == pytest.approx(float(token.mean()))
    assert found["critic/returns/max"] == returns.max()
    unexplained = np.var(returns - token.numpy(), ddof=1) / (np.var(returns, ddof=1) + 1e-5)
    assert found["critic/vf_explained_var"] == pytest.approx(1 - unexplained, rel=1e-5)
