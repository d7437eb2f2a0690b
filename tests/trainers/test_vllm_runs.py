"""Runs whose turns a vLLM server generates: weights handed over before the first turn, a server that dies, resume."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.engines.vllm_local import LocalServer, local_server
from turntree.agents.models import load_model, save_weights
from turntree.commands import run_evaluate
from turntree.errors import ConfigError, EngineError
from turntree.trainers.learner import train
from turntree.trainers.quickstart import write_tiny_model
from turntree.trainers.run_folder import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make venv-vllm"),
]

ARGUMENTS = ("--block-size", "32", "--enforce-eager", "--max-model-len", "512", "--dtype", "float32")


def serve(folder: Path, **options: Any) -> Any:
    return local_server(folder, arguments=ARGUMENTS, environment={"TORCH_COMPILE_DISABLE": "1"}, **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that is trained, and what the server starts from: another one of the same shape."""
    root = tmp_path_factory.mktemp("models")
    own = write_tiny_model(root / "own", seed=0, head_dim=32)
    other, tokenizer = load_model(write_tiny_model(root / "other", seed=1, head_dim=32))
    (root / "served").mkdir()
    save_weights(other, root / "served", untie=True)
    tokenizer.save_pretrained(root / "served")
    return own, root / "served"


@pytest.fixture
def server(models: tuple[Path, Path]) -> Iterator[LocalServer]:
    with serve(models[1]) as running:
        yield running


def port(server: LocalServer) -> int:
    return int(server.base_url.removesuffix("/v1").rpartition(":")[2])


def test_a_server_dies_in_a_rollout_and_the_run_goes_on_with_another(
    bed: Any, models: tuple[Path, Path], server: LocalServer, tmp_path: Path
) -> None:
    own, folder = models
    engine = ["engine=vllm_server", f"engine.base_url={server.base_url}", "engine.retries=1", "engine.timeout_s=60"]
    common = [*bed.args, *engine, f"model.path={own}", "trainer.learning_rate=1e-2", "trainer.steps=3"]
    run = [*common, "trainer.save_every=1", f"out={tmp_path / 'run'}"]
    with pytest.raises(EngineError):
        train(run, on_step=lambda step, metrics: server.kill())
    (first,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # The server started from other weights: only those that it was given before the first turn are the trainer's.
    assert first["mismatch/max"] < 1e-3
    with serve(folder, port=port(server)):
        result = train([*run, "resume=true"])
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert all(row["mismatch/max"] < 1e-3 for row in rows)
        assert rows[0] == first

        trained = ["env.test_questions=" + str(bed.world), f"model.path={result.folder / 'model'}"]
        run_evaluate([*common, *trained, f"out={tmp_path / 'served'}"])
        run_evaluate([*common, *trained, "engine=hf", f"out={tmp_path / 'hf'}"])
    documents = [json.loads((tmp_path / name / "evaluation.json").read_text("utf-8")) for name in ("served", "hf")]
    assert documents[0]["weights"] == "model.path"
    answers = [(tmp_path / name / "evaluation.jsonl").read_text("utf-8").splitlines() for name in ("served", "hf")]
    texts = [[json.loads(row)["prediction"] for row in rows] for rows in answers]
    assert texts[0] == texts[1], "greedy turns of the same weights"


def test_without_development_mode(bed: Any, models: tuple[Path, Path], tmp_path: Path) -> None:
    own, folder = models
    with serve(folder, dev_mode=False) as server:
        common = [*bed.args, "engine=vllm_server", f"engine.base_url={server.base_url}", f"model.path={own}"]
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            train([*common, f"out={tmp_path / 'run'}"])
        assert not (tmp_path / "run").exists()
        run_evaluate([*common, f"env.test_questions={bed.world}", f"out={tmp_path / 'scores'}"])
    document = json.loads((tmp_path / "scores" / "evaluation.json").read_text("utf-8"))
    assert (document["weights"], document["n"]) == ("the server's own", 24)
