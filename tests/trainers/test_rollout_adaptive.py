"""Adaptive budgets: which prompts are settled, what moves to whom, and that nothing is gained or lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Generation, Request, SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.errors import ConfigError
from turntree.search_backend.passage import Passage
from turntree.trainers.adaptive import allowances, is_certain, left_over
from turntree.trainers.expansion import Expansion, entropy, random_nodes
from turntree.trainers.plan import Allowance
from turntree.trainers.rollout import Budget, GrowthPlan, Limits, Prompt, Rollout, grow
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Node, Tree

TOKENS = ByteTokenizer()
SURE, RIGHT, WRONG = "<answer>sure</answer>", "<answer>Paris</answer>", "<answer>Rome</answer>"


class Shelf:
    fingerprint = "shelf"

    def __init__(self) -> None:
        self.queries = 0

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.queries += len(queries)
        return [[Passage("1", "Paris", f"shelved {q}")] for q in queries]


def speak(context: str, seed: int) -> str:
    """What the question says: easy ones are answered at once, hard ones searched first, and mixed ones both."""
    searched = "shelved" in context
    if "easy" in context:
        return SURE
    if "alike" in context:
        return WRONG if searched else f"<search>{seed % 1000}</search>"
    if "mixed" in context and seed % 2:
        return SURE
    return (RIGHT if seed % 2 else WRONG) if searched else f"<search>{seed % 1000}</search>"


class Counting(ScriptedEngine):
    tokens = 0

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        out = super().generate(requests)
        self.tokens += sum(len(g.ids) for g in out)
        return out


def prompts(*kinds: str) -> list[Prompt]:
    return [Prompt(f"p{i}", Question(f"q{i}", f"{kind} {i}?", ("Paris", "sure"))) for i, kind in enumerate(kinds)]


def run(plan: GrowthPlan, asked: Sequence[Prompt], *, engine: ScriptedEngine | None = None, **options: Any) -> Rollout:
    core = options.pop("core", None) or SearchQACore(Shelf())
    limits = options.pop("limits", None) or Limits(max_turn_tokens=64, max_context_tokens=4096)
    return grow(
        asked,
        core=core,
        engine=engine or ScriptedEngine(speak, TOKENS),
        dialogue=Dialogue(TOKENS),
        plan=plan,
        sampling=SamplingParams(max_tokens=1, stop=tuple(core.grammar.stop)),
        limits=limits,
        **options,
    )


PLAN = GrowthPlan(trees=1, chains=2, rounds=2, expansions=2, rule=random_nodes, adaptive=100.0)


def leaves(rollout: Rollout) -> list[int]:
    return [sum(len(t.leaves()) for t in g.trees) for g in rollout.groups]


def record(rollout: Rollout) -> list[Any]:
    return [
        (g.uid, t.index, t.rounds, n.path, n.text, n.status, n.reward, n.pruned, n.reason)
        for g in rollout.groups
        for t in g.trees
        for n in t.root.walk()
    ]


# Settled -------------------------------------------------------------------------------------------------------------


def first_turns(*turns: tuple[Any, float]) -> Tree:
    root = Node()
    for ordinal, (status, nll) in enumerate(turns):
        root.add_child(Node(ordinal=ordinal, turn_ids=(1,), logprobs=(-nll,), entropy=nll, status=status))
    return Tree(root)


@pytest.mark.parametrize(
    ("turns", "certain"),
    [
        ([("answered", 0.1), ("answered", 0.4)], True),
        ([("answered", 0.1), ("answered", 0.5)], False),
        ([("answered", 0.1), ("open", 0.1)], False),
        ([("answered", 0.1), ("truncated", 0.1)], False),
        ([("answered", 0.1), ("failed", 0.0)], False),
        ([], False),
    ],
)
def test_certain_is_answered_at_once_below_the_threshold(turns: list[tuple[Any, float]], certain: bool) -> None:
    assert is_certain(first_turns(*turns), 0.5) is certain


def test_certainty_needs_log_probs() -> None:
    tree = first_turns(("answered", 0.1))
    tree.root.children[0].logprobs = ()
    with pytest.raises(ConfigError, match="log-prob"):
        is_certain(tree, 0.5)


def test_one_uncertain_tree_leaves_its_prompt_unsettled() -> None:
    """A prompt has two trees of one chain; whichever ends first, the other decides too."""

    def script(context: str, seed: int) -> str:
        return SURE if "shelved" in context or seed % 2 else "<search>x</search>"

    plan, settled = replace(PLAN, trees=2, chains=1), []
    for seed in range(8):
        rollout = run(plan, prompts("hard"), engine=ScriptedEngine(script, TOKENS), run_seed=seed)
        certain = [is_certain(first_turns_of(t), 100.0) for t in rollout.groups[0].trees]
        assert leaves(rollout) == ([2] if all(certain) else [10])
        assert rollout.stats.settled_prompts == all(certain)
        settled.append(all(certain))
    assert 0 < sum(settled) < len(settled)


def first_turns_of(tree: Tree) -> Tree:
    """The tree's first chain only."""
    first = tree.root.children[0]
    return Tree(Node(children=[first]))


