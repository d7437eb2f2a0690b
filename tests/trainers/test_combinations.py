"""Expansion rule x credit rule x ratio level: every allowed combination runs, and the page says which they are."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turntree.errors import ConfigError
from turntree.trainers import credit as credit_rules
from turntree.trainers import expansion as expansion_rules
from turntree.trainers.combinations import CREDITS, EXPANSIONS, RATIOS, combinations, refusal, render
from turntree.trainers.compose import compose
from turntree.trainers.credit import Advantages, credit_needs
from turntree.trainers.losses import Denominators, policy_loss
from turntree.trainers.objectives import gather_occurrences
from turntree.trainers.packing import column, pack_groups, table, write_advantages
from turntree.trainers.tree import Group, Node, Tree

ROOT = Path(__file__).resolve().parents[2]
TREE_RULES = [name for name in EXPANSIONS if name != "chain"]


def grown(expansion: str, seed: int) -> Tree:
    """A tree of two chains of two or three turns, and what two rounds of the rule add to it."""
    rng = np.random.default_rng(seed)
    tree = Tree(Node(observation_ids=(1, 2, 3), observation="?"), "q", seed, seed=seed)
    for _ in range(2):
        play(tree.root, rng)
    rule: Any = getattr(expansion_rules, expansion)
    options = {"vocab_size": 23} if expansion in ("arpo", "aepo") else {}
    for _ in range(2):
        for pick in rule(tree, 2, rng, **options):
            play(pick.parent, rng)
        tree.rounds += 1
    return tree


def play(parent: Node, rng: np.random.Generator) -> None:
    """A trajectory from ``parent`` to an answer."""
    for turn in range(int(rng.integers(2, 4))):
        count = int(rng.integers(1, 4))
        logprobs = tuple((-rng.random(count)).tolist())
        child = Node(
            ordinal=len(parent.children),
            turn_ids=tuple(rng.integers(4, 23, count).tolist()),
            logprobs=logprobs,
            entropies=tuple(rng.random(count).tolist()),
            entropy=-sum(logprobs) / count,
            observation_ids=(7, 8) if turn == 0 else (),
        )
        parent = parent.add_child(child)
    parent.status, parent.reward = "answered", float(rng.integers(0, 2))


def advantages_of(name: str, groups: list[Group]) -> Advantages:
    rule: Any = getattr(credit_rules, name)
    nodes = [n for g in groups for t in g.trees for n in t.nodes()]
    tables = {
        "values": {n: np.full(len(n.turn_ids), 0.3) for n in nodes},
        "token_rewards": {n: np.full(len(n.turn_ids), -0.01) for n in nodes},
    }
    result: Advantages = rule(groups, **{key: tables[key] for key in credit_needs(rule)})
    return result


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_every_allowed_combination_runs(expansion: str) -> None:
    groups = [Group(f"q{g}", [grown(expansion, 10 * g + t) for t in range(2)]) for g in range(3)]
    credits = {credit for e, credit, _ in combinations() if e == expansion}
    assert credits
    for credit in sorted(credits):
        packs = pack_groups(groups, max_pack_tokens=10_000)
        write_advantages(packs, advantages_of(credit, groups))
        taught = False
        for ratio in (r for e, c, r in combinations() if (e, c) == (expansion, credit)):
            for pack in packs:
                logp = (column(pack, "tokens", "sampler_logp").double() * 1.01).requires_grad_()
                table(pack, "tokens").set("old_logp", column(pack, "tokens", "sampler_logp").double())
                level: Any = ratio
                loss = policy_loss(gather_occurrences(pack, logp), Denominators.of(packs), ratio=level).loss
                (gradient,) = torch.autograd.grad(loss, logp)
                assert torch.isfinite(loss)
                assert (gradient[~column(pack, "tokens", "loss_mask")] == 0).all()
                taught |= bool((gradient != 0).any())
        assert taught, f"{expansion} with {credit} teaches nothing"


def test_all_built_in_rules_are_in_the_table() -> None:
    def rules(module: Any, *first: str) -> set[str]:
        public = {name: getattr(module, name) for name in module.__all__}
        return {
            name
            for name, value in public.items()
            if inspect.isfunction(value) and tuple(value.__code__.co_varnames[: len(first)]) == first
        }

    assert rules(expansion_rules, "tree", "k", "rng") == set(EXPANSIONS)
    found = rules(credit_rules, "groups")
    assert set(CREDITS) <= found
    assert found - set(CREDITS) <= {"drop_small_groups"}


def test_refused_combinations_are_refused_with_their_reason() -> None:
    refused = [(e, c, r) for e in EXPANSIONS for c in CREDITS for r in RATIOS if refusal(e, c, r)]
    everything = Counter((e, c, r) for e in EXPANSIONS for c in CREDITS for r in RATIOS)
    assert Counter(refused) + Counter(combinations()) == everything
    for expansion, credit, ratio in refused:
        shape = [] if expansion == "chain" else ["algorithm.rounds=1", "algorithm.expansions=2"]
        with pytest.raises(ConfigError, match="do not go together") as error:
            compose(
                [
                    "algorithm=grpo",
                    *shape,
                    f"algorithm.expansion=turntree.trainers.expansion:{expansion}",
                    f"algorithm.credit=turntree.trainers.credit:{credit}",
                    f"algorithm.ratio={ratio}",
                ]
            )
        assert (refusal(expansion, credit, ratio) or "?") in str(error.value)


def test_the_page_shows_the_table() -> None:
    assert render() in (ROOT / "docs" / "combinations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm=tree_grpo", "algorithm.rounds=0", "algorithm.expansions=0"], "each tree has one"),
        (["algorithm=grpo", "algorithm.adaptive=0.1"], "there are none to move"),
        (["algorithm=dapo", "algorithm.overlong_buffer=7000"], "expected at most as much"),
        (["algorithm=grpo", "algorithm.sum_norm=100"], "divides seq-mean-token-sum-norm only"),
        (["algorithm=ppo", "algorithm.kl_estimator=k3+"], "a reward has no gradient"),
        (["algorithm=grpo", "algorithm.clip=cispo"], r"algorithm\.clip=cispo bounds the weight"),
        (["algorithm=grpo", "algorithm.turn_ratio=product"], r"algorithm\.turn_ratio=product.*no pool"),
        (["algorithm=grpo", "algorithm.ratio_gradient=true"], "both forms are the same"),
        (["algorithm=grpo", "algorithm.dual_clip=0.5"], "must be above 1"),
        (["algorithm=grpo", "algorithm.by_turns=[{max_turns: 0}]"], r"algorithm\.by_turns\[0\]\.max_turns=0"),
        (["algorithm=ppo", "algorithm.by_turns=[{max_turns: 1, ratio: turn}]"], "differ from token to token"),
        (
            ["algorithm=at2po", "algorithm.ratio=sequence", "algorithm.ratio_gradient=true"],
            "an advantage for each turn",
        ),
        (
            [
                "algorithm=at2po",
                "algorithm.ratio_gradient=true",
                "algorithm.by_turns=[{max_turns: 1, ratio: sequence}]",
            ],
            "an advantage for each turn",
        ),
        (["algorithm=at2po", "algorithm.reference_every=5"], "there is none"),
        (["algorithm=rft", "algorithm.reference_every=5"], "there is none"),
        (["algorithm=grpo", "algorithm.expansion=somebody.rules:deepest"], "is asked between rounds"),
        (["algorithm=grpo", "algorithm.budget_tokens=100"], "first chains always run"),
        (["algorithm=rft", "trainer.importance_cap=2"], "takes the place of"),
    ],
)
def test_impossible_options_are_refused_when_they_are_read(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compose(overrides)


def test_rules_of_others_go_with_everything() -> None:
    config = compose(["algorithm=grpo", "algorithm.credit=somebody.rules:gae", "algorithm.ratio=turn"])
    assert dataclasses.asdict(config.algorithm)["credit"] == "somebody.rules:gae"
