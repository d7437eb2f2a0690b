"""TurnWorld-S: its probabilities, its counts, and the gradients and curves that are measured in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.benchmarks.scripts import script
from turntree.errors import ConfigError
from turntree.trainers.config import AlgorithmConfig
from turntree.trainers.credit import Advantages
from turntree.trainers.expansion.rule import Expansion
from turntree.trainers.plan import GrowthPlan
from turntree.trainers.seeds import derive_rng
from turntree.trainers.tree import Group, Node

turnworld = script("turnworld")
worlds = script("_turnworld")
rollouts = script("_turnworld_rollout")
learning = script("_turnworld_learn")

SMALL = worlds.World(2, 4, 2, (1, 2), advantage=0.5, known=0.3, tokens=4_000)
ONE = worlds.World(1, 3, 2, (1,), advantage=0.3, known=0.0, tokens=4_000)


Ways = Iterator[tuple[tuple[tuple[int, int], ...], float]]


def ways(world: Any, table: Tensor, question: tuple[int, ...], state: Any) -> Ways:
    """Every way in which an episode can end: its choices, as places in the table, and its reward."""
    if state.answers(len(question)):
        row = world.answer_row(question[-1])
        yield from (
            (((row, c),), worlds.answer(state, c, hops=len(question)))
            for c in range(world.width)
            if table[row, c] > -math.inf
        )
        return
    rows = world.relation_row(question[state.hop], state.tried), world.sense_row(question[state.hop])
    for relation, sense in itertools.product(range(world.width), repeat=2):
        if table[rows[0], relation] + table[rows[1], sense] > -math.inf:
            for rest, reward in ways(world, table, question, worlds.search(state, relation, sense)):
                yield ((rows[0], relation), (rows[1], sense), *rest), reward


def enumerated(world: Any, logits: Tensor) -> Tensor:
    """Expected exact match, episode by episode; with a gradient."""
    table = world.log_probs(logits)
    total = torch.zeros((), dtype=torch.float64)
    for hops in world.hops:
        for question in itertools.product(range(world.contexts), repeat=hops):
            found = [path for path, reward in ways(world, table.detach(), question, worlds.START) if reward]
            chances = [table[tuple(zip(*path))].sum().exp() for path in found]
            total = total + torch.stack(chances).sum() / world.contexts**hops / len(world.hops)
    return total


def grown(name: str, world: Any = SMALL, *, seed: int = 0) -> tuple[Any, Any]:
    subject = next(a for a in turnworld.arms() if a.name == name).variants()[0]
    learner = learning.Learner(world, subject, seed=seed)
    return learner, learner.rollout()


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_success_rate_and_its_gradient_are_those_of_all_episodes(seed: int) -> None:
    logits = SMALL.cold_start(seed).requires_grad_()
    expected = enumerated(SMALL, logits)
    (gradient,) = torch.autograd.grad(expected, logits)
    assert SMALL.exact_match(logits).item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(learning.true_gradient(SMALL, logits), gradient)


def test_every_row_of_choices_is_a_distribution_without_what_was_tried() -> None:
    table = SMALL.log_probs(SMALL.cold_start(0)).exp()
    torch.testing.assert_close(table.sum(1), torch.ones(len(table), dtype=torch.float64))
    for tried in range(4):
        row = table[SMALL.relation_row(1, tried)]
        assert [float(row[r]) == 0.0 for r in range(4)] == [False, bool(tried & 1), bool(tried & 2), False]
    assert bool((table[SMALL.sense_row(0)][2:] == 0).all())


def test_two_relations_find_nothing_and_every_other_mistake_is_a_dead_end_that_goes_on() -> None:
    state = worlds.search(worlds.search(worlds.START, 1, 1), 2, 0)
    assert (state.hop, state.searches, state.tried, state.lost) == (0, 2, 3, False)
    right, wrong = worlds.search(state, 0, 0), worlds.search(state, 0, 1)
    assert (right.hop, right.tried, right.lost, wrong.hop, wrong.lost) == (1, 0, False, 1, True)
    assert worlds.search(right, 3, 0).lost
    assert [worlds.answer(s, c, hops=1) for s, c in ((right, 0), (right, 1), (wrong, 0))] == [1.0, 0.0, 0.0]
    assert right.answers(1)
    spent = worlds.State(hop=1, searches=4)
    assert spent.answers(2)
    assert worlds.answer(spent, 0, hops=2) == 0.0


def test_a_policy_draws_as_often_as_its_table_says() -> None:
    policy = rollouts.Policy.of(SMALL, SMALL.cold_start(1))
    rows = np.repeat(np.arange(len(policy.logprobs)), 20_000).reshape(-1, 20_000)
    drawn = policy.draw(rows, derive_rng("test"))
    shares = np.stack([(drawn == c).mean(1) for c in range(SMALL.width)], 1)
    np.testing.assert_allclose(shares, np.exp(policy.logprobs), atol=0.02)
    assert not shares[np.isneginf(policy.logprobs)].any()


@pytest.mark.parametrize("name", ["chain_grpo", "tree_grpo", "entropy_leaf", "guided_loo", "arpo"])
def test_tokens_and_trajectories_are_counted_exactly(name: str) -> None:
    learner, rollout = grown(name)
    trees = [tree for group in rollout.groups for tree in group.trees]
    turns = [node for tree in trees for node in tree.nodes()[1:]]
    searches = [node for node in turns if node.action == "search"]
    assert rollout.generated_tokens == sum(tree.generated_tokens for tree in trees)
    assert rollout.cost(SMALL) == rollout.generated_tokens
    assert rollout.cost(replace(SMALL, observations=True)) == rollout.generated_tokens + rollout.observation_tokens
    assert rollout.observation_tokens == 300 * len(searches) == sum(len(n.observation_ids) for n in turns)
    assert all(20 <= len(n.turn_ids) <= 80 for n in searches)
    assert all(10 <= len(n.turn_ids) <= 40 and n.is_leaf for n in turns if n.action == "answer")
    budget = learner.plan.budget.leaves if learner.plan.budget else None
    assert {len(tree.leaves()) for tree in trees} == {budget or learner.plan.leaves}


def test_a_node_holds_the_log_probs_and_entropies_of_its_choices() -> None:
    learner, rollout = grown("entropy_leaf")
    policy = rollouts.Policy.of(SMALL, learner.logits)
    for node, places in rollout.choices.items():
        nll = [-policy.logprobs[rollout.rows[i], rollout.columns[i]] for i in places]
        entropies = [policy.entropies[rollout.rows[i]] for i in places]
        assert node.entropy == pytest.approx(np.mean(nll))
        assert -math.fsum(node.logprobs) == pytest.approx(sum(nll))
        assert math.fsum(node.entropies) == pytest.approx(sum(entropies))
        assert len(places) == (2 if node.action == "search" else 1)


def shape(node: Node) -> tuple[Any, ...]:
    return node.ordinal, node.turn_ids, node.reward, tuple(shape(c) for c in node.children)


@pytest.mark.parametrize("name", ["entropy_leaf", "tree_grpo", "arpo"])
def test_a_seed_decides_trees_and_curves(name: str) -> None:
    first, second, other = (grown(name, seed=seed)[1].groups for seed in (0, 0, 1))
    assert [shape(t.root) for g in first for t in g.trees] == [shape(t.root) for g in second for t in g.trees]
    assert [shape(t.root) for g in first for t in g.trees] != [shape(t.root) for g in other for t in g.trees]
    curves = [grown(name)[0].train(SMALL.tokens, lr=0.3) for _ in range(2)]
    assert curves[0] == curves[1]


def test_all_arms_get_the_same_questions() -> None:
    one, other = (grown(name)[0] for name in ("chain_grpo", "guided_loo"))
    assert [next(one.questions) for _ in range(20)] == [next(other.questions) for _ in range(20)]


def test_the_gradient_of_chain_grpo_is_unbiased_up_to_scale() -> None:
    """One question, so that the scale, which depends on its success rate, is one number."""
    subject = turnworld.arm("chain_grpo", chains=2)
    learner = learning.Learner(ONE, subject, seed=0)
    with torch.no_grad():
        learner.logits.copy_(ONE.cold_start(5))
    truth = learning.true_gradient(ONE, learner.logits)
    expected = expected_gradient(learner)
    assert float(torch.cosine_similarity(expected.ravel(), truth.ravel(), dim=0)) > 0.999


def expected_gradient(learner: Any) -> Tensor:
    """Mean of the learner's gradient over many rollouts; the loss divides by choices, which vary: undone here."""
    total = torch.zeros_like(learner.logits)
    for _ in range(400):
        rollout = learner.rollout()
        choices = sum(
            len(rollout.choices[n]) for g in rollout.groups for leaf in g.scored_leaves() for n in leaf.trajectory()
        )
        total += learner.gradient(rollout) * choices
    return total