# What moves ----------------------------------------------------------------------------------------------------------


def test_expansions_of_settled_prompts_go_to_the_others_in_turn() -> None:
    rollout = run(PLAN, prompts("easy", "hard", "easy", "hard", "hard"))
    assert leaves(rollout) == [2, 6 + 3, 2, 6 + 3, 6 + 2]
    stats = rollout.stats
    assert (stats.settled_prompts, stats.moved_expansions, stats.moved_expansions_used) == (2, 8, 8)
    assert (stats.moved_generated_tokens, stats.moved_tool_calls) == (0, 0)
    assert stats.trajectories == 5 * 6


def test_prompts_whose_rewards_differ_come_first() -> None:
    one = replace(PLAN, rounds=1, expansions=1)
    rollout = run(one, prompts("easy", "alike", "hard"), run_seed=3)
    rewards = [{leaf.reward for leaf in g.scored_leaves()} for g in rollout.groups]
    assert [len(r) for r in rewards] == [1, 1, 2]
    assert leaves(rollout) == [2, 3, 4]
    assert leaves(run(one, prompts("easy", "alike", "alike"))) == [2, 4, 3]


def test_off_or_never_certain_moves_nothing() -> None:
    asked = prompts("easy", "hard", "mixed")
    off = run(replace(PLAN, adaptive=None), asked)
    never = run(replace(PLAN, adaptive=0.0), asked)
    assert record(never) == record(off)
    assert never.stats == off.stats
    assert leaves(off) == [6, 6, 6]
    moved = {k: v for k, v in off.stats.as_dict().items() if k.startswith(("moved", "settled"))}
    assert len(moved) == 5
    assert set(moved.values()) == {0}


def test_when_all_are_settled_nothing_moves() -> None:
    rollout = run(replace(PLAN, budget=Budget(generated_tokens=500)), prompts("easy", "easy"))
    assert leaves(rollout) == [2, 2]
    assert (rollout.stats.settled_prompts, rollout.stats.moved_expansions) == (2, 0)
    assert rollout.stats.moved_generated_tokens == 0


def test_a_prompt_that_failed_neither_gives_nor_takes() -> None:
    class Picky(SearchQACore):
        def initial(self, task: Question, *, seed: int) -> Any:
            if "broken" in task.question:
                raise ConfigError("no such task")
            return super().initial(task, seed=seed)

    rollout = run(PLAN, prompts("broken", "easy", "hard"), core=Picky(Shelf()))
    assert leaves(rollout) == [2, 2, 6 + 4]
    assert rollout.stats.settled_prompts == 1


def test_token_and_tool_budgets_move_with_the_expansions() -> None:
    """Each budget is just enough for the first chains of a hard prompt: what it grows more is a gift."""
    chains = run(GrowthPlan(chains=2), prompts("hard")).stats
    budget = Budget(generated_tokens=chains.generated_tokens, tool_calls=chains.tool_calls)
    asked = [prompts("easy", "hard")[0], Prompt("p0h", prompts("hard")[0].task)]
    alone = run(replace(PLAN, budget=budget), asked[1:])
    both = run(replace(PLAN, budget=budget), asked)
    easy = run(GrowthPlan(chains=2), asked[:1]).stats
    assert leaves(both)[0] == 2
    assert leaves(both)[1] > leaves(alone)[0]
    assert both.stats.moved_generated_tokens == chains.generated_tokens - easy.generated_tokens
    assert both.stats.moved_tool_calls == chains.tool_calls
    assert 0 < both.stats.moved_expansions_used <= both.stats.moved_expansions == 4


def test_a_leaf_budget_bounds_what_is_given() -> None:
    rollout = run(replace(PLAN, budget=Budget(leaves=3)), prompts("easy", "hard"))
    assert leaves(rollout) == [2, 4]
    assert (rollout.stats.moved_expansions, rollout.stats.overshoot_leaves) == (1, 0)


# Laws ----------------------------------------------------------------------------------------------------------------

Kinds = st.lists(st.sampled_from(["easy", "hard", "mixed", "alike"]), min_size=1, max_size=5)
Budgets = st.none() | st.builds(
    Budget,
    leaves=st.none() | st.integers(1, 9),
    generated_tokens=st.none() | st.integers(1, 400),
    tool_calls=st.none() | st.integers(1, 9),
)
Plans = st.builds(
    GrowthPlan,
    trees=st.integers(1, 2),
    chains=st.integers(1, 2),
    rounds=st.integers(1, 2),
    expansions=st.integers(1, 3),
    rule=st.sampled_from([random_nodes, entropy]),
    budget=Budgets,
    adaptive=st.sampled_from([0.45, 0.6, 100.0]),
)


