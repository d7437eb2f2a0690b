"""Growing trees: the laws (ids, budget, same seed same tree), limits, failures and the shape of plans."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Generation, Request, SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.scorer import AnswerScorer, Failed, Finished, score
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.core import (
    Action,
    Effects,
    Finish,
    Pending,
    Step,
    Tool,
    ToolCall,
    ToolFailure,
    ToolResult,
    TurnCore,
)
from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError, DataError, EngineError
from turntree.trainers.credit import at2po
from turntree.trainers.expansion import (
    Expansion,
    ExpansionRule,
    aepo,
    arpo,
    entropy,
    guided,
    random_nodes,
    ucb,
    value_variance,
)
from turntree.trainers.rollout import Budget, GrowthPlan, Limits, Prompt, Rollout, RolloutStats, grow
from turntree.trainers.seeds import derive_rng, derive_seed
from turntree.trainers.tree import Node, Tree

# A task with a tool and a random stream ------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    task: Question
    seed: int = 0
    turns: int = 0


@dataclass
class Lamp:
    """A tool that counts what it executes, and fails each new argument ``faults`` times."""

    faults: int = 0
    effects: Effects = "in_state"
    name: str = "look"
    executed: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        self.executed += len(calls)
        return [self._one(call.argument) for call in calls]

    def _one(self, argument: str) -> ToolResult | ToolFailure:
        self.seen[argument] += 1
        if self.faults < 0 or self.seen[argument] <= self.faults:
            return ToolFailure("timeout", f"no light for {argument}")
        return ToolResult(f"light on {argument}")


class LampCore(TurnCore[State]):
    """``look:x`` asks the tool, ``both:x`` asks twice, ``say:x`` ends (reward 1 for the answer), else a correction."""

    def __init__(self, lamp: Lamp | None = None, *, max_turns: int = 4, observation: str = "") -> None:
        self.lamp = lamp or Lamp()
        self.tools: Mapping[str, Tool] = {"look": self.lamp}
        self.max_turns = max_turns
        self.fixed = observation

    @property
    def fingerprint(self) -> str:
        return f"lamp-{self.max_turns}"

    def initial(self, task: Question, *, seed: int) -> tuple[State, str]:
        if not task.question:
            raise DataError("question is empty")
        return State(task, seed), f"{task.question}\n"

    def act(self, state: State, text: str, *, finish: Finish = "stop") -> Step[State] | Pending[State]:
        after = replace(state, turns=state.turns + 1)
        kind, _, argument = text.rstrip(";").partition(":")
        if kind == "say" and finish == "stop":
            right = argument in state.task.golden_answers
            info = FrozenDict({"action": "answer", "answer": argument, "stop_reason": "answer"})
            return Step(after, "", float(right), terminated=True, info=info)
        if after.turns >= self.max_turns:
            return Step(after, "", truncated=True, info=FrozenDict({"action": kind, "stop_reason": "turns"}))
        if kind in ("look", "both"):
            calls = (ToolCall("look", argument), ToolCall("look", argument + "'"))
            return Pending(text, Action("search", argument), calls[: 1 + (kind == "both")])
        return Step(after, f"[what? {finish}]", info=FrozenDict({"action": "invalid"}))

    def resolve(self, state: State, pending: Pending[State], results: Sequence[ToolResult]) -> Step[State]:
        after = replace(state, turns=state.turns + 1)
        seen = self.fixed or "[" + " ".join(str(r.value) for r in results) + f" {state.seed % 1000}]"
        return Step(after, seen, info=FrozenDict({"action": "search"}))

    def truncate(self, state: State, reason: str) -> Step[State]:
        return Step(state, "", 0.25, truncated=True, info=FrozenDict({"stop_reason": reason}))

    def reseed(self, state: State, seed: int) -> State:
        return replace(state, seed=seed)

    def encode_state(self, state: State) -> dict[str, Any]:
        return {"task": state.task.to_json(), "seed": state.seed, "turns": state.turns}

    def decode_state(self, data: Mapping[str, Any]) -> State:
        return State(Question.from_json(data["task"]), data["seed"], data["turns"])


TOKENS = ByteTokenizer()
WORDS = ["look:a;", "look:né;", "both:b;", "hm;", "say:yes;", "say:no;", "say:灯;"]


def speak(context: str, seed: int) -> str:
    return WORDS[seed % len(WORDS)]


class CountingEngine(ScriptedEngine):
    """Counts what it gave out."""

    tokens = 0

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        out = super().generate(requests)
        self.tokens += sum(len(g.ids) for g in out)
        return out


def task(i: int = 0, question: str = "is it lit?") -> Question:
    return Question(f"q{i}", question, ("yes", "灯"))


PROMPTS = [Prompt(f"p{i}", task(i)) for i in range(3)]
TREE_GRPO = GrowthPlan(trees=2, chains=1, rounds=2, expansions=2, rule=random_nodes)
AT2PO = GrowthPlan(trees=1, chains=3, rounds=2, expansions=2, rule=entropy)
RULES: tuple[ExpansionRule, ...] = (
    random_nodes,
    entropy,
    value_variance,
    guided,
    ucb,
    functools.partial(arpo, vocab_size=300),
    functools.partial(aepo, vocab_size=300),
)
NO_NODE: Any = None
LIMITS = Limits(max_turn_tokens=32, max_context_tokens=4000, tool_backoff_s=0.0)


def run(
    plan: GrowthPlan = AT2PO,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    core: TurnCore[Any] | None = None,
    engine: ScriptedEngine | None = None,
    limits: Limits = LIMITS,
    **options: Any,
) -> Rollout:
    return grow(
        prompts,
        core=core or LampCore(),
        engine=engine or ScriptedEngine(speak, TOKENS),
        dialogue=Dialogue(TOKENS),
        plan=plan,
        sampling=SamplingParams(max_tokens=1, stop=(";",)),
        limits=limits,
        **options,
    )


def one_chain(texts: Sequence[str], **options: Any) -> Node:
    """The only leaf of a single scripted chain."""
    (leaf,) = (
        run(GrowthPlan(), prompts=PROMPTS[:1], engine=ScriptedEngine(texts, TOKENS), **options)
        .groups[0]
        .trees[0]
        .leaves()
    )
    return leaf


def record(node: Node) -> dict[str, Any]:
    return {
        "path": list(node.path),
        "turn": node.text,
        "tokens": list(node.turn_ids),
        "nll": round(node.entropy, 9),
        "observation": node.observation,
        "observation_tokens": list(node.observation_ids),
        "status": node.status,
        "reward": node.reward,
        "picked": None if node.picked is None else list(node.picked.path),
        "reason": node.reason,
        "branchable": node.branchable,
        "pruned": node.pruned,
        "info": json.loads(json.dumps({k: v for k, v in node.info.items() if k != "message"})),
    }


def records(rollout: Rollout) -> dict[str, Any]:
    return {
        f"{group.uid}/{tree.index}": [record(n) for n in tree.root.walk()]
        for group in rollout.groups
        for tree in group.trees
    }


def nodes(rollout: Rollout) -> list[Node]:
    return [n for group in rollout.groups for tree in group.trees for n in tree.nodes()]


# Shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trees", "rounds", "expansions"), [(1, 1, 2), (2, 1, 2), (2, 3, 1), (3, 2, 4)])
def test_tree_grpo_has_one_leaf_and_one_more_per_expansion(trees: int, rounds: int, expansions: int) -> None:
    rollout = run(GrowthPlan(trees=trees, rounds=rounds, expansions=expansions, rule=random_nodes))
    for group in rollout.groups:
        assert [len(t.leaves()) for t in group.trees] == [1 + rounds * expansions] * trees
        assert [t.rounds for t in group.trees] == [rounds] * trees


@pytest.mark.parametrize(("chains", "rounds", "expansions"), [(3, 2, 2), (10, 2, 6), (1, 1, 1)])
def test_at2po_has_its_chains_and_one_leaf_per_expansion(chains: int, rounds: int, expansions: int) -> None:
    rollout = run(GrowthPlan(chains=chains, rounds=rounds, expansions=expansions, rule=entropy))
    for group in rollout.groups:
        assert [len(t.leaves()) for t in group.trees] == [chains + rounds * expansions]
    assert rollout.stats.trajectories == 3 * (chains + rounds * expansions)


def test_at2po_branches_are_siblings_of_the_picked_turn() -> None:
    rollout = run()
    picked = [n for n in nodes(rollout) if n.picked is not None]
    assert len(picked) == 3 * 4
    for node in picked:
        assert node.picked is not None
        assert node.parent is (node.picked.parent or node.picked)
        assert node is not node.picked


def test_tree_grpo_branches_are_children_of_the_picked_node() -> None:
    picked = [n for n in nodes(run(TREE_GRPO)) if n.picked is not None]
    assert len(picked) == 3 * 2 * 4
    assert all(n.parent is n.picked for n in picked)


def test_children_have_their_ordinals_in_order() -> None:
    for node in nodes(run(TREE_GRPO)) + nodes(run(AT2PO)):
        assert [c.ordinal for c in node.children] == list(range(len(node.children)))


def test_kept_leaves_prunes_but_counts_everything() -> None:
    everything, pruned = run(TREE_GRPO), run(replace(TREE_GRPO, kept_leaves=3))
    assert pruned.stats.pruned == 6 * (5 - 3)
    assert pruned.stats.generated_tokens == everything.stats.generated_tokens
    for group in pruned.groups:
        assert [len(t.scored_leaves()) for t in group.trees] == [3, 3]
        assert [len(t.leaves()) for t in group.trees] == [5, 5]
    # Which leaves stay is random, not always the first ones.
    assert len({tuple(leaf.pruned for leaf in t.leaves()) for g in pruned.groups for t in g.trees}) > 1


def test_no_prompts_give_an_empty_rollout() -> None:
    assert run(prompts=[]) == Rollout((), RolloutStats())


def test_repeated_uids_are_refused() -> None:
    with pytest.raises(ConfigError, match="unique"):
        run(prompts=[Prompt("a", task()), Prompt("a", task())])


# Law 1: ids in = ids out ---------------------------------------------------------------------------------------


def test_training_ids_are_the_ids_that_the_engine_saw() -> None:
    engine = ScriptedEngine(speak, TOKENS)
    rollout = run(TREE_GRPO, engine=engine)
    seen = {r.key: r for r in engine.requests}
    sampled = [n for n in nodes(rollout) if n.turn_ids]
    assert len(sampled) == len(seen) == rollout.stats.turns
    for group in rollout.groups:
        for tree in group.trees:
            for node in tree.root.walk():
                if node.parent is None:
                    continue
                request = seen[group.uid, tree.index, *node.path]
                path = node.trajectory()[:-1]
                context = [*tree.root.observation_ids, *(i for n in path for i in (*n.turn_ids, *n.observation_ids))]
                assert request.prefix.token_ids() == context
                assert TOKENS.decode(list(node.turn_ids)).startswith(node.text)
                assert len(node.logprobs) == len(node.turn_ids)
                assert node.entropy == pytest.approx(-np.mean(node.logprobs))


def test_prefix_handles_are_shared_while_growing_and_dropped_afterwards() -> None:
    engine = ScriptedEngine(speak, TOKENS)
    rollout = run(TREE_GRPO, engine=engine)
    first = [r.prefix for r in engine.requests if r.key[0] == "p0" and len(r.key) == 3]
    assert len({id(p) for p in first}) == 1, "all trees of a prompt share the prompt's handle"
    assert all(n.prefix is None for n in nodes(rollout))


# Law 6: budget -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    faults=st.integers(0, 3),
    retries=st.integers(0, 2),
    abort=st.integers(0, 4),
    overrun=st.booleans(),
    plan=st.sampled_from([TREE_GRPO, AT2PO, GrowthPlan(trees=2), *(replace(TREE_GRPO, rule=r) for r in RULES)]),
)
def test_reported_tokens_and_calls_are_those_made(
    seed: int, faults: int, retries: int, abort: int, overrun: bool, plan: GrowthPlan
) -> None:
    """Whatever fails, is retried, aborted, or runs on after its stop string."""
    lamp = Lamp(faults)
    engine = CountingEngine(
        lambda c, s: speak(c, s) + ("junk" if overrun else ""),
        TOKENS,
        abort=lambda r: bool(abort) and r.seed % 5 < abort,
        ignore_stop=overrun,
    )
    limits = replace(LIMITS, tool_retries=retries, engine_retries=1)
    rollout = run(plan, core=LampCore(lamp), engine=engine, limits=limits, run_seed=seed)
    stats, made = rollout.stats, nodes(rollout)
    assert stats.generated_tokens == engine.tokens
    assert stats.generated_tokens - stats.discarded_tokens == sum(len(n.turn_ids) for n in made)
    assert stats.generated_tokens - stats.discarded_tokens == sum(
        t.generated_tokens for g in rollout.groups for t in g.trees
    )
    assert stats.tool_attempts == lamp.executed
    leaves = [n for n in made if n.is_leaf]
    assert stats.trajectories == len(leaves)
    assert stats.turns == sum(bool(n.turn_ids) for n in made)
    assert stats.failed == sum(n.status == "failed" for n in leaves)
    assert sum(stats.truncated.values()) == sum(n.status == "truncated" for n in leaves)
    assert stats.aborted == sum(engine.abort(r) for r in engine.requests if engine.abort)
    asked = sum(1 + n.text.startswith("both") for n in made if n.text[:4] in ("look", "both") and _was_asked(n))
    if not faults:
        assert stats.tool_calls == stats.tool_attempts == asked


def _was_asked(node: Node) -> bool:
    return node.action == "search" or node.info.get("error") == "timeout"


def test_a_failed_call_is_retried_without_sampling_the_turn_again() -> None:
    lamp = Lamp(faults=2)
    engine = CountingEngine(["look:a;", "say:yes;"], TOKENS)
    rollout = run(GrowthPlan(), prompts=PROMPTS[:1], core=LampCore(lamp), engine=engine)
    assert [r.key for r in engine.requests] == [("p0", 0, 0), ("p0", 0, 0, 0)]
    assert (rollout.stats.tool_calls, rollout.stats.tool_attempts) == (1, 3)
    assert rollout.stats.failed == 0
    (leaf,) = rollout.groups[0].scored_leaves()
    assert leaf.reward == 1.0


def test_past_the_retries_the_leaf_fails_and_is_counted_by_type() -> None:
    leaf = one_chain(["look:a;"], core=LampCore(Lamp(faults=-1)))
    assert (leaf.status, leaf.reward, leaf.text) == ("failed", None, "look:a;")
    rollout = run(GrowthPlan(trees=4), core=LampCore(Lamp(faults=-1)))
    counts = rollout.stats.as_dict()
    assert counts["error/timeout/count"] == counts["failed"] > 0
    assert counts["tool_calls"] == 0


@pytest.mark.parametrize("budget", [Budget(leaves=5), Budget(generated_tokens=60), Budget(tool_calls=3)])
@pytest.mark.parametrize("trees", [1, 2])
def test_budgets_stop_growth_within_one_round(budget: Budget, trees: int) -> None:
    plan = GrowthPlan(trees=trees, rounds=50, expansions=2, rule=random_nodes, budget=budget)
    rollout = run(plan)
    free = run(replace(plan, budget=None, rounds=1))
    assert rollout.stats.trajectories < 3 * trees * plan.leaves
    for group in rollout.groups:
        for tree in group.trees:
            assert tree.rounds < 50
    used = {f: getattr(rollout.stats, name) for f, name in _NAMES.items()}
    over = {f: getattr(rollout.stats, f"overshoot_{f}") for f in _NAMES}
    for f in _NAMES:
        bound = getattr(budget, f)
        if bound is not None:
            assert used[f] <= 3 * bound + over[f]
            assert over[f] <= 3 * trees * 2 * max(10 * 4, free.stats.turns)
        else:
            assert over[f] == 0
    if budget.leaves is not None:
        assert rollout.stats.overshoot_leaves == 0


def mixes() -> st.SearchStrategy[Budget]:
    return st.builds(
        Budget,
        leaves=st.none() | st.integers(1, 12),
        generated_tokens=st.none() | st.integers(1, 250),
        tool_calls=st.none() | st.integers(1, 15),
    )


@settings(max_examples=60, deadline=None)
@given(budget=mixes(), trees=st.integers(1, 2), rule=st.sampled_from(RULES), seed=st.integers(0, 10**6))
def test_every_mix_of_budgets_is_kept_within_one_round(
    budget: Budget, trees: int, rule: ExpansionRule, seed: int
) -> None:
    """A round starts only while something of every bounded thing is left, and what was used is what was made."""
    lamp, engine = Lamp(), CountingEngine(speak, TOKENS)

    def checking(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
        share = budget.share(tree.index, trees)
        for bound, used in zip((share.leaves, share.generated_tokens, share.tool_calls), spent(tree), strict=True):
            assert bound is None or used < bound
        assert share.leaves is None or len(tree.leaves()) + k <= share.leaves
        return rule(tree, k, rng)

    plan = GrowthPlan(trees=trees, rounds=6, expansions=2, rule=checking, budget=budget)
    rollout = run(plan, core=LampCore(lamp), engine=engine, run_seed=seed)
    stats = rollout.stats
    assert (stats.generated_tokens, stats.tool_attempts) == (engine.tokens, lamp.executed)
    assert stats.tool_calls == stats.tool_attempts
    used = [[sum(column) for column in zip(*map(spent, group.trees), strict=True)] for group in rollout.groups]
    assert [stats.trajectories, stats.generated_tokens, stats.tool_calls] == [sum(column) for column in zip(*used)]
    for i, name in enumerate(("leaves", "generated_tokens", "tool_calls")):
        bound = getattr(budget, name)
        over = 0 if bound is None else sum(max(0, prompt[i] - bound) for prompt in used)
        assert getattr(stats, f"overshoot_{name}") == over
    assert stats.overshoot_leaves == sum(max(0, trees - (budget.leaves or trees)) for _ in rollout.groups)


def spent(tree: Tree) -> tuple[int, int, int]:
    """Leaves, generated tokens and tool calls that a tree's nodes show."""
    calls = sum(1 + n.text.startswith("both") for n in tree.nodes() if n.action == "search")
    return len(tree.leaves()), tree.generated_tokens, calls


