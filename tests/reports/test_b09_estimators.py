"""B09: each credit estimator on one hand tree, number by number."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.trainers.credit import (
    CreditRule,
    arpo,
    at2po,
    at2po_centred,
    explain,
    grpo,
    rloo,
    shrunk_loo,
    sibling_baseline,
    tree_diff,
    tree_diff_reference,
    tree_grpo,
)
from turntree.trainers.tree import Group, Node, Tree

C = 0.5 / (0.5773502691896258 + 1e-6)  # one leaf of [1, 0, 0, 1], unbiased: 0.866
P = 0.5 / (0.5 + 1e-6)  # population: 1.0


def hand_tree() -> Group:
    """root -> a (H 1) -> leaves 1 (H 1), 0 (H 3); root -> b (H 3) -> leaves 0 (H 1), 1 (H 1)."""
    root = Node()
    rewards, entropies = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 3.0], [1.0, 1.0]]
    for i, h in enumerate([1.0, 3.0]):
        node = root.add_child(Node(ordinal=i, entropy=h))
        for j in range(2):
            node.add_child(Node(ordinal=j, entropy=entropies[i][j], status="answered", reward=rewards[i][j]))
    return Group("hand", [Tree(root)])


# V(a) = 1/4 P - 3/4 P, V(b) = 0, V(root) = 1/4 V(a) + 3/4 V(b); each row: (a, leaf) or (b, leaf).
A, ROOT = -P / 2, -P / 8
CASES: list[tuple[CreditRule, dict[str, Any], list[tuple[float, float]]]] = [
    (grpo, {}, [(C, C), (-C, -C), (-C, -C), (C, C)]),
    (grpo, {"std": "none"}, [(0.5, 0.5), (-0.5, -0.5), (-0.5, -0.5), (0.5, 0.5)]),
    (tree_grpo, {}, [(2 * C, 2 * C), (-2 * C, -2 * C), (-2 * C, -2 * C), (2 * C, 2 * C)]),
    (at2po, {}, [(A, P), (A, -P), (0.0, -P), (0.0, P)]),
    (at2po, {"value": "child_mean"}, [(0.0, P), (0.0, -P), (0.0, -P), (0.0, P)]),
    (at2po, {"advantage": "diff_parent"}, [(A - ROOT, P - A), (A - ROOT, -P - A), (-ROOT, -P), (-ROOT, P)]),
    (
        at2po,
        {"advantage": "diff_global"},
        [(A - ROOT, P - ROOT), (A - ROOT, -P - ROOT), (-ROOT, -P - ROOT), (-ROOT, P - ROOT)],
    ),
    (at2po_centred, {}, [(A / 2, P), (A / 2, -P), (-A / 2, -P), (-A / 2, P)]),
    (rloo, {}, [(2 / 3, 2 / 3), (-2 / 3, -2 / 3), (-2 / 3, -2 / 3), (2 / 3, 2 / 3)]),
    (arpo, {}, [(0.0, C), (0.0, -C), (0.0, -C), (0.0, C)]),
    (tree_diff, {}, [(0.0, 1.0), (0.0, -1.0), (0.0, -1.0), (0.0, 1.0)]),  # global + local, no value on top
    (tree_diff_reference, {}, [(0.5 / 2**0.5, 1.4), (0.5 / 2**0.5, 0.0), (0.5 / 2**0.5, 0.0), (0.5 / 2**0.5, 1.4)]),
    (sibling_baseline, {}, [(0.0, 1.0), (0.0, -1.0), (0.0, -1.0), (0.0, 1.0)]),
    (shrunk_loo, {}, [(0.0, 0.625), (0.0, -0.625), (0.0, -0.625), (0.0, 0.625)]),
]


@pytest.mark.parametrize(("rule", "options", "expected"), CASES)
def test_b09_hand_tree(rule: CreditRule, options: dict[str, Any], expected: list[tuple[float, float]]) -> None:
    rows = rule([hand_tree()], **options).values[0]
    assert [tuple(r) for r in rows] == [pytest.approx(e, abs=1e-12) for e in expected]


@pytest.mark.parametrize(("rule", "options", "expected"), CASES)
def test_b09_explain_prints_every_advantage(
    rule: CreditRule, options: dict[str, Any], expected: list[tuple[float, float]]
) -> None:
    text = explain(hand_tree(), rule, **options)
    for row in expected:
        assert "  ".join(f"{a:+.4f}" for a in row) in text.replace("-0.0000", "+0.0000")


def test_b09_explain_shows_the_formula_of_each_node() -> None:
    text = explain(hand_tree(), at2po)
    assert "V(tree 0, 0) = 0.2500 x 1.0000 + 0.7500 x -1.0000 = -0.5000" in text
    assert "V(tree 0, root) = 0.2500 x -0.5000 + 0.7500 x 0.0000 = -0.1250" in text
    assert "inter: (1 - 0.5000) / (0.5774 + 1e-06) = 0.8660" in explain(hand_tree(), tree_grpo)
