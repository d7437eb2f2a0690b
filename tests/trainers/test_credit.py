"""Credit rules: golden numbers of the published code, and the laws they must hold on any tree."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import ConfigError, DataError
from turntree.trainers import credit
from turntree.trainers.credit import (
    Advantages,
    CreditRule,
    at2po,
    at2po_reference,
    at2po_values,
    child_weights,
    drop_small_groups,
    explain,
    grpo,
    normalise,
    tree_grpo,
    tree_grpo_reference,
)
from turntree.trainers.tree import Group, Node, Status, Tree


def build(nodes: list[dict[str, Any]], index: int = 0) -> tuple[Tree, dict[int, Node]]:
    """A tree from the golden files' node lists."""
    made: dict[int, Node] = {}
    for n in nodes:
        leaf = n["leaf"]
        node = Node(
            status="answered" if leaf else "open", entropy=n.get("entropy", 0.0), reward=n["reward"] if leaf else None
        )
        made[n["id"]] = node
        if n["parent"] is not None:
            parent = made[n["parent"]]
            node.ordinal = len(parent.children)
            parent.add_child(node)
    return Tree(made[nodes[0]["id"]], index=index), made


def flat(rewards: list[float], uid: str = "q") -> Group:
    root = Node()
    for i, r in enumerate(rewards):
        root.add_child(Node(ordinal=i, status="answered", reward=r))
    return Group(uid, [Tree(root)])


def numbers(advantages: Advantages, g: int = 0) -> list[float]:
    """The last turn's advantage of each leaf."""
    return [float(a[-1]) for a in advantages.values[g]]