_NAMES = {"leaves": "trajectories", "generated_tokens": "generated_tokens", "tool_calls": "tool_calls"}


def test_a_budget_that_is_used_up_exactly_starts_no_round() -> None:
    first = run(GrowthPlan(chains=3), prompts=PROMPTS[:1]).stats
    for extra, rounds in ((0, 0), (1, 1)):
        for name in ("generated_tokens", "tool_calls"):
            budget = Budget(**{name: getattr(first, name) + extra})
            plan = GrowthPlan(chains=3, rounds=1, expansions=2, rule=entropy, budget=budget)
            assert run(plan, prompts=PROMPTS[:1]).groups[0].trees[0].rounds == rounds


def test_a_budget_smaller_than_the_first_chains_is_reported_as_overshoot() -> None:
    rollout = run(replace(AT2PO, budget=Budget(leaves=2, generated_tokens=1)))
    assert rollout.stats.trajectories == 9
    assert rollout.stats.overshoot_leaves == 3
    assert rollout.stats.overshoot_generated_tokens == rollout.stats.generated_tokens - 3


def test_shares_of_a_budget_add_up() -> None:
    shares = [Budget(leaves=7, tool_calls=2).share(i, 3) for i in range(3)]
    assert [s.leaves for s in shares] == [3, 2, 2]
    assert [s.tool_calls for s in shares] == [1, 1, 1]
    assert [s.generated_tokens for s in shares] == [None] * 3


