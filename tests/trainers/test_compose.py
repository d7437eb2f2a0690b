"""Composition of configurations: unknown keys, types, ranges, import paths."""

from __future__ import annotations

import dataclasses

import pytest

from turntree.errors import ConfigError
from turntree.trainers import objectives
from turntree.trainers.build import credit_rule, growth_plan
from turntree.trainers.compose import compose, config_groups, import_object
from turntree.trainers.config import RunConfig, documented_options


def test_every_option_is_documented() -> None:
    options = list(documented_options())
    assert len(options) > 60
    assert all(doc and doc.endswith(".") for _, _, doc in options)
    assert len({key for key, _, _ in options}) == len(options)


def test_defaults_of_yaml_and_schema_agree() -> None:
    """What the help prints as a default is what a plain run gets, but for the algorithm's preset."""
    plain, composed = RunConfig(), compose([])
    for section in ("model", "env", "search", "reward", "engine", "sampling", "trainer", "coldstart", "sft"):
        assert getattr(plain, section) == getattr(composed, section)


@pytest.mark.parametrize("name", ["grpo", "tree_grpo", "at2po", "gspo", "dapo"])
def test_presets_are_the_papers_objectives(name: str) -> None:
    algorithm = compose([f"algorithm={name}"]).algorithm
    paper = getattr(objectives, name)()
    for key, value in paper.items():
        if key not in ("turn_ratio", "ratio_gradient"):
            assert getattr(algorithm, key) == value, key
    plan = growth_plan(algorithm)
    assert plan.chains == algorithm.chains
    assert callable(credit_rule(algorithm))


def test_published_tree_sizes() -> None:
    tree_grpo = compose(["algorithm=tree_grpo"]).algorithm
    assert (tree_grpo.trees, tree_grpo.chains, tree_grpo.rounds, tree_grpo.expansions) == (2, 1, 1, 2)
    at2po = compose(["algorithm=at2po"]).algorithm
    assert (at2po.trees, at2po.chains, at2po.rounds, at2po.expansions) == (1, 10, 2, 6)


def test_overrides_reach_nested_and_free_form_options() -> None:
    config = compose(["algorithm=tree_grpo", "trainer.steps=7", "algorithm.credit_args.estimator=intra", "seed=5"])
    assert config.trainer.steps == 7
    assert config.algorithm.credit_args == {"estimator": "intra"}
    assert config.seed == 5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.stepz=3", ["trainer.stepz", "Did you mean 'trainer.steps'"]),
        ("algorithm=at2p", ["at2p", "at2po"]),
        ("trainer.steps=x", ["trainer.steps=x", "Integer"]),
        ("trainer.steps=0", ["trainer.steps=0", ">= 1"]),
        ("trainer.store_max_mb=0", ["trainer.store_max_mb=0", ">= 1"]),
        ("model.dtype=float8", ["model.dtype", "bfloat16"]),
        ("trainer.steps", ["key=value"]),
        ("algorithm.rounds=1 algorithm.expansions=0", ["algorithm.rounds=1"]),
        ("algorithm.kept_leaves=99", ["kept_leaves=99"]),
        ("sampling.temperature=0", ["sampling.temperature", "must sample"]),
        ("sft.error=1.5", ["sft.error", "0..1"]),
        ("sampling.temperature=nan", ["sampling.temperature=nan", "finite"]),
        ("sampling.temperature=inf", ["sampling.temperature=inf", "finite"]),
        ("sampling.temperature=-1", ["sampling.temperature=-1", "must sample"]),
        ("sampling.eval_temperature=nan", ["sampling.eval_temperature=nan", "finite"]),
        ("sampling.eval_temperature=-0.5", ["sampling.eval_temperature=-0.5", ">= 0"]),
        ("trainer.learning_rate=nan", ["trainer.learning_rate=nan", "finite"]),
        ("trainer.learning_rate=inf", ["trainer.learning_rate=inf", "finite"]),
        ("trainer.importance_cap=nan", ["trainer.importance_cap=nan", "finite"]),
        ("trainer.adam_beta2=1", ["trainer.adam_beta2=1", "beta < 1"]),
        ("trainer.store_sample=nan", ["trainer.store_sample=nan", "finite"]),
        ("algorithm.clip_high=inf", ["algorithm.clip_high=inf", "finite"]),
        ("algorithm.dual_clip=nan", ["algorithm.dual_clip=nan", "finite"]),
        ("algorithm.entropy_coef=nan", ["algorithm.entropy_coef=nan", "finite"]),
        ("sft.laziness=nan", ["sft.laziness=nan", "finite"]),
        ("sft.learning_rate=-1", ["sft.learning_rate=-1", ">= 0"]),
        ("algorithm.chains=1 algorithm.rounds=0 algorithm.expansions=0", ["min_scored_leaves", "dropped"]),
    ],
)
def test_bad_options_say_what_was_expected(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(override.split())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "path", ["a b [1]", "a,b", "x=y", "it's", "C:\\data", "end\\", "q\\'x", "{a}", "数据(1)", "true", "1e3", "007"]
)
def test_texts_need_no_quotes_of_hydra(path: str) -> None:
    assert compose([f"out={path}"]).out == path


@pytest.mark.parametrize(
    ("value", "sets"),
    [
        ("[nq,mine=my/q.jsonl]", ["nq", "mine=my/q.jsonl"]),
        ("[a=b c/d.jsonl, all]", ["a=b c/d.jsonl", "all"]),
        ("['mine=q.jsonl',nq]", ["mine=q.jsonl", "nq"]),
        ("[]", []),
    ],
)
def test_texts_in_a_list_need_no_quotes_either(value: str, sets: list[str]) -> None:
    assert compose([f"eval.sets={value}"]).eval.sets == sets


def test_a_leading_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h (1)")
    assert compose(["out=~/runs"]).out == "/h (1)/runs"
    assert compose(["out=a~/runs"]).out == "a~/runs"


def test_what_a_recipe_gave_is_taken_back() -> None:
    config = compose(["algorithm=guided_loo", "~algorithm.credit_args.kappa", "algorithm.credit_args.prior=group"])
    assert config.algorithm.credit_args == {"prior": "group"}
    with pytest.raises(ConfigError, match="key=value"):
        compose(["~trainer.steps"])


def test_quoted_texts_and_interpolations_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNTREE_TEST_HOME", "/h")
    assert compose(["out='a [1]'"]).out == "a [1]"
    assert compose(["out=${oc.env:TURNTREE_TEST_HOME}/x(1)"]).out == "/h/x(1)"


def test_import_paths_name_the_option() -> None:
    assert import_object("dataclasses:replace", option="x") is dataclasses.replace
    for bad in ("dataclasses", "no_such_module_at_all:f", "dataclasses:replac", ":f", "dataclasses:"):
        with pytest.raises(ConfigError, match=r"algorithm\.credit"):
            import_object(bad, option="algorithm.credit")


def test_experiment_presets_compose() -> None:
    for name in config_groups()["experiment"]:
        assert compose([f"experiment={name}"]).algorithm.name