def load(golden_dir: Path, name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((golden_dir / f"{name}.json").read_text())["cases"]
    assert cases
    return cases


# Golden numbers


def test_golden_tree_grpo_advantage(golden_dir: Path) -> None:
    names: dict[str, Any] = {"inter_tree": "inter", "intra_tree": "intra", "tree_sum": "sum", "tree_2norm": "2norm"}
    for case in load(golden_dir, "tree_grpo_advantage"):
        groups, at = [], []
        for prompt in case["inputs"]["prompts"]:
            trees = []
            for i, t in enumerate(prompt["trees"]):
                tree, made = build(t["nodes"], i)
                trees.append(tree)
                index = {made[n["id"]]: n["leaf_index"] for n in t["nodes"] if n["leaf"]}
                at += [index[leaf] for leaf in tree.scored_leaves()]
            groups.append(Group(prompt["prompt"], trees))
        for key, estimator in names.items():
            got = tree_grpo(groups, estimator=estimator, singleton="raw")
            arrays = [a for group in got.values for a in group]
            expected = [case["expected"][key][i] for i in at]
            assert len(arrays) == len(case["inputs"]["leaf_rewards"])
            for array, number in zip(arrays, expected, strict=True):
                np.testing.assert_allclose(array, number, atol=1e-6, err_msg=key)


def spans(leaf: Node, ids: dict[Node, int], ends: dict[int, int], turns: np.ndarray[Any, Any], width: int) -> Any:
    row = np.zeros(width)
    for node, a in zip(leaf.trajectory(), turns, strict=True):
        assert node.parent is not None
        row[ends[ids[node.parent]] : ends[ids[node]]] = a
    return row


def test_golden_at2po_credit(golden_dir: Path) -> None:
    modes = {"child_softmax": "child", "child_mean": "child_mean", "leaf_mean": "leaf_mean"}
    for case in load(golden_dir, "at2po_credit"):
        nodes = case["inputs"]["nodes"]
        tree, made = build(nodes)
        ids = {node: i for i, node in made.items()}
        ends = {n["id"]: n["end"] for n in nodes}
        group = Group("q", [tree])
        for expected in case["expected"]:
            options: dict[str, Any] = {
                "weights": "softmax",
                "value": modes[expected["node_value_mode"]],
                "normalise_leaves": expected["leaf_value_norm"],
            }
            values = at2po_values(group, **options)
            assert len(values) == len(nodes)
            for node, v in values.items():
                assert v == pytest.approx(expected["node_value"][str(ids[node])], abs=1e-6)
            got = at2po([group], advantage=expected["node_adv_mode"], **options)
            leaves = group.scored_leaves()
            for leaf, turns in zip(leaves, got.values[0], strict=True):
                want = [expected["node_advantage"][str(ids[n])] for n in leaf.trajectory()]
                np.testing.assert_allclose(turns, want, atol=1e-6)
            for leaf_id, row in zip(expected.get("leaf_order", []), expected.get("token_advantages", []), strict=True):
                turns = got.values[0][leaves.index(made[leaf_id])]
                np.testing.assert_allclose(spans(made[leaf_id], ids, ends, turns, len(row)), row, atol=1e-6)


def test_golden_at2po_linear_weights(golden_dir: Path) -> None:
    for case in load(golden_dir, "at2po_credit"):
        tree, made = build(case["inputs"]["nodes"])
        derived = case["derived_not_reference"]
        for want in derived["child_weights"].values():
            h = [made[i].entropy for i in want["children"]]
            np.testing.assert_allclose(child_weights(h, weights="linear"), want["linear"], atol=1e-6)
            np.testing.assert_allclose(child_weights(h, weights="softmax"), want["softmax"], atol=1e-6)
        values = at2po_values(Group("q", [tree]))
        for i, want in derived["node_value_with_linear_weights_paper_variant"].items():
            assert values[made[int(i)]] == pytest.approx(want, abs=1e-6)


def test_golden_flat_advantages(golden_dir: Path) -> None:
    """GRPO, Dr. GRPO and RLOO of the flat baselines (their rewards are the rows' sums)."""
    for case in load(golden_dir, "flat_advantages"):
        inputs, expected = case["inputs"], case["expected"]
        if "token_level_rewards" not in inputs or "grpo" not in expected:
            continue
        rewards = np.array(inputs["token_level_rewards"]).sum(axis=1)
        mask, names = np.array(inputs["response_mask"]), np.array(inputs["group"])
        options: dict[str, dict[str, Any]] = {
            "grpo": {},
            "dr_grpo": {"std": "none"},
            "rloo": {"std": "none", "baseline": "leave_one_out"},
        }
        for key, option in options.items():
            for name in sorted(set(names)):
                rows = np.flatnonzero(names == name)
                got = numbers(grpo([flat(rewards[rows].tolist())], singleton="raw", **option))
                want = np.array(expected[key])[rows]
                np.testing.assert_allclose(np.array(got)[:, None] * mask[rows], want, atol=1e-6, err_msg=key)


# Laws

ESTIMATORS: list[Any] = ["sum", "inter", "intra", "2norm"]
VALUES: list[Any] = ["child", "child_mean", "leaf_mean"]
DIFFERENCES: list[Any] = ["node_value", "diff_parent", "diff_global", "diff_localglobal", "vanilla"]
WEIGHTS: list[Any] = ["linear", "softmax"]

RULES: list[CreditRule] = [
    grpo,
    partial(grpo, std="population"),
    partial(grpo, std="none"),
    partial(grpo, baseline="leave_one_out"),
    *[partial(tree_grpo, estimator=e) for e in ESTIMATORS],
    *[partial(at2po, value=v, advantage=a, weights=w) for v, a, w in product(VALUES, DIFFERENCES, WEIGHTS)],
]

STATUSES: list[Status] = ["answered", "answered", "truncated", "failed"]
rewards_ = st.sampled_from([0.0, 0.1, 0.2, 0.35, 0.8, 1.0, -1.0])
entropies_ = st.floats(0.0, 5.0)


@st.composite
def subtrees(draw: st.DrawFn, depth: int = 3) -> Node:
    """A node with everything below it; every inner node leads to at least one leaf."""
    if depth == 0 or draw(st.booleans()):
        status = draw(st.sampled_from(STATUSES))
        reward = None if status == "failed" else draw(rewards_)
        return Node(status=status, reward=reward, entropy=draw(entropies_))
    node = Node(entropy=draw(entropies_))
    for i in range(draw(st.integers(1, 3))):
        child = draw(subtrees(depth=depth - 1))
        child.ordinal = i
        node.add_child(child)
    return node


@st.composite
def groups(draw: st.DrawFn) -> Group:
    trees = []
    for i in range(draw(st.integers(1, 2))):
        root = Node()
        for j in range(draw(st.integers(1, 3))):
            child = draw(subtrees())
            child.ordinal = j
            root.add_child(child)
        trees.append(Tree(root, index=i))
    return Group("q", trees)


def set_rewards(group: Group, f: Any) -> None:
    for leaf in group.scored_leaves():
        leaf.reward = f(leaf.reward)


@settings(max_examples=40, deadline=None)
@given(groups(), st.floats(-3, 3))
def test_equal_rewards_give_exactly_zero(group: Group, reward: float) -> None:
    set_rewards(group, lambda _: reward)
    for rule in RULES:
        for turns in rule([group]).values[0]:
            assert (turns == 0.0).all()


@settings(max_examples=40, deadline=None)
@given(groups())
def test_shapes_follow_the_scored_leaves(group: Group) -> None:
    leaves = group.scored_leaves()
    for rule in RULES:
        got = rule([group])
        assert got.per == "turn"
        assert [len(a) for a in got.values[0]] == [leaf.depth for leaf in leaves]
        assert all(a.dtype == np.float64 and np.isfinite(a).all() for a in got.values[0])


@settings(max_examples=40, deadline=None)
@given(groups(), groups())
def test_groups_never_mix(a: Group, b: Group) -> None:
    """Same names, same batch: the result is that of each group alone."""
    for rule in RULES:
        together, first, second = rule([a, b]), rule([a]), rule([b])
        for got, want in zip(together.values, (*first.values, *second.values), strict=True):
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y)


