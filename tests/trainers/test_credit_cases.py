"""Credit rules on small cases, their refusals, and what explain() prints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import ConfigError, DataError
from turntree.trainers import credit
from turntree.trainers.credit import (
    Advantages,
    CreditRule,
    arpo,
    at2po,
    at2po_reference,
    at2po_values,
    child_weights,
    credit_needs,
    drop_small_groups,
    explain,
    gae,
    grpo,
    opo,
    reinforce_pp,
    rejection_sampling,
    rloo,
    shrunk_loo,
    sibling_baseline,
    tree_diff,
    tree_grpo,
    tree_grpo_reference,
)
from turntree.trainers.credit.returns import whiten
from turntree.trainers.tree import Group, Node, Tree

Array = npt.NDArray[np.float64]


def flat(rewards: list[float], uid: str = "q") -> Group:
    root = Node()
    for i, r in enumerate(rewards):
        root.add_child(Node(ordinal=i, status="answered", reward=r))
    return Group(uid, [Tree(root)])


def numbers(advantages: Advantages, g: int = 0) -> list[float]:
    """The last turn's advantage of each leaf."""
    return [float(a[-1]) for a in advantages.values[g]]


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


@pytest.mark.parametrize(
    "options", [{"estimator": "leaf"}, {"singleton": "one"}, {"estimator": "sum", "singleton": ""}]
)
def test_unknown_words_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        tree_grpo([flat([1.0, 0.0])], **options)


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="finite"):
        grpo([flat([1.0, float("nan")])])


def test_whitening_of_one_number_and_of_equal_ones_is_zero() -> None:
    for numbers_ in ([0.3], [0.1] * 16, []):
        (row,) = whiten([[np.array(numbers_)]])[0]
        np.testing.assert_array_equal(row, np.zeros(len(numbers_)))
    (row,) = whiten([[np.array([0.0, 1.0, 2.0])]])[0]
    np.testing.assert_allclose(row, [-1.0, 0.0, 1.0], atol=1e-7)


def test_prior_of_the_batch_is_not_relative_to_the_group() -> None:
    right, wrong = flat([1.0, 1.0]), flat([0.0, 0.0])
    got = shrunk_loo([right, wrong], kappa=3.0)
    assert numbers(got, 0) == pytest.approx([1 - (1 + 3 * 0.5) / 4] * 2)
    assert numbers(got, 1) == pytest.approx([0 - 3 * 0.5 / 4] * 2)
    assert numbers(shrunk_loo([flat([0.8]), right, wrong])) == pytest.approx([0.8 - 2.8 / 5])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.35, 0.8, 1.0, -1.0]), min_size=2, max_size=8),
    st.sampled_from([0.0, 1.0, 3.0]),
)
def test_shrunk_loo_on_chains_is_rloo_up_to_a_factor(rewards: list[float], kappa: float) -> None:
    n = len(rewards)
    factor = (n - 1) * (n + kappa) / (n * (n - 1 + kappa))
    got = numbers(shrunk_loo([flat(rewards)], kappa=kappa, prior="group"))
    assert got == pytest.approx([a * factor for a in numbers(rloo([flat(rewards)]))], abs=1e-9)


def test_a_turn_without_siblings() -> None:
    root = Node()
    only = root.add_child(Node(entropy=1.0))
    for i, r in enumerate([1.0, 0.0, 0.0]):
        only.add_child(Node(ordinal=i, entropy=1.0, status="answered", reward=r))
    group = Group("q", [Tree(root)])
    for rule in (sibling_baseline, partial(at2po, advantage="diff_parent"), tree_diff):
        assert [row[0] for row in rule([group]).values[0]] == [0.0, 0.0, 0.0]
    assert numbers(sibling_baseline([group])) == pytest.approx([1.0, -0.5, -0.5])


def test_rejection_sampling_takes_the_best_of_those_over_the_threshold() -> None:
    group = flat([0.5, 1.0, 0.9, 1.0, 0.2])
    got = rejection_sampling([group], threshold=0.5, best=3)
    assert numbers(got) == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert got.weights == got.values
    assert numbers(rejection_sampling([group], best=1)) == [0.0, 1.0, 0.0, 0.0, 0.0]
    nothing = rejection_sampling([group], threshold=2.0)
    assert nothing.weights is not None
    assert [w.tolist() for w in nothing.weights[0]] == [[0.0]] * 5


