"""Kill -9 at seeded moments of every stage of a run: the resumed run equals the one that was never killed, bit for bit.

``TURNTREE_KILLS`` sets the number of moments (default 6). A moment is a stage, one of its occasions, and a call within
it: what the process had written, and where it was, is the same on every machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint
from turntree.trainers.metrics import TIMING
from turntree.trainers.run_folder import read_metrics

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TURNTREE_KILLS", "6"))
STAGES = ("rollout", "update", "checkpoint", "best", "validation", "store", "metrics", "export", "run")
Attempt = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def attempt(bed: Any) -> Iterator[Attempt]:
    """``attempt(command, overrides, kill=None)``: run it in a process that dies at ``kill``; how it ended."""
    script = Path(__file__).resolve().parent.parent / "killed.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), str(bed.rules)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answered = process.stdin, process.stdout

        def run(
            command: str, overrides: list[str], kill: dict[str, Any] | None = None, *, measure: bool = False
        ) -> dict[str, Any]:
            job = {"command": command, "overrides": overrides, "kill": kill, "measure": measure}
            asked.write(json.dumps(job) + "\n")
            asked.flush()
            found: dict[str, Any] = json.loads(answered.readline())
            return found

        yield run
        asked.close()
        process.wait(timeout=30)


def overrides(bed: Any, out: Path, *more: str) -> list[str]:
    """Four steps with validations, several updates, a reference and checkpoints that lag behind the metrics."""
    return [
        *bed.args,
        "trainer.steps=4",
        "trainer.save_every=2",
        "trainer.epochs=2",
        "trainer.prompts_per_update=2",
        "trainer.warmup_steps=6",
        "trainer.eval_every=2",
        "trainer.eval_questions=3",
        "trainer.loggers=[]",
        "algorithm.kl_coef=0.05",
        f"env.dev_questions={bed.world}",
        f"out={out}",
        *more,
    ]


def without_passport(file: Path) -> Any:
    """The lines of a result; a passport names the commit, which may change while a test runs."""
    if file.suffix == ".jsonl":
        return file.read_text(encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key not in ("passport", "seconds")}


def seen(run: Path) -> dict[str, Any]:
    """All that a run leaves behind, without the clock."""
    metrics = [
        {k: v for k, v in row.items() if not k.startswith(TIMING)} for row in read_metrics(run / "metrics.jsonl")
    ]
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    loaded = load_checkpoint(newest)
    progress = {k: v for k, v in loaded.state["progress"].items() if k != "seconds"}
    return {
        "metrics": metrics,
        "step": loaded.step,
        "progress": progress,
        "moments": (newest / "state.safetensors").read_bytes(),
        "checkpoints": sorted(folder.name.partition(".")[0] for folder in (run / "checkpoints").glob("step-*")),
        "trees": {file.name: file.read_bytes() for file in (run / "trees").iterdir() if file.name != "store.json"},
        "validation": {str(f.relative_to(run)): without_passport(f) for f in (run / "validation").rglob("*.json*")},
        "names": sorted(path.name for path in run.iterdir() if not path.name.startswith(".")),
    }


def assert_equal(killed: Path, straight: Path) -> None:
    found, expected = seen(killed), seen(straight)
    for key, value in expected.items():
        assert found[key] == value, key
    for name in ("model", "best-model"):
        one, other = (load_file(run / name / "model.safetensors") for run in (killed, straight))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name


@pytest.fixture(scope="module")
def straight(bed: Any, attempt: Attempt, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """The run that is never killed, and the calls that each occasion of its stages took."""
    out = tmp_path_factory.mktemp("straight") / "run"
    done = attempt("train", overrides(bed, out), measure=True)
    assert done["end"] == "done"
    assert set(done["counts"]) == set(STAGES)
    return out, done["counts"]


def moments(counts: dict[str, list[int]], stages: tuple[str, ...], number: int, *, seed: int) -> list[dict[str, Any]]:
    """Seeded moments that go round the stages."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(number):
        stage = stages[i % len(stages)]
        occasion = int(rng.integers(len(counts[stage])))
        found.append({"stage": stage, "occasion": occasion, "call": int(rng.integers(counts[stage][occasion]))})
    return found


def test_a_killed_training_run_resumes_as_if_nothing_had_been(
    bed: Any, attempt: Attempt, straight: tuple[Path, dict[str, list[int]]], tmp_path: Path
) -> None:
    expected, counts = straight
    for number, kill in enumerate(moments(counts, STAGES, KILLS, seed=11)):
        run = tmp_path / f"run-{number}"
        assert attempt("train", overrides(bed, run), kill)["end"] == "killed", kill
        assert attempt("train", overrides(bed, run, "resume=true"))["end"] == "done", kill
        try:
            assert_equal(run, expected)
        except AssertionError as error:
            raise AssertionError(f"killed at {kill}: {error}") from error
        shutil.rmtree(run)


def test_a_run_that_is_killed_again_and_again(
    bed: Any, attempt: Attempt, straight: tuple[Path, dict[str, list[int]]], tmp_path: Path
) -> None:
    """Once in every stage, each time in the process that went on from the kill before."""
    expected, counts = straight
    run, options = tmp_path / "run", overrides(bed, tmp_path / "run", "resume=true")
    rng = np.random.default_rng(12)
    for stage in ("rollout", "store", "update", "checkpoint", "best", "metrics", "validation", "checkpoint", "export"):
        call = 0 if stage == "best" else int(rng.integers(max(counts[stage])))
        kill = {"stage": stage, "occasion": 0, "call": call}
        assert attempt("train", options, kill)["end"] == "killed", kill
    assert attempt("train", options)["end"] == "done"
    assert_equal(run, expected)


@pytest.mark.parametrize("command", ["evaluate", "sft"])
def test_killed_evaluations_and_cold_starts_go_on(bed: Any, attempt: Attempt, tmp_path: Path, command: str) -> None:
    """Nothing is played or learnt twice, and what is written equals the run that was never killed."""

    def options(out: Path, *more: str) -> list[str]:
        own = [f"env.test_questions={bed.world}"] if command == "evaluate" else ["sft.steps=6", "sft.save_every=2"]
        small = ["sft.demonstrations=8", "sft.batch_size=4", "env.grammar=turntree.envs.worlds.grammar:WorldGrammar"]
        return [*bed.args, *own, *(small if command == "sft" else []), f"out={out}", *more]

    whole = tmp_path / "whole"
    done = attempt(command, options(whole), measure=True)
    assert done["end"] == "done"
    for number, kill in enumerate(moments(done["counts"], ("run",), max(2, KILLS // 3), seed=13)):
        run = tmp_path / f"run-{number}"
        assert attempt(command, options(run), kill)["end"] == "killed"
        assert attempt(command, options(run, "resume=true"))["end"] == "done", kill
        if command == "evaluate":
            assert (run / "evaluation.jsonl").read_text() == (whole / "evaluation.jsonl").read_text(), kill
            one, other = (without_passport(folder / "evaluation.json") for folder in (run, whole))
            assert one == other, kill
        else:
            one, other = (load_file(folder / "model" / "model.safetensors") for folder in (run, whole))
            assert all(torch.equal(one[key], other[key]) for key in one), kill
        shutil.rmtree(run)