# Law 8: same seed, same tree -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    arrival=st.integers(0, 10**6),
    concurrent=st.none() | st.integers(1, 5),
    batch=st.none() | st.integers(1, 5),
    order=st.permutations(PROMPTS),
    plan=st.sampled_from(
        [
            *(replace(TREE_GRPO, rule=rule) for rule in RULES),
            replace(TREE_GRPO, kept_leaves=2),
            replace(AT2PO, budget=Budget(generated_tokens=90)),
        ]
    ),
)
def test_trees_do_not_depend_on_batches_or_arrival(
    seed: int, arrival: int, concurrent: int | None, batch: int | None, order: list[Prompt], plan: GrowthPlan
) -> None:
    plain = run(plan, run_seed=seed)
    limits = replace(LIMITS, max_concurrent_trees=concurrent, max_batch_requests=batch)
    engine = ScriptedEngine(speak, TOKENS, arrival_seed=arrival)
    shuffled = run(plan, run_seed=seed, prompts=order, engine=engine, limits=limits)
    assert records(shuffled) == records(plain)
    assert [g.uid for g in shuffled.groups] == [p.uid for p in order]
    assert shuffled.stats.as_dict() == plain.stats.as_dict()


def test_a_prompt_grows_the_same_trees_alone_and_in_company() -> None:
    together = records(run(TREE_GRPO, run_seed=5))
    for prompt in PROMPTS:
        alone = records(run(TREE_GRPO, run_seed=5, prompts=[prompt]))
        assert alone == {k: v for k, v in together.items() if k.startswith(f"{prompt.uid}/")}


