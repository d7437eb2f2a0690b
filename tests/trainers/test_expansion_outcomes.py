"""Rules that look at rewards: their formulas on trees by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from turntree.errors import ConfigError
from turntree.trainers.expansion import guided, ucb, value_variance
from turntree.trainers.tree import Node, Tree


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def turn(ordinal: int, *, nll: float = 1.0, tokens: int = 2, reward: float | None = None, status: Any = None) -> Node:
    return Node(
        ordinal=ordinal,
        turn_ids=(1,) * tokens,
        logprobs=(-nll,) * tokens,
        entropy=nll,
        status=status or ("open" if reward is None else "answered"),
        reward=reward,
    )


def two_searches(left: tuple[float, ...], right: tuple[float, ...], **tops: Any) -> Tree:
    """Two first turns, each with answers of the given rewards below."""
    root = Node()
    for ordinal, rewards in enumerate((left, right)):
        top = root.add_child(turn(ordinal, **tops))
        for i, reward in enumerate(rewards):
            top.add_child(turn(i, reward=reward))
    return Tree(root)


def paths(picks: list[Any]) -> list[tuple[int, ...]]:
    assert all(p.parent is p.picked for p in picks)
    return [p.parent.path for p in picks]


# value_variance ------------------------------------------------------------------------------------------------------


def test_value_variance_ranks_states_by_the_variance_below() -> None:
    tree = two_searches((1.0, 1.0, 1.0), (1.0, 0.0))
    picks = value_variance(tree, 3, rng())
    assert paths(picks) == [(1,), (), (0,)]
    assert [p.score for p in picks] == pytest.approx([0.25, 0.16, 0.0])


def test_value_variance_ties_are_breadth_first_and_short_rankings_repeat() -> None:
    assert paths(value_variance(two_searches((0.8, 0.8), (0.8,)), 5, rng())) == [(), (0,), (1,), (), (0,)]


def test_value_variance_leaves_out_failed_and_pruned_leaves() -> None:
    tree = two_searches((0.0, 1.0), (0.0, 1.0))
    tree.root.children[0].children[1].pruned = True
    failed = tree.root.children[1].children[1]
    failed.status, failed.reward = "failed", None
    assert [p.score for p in value_variance(tree, 3, rng())] == [0.0] * 3


# guided --------------------------------------------------------------------------------------------------------------


def test_guided_is_the_formula() -> None:
    """Below a: nll 3 and 1, rewards 1 and 0. Root: two draws of nll 1, rewards 1, 0, 0; paths of 4 tokens each."""
    tree = two_searches((1.0, 0.0), (0.0,))
    tree.root.children[0].children[0].entropy = 3.0
    a = 2.0 * (2 / 4) * (2 / 4) / (2 * 3 * (2 / 4))
    b = 1.0 * (1 / 3) * (2 / 3) / (1 * 2 * (2 / 4))
    root = 1.0 * (2 / 5) * (3 / 5) / (2 * 3)
    assert b > a > root
    picks = guided(tree, 2, rng())
    assert paths(picks) == [(1,), (0,)]
    assert [p.score for p in picks] == pytest.approx([b, a])
    tree.root.children[0].branchable = tree.root.children[1].branchable = False
    assert guided(tree, 1, rng())[0].score == pytest.approx(root)


def test_guided_counts_each_pick_as_a_draw() -> None:
    tree = two_searches((1.0,), (1.0,))
    first, second, third = guided(tree, 3, rng(), prior=1.0)
    assert paths([first, second]) == [(0,), (1,)], "equal gains: the second pick goes to the sibling"
    assert third.score is not None
    assert second.score is not None
    assert third.score == pytest.approx(second.score / 3)


def test_guided_prefers_the_uncertain_the_undecided_and_the_cheap() -> None:
    sure, unsure = two_searches((1.0, 0.0), (1.0, 0.0)), two_searches((1.0, 0.0), (1.0, 0.0))
    for leaf in unsure.root.children[1].children:
        leaf.entropy = 2.0
    assert paths(guided(sure, 1, rng())) == [(0,)]
    assert paths(guided(unsure, 1, rng())) == [(1,)]
    decided = two_searches((1.0, 1.0), (1.0, 0.0))
    assert paths(guided(decided, 1, rng())) == [(1,)]
    dear = two_searches((1.0, 0.0), (1.0, 0.0))
    for leaf in dear.root.children[0].children:
        leaf.turn_ids, leaf.logprobs = (1,) * 9, (-1.0,) * 9
    assert paths(guided(dear, 1, rng())) == [(1,)]


def test_guided_scales_rewards_by_their_range() -> None:
    plain, wide = two_searches((1.0, 0.0), (0.0,)), two_searches((3.0, -1.0), (-1.0,))
    expected = [p.score for p in guided(plain, 4, rng())]
    assert [p.score for p in guided(wide, 4, rng(), low=-1.0, high=3.0)] == pytest.approx(expected)


def test_guided_knows_nothing_of_draws_that_failed() -> None:
    tree = two_searches((1.0,), (1.0,))
    top = tree.root.children[0]
    expected = [p.score for p in guided(tree, 6, rng())]
    top.add_child(turn(1, nll=50.0, status="failed"))
    assert [p.score for p in guided(tree, 6, rng())] == pytest.approx(expected)


@pytest.mark.parametrize("options", [{"low": 1.0}, {"prior": 0.0}, {"high": math.nan}])
def test_guided_refuses_empty_ranges(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="low < high and prior"):
        guided(two_searches((1.0,), (0.0,)), 1, rng(), **options)


def test_guided_refuses_tokens_without_log_probs() -> None:
    tree = two_searches((1.0,), (0.0,))
    tree.root.children[0].logprobs = ()
    with pytest.raises(ConfigError, match="log-prob"):
        guided(tree, 1, rng())


# ucb -----------------------------------------------------------------------------------------------------------------


def test_ucb_is_the_formula() -> None:
    tree = two_searches((1.0, 0.5, 0.0), (1.0,))
    log = math.log(4)
    expected = {
        (): 0.625 + 0.5 * math.sqrt(log / 4),
        (0,): 0.5 + 0.5 * math.sqrt(log / 3),
        (1,): 1.0 + 0.5 * math.sqrt(log),
    }
    for path, score in expected.items():
        node = next(n for n in tree.nodes() if n.path == path)
        others = [n for n in tree.nodes() if not n.is_leaf and n is not node]
        for other in others:
            other.branchable = False
        (pick,) = ucb(tree, 1, rng(), exploration=0.5)
        assert pick.parent.path == path
        assert pick.score == pytest.approx(score)
        for other in others:
            other.branchable = True
    assert paths(ucb(tree, 1, rng(), exploration=0.5)) == [(1,)]


def test_ucb_exploits_without_exploration_and_spreads_with_it() -> None:
    tree = two_searches((1.0, 1.0, 1.0), (0.0,))
    assert paths(ucb(tree, 4, rng(), exploration=0.0)) == [(0,)] * 4
    spread = paths(ucb(tree, 6, rng(), exploration=5.0))
    assert spread[0] == (1,), "the state that was hardly tried"
    assert len(set(spread)) > 1
    assert len(set(paths(ucb(two_searches((1.0,), (1.0,)), 2, rng())))) == 2


def test_ucb_visits_count_for_the_states_above() -> None:
    """A pick below the root makes the root itself better known."""
    tree = two_searches((1.0,), (1.0,))
    reasons = [p.reason for p in ucb(tree, 3, rng())]
    assert reasons == ["q 0.5000, 1 of 2 visits", "q 0.5000, 1 of 3 visits", "q 0.5000, 2 of 4 visits"]


def test_ucb_does_not_depend_on_the_scale_of_rewards() -> None:
    plain, scaled = two_searches((1.0, 0.5), (0.0,)), two_searches((30.0, 10.0), (-10.0,))
    assert [p.score for p in ucb(plain, 5, rng())] == pytest.approx([p.score for p in ucb(scaled, 5, rng())])


def test_ucb_takes_a_state_without_scored_leaves_for_average() -> None:
    tree = two_searches((1.0, 1.0, 0.0), ())
    tree.root.children[1].add_child(turn(0, status="failed"))
    tree.root.branchable = tree.root.children[0].branchable = False
    (pick,) = ucb(tree, 1, rng(), exploration=1.0)
    assert pick.score == pytest.approx(2 / 3 + math.sqrt(math.log(3)))


@pytest.mark.parametrize("exploration", [-1.0, math.nan, math.inf])
def test_ucb_refuses_bad_exploration(exploration: float) -> None:
    with pytest.raises(ConfigError, match="exploration"):
        ucb(two_searches((1.0,), (0.0,)), 1, rng(), exploration=exploration)