@settings(max_examples=40, deadline=None)
@given(groups(), st.floats(-2, 2))
def test_a_constant_added_to_all_rewards_changes_nothing(group: Group, shift: float) -> None:
    before = [rule([group]) for rule in RULES]
    set_rewards(group, lambda r: r + shift)
    for rule, old in zip(RULES, before, strict=True):
        for x, y in zip(rule([group]).values[0], old.values[0], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-7)


def mirrored(node: Node) -> Node:
    copy = Node(status=node.status, reward=node.reward, entropy=node.entropy)
    for i, child in enumerate(reversed(node.children)):
        twin = mirrored(child)
        twin.ordinal = i
        copy.add_child(twin)
    return copy


@settings(max_examples=40, deadline=None)
@given(groups())
def test_the_order_of_children_and_trees_does_not_matter(group: Group) -> None:
    mirror = Group("m", [Tree(mirrored(t.root), index=i) for i, t in enumerate(reversed(group.trees))])
    for rule in RULES:
        straight, back = rule([group]).values[0], rule([mirror]).values[0]
        for x, y in zip(straight, reversed(back), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(rewards_, min_size=1, max_size=9))
def test_group_relative_advantages_sum_to_zero(rewards: list[float]) -> None:
    stds: list[Any] = ["unbiased", "population", "none"]
    for std in stds:
        assert sum(normalise(rewards, std=std)) == pytest.approx(0.0, abs=1e-9)
    assert sum(normalise(rewards, std="none", baseline="leave_one_out")) == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(entropies_, min_size=1, max_size=6), st.floats(0.1, 3))
