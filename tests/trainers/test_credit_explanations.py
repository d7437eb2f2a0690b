"""What ``explain()`` prints, word for word, and the refusals of credit rules."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turntree.errors import ConfigError, DataError
from turntree.trainers.credit import (
    Advantages,
    CreditRule,
    arpo,
    at2po,
    at2po_centred,
    at2po_reference,
    at2po_values,
    child_weights,
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
    tree_grpo_reference,
)
from turntree.trainers.tree import Group, Node, Status, Tree

GOLDEN = Path(__file__).parent.parent / "golden_trees" / "explanations.txt"


def add(
    parent: Node, tokens: int, *, entropy: float = 0.0, reward: float | None = None, status: Status = "open"
) -> Node:
    """A child with so many tokens; with a reward it is an answer."""
    if reward is not None:
        status = "answered"
    node = Node(ordinal=len(parent.children), turn_ids=(7,) * tokens, entropy=entropy, reward=reward, status=status)
    return parent.add_child(node)


def forked() -> Group:
    """Two trees: a shared turn over a right, a wrong and a failed leaf; two leaves below the second root."""
    first, second = Node(), Node()
    shared = add(first, 2, entropy=1.5)
    add(shared, 1, entropy=0.5, reward=1.0)
    add(shared, 2, entropy=1.0, reward=0.0)
    add(shared, 1, entropy=2.0, status="failed")
    add(first, 1, entropy=0.25, reward=0.25)
    add(second, 3, entropy=2.0, reward=0.5)
    add(add(second, 1, entropy=0.75), 1, entropy=1.25, reward=-1.0)
    return Group("why?", [Tree(first), Tree(second, index=1)])


def equal() -> Group:
    root = Node()
    for tokens in (1, 2):
        add(root, tokens, entropy=1.0, reward=0.3)
    return Group("same", [Tree(root)])


def one() -> Group:
    root = Node()
    add(root, 2, entropy=1.0, reward=0.8)
    return Group("alone", [Tree(root)])


def signals(group: Group) -> dict[str, dict[Node, Any]]:
    nodes = [n for tree in group.trees for n in tree.nodes()]
    ramps = {n: 0.25 * np.arange(1, 1 + len(n.turn_ids)) + 0.1 * n.entropy for n in nodes}
    return {"values": ramps, "token_rewards": {n: -0.1 * r for n, r in ramps.items()}}


def unexplained(groups: list[Group]) -> Advantages:
    return Advantages("turn", tuple(tuple(np.zeros(leaf.depth) for leaf in g.scored_leaves()) for g in groups))


PLAIN: dict[str, CreditRule] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "arpo": arpo,
    "tree_grpo": tree_grpo,
    "tree_grpo_reference": tree_grpo_reference,
    "at2po": at2po,
    "at2po_reference": at2po_reference,
    "at2po_centred": at2po_centred,
    "tree_diff": tree_diff,
    "tree_diff_reference": tree_diff_reference,
    "sibling_baseline": sibling_baseline,
    "shrunk_loo": shrunk_loo,
    "rejection_sampling": rejection_sampling,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
    "a rule that explains nothing": unexplained,
}
WITH_OPTIONS: dict[str, CreditRule] = {
    "grpo std=population": partial(grpo, std="population"),
    "grpo std=none singleton=raw": partial(grpo, std="none", singleton="raw"),
    "grpo baseline=leave_one_out": partial(grpo, baseline="leave_one_out", eps=0.5),
    "grpo eps=0.5": partial(grpo, eps=0.5),
    "arpo shared=soft": partial(arpo, shared="soft"),
    "arpo std=none": partial(arpo, std="none", singleton="raw"),
    "arpo eps=0.5": partial(arpo, std="population", eps=0.5),
    "opo singleton=raw": partial(opo, singleton="raw"),
    "tree_grpo estimator=inter": partial(tree_grpo, estimator="inter", eps=0.5),
    "tree_grpo estimator=intra": partial(tree_grpo, estimator="intra", singleton="raw"),
    "tree_grpo estimator=2norm": partial(tree_grpo, estimator="2norm"),
    "at2po weights=softmax": partial(at2po, weights="softmax", eps=0.5),
    "at2po value=child_mean": partial(at2po, value="child_mean", singleton="raw"),
    "at2po value=leaf_mean": partial(at2po, value="leaf_mean"),
    "at2po advantage=diff_parent": partial(at2po, advantage="diff_parent"),
    "at2po advantage=diff_global": partial(at2po, advantage="diff_global"),
    "at2po advantage=diff_localglobal": partial(at2po, advantage="diff_localglobal"),
    "at2po advantage=vanilla": partial(at2po, advantage="vanilla", singleton="raw", eps=0.5),
    "at2po normalise_leaves=False": partial(at2po, normalise_leaves=False),
    "at2po_centred value=leaf_mean": partial(at2po_centred, value="leaf_mean", eps=0.5),
    "at2po_centred weights=softmax": partial(at2po_centred, weights="softmax"),
    "tree_diff_reference margin=0.3": partial(tree_diff_reference, margin=0.3),
    "shrunk_loo kappa=1 prior=group": partial(shrunk_loo, kappa=1.0, prior="group"),
    "shrunk_loo kappa=0": partial(shrunk_loo, kappa=0.0),
    "rejection_sampling threshold=0 best=2": partial(rejection_sampling, threshold=0.0, best=2),
    "reinforce_pp gamma=0.5": partial(reinforce_pp, gamma=0.5),
    "reinforce_pp_baseline singleton=raw": partial(reinforce_pp_baseline, singleton="raw"),
    "gae gamma=0.5 lam=0.25": partial(gae, gamma=0.5, lam=0.25),
}


def explanations() -> dict[str, str]:
    """Every rule on each group, and those that take values and token rewards with some of them."""
    found = {f"{name} of {g.uid}": explain(g, rule) for name, rule in PLAIN.items() for g in (forked(), equal(), one())}
    found |= {f"{name} of why?": explain(forked(), rule) for name, rule in WITH_OPTIONS.items()}
    found |= {f"{name} of alone": explain(one(), WITH_OPTIONS[name]) for name in WITH_OPTIONS if "=raw" in name}
    group = forked()
    tables = signals(group)
    found["gae with values"] = explain(group, gae, values=tables["values"])
    found["gae with both"] = explain(group, gae, gamma=0.5, lam=0.25, **tables)
    found["reinforce_pp with rewards"] = explain(group, reinforce_pp, token_rewards=tables["token_rewards"], gamma=0.5)
    found["tree_grpo of a tree"] = explain(group.trees[1])
    return found


def test_golden_explanations() -> None:
    """After a change on purpose: ``TURNTREE_REGENERATE=1 pytest tests/trainers/test_credit_explanations.py``."""
    found = explanations()
    text = "".join(f"== {name}\n{lines}\n\n" for name, lines in found.items())
    if os.environ.get("TURNTREE_REGENERATE"):
        GOLDEN.write_text(text, encoding="utf-8")
    parts = ("\n" + GOLDEN.read_text(encoding="utf-8")).split("\n== ")[1:]
    golden = dict(part.rstrip("\n").split("\n", 1) for part in parts)
    assert found.keys() == golden.keys()
    for name, lines in found.items():
        assert lines == golden[name], name


# Refusals

LEVELS: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (grpo, {"std": "robust"}, "std must be one of unbiased, population, none; found 'robust'"),
    (grpo, {"singleton": "one"}, "singleton must be one of zero, raw; found 'one'"),
    (grpo, {"baseline": "median"}, "baseline must be one of mean, leave_one_out; found 'median'"),
    (opo, {"singleton": "one"}, "singleton must be one of zero, raw; found 'one'"),
    (reinforce_pp_baseline, {"singleton": "one"}, "singleton must be one of zero, raw; found 'one'"),
    (arpo, {"shared": "both"}, "shared must be one of hard, soft; found 'both'"),
    (tree_grpo, {"estimator": "leaf"}, "estimator must be one of sum, inter, intra, 2norm; found 'leaf'"),
    (at2po, {"weights": "flat"}, "weights must be one of linear, softmax; found 'flat'"),
    (at2po, {"value": "node"}, "value must be one of child, child_mean, leaf_mean; found 'node'"),
    (
        at2po,
        {"advantage": "diff"},
        "advantage must be one of node_value, diff_parent, diff_global, diff_localglobal, vanilla; found 'diff'",
    ),
    (shrunk_loo, {"prior": "mean"}, "prior must be one of batch, group; found 'mean'"),
    (shrunk_loo, {"kappa": float("inf")}, "kappa must be a finite number of at least 0, found inf"),
    (shrunk_loo, {"kappa": -0.5}, "kappa must be a finite number of at least 0, found -0.5"),
    (reinforce_pp, {"gamma": 1.01}, "gamma must be from 0 to 1, found 1.01"),
    (reinforce_pp, {"gamma": -0.01}, "gamma must be from 0 to 1, found -0.01"),
    (gae, {"gamma": 2.0, "values": {}}, "gamma must be from 0 to 1, found 2.0"),
    (gae, {"lam": float("nan"), "values": {}}, "lam must be from 0 to 1, found nan"),
    (rejection_sampling, {"best": 0}, "best must be at least 1 or null, found 0"),
]


@pytest.mark.parametrize(("rule", "options", "message"), LEVELS)
def test_a_refusal_names_the_option_and_what_it_may_be(
    rule: Callable[..., object], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        rule([forked()], **options)
    assert str(refusal.value) == f"credit: {message}"


def test_options_at_their_ends_are_taken() -> None:
    group = forked()
    assert shrunk_loo([group], kappa=0.0).values
    for gamma in (0.0, 1.0):
        assert reinforce_pp([group], gamma=gamma).values
        assert gae([group], gamma=gamma, lam=gamma, values=signals(group)["values"]).values
    assert [row[-1] for row in rejection_sampling([group], threshold=0.0, best=1).values[0]] == [
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("rule", "table", "what"), [(gae, "values", "values"), (reinforce_pp, "token_rewards", "token rewards")]
)
def test_numbers_of_tokens_that_do_not_fit_name_the_node(rule: CreditRule, table: str, what: str) -> None:
    group = forked()
    tables = signals(group)
    shared = group.trees[0].root.children[0]
    needed = tables[table] if rule is gae else tables["token_rewards"]
    for wrong in ([0.5], [0.5, float("nan")]):
        with pytest.raises(DataError) as refusal:
            rule([group], **{table: {**needed, shared: np.array(wrong)}})
        expected = f"credit: node (0,) has 2 sampled tokens and needs as many finite {what}, found {wrong}"
        assert str(refusal.value) == expected
    with pytest.raises(DataError, match=rf"as many finite {what}, found none$"):
        rule([group], **{table: {node: row for node, row in needed.items() if node is not shared}})


def test_rewards_may_be_whole_numbers() -> None:
    assert normalise([0, 1, 2], std="none").tolist() == [-1.0, 0.0, 1.0]
    assert normalise([0, 1, 2], std="none", baseline="leave_one_out").tolist() == [-1.5, 0.0, 1.5]
    assert normalise([1, 1]).dtype == np.float64
    np.testing.assert_allclose(child_weights([1, 3]), [0.25, 0.75])


def test_a_deviation_at_or_below_eps_does_not_scale() -> None:
    """Beside the first reward stand 1 and 3, with an unbiased deviation of sqrt(2); beside the last 0 and 1."""
    got = normalise([0.0, 1.0, 3.0], baseline="leave_one_out", eps=1.0)
    np.testing.assert_allclose(got, [-2.0 / np.sqrt(2.0), -0.5 / (3 / np.sqrt(2.0)), 2.5])
    exact = float(np.std([0.0, 1.0], ddof=1))
    assert normalise([0.0, 1.0, 3.0], baseline="leave_one_out", eps=exact)[2] == 2.5


def test_values_hold_every_node_that_leads_to_a_scored_leaf() -> None:
    group = forked()
    values = at2po_values(group, normalise_leaves=False)
    first, second = (tree.root for tree in group.trees)
    shared, single = first.children
    failed = shared.children[2]
    assert failed not in values
    # Entropies 0.5 and 1 weigh the rewards 1 and 0; 1.5 and 0.25 their mixture and 0.25.
    assert values[shared] == pytest.approx(0.5 / 1.5)
    assert values[first] == pytest.approx((1.5 * values[shared] + 0.25 * 0.25) / 1.75)
    assert values[single] == 0.25
    assert values[second] == pytest.approx((2.0 * 0.5 - 0.75) / 2.75)
    assert len(values) == 9