def test_needs_are_those_of_the_function_below() -> None:
    assert credit_needs(partial(gae, lam=0.5)) == ("values", "token_rewards")
    assert credit_needs(reinforce_pp) == ("token_rewards",)
    assert credit_needs(grpo) == ()
    with pytest.raises(ConfigError, match="needs must be some of"):
        credit_needs(credit.explained(lambda group: [], needs=("entropy",))(lambda groups: Advantages("turn", ())))


BAD: list[tuple[CreditRule, dict[str, Any], str]] = [
    (reinforce_pp, {"gamma": 1.5}, "gamma must be from 0 to 1"),
    (gae, {"values": {}, "lam": -0.1}, "lam must be from 0 to 1"),
    (shrunk_loo, {"kappa": -1.0}, "kappa must be a finite number"),
    (shrunk_loo, {"prior": "mean"}, "prior must be one of"),
    (arpo, {"shared": "both"}, "shared must be one of"),
    (opo, {"singleton": "one"}, "singleton must be one of"),
    (rejection_sampling, {"best": 0}, "best must be at least 1"),
]


@pytest.mark.parametrize(("rule", "options", "message"), BAD)
def test_options_out_of_range_are_refused(rule: CreditRule, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule([flat([1.0, 0.0])], **options)


@pytest.mark.parametrize("values", [[], [0.1], [0.1, float("inf")]])
def test_values_that_do_not_fit_are_refused(values: list[float]) -> None:
    group = flat([1.0])
    (leaf,) = group.scored_leaves()
    leaf.turn_ids = (1, 2)
    for table in ({leaf: np.array(values)}, {}):
        with pytest.raises(DataError, match="2 sampled tokens and needs as many finite values"):
            gae([group], values=table)


# Explanations


def names_of(text: str) -> list[str]:
    return [line for line in text.split("advantage of each")[1].splitlines() if line.startswith("  tree")]


def test_explain_shows_omega_under_both_settings_and_weights_of_the_rule() -> None:
    root = Node()
    turn = root.add_child(Node())
    for i, r in enumerate([1.0, 0.0]):
        turn.add_child(Node(ordinal=i, status="answered", reward=r))
    first, second = names_of(explain(Tree(root), rejection_sampling))
    assert first.endswith("omega 1, 1 per_leaf; 1/2, 1 once")
    assert second.endswith("omega 0, 0 per_leaf; 0, 0 once")


def test_explain_takes_values_and_options_and_partials() -> None:
    group = flat([1.0, 0.0, 0.5])
    table: dict[Node, Array] = {leaf: np.array([0.25]) for leaf in group.scored_leaves()}
    for leaf in table:
        leaf.turn_ids = (1,)
    text = explain(group, gae, values=table)
    assert "V     = 0.2500" in text
    assert "taken as 0, since not given: token_rewards" in text
    assert "taken as 0, since not given: token_rewards" in explain(group, partial(gae, values=table))
    assert "of the others" in explain(group, grpo, baseline="leave_one_out")
    assert explain(group, partial(at2po, advantage="vanilla")).count("A(") == 1 + 3
    assert explain(group, tree_grpo_reference).startswith("tree_grpo_reference: ")
    assert "w softmax" in explain(group, at2po_reference)
    assert "V(n)" not in explain(group.trees[0], lambda g: at2po(g))


def test_explain_prints_what_a_rule_of_ones_own_says() -> None:
    @credit.explained(lambda group, scale=1.0: [f"scale {scale:g} of {group.uid}"])
    def mine(groups: Sequence[Group], *, scale: float = 1.0) -> Advantages:
        return Advantages("turn", tuple(tuple(np.full(1, scale) for _ in g.scored_leaves()) for g in groups))

    text = explain(flat([1.0, 0.0]), mine, scale=2.0)
    assert text.startswith("mine: ")
    assert "scale 2 of q" in text


def test_every_public_name_exists() -> None:
    assert all(hasattr(credit, name) for name in credit.__all__)
