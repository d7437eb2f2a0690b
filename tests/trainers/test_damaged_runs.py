"""Run folders that something happened to: the newest good checkpoint is used, the error is clear, nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turntree.errors import CheckpointError
from turntree.trainers.checkpoint import latest_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.metrics import TIMING
from turntree.trainers.run_folder import RunFolder, read_metrics

MakeConfig = Callable[..., RunConfig]
Damage = Callable[[Path], None]
STEPS = ("trainer.save_every=1", "trainer.keep_checkpoints=3", "trainer.loggers=[]")


def truncate(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def flip(checkpoint: Path) -> None:
    file = checkpoint / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def garble_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": [')


def empty(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        file.unlink()


DAMAGES = (truncate, flip, lose_state, garble_manifest, empty)


def content(folder: Path) -> dict[str, bytes]:
    """All files but the report, which is drawn anew from the others."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "report.html"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMING)} for row in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def finished(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, a checkpoint each."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(make_config(*STEPS, "trainer.steps=3", f"out={run}"))
    return run


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_good_checkpoint_is_used_and_the_step_done_again(
    make_config: MakeConfig, finished: Path, tmp_path: Path, damage: Damage
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    broken = run / "checkpoints" / "step-00000003"
    damage(broken)
    with pytest.warns(UserWarning, match=r"damaged checkpoint.*step-00000003"):
        result = train(make_config(*STEPS, "trainer.steps=3", f"out={run}", "resume=true"))
    assert result.progress.step == 3
    assert rows(run) == rows(finished)
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (run, finished))
    assert all(torch.equal(one[name], other[name]) for name in one)
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000003.1", "beside the damaged one, not over it"


@pytest.mark.filterwarnings("ignore:skipped a damaged checkpoint")
def test_without_a_good_checkpoint_nothing_is_dropped(make_config: MakeConfig, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for damage, checkpoint in zip(DAMAGES, sorted((run / "checkpoints").glob("step-*"))):
        damage(checkpoint)
    before = content(run)
    with pytest.raises(CheckpointError, match=r"only damaged ones.*nothing was changed"):
        train(make_config(*STEPS, "trainer.steps=3", f"out={run}", "resume=true"))
    assert content(run) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "trees/store.json", "run.json", "config.yaml"])
def test_a_missing_file_is_an_error_or_changes_nothing_that_is_learnt(
    make_config: MakeConfig, finished: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).unlink()
    before = content(run / "checkpoints")
    config = make_config(*STEPS, "trainer.steps=3", f"out={run}", "resume=true")
    if name == "run.json":
        with pytest.raises(CheckpointError, match="parts of a broken run"):
            train(config)
    else:
        train(config)
        one, other = (load_file(folder / "model" / "model.safetensors") for folder in (run, finished))
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert content(run / "checkpoints") == before


def test_a_changed_configuration_changes_nothing(make_config: MakeConfig, finished: Path) -> None:
    before = content(finished)
    with pytest.raises(CheckpointError, match=r"trainer\.learning_rate"):
        train(make_config(*STEPS, "trainer.learning_rate=1e-5", f"out={finished}", "resume=true"))
    assert content(finished) == before


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    """Also for root, whom permissions do not stop."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", Path("/proc/turntree-run")):
        with pytest.raises(CheckpointError, match=rf"can be written at {place}.*out=") as caught:
            RunFolder.create(place, {})
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
def test_a_read_only_run_is_refused_before_any_work(make_config: MakeConfig, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    run.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="read-only"):
            train(make_config(*STEPS, "trainer.steps=4", f"out={run}", "resume=true"))
    finally:
        run.chmod(0o755)