def test_seed_prompt_and_tree_each_change_the_draws() -> None:
    first, second = records(run(TREE_GRPO, run_seed=1)), records(run(TREE_GRPO, run_seed=2))
    assert first != second
    trees = {json.dumps([r["turn"] for r in tree]) for tree in first.values()}
    assert len(trees) > 3


def test_siblings_resume_the_same_state_with_other_random_streams() -> None:
    rollout = run(GrowthPlan(rounds=1, expansions=4, rule=random_nodes), prompts=PROMPTS[:1])
    tree = rollout.groups[0].trees[0]
    families = [[child.state.seed for child in node.children] for node in tree.nodes() if len(node.children) > 1]
    assert families
    assert all(len(set(seeds)) == len(seeds) for seeds in families)
    assert all(child.state.turns == child.depth for child in tree.nodes())


def test_trees_in_flight_are_bounded() -> None:
    class Watching(ScriptedEngine):
        most = 0

        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            self.most = max(self.most, len({r.key[:2] for r in requests}))
            return super().generate(requests)

    for bound, expected in ((1, 1), (4, 4), (None, 6)):
        engine = Watching(speak, TOKENS)
        run(TREE_GRPO, engine=engine, limits=replace(LIMITS, max_concurrent_trees=bound))
        assert engine.most == expected


