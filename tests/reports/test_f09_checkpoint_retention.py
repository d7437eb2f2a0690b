"""Report F09: with one checkpoint kept, the old one was deleted before the new one was complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint

# A limit on the size of written files stands in for a full disk: the system refuses the write in the same place.
RUN = """
import resource, sys
import torch
from turntree.errors import CheckpointError
from turntree.trainers.checkpoint import save_checkpoint

folder, limit = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
save_checkpoint(folder, 1, model=model, optimizer=optimizer, state={"big": "x" * 60_000}, keep=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    save_checkpoint(folder, 2, model=model, optimizer=optimizer, state={"big": "x" * 60_000}, keep=1)
except CheckpointError as error:
    print(error)
"""


def run_out_of_space(folder: Path, limit: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(limit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_old_one_intact(folder: Path) -> None:
    assert [p.name for p in folder.iterdir()] == ["step-00000001"]
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert load_checkpoint(newest).step == 1


def test_f09_disk_full_while_writing_the_weights(tmp_path: Path) -> None:
    message = run_out_of_space(tmp_path, 20_000)
    assert "step 2 could not be written" in message
    assert "older checkpoints are untouched" in message
    assert_old_one_intact(tmp_path)


def test_f09_disk_full_while_writing_the_state(tmp_path: Path) -> None:
    message = run_out_of_space(tmp_path, 50_000)
    assert "older checkpoints are untouched" in message
    assert_old_one_intact(tmp_path)
