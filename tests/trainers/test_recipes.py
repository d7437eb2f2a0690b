"""Every recipe of configs/algorithm trains the tiny model, and the parts that only some of them use work in a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from turntree.errors import ConfigError
from turntree.trainers.build_training import objective_args
from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint
from turntree.trainers.compose import compose, config_groups
from turntree.trainers.learner import TrainResult, train
from turntree.trainers.metrics import TIMING
from turntree.trainers.objectives import ObjectiveArgs, PolicyObjective, at2po, dapo, grpo, gspo, tree_grpo
from turntree.trainers.run_folder import read_metrics

if TYPE_CHECKING:
    from tests.conftest import Bed

RECIPES = config_groups()["algorithm"]
OWN = {
    "rft": ["algorithm.credit_args.threshold=0.5"],  # rewards here are quarters, and no trajectory is perfect
    "sft": ["env.grammar=turntree.envs.worlds.grammar:WorldGrammar"],  # the teacher writes a grammar that can be read
}
"""What a recipe needs beside the settings of all runs here."""


def run(bed: Bed, out: Path, *overrides: str) -> TrainResult:
    return train([*bed.args, "trainer.prompts_per_step=2", "trainer.check_packed=false", f"out={out}", *overrides])


def rows(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMING)} for row in read_metrics(out / "metrics.jsonl")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_updates_of_every_recipe(bed: Bed, tmp_path: Path, recipe: str) -> None:
    result = run(bed, tmp_path / "run", f"algorithm={recipe}", *OWN.get(recipe, []))
    assert result.progress.updates == 2
    assert result.progress.skipped == 0
    for row in rows(tmp_path / "run"):
        assert math.isfinite(row["actor/loss"])
        assert math.isfinite(row["actor/grad_norm"])
    moved = weights(tmp_path / "run" / "model")
    assert any(not torch.equal(before, moved[name]) for name, before in weights(bed.model).items())


@pytest.mark.parametrize("preset", [grpo, tree_grpo, at2po, gspo, dapo], ids=lambda preset: preset.__name__)
def test_presets_of_objectives_are_those_of_the_recipes(preset: Callable[[], ObjectiveArgs]) -> None:
    recipe = dict[str, Any](objective_args(compose([f"algorithm={preset.__name__}"])))
    defaults = {name: p.default for name, p in inspect.signature(PolicyObjective).parameters.items()}
    ours: dict[str, Any] = {name: defaults[name] for name in recipe} | dict(preset())
    assert list(ours.pop("by_turns")) == list(recipe.pop("by_turns"))
    assert ours == recipe


def test_the_recipes_are_the_ones_that_are_promised() -> None:
    promised = (
        "grpo dr_grpo rloo dapo gspo ppo reinforce_pp reinforce_pp_baseline arpo aepo tree_grpo tree_grpo_reference "
        "at2po at2po_printed at2po_reference step_dpo ucb_tree entropy_leaf guided_loo"
    )
    assert set(promised.split()) <= set(RECIPES)


# The value head -------------------------------------------------------------------------------------------------------


def test_ppo_learns_values(bed: Bed, tmp_path: Path) -> None:
    run(
        bed, tmp_path, "algorithm=ppo", "trainer.steps=12", "trainer.learning_rate=3e-3", "reward.name=users_rules:paid"
    )
    found = rows(tmp_path)
    assert found[0]["critic/values/mean"] == 0.0, "a new head gives 0"
    losses = [row["critic/vf_loss"] for row in found]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3]), losses
    assert found[-1]["critic/values/mean"] > 0.2


RESUMED = {
    "ppo": ["algorithm=ppo", "algorithm.reference_every=2", "trainer.epochs=2"],
    "dapo": ["algorithm=dapo", "algorithm.chains=3", "reward.name=users_rules:rare"],
    "step_dpo": ["algorithm=step_dpo", "algorithm.reference_every=1"],
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_one_that_was_never_stopped(bed: Bed, tmp_path: Path, name: str) -> None:
    options = RESUMED[name]
    run(bed, tmp_path / "whole", *options, "trainer.steps=4")
    run(bed, tmp_path / "cut", *options, "trainer.steps=3", "trainer.save_every=3")
    run(bed, tmp_path / "cut", *options, "trainer.steps=4", "resume=true")
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    a, b = (weights(tmp_path / half / "model") for half in ("cut", "whole"))
    assert all(torch.equal(a[key], b[key]) for key in b)


# Options that only some recipes use -----------------------------------------------------------------------------------


def test_the_reference_follows_the_policy_where_it_is_renewed(bed: Bed, tmp_path: Path) -> None:
    options = ["algorithm=grpo", "algorithm.kl_coef=0.1", "trainer.steps=3", "trainer.prompts_per_step=4"]
    run(bed, tmp_path / "frozen", *options)
    run(bed, tmp_path / "moving", *options, "algorithm.reference_every=1")
    frozen, moving = rows(tmp_path / "frozen"), rows(tmp_path / "moving")
    assert frozen[0]["actor/kl_loss"] == moving[0]["actor/kl_loss"] == 0.0
    assert frozen[2]["actor/kl_loss"] > 0
    assert all(row["actor/kl_loss"] == pytest.approx(0.0, abs=1e-7) for row in moving), "one update a rollout"
    saved = latest_checkpoint(tmp_path / "moving" / "checkpoints")
    assert saved is not None
    reference = load_checkpoint(saved).state["reference"]
    policy = weights(tmp_path / "moving" / "model")
    assert all(torch.equal(reference[name], value) for name, value in policy.items())


def test_kl_in_the_reward_is_taken_from_the_rewards(bed: Bed, tmp_path: Path) -> None:
    run(bed, tmp_path, "algorithm=rloo", "algorithm.kl_coef=0.5", "trainer.steps=3", "trainer.learning_rate=1e-2")
    last = rows(tmp_path)[-1]
    assert last["actor/loss_kl"] == 0.0
    assert last["tree/reward/kl"] != 0.0
    assert last["critic/rewards/mean"] == pytest.approx(last["critic/score/mean"] + last["tree/reward/kl"])


def test_overlong_trajectories_are_punished(bed: Bed, tmp_path: Path) -> None:
    run(bed, tmp_path, "algorithm=grpo", "algorithm.overlong_tokens=12", "algorithm.overlong_buffer=11")
    for row in rows(tmp_path):
        assert -1.0 <= row["tree/reward/overlong"] < 0.0
        assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"] + row["tree/reward/overlong"])


def test_dynamic_sampling_replaces_groups_of_equal_rewards(bed: Bed, tmp_path: Path) -> None:
    options = ["algorithm=dapo", "algorithm.chains=3", "reward.name=users_rules:rare", "trainer.steps=4"]
    run(bed, tmp_path / "on", *options, "algorithm.dynamic_sampling=4")
    run(bed, tmp_path / "off", *options, "algorithm.dynamic_sampling=0")
    on, off = rows(tmp_path / "on"), rows(tmp_path / "off")

    def mean(found: list[dict[str, Any]]) -> float:
        return math.fsum(row["tree/mixed_groups"] for row in found) / len(found)

    assert mean(on) > mean(off)
    assert max(row["tree/sampling/batches"] for row in on) > 1
    for row in on:
        assert row["budget/prompts"] == 2 * row["tree/sampling/batches"], "what was filtered was used all the same"
        assert row["tree/sampling/filtered_groups"] <= row["budget/prompts"]
    assert "tree/sampling/batches" not in off[0]


def test_a_likelihood_follows_the_aggregation_of_the_run(bed: Bed, tmp_path: Path) -> None:
    options = ["algorithm=rft", "algorithm.credit_args.threshold=0.25", "trainer.steps=1"]
    run(bed, tmp_path / "tokens", *options)
    run(bed, tmp_path / "sums", *options, "algorithm.aggregation=seq-mean-token-sum")
    run(bed, tmp_path / "own", *options, "algorithm.objective_args.aggregation=seq-mean-token-sum")
    tokens, sums, own = (rows(tmp_path / name)[0]["actor/pg_loss"] for name in ("tokens", "sums", "own"))
    assert own == sums > tokens > 0


def test_other_settings_for_trajectories_of_few_turns(bed: Bed, tmp_path: Path) -> None:
    options = ["algorithm=grpo", "trainer.epochs=3", "trainer.learning_rate=1e-2"]
    bands = "algorithm.by_turns=[{max_turns: 2, ratio: sequence, clip_low: 0.0001, clip_high: 0.0001}]"
    run(bed, tmp_path / "plain", *options)
    run(bed, tmp_path / "bands", *options, bands)
    plain, banded = (rows(tmp_path / name)[0]["actor/pg_clipfrac"] for name in ("plain", "bands"))
    assert banded > plain


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["algorithm=step_dpo", "algorithm.entropy_balance=0.2"], "entropy_balance"),
        (["algorithm=step_dpo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "kl_in=reward"),
        (["algorithm=step_dpo", "algorithm.credit=turntree.trainers.credit:gae"], "needs values"),
        (["algorithm=step_dpo", "algorithm.shared_turns=once"], "shared_turns=once has no effect"),
        (
            [
                "algorithm=step_dpo",
                "algorithm.rounds=0",
                "algorithm.expansions=0",
                "algorithm.expansion=turntree.trainers.expansion:chain",
            ],
            "needs sibling turns",
        ),
        (["algorithm=grpo", "algorithm.by_turns=[{max_turns: 2, rato: turn}]"], "rato"),
        (["algorithm=arpo", "algorithm.expansion_args.beam_size=0"], "beam_size"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sampled(
    bed: Bed, tmp_path: Path, options: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(bed, tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()