def test_one_engine_batch_holds_turns_of_many_trees() -> None:
    sizes: list[int] = []

    class Watching(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            sizes.append(len(requests))
            return super().generate(requests)

    run(TREE_GRPO, engine=Watching(speak, TOKENS))
    assert sizes[0] == 6
    run(TREE_GRPO, engine=Watching(speak, TOKENS), limits=replace(LIMITS, max_batch_requests=2))
    assert max(sizes[sizes.index(2) :]) <= 6


def test_asynchronous_rules_grow_the_planned_number_of_leaves() -> None:
    calls: list[int] = []

    def greedy(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
        calls.append(k)
        return random_nodes(tree, k, rng)

    greedy.needs = "any"  # type: ignore[attr-defined]
    rollout = run(GrowthPlan(chains=3, rounds=2, expansions=2, rule=greedy))
    assert [len(g.trees[0].leaves()) for g in rollout.groups] == [7, 7, 7]
    assert calls == [1] * 12
    for node in nodes(rollout):
        assert [c.ordinal for c in node.children] == list(range(len(node.children)))
    budgeted = run(GrowthPlan(chains=3, rounds=20, expansions=2, rule=greedy, budget=Budget(leaves=5)))
    assert [len(g.trees[0].leaves()) for g in budgeted.groups] == [5, 5, 5]


# Limits --------------------------------------------------------------------------------------------------------


def test_an_observation_that_fits_exactly_is_kept() -> None:
    """Response budget 4, a turn of 2 tokens, an observation of 2 tokens."""
    core = LampCore(observation="ok")
    leaf = one_chain(["look:a;"], core=core, limits=Limits(32, 4000, max_response_tokens=9))
    assert (len(leaf.turn_ids), len(leaf.observation_ids)) == (7, 2)
    assert (leaf.status, leaf.info["stop_reason"], leaf.reward) == ("truncated", "context", 0.25)


def test_an_observation_that_does_not_fit_ends_the_episode_within_the_limit() -> None:
    core = LampCore(observation="far too long")
    leaf = one_chain(["look:a;"], core=core, limits=Limits(32, 4000, max_response_tokens=9))
    assert leaf.observation_ids == ()
    assert leaf.observation == "far too long"
    assert leaf.info["observation_tokens_left_out"] == 12
    assert (leaf.status, leaf.info["stop_reason"], leaf.reward) == ("truncated", "context", 0.25)


@pytest.mark.parametrize("length", [8, 9, 10, 40])
def test_no_request_ever_asks_for_less_than_one_token_or_more_than_fits(length: int) -> None:
    prompt = len(Dialogue(TOKENS).prompt_ids("is it lit?\n"))
    engine = ScriptedEngine(speak, TOKENS)
    limits = Limits(max_turn_tokens=7, max_context_tokens=prompt + length)
    rollout = run(TREE_GRPO, engine=engine, limits=limits)
    assert engine.requests
    for request in engine.requests:
        assert 1 <= request.params.max_tokens <= 7
        assert len(request.prefix) + request.params.max_tokens <= limits.max_context_tokens
    for group in rollout.groups:
        for leaf in group.scored_leaves():
            ids = sum(len(n.turn_ids) + len(n.observation_ids) for n in leaf.trajectory())
            assert ids + len(group.trees[0].root.observation_ids) <= limits.max_context_tokens
    assert rollout.stats.failed == 0


def test_a_prompt_that_fills_the_context_is_truncated_and_scored() -> None:
    engine = ScriptedEngine(speak, TOKENS)
    rollout = run(AT2PO, engine=engine, limits=Limits(32, 8))
    assert engine.requests == []
    assert rollout.stats.as_dict()["truncated/context/count"] == rollout.stats.trajectories == 21
    assert all(leaf.reward == 0.25 for g in rollout.groups for leaf in g.scored_leaves())


def test_a_turn_cut_by_the_limit_reaches_the_environment_as_cut() -> None:
    engine = ScriptedEngine(lambda c, s: "say:yes;", TOKENS)
    rollout = run(GrowthPlan(), prompts=PROMPTS[:1], engine=engine, limits=replace(LIMITS, max_turn_tokens=3))
    first = rollout.groups[0].trees[0].root.children[0]
    assert len(first.turn_ids) == 3
    assert first.observation == "[what? length]"


def test_engines_that_run_on_are_cut_and_counted() -> None:
    for fault in ("ignore_stop", "ignore_limit"):
        engine = CountingEngine(lambda c, s: "say:yes;junk", TOKENS, **{fault: True})  # type: ignore[arg-type]
        limits = LIMITS if fault == "ignore_stop" else replace(LIMITS, max_turn_tokens=5)
        rollout = run(GrowthPlan(), prompts=PROMPTS[:1], core=LampCore(max_turns=1), engine=engine, limits=limits)
        (leaf,) = rollout.groups[0].trees[0].leaves()
        assert len(leaf.turn_ids) == (8 if fault == "ignore_stop" else 5)
        assert rollout.stats.generated_tokens == engine.tokens
        assert rollout.stats.discarded_tokens == engine.tokens - len(leaf.turn_ids) > 0


# Failures ------------------------------------------------------------------------------------------------------


def test_an_aborted_turn_is_asked_for_again() -> None:
    tries: Counter[tuple[Any, ...]] = Counter()

    def once(request: Request) -> bool:
        tries[request.key] += 1
        return tries[request.key] == 1

    rollout = run(engine=ScriptedEngine(speak, TOKENS, abort=once))
    assert rollout.stats.failed == 0
    assert rollout.stats.aborted == rollout.stats.turns
    assert records(rollout) == records(run())


def test_a_turn_that_is_always_aborted_fails_its_leaf() -> None:
    rollout = run(engine=ScriptedEngine(speak, TOKENS, abort=lambda r: r.key[-1] == 1))
    assert rollout.stats.as_dict()["error/abort/count"] > 0
    for node in nodes(rollout):
        if node.ordinal == 1 and node.parent is not None:
            assert (node.status, node.turn_ids, node.reward) == ("failed", (), None)


def test_one_bad_request_fails_alone() -> None:
    def bad(request: Request) -> bool:
        return request.key == ("p1", 0, 2)

    rollout = run(engine=ScriptedEngine(speak, TOKENS, fail=bad))
    assert rollout.stats.as_dict()["error/EngineError/count"] == 1
    failed = [n for n in nodes(rollout) if n.status == "failed"]
    assert [n.path for n in failed] == [(2,)]
    assert "scripted failure" in failed[0].info["message"]
    assert len(rollout.groups[1].scored_leaves()) == 6
    untouched = {k: v for k, v in records(run()).items() if k != "p1/0"}
    assert {k: v for k, v in records(rollout).items() if k != "p1/0"} == untouched


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_never_answers_is_an_error_that_names_the_cause(count: int) -> None:
    class Broken(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            raise RuntimeError("out of memory")

    with pytest.raises(EngineError, match=r"Broken failed .* RuntimeError: out of memory"):
        run(GrowthPlan(), prompts=PROMPTS[:count], engine=Broken(speak, TOKENS))


def test_an_engine_that_dies_on_the_way_stops_the_rollout() -> None:
    class Dying(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            if len(self.requests) > 20:
                raise RuntimeError("connection lost")
            return super().generate(requests)

    with pytest.raises(EngineError, match="connection lost"):
        run(GrowthPlan(trees=20, chains=4), engine=Dying(speak, TOKENS), limits=replace(LIMITS, max_batch_requests=8))


def test_an_engine_that_loses_an_answer_breaks_its_contract() -> None:
    class Losing(ScriptedEngine):
        def as_completed(self, requests: Sequence[Request]) -> Any:
            return iter(list(super().as_completed(requests))[1:])

    with pytest.raises(EngineError, match="exactly once"):
        run(GrowthPlan(), engine=Losing(speak, TOKENS))


def test_a_prompt_that_cannot_be_made_fails_its_own_leaves_only() -> None:
    rollout = run(prompts=[Prompt("bad", task(question="")), *PROMPTS])
    assert [leaf.status for leaf in rollout.groups[0].trees[0].leaves()] == ["failed"] * 3
    assert rollout.stats.as_dict()["error/DataError/count"] == 3
    assert rollout.groups[0].trees[0].leaves()[0].info["message"] == "question is empty"
    assert {k: v for k, v in records(rollout).items() if k != "bad/0"} == records(run())
    kept = rollout.drop_small_groups()
    assert [g.uid for g in kept.groups] == ["p0", "p1", "p2"]
    assert kept.stats.dropped_groups == 1


def test_nodes_after_an_external_call_are_never_grown() -> None:
    for plan in (replace(TREE_GRPO, rounds=4), replace(AT2PO, rounds=4)):
        made = nodes(run(plan, core=LampCore(Lamp(effects="external"))))
        called = [n for n in made if n.action == "search"]
        assert called
        for node in called:
            assert all(not n.branchable for n in node.walk())
            assert [c.picked for c in node.children] in ([None], [])
        assert all(n.parent.branchable for n in made if n.picked is not None and n.parent is not None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda t, k, r: [Expansion(t.leaves()[0], t.root, None, "")], "open, branchable"),
        (lambda t, k, r: [Expansion(Node(), t.root, None, "")], "of the tree it was given"),
        (lambda t, k, r: [Expansion(t.root, t.root, None, "")] * (k + 1), "at most 2"),
        (lambda t, k, r: [Expansion(t.root, Node(), None, "")], "another tree"),
        (lambda t, k, r: [t.root.children[0]], "list with Node$"),
        (lambda t, k, r: [Expansion(t.root, NO_NODE, None, "")], "list with Expansion of Node and NoneType$"),
        (lambda t, k, r: None, "NoneType$"),
        (lambda t, k, r: (Expansion(t.root, t.root, None, "") for _ in range(k)), "generator$"),
    ],
)
def test_rules_that_break_their_contract_are_refused(rule: ExpansionRule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(GrowthPlan(rounds=1, expansions=2, rule=rule))


def test_trees_that_a_plan_does_not_have_are_refused() -> None:
    for index in (-1, 2):
        with pytest.raises(ConfigError, match=r"trees 0 to 1, found \[\('p0', "):
            run(TREE_GRPO, only={"p0": [index]})
    assert [t.index for t in run(TREE_GRPO, only={"p0": [1, 1]}).groups[0].trees] == [1]


def test_an_environment_may_say_error_in_the_info_of_a_turn() -> None:
    """It is the turn's own; only a prompt that could not be made fails what grows from it."""

    class Noting(LampCore):
        def resolve(self, state: Any, pending: Any, results: Any) -> Any:
            step = super().resolve(state, pending, results)
            return replace(step, info=FrozenDict({**step.info, "error": "the lamp flickers"}))

    plan = replace(AT2PO, rounds=3, rule=random_nodes)
    noting, plain = run(plan, core=Noting()), run(plan)
    assert noting.stats == plain.stats
    assert [(n.path, n.text, n.status, n.reward) for n in nodes(noting)] == [
        (n.path, n.text, n.status, n.reward) for n in nodes(plain)
    ]


def test_a_rule_may_pick_nothing() -> None:
    rollout = run(GrowthPlan(rounds=3, expansions=2, rule=lambda t, k, r: []))
    assert rollout.stats.trajectories == 3


# Scores --------------------------------------------------------------------------------------------------------


def test_scorer_and_finisher_run_before_the_next_round() -> None:
    batches: list[int] = []

    def finisher(finished: Sequence[Finished]) -> list[Finished | Failed]:
        return [replace(f, answer="灯") if f.status == "truncated" else f for f in finished]

    def judge(finished: Sequence[Finished]) -> list[float | Failed]:
        batches.append(len(finished))
        return [Failed("judge_down") if f.answer == "no" else 0.5 for f in finished]

    def rewarded(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
        assert all(leaf.reward is not None or leaf.status == "failed" for leaf in tree.leaves())
        return random_nodes(tree, k, rng)

    rollout = run(GrowthPlan(chains=3, rounds=2, expansions=2, rule=rewarded), scorer=judge, finisher=finisher)
    leaves = [n for n in nodes(rollout) if n.is_leaf]
    assert sum(batches) == len(leaves)
    assert max(batches) > 1
    assert {leaf.reward for leaf in leaves if leaf.status != "failed"} == {0.5}
    assert {leaf.info["error"] for leaf in leaves if leaf.status == "failed"} == {"judge_down"}
    assert rollout.stats.as_dict()["error/judge_down/count"] == sum(leaf.status == "failed" for leaf in leaves)
    assert all(leaf.info["answer"] == "灯" for leaf in leaves if leaf.status == "truncated")


def test_the_environments_rewards_add_up_over_a_trajectory() -> None:
    class Paying(LampCore):
        def resolve(self, state: State, pending: Pending[State], results: Sequence[ToolResult]) -> Step[State]:
            return replace(super().resolve(state, pending, results), reward=-0.125)

    leaf = one_chain(["look:a;", "look:b;", "say:yes;"], core=Paying())
    assert leaf.reward == 0.75


def test_deferred_rewards_need_a_scorer() -> None:
    class Deferring(LampCore):
        def act(self, state: State, text: str, *, finish: Finish = "stop") -> Step[State] | Pending[State]:
            step = super().act(state, text, finish=finish)
            if isinstance(step, Step):
                return replace(step, info=FrozenDict({**step.info, "reward_pending": True}))
            return step

    with pytest.raises(ConfigError, match="give the rollout a scorer"):
        run(core=Deferring())
    assert run(core=Deferring(), scorer=AnswerScorer()).stats.failed == 0


def test_score_checks_what_it_is_given() -> None:
    done = Finished(task(), "q", (), "answered", "yes", 0.0)
    assert [s.reward for s in score([done, done], scorer=None)] == [0.0, 0.0]
    assert score([done], scorer=AnswerScorer())[0].reward == 1.0
    assert score([replace(done, answer=None)], scorer=AnswerScorer(no_answer=-1.0))[0].reward == -1.0
    assert score([], scorer=None) == []
    nan = score([done], scorer=lambda f: [float("nan")])[0].reward
    assert isinstance(nan, Failed)
    assert nan.kind == "non_finite_reward"
    down = score([done], scorer=AnswerScorer(), finisher=lambda f: [Failed("summariser")])[0]
    assert (down.finished, down.reward) == (None, Failed("summariser"))
    with pytest.raises(ConfigError, match="given 1 trajectories and returned 0"):
        score([done], scorer=lambda f: [])
    with pytest.raises(ConfigError, match="finisher"):
        score([done], scorer=None, finisher=lambda f: [])


# Plans and seeds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrowthPlan(trees=0),
        lambda: GrowthPlan(chains=0),
        lambda: GrowthPlan(kept_leaves=2),
        lambda: GrowthPlan(rounds=1),
        lambda: GrowthPlan(rounds=1, expansions=1),
        lambda: Budget(leaves=0),
        lambda: Limits(0, 10),
        lambda: Limits(1, 10, tool_retries=-1),
        lambda: Limits(1, 10, max_concurrent_trees=0),
        lambda: Limits(1, 10, tool_backoff_s=float("nan")),
    ],
)
def test_impossible_plans_and_limits_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"at least|set both|never expands|lower kept_leaves"):
        make()


def test_on_tree_sees_every_finished_tree() -> None:
    seen: list[tuple[str, int]] = []
    run(TREE_GRPO, on_tree=lambda t: seen.append((t.prompt_uid, t.index)))
    assert sorted(seen) == [(f"p{i}", j) for i in range(3) for j in range(2)]


def test_seeds_are_the_same_everywhere_and_never_collide_by_concatenation() -> None:
    assert derive_seed(7, "p0", 1, (0, 2), "turn") == 8825282410828057860
    parts: list[tuple[Any, ...]] = [("ab", "c"), ("a", "bc"), ("abc",), (("abc",),), (1, 2), (12,), ("12",), ((1, 2),)]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed("灯\ud800") != derive_seed("灯")
    assert derive_rng(1, "a").random() == derive_rng(1, "a").random()


# Golden trees --------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent.parent / "golden_trees"


def readable(found: dict[str, Any]) -> str:
    """JSON with one line a node, so that a diff shows which nodes changed."""
    line = functools.partial(json.dumps, ensure_ascii=False)
    trees = ",\n".join(
        f"{line(name)}: [\n" + ",\n".join(map(line, tree)) + "\n]" for name, tree in found["trees"].items()
    )
    rest = ",\n".join(f"{line(key)}: {line(found[key])}" for key in found if key != "trees")
    return f'{{"trees": {{\n{trees}\n}},\n{rest}}}\n'


@pytest.mark.parametrize(("name", "plan"), [("tree_grpo", TREE_GRPO), ("at2po", AT2PO)])
def test_golden_whole_trees(name: str, plan: GrowthPlan) -> None:
    """After a change on purpose: ``TURNTREE_REGENERATE=1 pytest tests/trainers/test_rollout.py -k golden``."""
    rollout = run(plan, prompts=PROMPTS[:1], run_seed=6)
    advantages = [[round(float(a), 9) for a in turns] for turns in at2po(rollout.groups).values[0]]
    found = {"trees": records(rollout), "at2po_advantages": advantages, "stats": rollout.stats.as_dict()}
    path = GOLDEN / f"{name}.json"
    if os.environ.get("TURNTREE_REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(readable(found), encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(found))