@settings(max_examples=50, deadline=None)
@given(
    kinds=Kinds,
    plan=Plans,
    seed=st.integers(0, 10**6),
    arrival=st.integers(0, 10**6),
    concurrent=st.none() | st.integers(1, 3),
    batch=st.none() | st.integers(1, 4),
)
def test_what_moves_does_not_depend_on_batches_or_arrival(
    kinds: list[str], plan: GrowthPlan, seed: int, arrival: int, concurrent: int | None, batch: int | None
) -> None:
    plain = run(plan, prompts(*kinds), run_seed=seed)
    limits = Limits(
        max_turn_tokens=64, max_context_tokens=4096, max_concurrent_trees=concurrent, max_batch_requests=batch
    )
    engine = ScriptedEngine(speak, TOKENS, arrival_seed=arrival)
    other = run(plan, prompts(*kinds), run_seed=seed, engine=engine, limits=limits)
    assert record(other) == record(plain)
    # Identical calls of one batch are sent once, so attempts, and they alone, follow the batches.
    assert replace(other.stats, tool_attempts=0) == replace(plain.stats, tool_attempts=0)


@settings(max_examples=50, deadline=None)
@given(kinds=Kinds, plan=Plans, seed=st.integers(0, 10**6))
def test_nothing_is_gained_or_lost(kinds: list[str], plan: GrowthPlan, seed: int) -> None:
    engine, shelf = Counting(speak, TOKENS), Shelf()
    rollout = run(plan, prompts(*kinds), run_seed=seed, engine=engine, core=SearchQACore(shelf))
    stats, budget, n = rollout.stats, plan.budget or Budget(), len(kinds)
    assert (stats.generated_tokens, stats.tool_attempts) == (engine.tokens, shelf.queries)
    assert stats.trajectories == sum(leaves(rollout)) <= n * plan.trees * plan.leaves
    assert stats.moved_expansions_used <= stats.moved_expansions
    assert stats.moved_expansions <= stats.settled_prompts * plan.trees * plan.rounds * plan.expansions
    for used, bound, over in (
        (stats.trajectories, budget.leaves, stats.overshoot_leaves),
        (stats.generated_tokens, budget.generated_tokens, stats.overshoot_generated_tokens),
        (stats.tool_calls, budget.tool_calls, stats.overshoot_tool_calls),
    ):
        assert bound is None or used <= n * bound + over
        assert bound is not None or over == 0
    assert all(node.prefix is None for g in rollout.groups for t in g.trees for node in t.nodes())
    settled = [all(is_certain(t, plan.adaptive or 0.0) and not t.rounds for t in g.trees) for g in rollout.groups]
    assert stats.settled_prompts == sum(settled)
    for group, still in zip(rollout.groups, settled, strict=True):
        assert not still or sum(len(t.leaves()) for t in group.trees) == plan.trees * plan.chains


@given(
    st.builds(Allowance, st.integers(0, 40), st.integers(0, 999), st.integers(0, 99)),
    st.integers(0, 12),
)
def test_a_deal_hands_out_everything_or_nothing(pool: Allowance, trees: int) -> None:
    shares = allowances(pool, trees)
    assert len(shares) == min(trees, pool.expansions)
    assert sum(shares, Allowance()) == (pool if shares else Allowance())
    assert all(s.expansions >= 1 for s in shares)
    for name in ("expansions", "generated_tokens", "tool_calls"):
        column = [getattr(s, name) for s in shares]
        assert column == sorted(column, reverse=True)
        assert not column or column[0] - column[-1] <= 1


def test_what_is_left_over_is_counted_for_the_whole_prompt() -> None:
    plan = replace(PLAN, trees=2, budget=Budget(leaves=7, generated_tokens=10))
    used = Tally(trajectories=4, generated_tokens=12, tool_calls=1)
    assert left_over(plan, used) == Allowance(3, 0, 0)
    assert left_over(replace(plan, budget=None), used) == Allowance(8, 0, 0)
    assert left_over(replace(plan, budget=Budget(tool_calls=5)), used) == Allowance(8, 0, 4)


# Refusals ------------------------------------------------------------------------------------------------------------


def anytime(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    return random_nodes(tree, k, rng)


anytime.needs = "any"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrowthPlan(chains=2, adaptive=0.1), "rounds=0 makes none"),
        (lambda: replace(PLAN, adaptive=-0.1), "adaptive must be at least 0"),
        (lambda: replace(PLAN, adaptive=float("nan")), "adaptive must be at least 0"),
        (lambda: replace(PLAN, rule=anytime), "expands before that"),
    ],
)
def test_impossible_plans_are_refused(make: Callable[[], GrowthPlan], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
