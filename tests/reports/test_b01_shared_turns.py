"""B01: a sampled turn that lies on several trajectories has an explicit, declared weight."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from turntree.trainers.losses import Denominators, Occurrences, policy_loss
from turntree.trainers.objectives import gather_occurrences
from turntree.trainers.packing import column, pack_groups, table
from turntree.trainers.tree import Group, Node, Tree


def root_turn_with_two_children() -> Group:
    root = Node(observation_ids=(1, 2))
    shared = root.add_child(Node(turn_ids=(3, 4), logprobs=(-1.0, -1.0), observation_ids=(5,)))
    for ordinal, (token, reward) in enumerate(((6, 1.0), (7, 0.0))):
        shared.add_child(Node(ordinal=ordinal, turn_ids=(token,), logprobs=(-1.0,), status="answered", reward=reward))
    return Group("q", [Tree(root)])


def gradient_by_token(shared_turns: Literal["per_leaf", "once"], advantages: tuple[float, float]) -> list[float]:
    """-d loss / d log-prob of each sampled token of the tree, on policy, token-mean times its denominator."""
    (pack,) = pack_groups([root_turn_with_two_children()], max_pack_tokens=100, shared_turns=shared_turns)
    leaf = column(pack, "occurrences", "leaf")
    table(pack, "occurrences").set("advantage", torch.tensor(advantages)[leaf])
    logp = torch.full((len(table(pack, "tokens")),), -1.0, requires_grad=True)
    occurrences: Occurrences = gather_occurrences(pack, logp)
    denominators = Denominators.of([pack])
    loss = policy_loss(occurrences, denominators).loss * denominators.weight
    (grad,) = torch.autograd.grad(loss, logp)
    return [-g for g in grad[column(pack, "tokens", "loss_mask")].tolist()]


@pytest.mark.parametrize(
    ("shared_turns", "advantages", "expected"),
    [
        ("per_leaf", (1.0, 1.0), [2.0, 2.0, 1.0, 1.0]),
        ("once", (1.0, 1.0), [1.0, 1.0, 1.0, 1.0]),
        ("per_leaf", (1.0, -0.5), [0.5, 0.5, 1.0, -0.5]),
        ("once", (1.0, -0.5), [0.25, 0.25, 1.0, -0.5]),
    ],
)
def test_b01_shared_turn_weight_is_exact(
    shared_turns: Literal["per_leaf", "once"], advantages: tuple[float, float], expected: list[float]
) -> None:
    assert gradient_by_token(shared_turns, advantages) == pytest.approx(expected)


@pytest.mark.parametrize("budget", [100, 6])
def test_b01_denominators_count_the_declared_weights(budget: int) -> None:
    group = root_turn_with_two_children()
    for shared_turns, weight, turns in (("per_leaf", 6.0, 4.0), ("once", 4.0, 3.0)):
        packs = pack_groups([group], max_pack_tokens=budget, shared_turns=shared_turns)  # type: ignore[arg-type]
        assert len(packs) == (1 if budget == 100 else 2)
        assert Denominators.of(packs) == Denominators(weight=weight, rows=2.0, width=3.0, turns=turns)