@pytest.mark.parametrize(
    "subject", [v for a in turnworld.arms() for v in a.variants()], ids=lambda a: f"{a.name}-{a.shape}"
)
def test_every_arm_learns_for_a_few_rounds(subject: Any) -> None:
    learner = learning.Learner(SMALL, subject, seed=0)
    before = learner.logits.detach().clone()
    curve = learner.train(SMALL.tokens, lr=0.1)
    assert curve.tokens[0] == 0
    assert curve.tokens == sorted(curve.tokens)
    assert curve.tokens[-1] >= SMALL.tokens > curve.tokens[-2]
    assert not torch.equal(before, learner.logits)
    assert bool(torch.isfinite(learner.logits).all())


def test_shared_turns_weigh_once() -> None:
    _, rollout = grown("entropy_leaf")
    weights = {}
    for shared in ("per_leaf", "once"):
        subject = turnworld.arm("x", chains=2, rounds=2, expansions=2, expansion="entropy", shared_turns=shared)
        weights[shared] = float(learning._batch(rollout, subject).weight.sum())
    assert weights["once"] == pytest.approx(len(rollout.rows))
    assert weights["per_leaf"] > weights["once"]


def numbered_tokens(groups: Sequence[Group]) -> Advantages:
    """A credit rule: the advantage of each token is its place in its trajectory."""
    return Advantages(
        "token",
        tuple(
            tuple(np.arange(sum(len(n.turn_ids) for n in leaf.trajectory()), dtype=float) for leaf in g.scored_leaves())
            for g in groups
        ),
    )