def test_child_weights_are_a_distribution_in_the_order_of_entropy(h: list[float], c: float) -> None:
    for kind in WEIGHTS:
        w = child_weights(h, weights=kind)
        assert w.sum() == pytest.approx(1.0)
        assert (w >= 0.0).all()
        order = np.argsort(h, kind="stable")
        assert (np.diff(w[order]) >= -1e-12).all()
    # Linear weights ignore the unit of entropy, softmax weights a common offset.
    if max(h) > 1e-9:
        np.testing.assert_allclose(child_weights([x * c for x in h]), child_weights(h), atol=1e-9)
    shifted = child_weights([x + c for x in h], weights="softmax")
    np.testing.assert_allclose(shifted, child_weights(h, weights="softmax"), atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(groups())
def test_values_lie_between_those_of_the_children(group: Group) -> None:
    for value in VALUES:
        values = at2po_values(group, value=value)
        for node in values:
            below = [values[c] for c in node.children if c in values]
            if below:
                assert min(below) - 1e-9 <= values[node] <= max(below) + 1e-9


# Cases


def test_linear_weights_are_uniform_where_all_entropies_are_zero() -> None:
    np.testing.assert_array_equal(child_weights([0.0, 0.0, 0.0, 0.0]), [0.25] * 4)
    np.testing.assert_array_equal(child_weights([-1e-12, 2.0]), [0.0, 1.0])


def test_singletons() -> None:
    one = [flat([0.8])]
    assert numbers(grpo(one)) == [0.0]
    assert numbers(grpo(one, singleton="raw")) == pytest.approx([0.8 / (1 + 1e-6)])
    assert numbers(grpo(one, std="none", singleton="raw")) == [0.8]
    assert numbers(tree_grpo(one)) == [0.0]
    assert numbers(tree_grpo_reference(one)) == pytest.approx([1.6], abs=1e-5)
    assert numbers(at2po(one)) == [0.0]


def test_failed_and_pruned_leaves_take_no_part() -> None:
    group = flat([1.0, 0.0, 0.5, 0.5])
    _, _, failed, pruned = group.trees[0].root.children
    failed.status, failed.reward = "failed", None
    pruned.pruned = True
    for rule in (grpo, tree_grpo, at2po):
        assert numbers(rule([group])) == pytest.approx(numbers(rule([flat([1.0, 0.0])])))
    values = at2po_values(group)
    assert failed not in values
    assert pruned not in values


def test_child_weights_are_renormalised_over_children_that_lead_to_a_reward() -> None:
    root = Node()
    for i, (h, r) in enumerate([(1.0, 1.0), (3.0, 0.0), (4.0, None)]):
        root.add_child(Node(ordinal=i, entropy=h, status="answered" if r is not None else "failed", reward=r))
    values = at2po_values(Group("q", [Tree(root)]), normalise_leaves=False)
    assert values[root] == pytest.approx(0.25)


def test_groups_with_too_few_scored_leaves_are_dropped() -> None:
    small, large = flat([1.0], "a"), flat([1.0, 0.0], "b")
    assert drop_small_groups([small, large]) == ([large], [small])
    assert drop_small_groups([small, large], 1) == ([small, large], [])
    assert drop_small_groups([]) == ([], [])


def test_empty_groups_are_no_error() -> None:
    nothing = Group("q", [Tree(Node())])
    for rule in RULES:
        assert rule([]).values == ()
        assert rule([nothing, Group("r", [])]).values == ((), ())


@pytest.mark.parametrize(
    "options", [{"estimator": "leaf"}, {"singleton": "one"}, {"estimator": "sum", "singleton": ""}]
)
def test_unknown_words_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        tree_grpo([flat([1.0, 0.0])], **options)


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="finite"):
        grpo([flat([1.0, float("nan")])])


def test_explain_prints_the_numbers_of_every_rule() -> None:
    group = flat([1.0, 0.0, 0.5])
    for rule in (grpo, tree_grpo, tree_grpo_reference, at2po, at2po_reference):
        text = explain(group, rule)
        for a in numbers(rule([group])):
            assert f"{a:.4f}" in text
    assert "of the others" in explain(group, grpo, baseline="leave_one_out")
    assert explain(group, at2po, advantage="vanilla").count("A(") == 1 + 3
    assert "advantage of each turn" in explain(group.trees[0], lambda g: grpo(g))


def test_every_public_name_exists() -> None:
    assert all(hasattr(credit, name) for name in credit.__all__)
