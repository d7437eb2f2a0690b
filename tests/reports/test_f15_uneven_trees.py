"""Report F15: prompts with different numbers of rows crashed the mini-batches, or added optimiser steps."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.agents.models import load_model
from turntree.trainers.credit import grpo
from turntree.trainers.packing import table
from turntree.trainers.preparation import Preparation
from turntree.trainers.rollout import Rollout
from turntree.trainers.tally import RolloutStats
from turntree.trainers.tree import Group, Node, Tree

LEAVES = (3, 7, 5)


def grown(uid: str, leaves: int) -> Group:
    root = Node(observation_ids=(5, 6, 7))
    for ordinal in range(leaves):
        ids = tuple(range(8, 10 + ordinal))
        root.add_child(
            Node(
                ordinal=ordinal,
                turn_ids=ids,
                logprobs=(-1.0,) * len(ids),
                entropy=1.0,
                action="answer",
                status="answered",
                reward=float(ordinal % 2),
            )
        )
    return Group(uid, (Tree(root, uid),))


@pytest.mark.parametrize("max_pack_tokens", [10_000, 24])
@pytest.mark.parametrize(("prompts", "rows"), [(1, [3, 7, 5]), (2, [10, 5]), (3, [15]), (4, [15])])
def test_f15_mini_batches_are_counted_in_prompts(bed: Any, prompts: int, rows: list[int], max_pack_tokens: int) -> None:
    model, _ = load_model(bed.model)
    groups = tuple(grown(f"0/{i}", leaves) for i, leaves in enumerate(LEAVES))
    preparation = Preparation(credit=grpo, model=model, max_pack_tokens=max_pack_tokens, groups_per_update=prompts)
    prepared = preparation.prepare(Rollout(groups, RolloutStats()))
    assert [sum(len(table(pack, "rows")) for pack in packs) for packs in prepared.minibatches] == rows
