"""The rank that writes a checkpoint dies over it: the others are ended, and what was whole before goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.store import TreeStore

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

DYING = '''
"""A reward whose module ends the first rank in the middle of its third checkpoint: written, and not yet renamed."""

import os
import signal
from pathlib import Path

from turntree.trainers import run_checkpoints

save, rename = run_checkpoints.save_checkpoint, os.replace


def dying(folder, step, **parts):
    if step == 3 and os.environ.get("RANK") == "0":
        os.replace = os.rename = Path.rename = Path.replace = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    return save(folder, step, **parts)


run_checkpoints.save_checkpoint = dying


def busy(outcome):
    return len(outcome.observations) / 4
'''


def shapes(run: Path) -> list[Any]:
    trees = TreeStore(run / "trees").read()
    return [(s.step, s.tree.prompt_uid, s.tree.index, [n.turn_ids for n in s.tree.nodes()]) for s in trees]


def test_a_rank_dies_while_it_writes_a_checkpoint(
    bed: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "dying_rules.py").write_text(DYING, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(bed.rules), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    steps = ["trainer.steps=5", "trainer.save_every=1", "trainer.prompts_per_update=2", "trainer.max_pack_tokens=300"]
    options = [*bed.args, *steps, "reward.name=dying_rules:busy", f"out={tmp_path / 'run'}"]
    spread = ["trainer.strategy=deepspeed", "trainer.ranks=2", "deepspeed.stage=3"]
    command = [sys.executable, "-m", "turntree", "train", *options]
    done = subprocess.run([*command, *spread], capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 3
    assert "rank 0 of 2" in done.stderr
    assert "was killed by signal SIGKILL" in done.stderr
    assert "resume=true" in done.stderr
    newest = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert load_checkpoint(newest).step == 2
    # One process without DeepSpeed takes the run up, and it ends as one that was never stopped.
    done = subprocess.run([*command, "resume=true"], capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    train(make_config(*steps, f"out={tmp_path / 'straight'}"))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert shapes(tmp_path / "run") == shapes(tmp_path / "straight")
