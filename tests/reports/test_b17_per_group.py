"""B17: advantages are relative to the prompt's own group, never to the batch."""

from __future__ import annotations

import numpy as np

from turntree.trainers.credit import at2po, grpo, tree_grpo
from turntree.trainers.tree import Group, Node, Tree


def group(rewards: list[float], uid: str) -> Group:
    root = Node()
    for i, r in enumerate(rewards):
        root.add_child(Node(ordinal=i, status="answered", reward=r))
    return Group(uid, [Tree(root, uid)])


def test_b17_one_question_always_right_one_always_wrong() -> None:
    for uids in (("a", "b"), ("same", "same")):
        batch = [group([1.0] * 4, uids[0]), group([0.0] * 4, uids[1])]
        for rule in (grpo, tree_grpo, at2po):
            assert all(not np.any(a) for g in rule(batch).values for a in g)


def test_b17_scale_of_one_group_does_not_reach_another() -> None:
    small, large = group([0.0, 1.0], "a"), group([0.0, 1000.0], "b")
    np.testing.assert_allclose(grpo([small, large]).values[0], grpo([small]).values[0])
