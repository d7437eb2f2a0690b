"""``turntree rltr``: all arms of a small world, at equal budgets, resumed arm by arm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.models import load_tokenizer
from turntree.envs.sandbox import probe
from turntree.errors import CheckpointError, ConfigError
from turntree.trainers.compose import compose
from turntree.trainers.rltr import compare_arms

SMALL = [
    "experiment=rltr",
    "algorithm=grpo",
    "algorithm.chains=2",
    "sft.steps=2",
    "sft.batch_size=4",
    "sft.demonstrations=20",
    "rltr.entities=80",
    "rltr.train_questions=30",
    "rltr.test_questions=6",
    "trainer.steps=1",
    "trainer.prompts_per_step=2",
    "trainer.eval_every=0",
]


def options(*overrides: str) -> Any:
    return compose([*SMALL, *overrides])


class Stages:
    """What was reported, by stage."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        assert 0 <= done <= total
        self.seen[stage] = done


@pytest.mark.slow
def test_all_arms_in_one_table_and_resumed(tmp_path: Path) -> None:
    stages = Stages()
    found = compare_arms(options(f"out={tmp_path}", "rltr.seeds=2"), stages)
    assert found.seeds == (0, 1)
    assert found.names == ("direct", "sft", "rl", "planner_sft", "rltr")
    assert {f"seed {s}: evaluate {name}" for s in (0, 1) for name in found.names} <= stages.seen.keys()
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["budget"]["rl_steps"] == 1
    for name in ("rl", "rltr"):
        training = [one["training"] for one in document["arms"][name]["per_seed"]]
        assert [t["trajectories"] for t in training] == [4, 4], "equal budgets"
        assert [t["sft_demonstrations"] for t in training] == [20, 20]
    for arm in found.arms:
        assert len(arm.ids) == 6
        assert None not in arm.values["completeness"], "measured of illegal formats too"
    direct = json.loads((tmp_path / "seed-0" / "evaluation-direct" / "evaluation.json").read_text())
    assert (direct["max_turns"], direct["searches_mean"], direct["agent"]) == (1, 0.0, "react")
    planned = json.loads((tmp_path / "seed-0" / "evaluation-rltr" / "evaluation.json").read_text())
    assert (planned["agent"], planned["summarizer"]) == ("planner_summarizer", "rule")

    again = Stages()
    (tmp_path / "seed-1" / "arm-rltr.json").unlink()
    resumed = compare_arms(options(f"out={tmp_path}", "rltr.seeds=2", "resume=true"), again)
    assert resumed == found
    assert not any(stage.startswith("seed 0") for stage in again.seen)
    with pytest.raises(CheckpointError, match=r"sampling\.max_turn_tokens"):
        compare_arms(options(f"out={tmp_path}", "resume=true", "sampling.max_turn_tokens=39"))


@pytest.mark.slow
def test_only_what_an_arm_needs_is_trained(tmp_path: Path) -> None:
    found = compare_arms(options(f"out={tmp_path}", "rltr.arms=[direct,rltr]", "rltr.cold_start=false"))
    assert found.names == ("direct", "rltr")
    assert not (tmp_path / "seed-0" / "sft").exists()
    assert not (tmp_path / "seed-0" / "rl").exists()
    with pytest.raises(CheckpointError, match="already holds a run"):
        compare_arms(options(f"out={tmp_path}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rltr.arms=[direct,rlrt]"], "Did you mean 'rltr'"),
        (["rltr.arms=[]"], "expected some of"),
        (["rltr.seeds=0"], "rltr.seeds"),
        (["rltr.profile=standard"], "rltr.profile"),
    ],
)
def test_options_that_do_not_fit(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*overrides)


def test_questions_of_one_s_own_need_a_model_and_a_test_set(tmp_path: Path) -> None:
    config = options(f"out={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"needs model\.path"):
        compare_arms(replace(config, env=replace(config.env, questions="train.jsonl")))
    own = replace(config, env=replace(config.env, questions="train.jsonl"), model=replace(config.model, path="model"))
    with pytest.raises(ConfigError, match="test_questions"):
        compare_arms(own)
    assert not (tmp_path / "run").exists()


def test_arms_are_asked_for_in_any_order() -> None:
    assert options("rltr.arms=[rltr,direct,rltr]").rltr.chosen == ("direct", "rltr")
    assert options("rltr.cold_start=false").rltr.chosen == ("direct", "rl", "rltr")


@pytest.mark.skipif(bool(probe().missing), reason="code cannot be isolated here")
@pytest.mark.slow
def test_a_world_of_search_and_code(tmp_path: Path) -> None:
    found = compare_arms(compose([*SMALL[1:], "experiment=rltr_code", "rltr.arms=[direct,rltr]", f"out={tmp_path}"]))
    assert found.names == ("direct", "rltr")
    bed = tmp_path / "seed-0"
    assert json.loads((bed / "worlds" / "test" / "meta.json").read_text())["config"]["profile"] == "code"
    tokenizer: Any = load_tokenizer(bed / "initial-model")
    for text in ("<finish>", "</finish>", "<python>", "</python>", "1820", "2019"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
