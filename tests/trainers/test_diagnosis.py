"""Updates that cannot be made: skipped, counted, and after a limit the run stops with the batch saved."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import turntree.trainers.stepper
from turntree.errors import ConfigError, DivergenceError
from turntree.trainers.checkpoint import latest_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.credit import grpo
from turntree.trainers.diagnosis import Skipped, diagnose, stop_diverged
from turntree.trainers.distributed.strategy import Single
from turntree.trainers.learner import train
from turntree.trainers.packing import Pack, pack_groups, table, write_advantages
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.updates import update

MakeConfig = Callable[..., RunConfig]
LIMITS = ("trainer.prompts_per_update=1", "trainer.save_every=1", "trainer.steps=4")


class Poison:
    """Spoils every update from the ``first`` on, ``count`` of them: what a broken kernel or scorer would do."""

    def __init__(self, place: str, first: int, count: int) -> None:
        self.place, self.first, self.last = place, first, first + count - 1
        self.seen = 0

    def __call__(self, strategy: Any, packs: Any, loss: Any) -> Any:
        self.seen += 1
        if not self.first <= self.seen <= self.last:
            return update(strategy, packs, loss)
        if self.place == "advantage":
            table(packs[0], "occurrences").get("advantage")[0] = float("nan")
        elif self.place == "logits":
            table(packs[0], "tokens").get("old_logp")[:] = float("nan")

        def spoilt(pack: Pack) -> Any:
            value, report = loss(pack)
            return (value + float("inf") if self.place == "loss" else value), report

        return update(strategy, packs, spoilt)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Poison]:
    def make(place: str, *, first: int, count: int) -> Poison:
        made = Poison(place, first, count)
        monkeypatch.setattr(turntree.trainers.stepper, "update", made)
        return made

    return make


@pytest.mark.parametrize("place", ["advantage", "logits", "loss"])
def test_a_few_skipped_updates_are_counted_and_the_run_goes_on(
    make_config: MakeConfig, poison: Any, tmp_path: Path, place: str
) -> None:
    poison(place, first=2, count=2)
    result = train(make_config(*LIMITS, "trainer.steps=2", "trainer.max_skipped_updates=3", f"out={tmp_path / 'run'}"))
    assert result.progress.step == 2
    assert (result.progress.skipped, result.progress.skipped_in_a_row) == (2, 0)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["total/skipped_updates"] == 2
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert not (tmp_path / "run" / "diagnosis").exists()


@pytest.mark.parametrize(
    ("place", "words"),
    [("advantage", "advantages are not finite"), ("logits", "trainer's own pass"), ("loss", "gradient is not")],
)
def test_after_the_limit_the_run_stops_with_a_diagnosis_and_the_batch(
    make_config: MakeConfig, poison: Any, tmp_path: Path, place: str, words: str
) -> None:
    run = tmp_path / "run"
    poison(place, first=6, count=100)
    with pytest.raises(DivergenceError, match=words) as caught:
        train(make_config(*LIMITS, "trainer.max_skipped_updates=2", f"out={run}"))
    assert "2 updates in a row" in str(caught.value)
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert str(newest) in str(caught.value)
    (where,) = (run / "diagnosis").iterdir()
    found = json.loads((where / "diagnosis.json").read_text())
    assert (found["step"], found["skipped_in_a_row"], found["weights"]) == (2, 2, [])
    assert words in " ".join(found["look_at"])
    batch = load_file(where / "batch.safetensors")
    assert {"0/tokens/ids", "0/tokens/old_logp", "0/occurrences/advantage", "0/rows/leaf"} <= batch.keys()
    assert len(batch["0/tokens/ids"]) == found["packs"][0]["tokens"]
    if place == "advantage":
        assert found["columns"] == {"occurrences.advantage": 1}
        assert bool(batch["0/occurrences/advantage"][0].isnan())
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1], "the step that broke is not reported"


@pytest.mark.slow
def test_mended_it_can_be_resumed(make_config: MakeConfig, poison: Any, tmp_path: Path) -> None:
    options = (*LIMITS, "trainer.steps=3", "trainer.max_skipped_updates=2")
    poison("advantage", first=7, count=100)
    with pytest.raises(DivergenceError):
        train(make_config(*options, f"out={tmp_path / 'run'}"))
    poison("advantage", first=0, count=0)
    train(make_config(*options, f"out={tmp_path / 'run'}", "resume=true"))
    train(make_config(*options, f"out={tmp_path / 'straight'}"))
    ends = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "straight")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_without_a_limit_a_run_never_stops(make_config: MakeConfig, poison: Any, tmp_path: Path) -> None:
    poison("loss", first=1, count=1000)
    result = train(
        make_config(*LIMITS, "trainer.steps=2", "trainer.max_skipped_updates=null", f"out={tmp_path / 'run'}")
    )
    assert result.progress.skipped == result.progress.updates == result.progress.skipped_in_a_row == 8


def batch_of(groups: Any) -> list[Pack]:
    packs = pack_groups(groups, max_pack_tokens=100)
    write_advantages(packs, grpo(groups))
    return packs


def test_broken_weights_are_named_first(tiny_llama: Any, random_groups: Any) -> None:
    model = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    found = diagnose(Skipped(batch_of(random_groups(3)), [{"loss_objective": math.nan}], math.nan), model)
    assert found["weights"] == ["model.layers.0.mlp.up_proj.weight"]
    assert "weights are not finite" in found["look_at"][0]
    assert found["grad_norm"] == "nan"
    assert found["reports"] == [{"loss_objective": "nan"}]
    json.dumps(found, allow_nan=False)


def test_a_loss_that_is_infinite_is_not_learnt_from(tiny_llama: Any, random_groups: Any) -> None:
    model = copy.deepcopy(tiny_llama)
    strategy = Single(model, torch.optim.SGD(model.parameters(), lr=1.0), parameters=model.parameters(), clip=1.0)
    before = copy.deepcopy(model.state_dict())
    packs = batch_of(random_groups(3))
    _, norm = update(strategy, packs, lambda pack: (strategy.forward(pack).logp.sum() + float("inf"), None))
    assert not math.isfinite(norm)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_disk_that_takes_nothing_does_not_hide_the_diagnosis(
    tiny_llama: Any, random_groups: Any, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    skipped = Skipped(batch_of(random_groups(3)), [{"loss_objective": math.inf}], math.inf)
    with pytest.raises(DivergenceError, match=r"loss_objective.*could not be written.*no checkpoint yet"):
        stop_diverged(blocked / "step", skipped, tiny_llama, step=1, in_a_row=5, newest=None)


def test_the_limit_is_checked(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_skipped_updates"):
        make_config("trainer.max_skipped_updates=0")
