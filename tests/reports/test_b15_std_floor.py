"""B15: seven equal rewards and one other: no residue of rounding may blow up an advantage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turntree.trainers.credit import at2po, grpo, normalise, tree_grpo
from turntree.trainers.tree import Group, Node, Tree

REWARDS = [0.35] * 7 + [-0.25]


def group(rewards: list[float]) -> Group:
    root = Node()
    for i, r in enumerate(rewards):
        root.add_child(Node(ordinal=i, status="answered", reward=r))
    return Group("q", [Tree(root)])


@pytest.mark.parametrize("std", ["unbiased", "population", "none"])
def test_b15_leave_one_out_keeps_the_single_reward_unscaled(std: Any) -> None:
    a = normalise(REWARDS, std=std, baseline="leave_one_out")
    assert a[-1] == pytest.approx(-0.6)
    assert np.abs(a).max() < 1.0


def test_b15_plain_rules_are_bounded() -> None:
    for rule in (grpo, tree_grpo, at2po):
        values = np.concatenate(rule([group(REWARDS)]).values[0])
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 2 * np.sqrt(len(REWARDS))


def test_b15_rounding_residue_counts_as_equal() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit only."""
    baselines: list[Any] = ["mean", "leave_one_out"]
    for baseline in baselines:
        a = normalise([0.1 + 0.2, 0.3, 0.3], baseline=baseline)
        assert np.abs(a).max() < 1e-9
    for n in (3, 7, 16, 1000):
        assert not normalise([0.8] * n).any()
        assert not normalise([0.2] * n, baseline="leave_one_out").any()