def test_advantages_of_tokens_are_those_of_the_choices() -> None:
    _, rollout = grown("chain_grpo")
    batch = learning._batch(rollout, SimpleNamespace(credit=numbered_tokens, algorithm=AlgorithmConfig()))
    path = rollout.groups[0].scored_leaves()[0].trajectory()
    starts = itertools.accumulate((len(n.turn_ids) for n in path), initial=0)
    expected = [start + i for start, n in zip(starts, path) for i in range(len(rollout.choices[n]))]
    assert batch.advantage[: len(expected)].tolist() == expected


def test_a_curve_crosses_between_updates_and_fills_its_area() -> None:
    curve = learning.Curve([0, 10, 30], [0.0, 0.2, 0.6])
    assert curve.reaches(0.1) == pytest.approx(5.0)
    assert curve.reaches(0.5) == pytest.approx(25.0)
    assert curve.reaches(0.7) == math.inf
    assert curve.area(30) == pytest.approx((1.0 + 8.0) / 30)
    assert curve.area(20) == pytest.approx((1.0 + 3.0) / 20)


def test_a_rate_is_climbed_to_until_no_neighbour_is_better() -> None:
    assert turnworld.climb(lambda rate: -abs(math.log2(rate / 3.2))) == (pytest.approx(3.2), pytest.approx(0.0))
    assert turnworld.climb(lambda rate: 1.0)[0] == pytest.approx(0.4)
    assert turnworld.climb(lambda rate: -rate)[0] == pytest.approx(0.4 / 2**turnworld.STEPS)


def test_tokens_to_a_cosine_grow_with_the_noise() -> None:
    truth = np.array([1.0, 0.0])
    exact = np.tile(truth, (8, 1))
    assert turnworld.tokens_to_cosine(exact, 100.0, truth, derive_rng("o")) == pytest.approx(25.0)
    assert turnworld.tokens_to_cosine(-exact, 100.0, truth, derive_rng("o")) == math.inf
    noisy = [exact + scale * derive_rng("n").standard_normal((8, 2)) for scale in (0.5, 5.0)]
    found = [turnworld.tokens_to_cosine(g, 100.0, truth, derive_rng("o")) for g in noisy]
    assert found[0] < found[1]


def test_an_arm_of_a_user_names_rules_by_name_or_import_path() -> None:
    path = "turntree.trainers.expansion:ucb"
    mine = turnworld.parse_arm(
        f"name=mine expansion={path} expansion_args.exploration=0.5 credit=rloo chains=2 rounds=1 expansions=3 epochs=2"
    )
    assert (mine.name, mine.epochs, mine.shape, mine.algorithm.expansion) == ("mine", 2, "2+1x3", path)
    assert mine.algorithm.credit == "turntree.trainers.credit:rloo"
    assert mine.algorithm.expansion_args == {"exploration": 0.5}


@pytest.mark.parametrize(
    ("text", "named"),
    [("chain=4", "chain=4"), ("chains=4 kl_coef=0.1", "kl_coef"), ("chains=4 credit=gae", "value head")],
)
def test_what_the_bench_cannot_follow_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        turnworld.parse_arm(text)


def a_leaf(tree: Any, k: int, rng: np.random.Generator) -> list[Expansion]:
    """A wrong rule: nothing grows from a leaf."""
    leaf = tree.leaves()[0]
    return [Expansion(leaf, leaf, 0.0, "")]


def one_too_many(tree: Any, k: int, rng: np.random.Generator) -> list[Expansion]:
    """A wrong rule."""
    return [Expansion(tree.root, tree.root, 0.0, "")] * (k + 1)


@pytest.mark.parametrize(("rule", "said"), [(a_leaf, "open, branchable"), (one_too_many, "at most 1")])
def test_a_rule_that_a_run_would_refuse_is_refused(rule: Any, said: str) -> None:
    plan = GrowthPlan(trees=1, chains=1, rounds=1, expansions=1, rule=rule)
    policy = rollouts.Policy.of(SMALL, SMALL.cold_start(0))
    with pytest.raises(ConfigError, match=said):
        rollouts.grow(SMALL, policy, [(0,)], plan=plan, rng=derive_rng("test"))
