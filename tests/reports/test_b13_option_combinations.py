"""B13: every combination of expansion options runs for several steps, or is refused before anything is generated."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.errors import ConfigError
from turntree.search_backend.passage import Passage
from turntree.trainers.credit import at2po, drop_small_groups, grpo, tree_grpo
from turntree.trainers.expansion import aepo, arpo, chain, entropy, random_nodes
from turntree.trainers.rollout import Budget, GrowthPlan, Limits, Prompt, grow


class Shelf:
    fingerprint = "shelf"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[Passage("1", "Paris", f"about {q}")] for q in queries]


TURNS = ["<search>a</search>", "<answer>Paris</answer>", "<answer>Rome</answer>", "nothing"]
OPTIONS: dict[str, list[Any]] = {
    "trees": [1, 2],
    "chains": [1, 3],
    "rounds": [0, 2],
    "expansions": [0, 2],
    "kept_leaves": [None, 2],
    "budget": [None, Budget(generated_tokens=150)],
    "rule": [chain, random_nodes, entropy],
    "adaptive": [None, 0.5],
}
BRANCHING: dict[str, list[Any]] = {
    "entropy_weight": [0.0, 0.2],
    "branch_probability": [0.0, 0.5, 1.0],
    "beam_size": [1, 3],
}
PENALTY: dict[str, list[Any]] = {
    "penalty": ["chain", "tree"],
    "dynamic": [False, True],
    "rollouts": [None, 6],
}


def product(options: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


COMBINATIONS = product(OPTIONS)
TOKEN_ENTROPY = [(arpo, o) for o in product(BRANCHING)] + [(aepo, o) for o in product(BRANCHING | PENALTY)]


def runnable(options: dict[str, Any]) -> bool:
    expands = options["rounds"] > 0 and options["expansions"] > 0
    leaves = options["chains"] + options["rounds"] * options["expansions"]
    return (
        bool(options["rounds"]) == bool(options["expansions"])
        and not (expands and options["rule"] is chain)
        and (options["kept_leaves"] or 1) <= leaves
        and not (options["adaptive"] is not None and not expands)
    )


def consistent(options: dict[str, Any]) -> bool:
    return bool(options.get("dynamic")) == (options.get("rollouts") is not None)


def test_b13_both_kinds_of_combination_occur() -> None:
    assert 0 < sum(map(runnable, COMBINATIONS)) < len(COMBINATIONS)
    assert 0 < sum(consistent(o) for _, o in TOKEN_ENTROPY) < len(TOKEN_ENTROPY)


@pytest.mark.parametrize("options", [o for o in COMBINATIONS if not runnable(o)])
def test_b13_impossible_combinations_are_refused_with_the_reason(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"set both above 0|never expands|lower kept_leaves|leave adaptive out"):
        GrowthPlan(**options)


@pytest.mark.parametrize("options", [o for o in COMBINATIONS if runnable(o)])
def test_b13_possible_combinations_run_for_six_steps(options: dict[str, Any]) -> None:
    six_steps(GrowthPlan(**options))


@pytest.mark.parametrize(("rule", "options"), [(r, o) for r, o in TOKEN_ENTROPY if consistent(o)])
def test_b13_options_of_token_entropy_branching_run_for_six_steps(rule: Any, options: dict[str, Any]) -> None:
    """Also with AEPO's dynamic first chains switched off, at which the published code fails."""
    bound, chains = functools.partial(rule, vocab_size=300, **options), 1 if options.get("dynamic") else 3
    six_steps(GrowthPlan(chains=chains, rounds=6, expansions=3, rule=bound, budget=Budget(leaves=6)), leaves=6)


@pytest.mark.parametrize("options", [o for _, o in TOKEN_ENTROPY if not consistent(o)])
def test_b13_other_options_are_refused_with_the_reason(options: dict[str, Any]) -> None:
    plan = GrowthPlan(rounds=1, expansions=1, rule=functools.partial(aepo, vocab_size=300, **options))
    with pytest.raises(ConfigError, match="set dynamic=true and rollouts to at least 1, or neither"):
        six_steps(plan)


def six_steps(plan: GrowthPlan, *, leaves: int | None = None) -> None:
    tokenizer, core = ByteTokenizer(), SearchQACore(Shelf())
    expected = leaves or (plan.leaves if plan.budget is None and plan.adaptive is None else None)
    for step in range(6):
        rollout = grow(
            [Prompt(f"{step}/0", Question("q", "Where?", ("Paris",)))],
            core=core,
            engine=ScriptedEngine(lambda _, seed: TURNS[seed % 4], tokenizer),
            dialogue=Dialogue(tokenizer),
            plan=plan,
            sampling=SamplingParams(max_tokens=1, stop=tuple(core.grammar.stop)),
            limits=Limits(max_turn_tokens=64, max_context_tokens=4096),
            run_seed=step,
        )
        if expected is not None:
            assert [len(t.leaves()) for t in rollout.groups[0].trees] == [expected] * plan.trees
        kept, _ = drop_small_groups(rollout.groups)
        for rule in (grpo, tree_grpo, at2po):
            for group, values in zip(kept, rule(kept).values, strict=True):
                assert len(values) == len(group.scored_leaves())
