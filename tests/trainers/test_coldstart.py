"""The cold start as one job: what it writes, resuming it, and Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from turntree.agents.models import load_model
from turntree.errors import CheckpointError, DataError
from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint
from turntree.trainers.coldstart import cold_start
from turntree.trainers.config import RunConfig
from turntree.trainers.run_folder import read_metrics

MakeConfig = Callable[..., RunConfig]

COLD = ("env.grammar=turntree.envs.worlds.grammar:WorldGrammar", "sft.steps=6", "sft.demonstrations=16",
        "sft.batch_size=4", "sft.save_every=4", "sft.warmup_steps=2")  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_equal(a: Path, b: Path) -> None:
    assert read_metrics(a / "metrics.jsonl") == read_metrics(b / "metrics.jsonl")
    assert (a / "demonstrations.jsonl").read_bytes() == (b / "demonstrations.jsonl").read_bytes()
    assert all(torch.equal(tensor, weights(b)[name]) for name, tensor in weights(a).items())


@pytest.fixture(scope="module")
def straight(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cold") / "run"
    cold_start(make_config(*COLD, f"out={out}"))
    return out


def test_what_a_cold_start_leaves(straight: Path) -> None:
    summary = json.loads((straight / "summary.json").read_text())
    losses = [row["loss"] for row in read_metrics(straight / "metrics.jsonl")]
    assert (summary["steps"], summary["demonstrations"], summary["skipped"]) == (6, 16, 0)
    assert (summary["loss_first"], summary["loss_last"]) == (losses[0], losses[-1])
    assert losses[-1] < losses[0]
    rows = [json.loads(line) for line in (straight / "demonstrations.jsonl").read_text().splitlines()]
    assert summary["teacher_em"] == pytest.approx(sum(row["em"] for row in rows) / 16)
    model, tokenizer = load_model(straight / "model")
    assert len(tokenizer) == model.config.vocab_size


def test_ctrl_c_saves_and_the_resumed_one_is_equal(make_config: MakeConfig, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = make_config(*COLD, f"out={run}")

    def press(step: int, loss: float) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cold_start(config, on_step=press)
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    assert load_checkpoint(found).step == 2
    assert not (run / "summary.json").exists(), "a summary marks a cold start that is done"
    assert not (run / "model").exists()
    seen: list[int] = []
    done = cold_start(dataclasses.replace(config, resume=True), on_step=lambda step, loss: seen.append(step))
    assert seen == [3, 4, 5, 6]
    assert done.result.steps == 6
    assert_equal(straight, run)


def test_the_second_ctrl_c_stops_at_once(make_config: MakeConfig, straight: Path, tmp_path: Path) -> None:
    config = make_config(*COLD, f"out={tmp_path / 'run'}")

    def press(step: int, loss: float) -> None:
        if step == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cold_start(config, on_step=press)
    found = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert load_checkpoint(found).step == 4
    cold_start(dataclasses.replace(config, resume=True))
    assert_equal(straight, tmp_path / "run")


def test_resume_with_another_configuration_is_refused(make_config: MakeConfig, straight: Path) -> None:
    with pytest.raises(CheckpointError, match=r"sft\.laziness"):
        cold_start(make_config(*COLD, "sft.laziness=0.9", f"out={straight}", "resume=true"))
    with pytest.raises(CheckpointError, match="resume=true"):
        cold_start(make_config(*COLD, f"out={straight}"))


def test_what_cannot_be_taught_leaves_no_folder(make_config: MakeConfig, bed: object, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match=r"quickstart-train-1-.*sampling\.max_context_tokens=30"):
        cold_start(make_config(*COLD, "sampling.max_context_tokens=30", f"out={out}"))
    (tmp_path / "questions.jsonl").write_text('{"id": "x", "question": "Who?", "golden_answers": ["y"]}\n')
    corpus = make_config().env.questions + "/corpus.jsonl"
    with pytest.raises(DataError, match="gold steps"):
        cold_start(make_config(*COLD, f"env.questions={tmp_path}", f"search.corpus={corpus}", f"out={out}"))
    assert not out.exists()
