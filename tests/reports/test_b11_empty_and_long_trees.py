"""B11: a batch without trees does not crash; a long tree never needs a tokens x tokens tensor."""

from __future__ import annotations

import tracemalloc

import torch

from turntree.trainers.credit import Advantages
from turntree.trainers.forward import score_packs
from turntree.trainers.losses import Denominators
from turntree.trainers.objectives import combine_metrics
from turntree.trainers.packing import column, pack_groups, table, write_advantages
from turntree.trainers.tree import Group, Node, Tree
from turntree.trainers.tree_attention import plan_attention


def turn(ordinal: int, length: int, *, leaf: bool) -> Node:
    return Node(
        ordinal=ordinal,
        turn_ids=(1,) * length,
        logprobs=(-1.0,) * length,
        observation_ids=() if leaf else (2,) * length,
        status="answered" if leaf else "open",
        reward=1.0 if leaf else None,
    )


def test_b11_no_trees_make_no_packs() -> None:
    failed = Node(observation_ids=(1,))
    failed.add_child(Node(turn_ids=(2,), logprobs=(-1.0,), status="failed"))
    for groups in ([], [Group("q", [])], [Group("q", [Tree(failed)])]):
        packs = pack_groups(groups, max_pack_tokens=10)
        assert packs == []
        score_packs(torch.nn.Linear(1, 1), packs)
        write_advantages(packs, Advantages(per="turn", values=((),)))
        assert Denominators.of(packs) == Denominators(0.0, 0.0, 0.0)
    assert combine_metrics([])["ess_turn"] == 1.0


def test_b11_a_tree_of_32k_tokens_needs_no_square_tensor() -> None:
    root = Node(observation_ids=(3,) * 1000)
    for a in range(8):
        first = root.add_child(turn(a, 300, leaf=False))
        for b in range(8):
            second = first.add_child(turn(b, 160, leaf=False))
            second.add_child(turn(0, 100, leaf=True))
    tracemalloc.start()
    (pack,) = pack_groups([Group("q", [Tree(root)])], max_pack_tokens=10**6)
    plan = plan_attention(column(pack, "tokens", "subtree_end"), column(pack, "tokens", "predecessor"))
    cover = plan.cover()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    n = len(table(pack, "tokens"))
    assert n > 32_000
    tensors = [t for c in cover.calls for t in (c.queries, c.keys, c.mask) if t is not None]
    # An N x N mask of single bytes would be n * n bytes.
    assert peak + sum(t.numel() * t.element_size() for t in tensors) < n * n / 8
    assert cover.pairs < n * n / 8
