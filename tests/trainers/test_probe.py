"""Rules by import path are tried before a run: wrong kinds and wrong values are refused with the option's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from turntree.errors import ConfigError
from turntree.trainers.build import credit_rule, finisher, growth_plan, loss_function, scorer
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.task import build_task

MAKERS: dict[str, Callable[[RunConfig], Any]] = {
    "reward.scorer": scorer,
    "reward.finisher": finisher,
    "algorithm.credit": lambda config: credit_rule(config.algorithm),
    "algorithm.expansion": lambda config: growth_plan(config.algorithm),
    "algorithm.objective": lambda config: loss_function(config.algorithm),
}


@cache
def base(overrides: tuple[str, ...]) -> RunConfig:
    return compose(overrides)


def make(bed: Any, overrides: str) -> Any:
    """What the option of the first override names, built as a run builds it."""
    option = overrides.partition("=")[0]
    section = option.partition(".")[0]
    given: dict[str, Any] = {}
    for key, value in (override.split("=") for override in overrides.split()):
        head, _, argument = key.removeprefix(f"{section}.").partition(".")
        given[head] = {argument: float(value) if value[0].isdigit() else value} if argument else value
    config = base(tuple(bed.args))
    config = replace(config, **{section: replace(getattr(config, section), **given)})
    tokenizer: Any = SimpleNamespace()
    if option in MAKERS:
        return MAKERS[option](config)
    return build_task(config, tokenizer)


@pytest.mark.parametrize("found", ["math:sqrt", "math:pi", "builtins:dict", "builtins:len"])
@pytest.mark.parametrize("option", [*MAKERS, "reward.name", "env.grammar"])
def test_what_is_no_rule_is_refused_by_name(bed: Any, option: str, found: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(option)):
        make(bed, f"{option}={found}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "algorithm.credit=turntree.trainers.credit:grpo algorithm.credit_args.eps=x",
            r"algorithm\.credit_args\.eps=x.*TypeError",
        ),
        ("env.grammar=users_rules:busy", r"env\.grammar=users_rules:busy"),
        ("env.grammar=users_rules:Down env.grammar_args.corpus=x", r"env\.grammar.*without"),
        (
            "env.grammar=turntree.envs.grammar:TagGrammar env.grammar_args.think=maybe",
            r"env\.grammar=.*'think': 'maybe'.*optional",
        ),
        ("reward.name=users_rules:constant", r"reward\.name=users_rules:constant failed"),
        ("reward.name=emm", r"reward\.name=emm.*did you mean 'em'"),
        ("reward.scorer=users_rules:Down", r"reward\.scorer=users_rules:Down.*class Down"),
        ("reward.finisher=users_rules:root_only", r"reward\.finisher=users_rules:root_only.*one batch"),
        ("algorithm.credit=users_rules:constant", r"algorithm\.credit=users_rules:constant.*Advantages"),
        ("algorithm.expansion=users_rules:constant", r"algorithm\.expansion=users_rules:constant failed"),
        (
            "algorithm.expansion=users_rules:ended",
            r"algorithm\.expansion=users_rules:ended.*status answered.*must choose open",
        ),
        ("algorithm.objective=users_rules:constant", r"algorithm\.objective=users_rules:constant failed"),
    ],
)
def test_the_wrong_kind_of_rule_is_refused_by_name(bed: Any, overrides: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(bed, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            f"algorithm.credit=turntree.trainers.credit:{rule}"
            for rule in ("grpo", "tree_grpo", "at2po", "tree_grpo_reference", "at2po_reference")
        ),
        *(f"algorithm.expansion=turntree.trainers.expansion:{rule}" for rule in ("random_nodes", "entropy")),
        "algorithm.credit=users_rules:halved algorithm.credit_args.factor=0.25",
        "algorithm.expansion=users_rules:root_only",
        "algorithm.objective=users_rules:flat",
        "reward.scorer=users_rules:constant",
        "reward.finisher=users_rules:first_gold",
        *(f"reward.name={name}" for name in ("em", "f1", "tree_grpo", "atpo", "users_rules:busy")),
        "env.grammar=users_rules:Babble",
    ],
)
def test_rules_that_work_pass_their_trial(bed: Any, overrides: str) -> None:
    assert make(bed, overrides) is not None
