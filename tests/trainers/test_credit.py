"""Credit rules: the laws they must hold on any tree, and plain loops that they must agree with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.trainers.credit import (
    Advantages,
    CreditRule,
    arpo,
    at2po,
    at2po_centred,
    at2po_values,
    child_weights,
    credit_needs,
    dr_grpo,
    explain,
    gae,
    grpo,
    normalise,
    opo,
    reinforce_pp,
    reinforce_pp_baseline,
    rejection_sampling,
    rloo,
    shrunk_loo,
    sibling_baseline,
    tree_diff,
    tree_diff_reference,
    tree_grpo,
)
from turntree.trainers.tree import Group, Node, Status, Tree

Array = npt.NDArray[np.float64]


# Laws

ESTIMATORS: list[Any] = ["sum", "inter", "intra", "2norm"]
VALUES: list[Any] = ["child", "child_mean", "leaf_mean"]
DIFFERENCES: list[Any] = ["node_value", "diff_parent", "diff_global", "diff_localglobal", "vanilla"]
WEIGHTS: list[Any] = ["linear", "softmax"]

GROUP_RELATIVE: list[CreditRule] = [
    grpo,
    partial(grpo, std="population"),
    partial(grpo, baseline="leave_one_out"),
    dr_grpo,
    rloo,
    opo,
    arpo,
    partial(arpo, shared="soft", std="none"),
    *[partial(tree_grpo, estimator=e) for e in ESTIMATORS],
    *[partial(at2po, advantage=a, weights=w) for a, w in product(DIFFERENCES, WEIGHTS)],
    *[partial(at2po, advantage=a, value=v) for a, v in product(DIFFERENCES[:-1], VALUES[1:])],
    *[partial(at2po, advantage=a, normalise_leaves=False) for a in DIFFERENCES if a.startswith("diff")],
    *[partial(at2po_centred, value=v) for v in VALUES],
    tree_diff,
    sibling_baseline,
    *[partial(shrunk_loo, prior="group", kappa=k) for k in (0.0, 1.0, 3.0)],
]
ZERO_IF_ALL_ARE_EQUAL: list[CreditRule] = [reinforce_pp, reinforce_pp_baseline, shrunk_loo]
OTHERS: list[CreditRule] = [
    *ZERO_IF_ALL_ARE_EQUAL,
    partial(reinforce_pp, gamma=0.9),
    gae,
    partial(gae, gamma=0.9, lam=0.8),
    tree_diff_reference,
    rejection_sampling,
    partial(rejection_sampling, threshold=0.1),
]
RULES = [*GROUP_RELATIVE, *OTHERS]


def signals(groups: Sequence[Group]) -> dict[str, dict[Node, Array]]:
    """Values and token rewards that depend on what a node holds only."""
    nodes = [n for group in groups for tree in group.trees for n in tree.nodes()]
    ramps = {n: np.sin(n.entropy + np.arange(len(n.turn_ids))) for n in nodes}
    return {"values": ramps, "token_rewards": {n: 0.1 * r**2 for n, r in ramps.items()}}


def give(rule: CreditRule, groups: Sequence[Group]) -> Advantages:
    """``rule(groups)`` with the signals that the rule needs."""
    tables = signals(groups)
    return rule(groups, **{name: tables[name] for name in credit_needs(rule)})


STATUSES: list[Status] = ["answered", "answered", "truncated", "failed"]
rewards_ = st.sampled_from([0.0, 0.1, 0.2, 0.35, 0.8, 1.0, -1.0])
entropies_ = st.floats(0.0, 5.0)
turns_ = st.integers(0, 3).map(lambda n: (7,) * n)


@st.composite
def subtrees(draw: st.DrawFn, depth: int = 3) -> Node:
    """A node with everything below it; every inner node leads to at least one leaf."""
    if depth == 0 or draw(st.booleans()):
        status = draw(st.sampled_from(STATUSES))
        reward = None if status == "failed" else draw(rewards_)
        return Node(status=status, reward=reward, entropy=draw(entropies_), turn_ids=draw(turns_))
    node = Node(entropy=draw(entropies_), turn_ids=draw(turns_))
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


def same(a: Advantages, b: Advantages, atol: float = 0.0) -> None:
    for x, y in zip((a.values, a.returns, a.weights), (b.values, b.returns, b.weights), strict=True):
        assert (x is None) == (y is None)
        rows = zip(sum(x or (), ()), sum(y or (), ()), strict=True)
        for row, other in rows:
            np.testing.assert_allclose(row, other, rtol=0.0, atol=atol)


@settings(max_examples=25, deadline=None)
@given(groups(), groups(), st.floats(-3, 3), st.floats(-3, 3))
def test_equal_rewards_give_exactly_zero(a: Group, b: Group, reward: float, other: float) -> None:
    set_rewards(a, lambda _: reward)
    set_rewards(b, lambda _: other)
    for rule in GROUP_RELATIVE:
        for turns in sum(rule([a, b]).values, ()):
            assert (turns == 0.0).all()
    set_rewards(b, lambda _: reward)
    for rule in ZERO_IF_ALL_ARE_EQUAL:
        for turns in sum(rule([a, b]).values, ()):
            assert (turns == 0.0).all()


@settings(max_examples=25, deadline=None)
@given(groups())
def test_shapes_follow_the_scored_leaves(group: Group) -> None:
    leaves = group.scored_leaves()
    depths = [leaf.depth for leaf in leaves]
    tokens = [sum(len(n.turn_ids) for n in leaf.trajectory()) for leaf in leaves]
    for rule in RULES:
        got = give(rule, [group])
        assert [len(a) for a in got.values[0]] == (depths if got.per == "turn" else tokens)
        assert all(a.dtype == np.float64 and np.isfinite(a).all() for a in got.values[0])
        assert got.weights is None or [len(a) for a in got.weights[0]] == depths
        assert (got.returns is not None) == ("values" in credit_needs(rule))
        assert got.returns is None or [len(a) for a in got.returns[0]] == tokens


@settings(max_examples=25, deadline=None)
@given(groups(), groups())
def test_groups_never_mix(a: Group, b: Group) -> None:
    """Same names, same batch: the result is that of each group alone."""
    alone: list[CreditRule] = [*GROUP_RELATIVE, tree_diff_reference, rejection_sampling]
    for rule in alone:
        together, first, second = rule([a, b]), rule([a]), rule([b])
        same(together, Advantages("turn", first.values + second.values, weights=both(first.weights, second.weights)))


def both(a: Any, b: Any) -> Any:
    return None if a is None else a + b


@settings(max_examples=25, deadline=None)
@given(groups(), st.floats(-2, 2))
def test_a_constant_added_to_all_rewards_changes_nothing(group: Group, shift: float) -> None:
    rules = [*GROUP_RELATIVE, *ZERO_IF_ALL_ARE_EQUAL]
    before = [rule([group]) for rule in rules]
    set_rewards(group, lambda r: r + shift)
    for rule, old in zip(rules, before, strict=True):
        same(rule([group]), old, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(groups())
def test_leaves_without_a_reward_might_as_well_not_be_there(group: Group) -> None:
    rest = Group(group.uid, [Tree(scored_part(t.root) or Node(), index=t.index) for t in group.trees])
    for rule in RULES:
        same(give(rule, [group]), give(rule, [rest]), atol=1e-12)


def scored_part(node: Node) -> Node | None:
    """A copy of what leads to scored leaves."""
    children = [c for c in map(scored_part, node.children) if c is not None]
    if not children and not node.is_scored:
        return None
    copy = Node(status=node.status, reward=node.reward, entropy=node.entropy, turn_ids=node.turn_ids)
    for i, child in enumerate(children):
        child.ordinal = i
        copy.add_child(child)
    return copy


@settings(max_examples=20, deadline=None)
@given(groups(), groups())
def test_groups_without_a_scored_leaf_are_empty_rows(failed: Group, other: Group) -> None:
    for leaf in failed.scored_leaves():
        leaf.status, leaf.reward = "failed", None
    for rule in RULES:
        got = give(rule, [failed, other])
        assert got.values[0] == ()
        same(got, Advantages(got.per, ((), *give(rule, [other]).values), got.returns, got.weights))
        assert "0 scored leaves" in explain(failed, rule)


@settings(max_examples=25, deadline=None)
@given(groups())
def test_one_scored_leaf_gives_zero(group: Group) -> None:
    for leaf in group.scored_leaves()[1:]:
        leaf.pruned = True
    for rule in GROUP_RELATIVE:
        assert not any(row.any() for row in rule([group]).values[0])


def mirrored(node: Node) -> Node:
    copy = Node(status=node.status, reward=node.reward, entropy=node.entropy, turn_ids=node.turn_ids)
    for i, child in enumerate(reversed(node.children)):
        twin = mirrored(child)
        twin.ordinal = i
        copy.add_child(twin)
    return copy


@settings(max_examples=25, deadline=None)
@given(groups())
def test_the_order_of_children_and_trees_does_not_matter(group: Group) -> None:
    mirror = Group("m", [Tree(mirrored(t.root), index=i) for i, t in enumerate(reversed(group.trees))])
    for rule in RULES:
        back = give(rule, [mirror])
        turned = [r and (r[0][::-1],) for r in (back.values, back.returns, back.weights)]
        same(give(rule, [group]), Advantages(back.per, turned[0] or (), *turned[1:]), atol=1e-9)


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


@settings(max_examples=25, deadline=None)
@given(groups())
def test_values_lie_between_those_of_the_children(group: Group) -> None:
    for value in VALUES:
        values = at2po_values(group, value=value)
        for node in values:
            below = [values[c] for c in node.children if c in values]
            if below:
                assert min(below) - 1e-9 <= values[node] <= max(below) + 1e-9


# Plain loops


def leaves_of(group: Group, turn: Node) -> list[Node]:
    return [leaf for leaf in group.scored_leaves() if turn in leaf.trajectory()]


def reward(leaf: Node) -> float:
    assert leaf.reward is not None
    return leaf.reward


def value(group: Group, turn: Node) -> float:
    return float(np.mean([reward(leaf) for leaf in leaves_of(group, turn)]))


def rivals(group: Group, turn: Node) -> list[Node]:
    """Other turns, with a scored leaf below, from the same state; all roots are one state."""
    found = [n for tree in group.trees for n in tree.nodes()[1:] if leaves_of(group, n) and n is not turn]
    assert turn.parent is not None
    return [n for n in found if n.parent is turn.parent or (n.depth == 1 and turn.depth == 1)]


def each_turn(group: Group, rule: CreditRule, wanted: Callable[[Node], float]) -> None:
    for leaf, row in zip(group.scored_leaves(), rule([group]).values[0], strict=True):
        np.testing.assert_allclose(row, [wanted(turn) for turn in leaf.trajectory()], atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(groups())
def test_sibling_baseline_is_the_mean_of_the_other_children(group: Group) -> None:
    def wanted(turn: Node) -> float:
        others = [value(group, s) for s in rivals(group, turn)]
        return value(group, turn) - float(np.mean(others)) if others else 0.0

    each_turn(group, sibling_baseline, wanted)


@settings(max_examples=25, deadline=None)
@given(groups(), st.sampled_from([0.0, 0.5, 3.0]), st.booleans())
def test_shrunk_loo_is_the_recursion_of_its_formula(group: Group, kappa: float, alone: bool) -> None:
    fixed = Group("other", [Tree(Node(children=[]))])
    fixed.trees[0].root.add_child(Node(status="answered", reward=0.7))
    pool = group.scored_leaves() + ([] if alone else fixed.scored_leaves())

    def baseline(turn: Node) -> float:
        beside = [reward(leaf) for s in rivals(group, turn) for leaf in leaves_of(group, s)]
        assert turn.parent is not None
        above = baseline(turn.parent) if turn.depth > 1 else float(np.mean([reward(leaf) for leaf in pool]))
        weight = len(beside) + kappa
        return float(sum(beside) + kappa * above) / weight if weight else above

    batch = [group] if alone else [group, fixed]
    prior: Any = "group" if alone else "batch"
    each_turn(
        group,
        lambda groups: shrunk_loo(batch, kappa=kappa, prior=prior),
        lambda turn: value(group, turn) - baseline(turn),
    )


@settings(max_examples=25, deadline=None)
@given(groups())
def test_tree_diff_is_global_and_local_advantage(group: Group) -> None:
    top = np.mean([reward(leaf) for leaf in group.scored_leaves()] or [0.0])

    def wanted(turn: Node) -> float:
        v, parent = value(group, turn), turn.parent
        above = value(group, parent) if parent is not None and turn.depth > 1 else top
        return float((2 * v - top - above) / np.sqrt(len(leaves_of(group, turn))))

    each_turn(group, tree_diff, wanted)


@settings(max_examples=25, deadline=None)
@given(groups())
def test_arpo_is_the_mean_of_grpo_over_the_leaves_below(group: Group) -> None:
    own = {leaf: row[-1] for leaf, row in zip(group.scored_leaves(), grpo([group]).values[0], strict=True)}
    each_turn(group, arpo, lambda turn: float(np.mean([own[leaf] for leaf in leaves_of(group, turn)])))


@settings(max_examples=25, deadline=None)
@given(groups())
def test_how_chains_are_spread_over_trees_is_nothing_to_the_surroundings(group: Group) -> None:
    one = Node()
    for i, child in enumerate(c for tree in group.trees for c in tree.root.children):
        twin = mirrored(mirrored(child))
        twin.ordinal = i
        one.add_child(twin)
    joined = Group("joined", [Tree(one)])
    for rule in (tree_diff, sibling_baseline, shrunk_loo, partial(shrunk_loo, prior="group")):
        same(rule([group]), rule([joined]), atol=1e-12)


def loop_gae(path: Sequence[tuple[float, float]], gamma: float, lam: float) -> list[float]:
    """Advantages of (reward, value) steps, forwards from each step, as the sum of discounted deltas."""
    out = []
    for t in range(len(path)):
        total, discount = 0.0, 1.0
        for k in range(t, len(path)):
            following = path[k + 1][1] if k + 1 < len(path) else 0.0
            total += discount * (path[k][0] + gamma * following - path[k][1])
            discount *= gamma * lam
        out.append(total)
    return out


@settings(max_examples=25, deadline=None)
@given(st.lists(groups(), min_size=1, max_size=2), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_loop_over_each_path(batch: list[Group], gamma: float, lam: float) -> None:
    tables = signals(batch)
    values, extra = tables["values"], tables["token_rewards"]
    raw: list[float] = []
    targets: dict[tuple[Node, int], list[float]] = {}
    for leaf in (leaf for group in batch for leaf in group.scored_leaves()):
        tokens = [(n, i) for n in leaf.trajectory() for i in range(len(n.turn_ids))]
        path = [(extra[n][i], values[n][i]) for n, i in tokens]
        if path:
            path[-1] = (path[-1][0] + (leaf.reward or 0.0), path[-1][1])
        found = loop_gae(path, gamma, lam)
        raw += found
        for (n, i), a in zip(tokens, found, strict=True):
            targets.setdefault((n, i), []).append(a + values[n][i])
    got = gae(batch, values=values, token_rewards=extra, gamma=gamma, lam=lam)
    x = np.array(raw)
    white = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8) if x.size > 1 else np.zeros(x.size)
    np.testing.assert_allclose(np.concatenate([np.zeros(0), *sum(got.values, ())]), white, atol=1e-6)
    assert got.returns is not None
    for leaf, row in zip((leaf for g in batch for leaf in g.scored_leaves()), sum(got.returns, ()), strict=True):
        want = [np.mean(targets[n, i]) for n in leaf.trajectory() for i in range(len(n.turn_ids))]
        np.testing.assert_allclose(row, want, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(groups(), st.sampled_from([1.0, 0.9]))
def test_a_reward_of_the_last_token_is_one_of_the_leaf(group: Group, gamma: float) -> None:
    for leaf in group.scored_leaves():
        leaf.turn_ids = leaf.turn_ids or (7,)
    none = {n: np.zeros(len(n.turn_ids)) for tree in group.trees for n in tree.nodes()}
    before = reinforce_pp([group], gamma=gamma), gae([group], values=none, gamma=gamma)
    last = {n: np.eye(1, len(n.turn_ids), len(n.turn_ids) - 1)[0] * (n.reward or 0.0) for n in none if n.turn_ids}
    set_rewards(group, lambda _: 0.0)
    same(reinforce_pp([group], gamma=gamma, token_rewards=none | last), before[0], atol=1e-12)
    same(gae([group], values=none, token_rewards=none | last, gamma=gamma), before[1], atol=1e-12)


def test_empty_groups_are_no_error() -> None:
    nothing = Group("q", [Tree(Node())])
    for rule in RULES:
        assert give(rule, []).values == ()
        assert give(rule, [nothing, Group("r", [])]).values == ((), ())


@settings(max_examples=30, deadline=None)
@given(groups())
def test_explain_prints_every_advantage_of_every_rule_in_its_formula(group: Group) -> None:
    for rule in RULES:
        text = explain(group, rule)
        formula = text.split("advantage of each")[0].replace("-0.0000", "0.0000")
        zeros = {n: np.zeros(len(n.turn_ids)) for tree in group.trees for n in tree.nodes()}
        got = rule([group], **dict.fromkeys(credit_needs(rule), zeros))
        for a in np.concatenate([np.zeros(0), *got.values[0]]):
            assert f"{round(float(a), 4) + 0.0:.4f}" in formula, text
        assert len([line for line in text.splitlines() if line.endswith(" once")]) == len(group.scored_leaves())
        assert ("taken as 0, since not given: " in text) == bool(credit_needs(rule))
