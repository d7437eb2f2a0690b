"""Where the run writes: that it can, that there is room, and whether a run lies there that it may go on with."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from turntree.errors import TurnTreeError
from turntree.search_backend.machine import human_bytes
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor.check import Check, Level

__all__ = ["run_folder", "space"]

_LITTLE = 1e9
_LEAST = 16e6
"""Below this not even the metrics and trees of a tiny run have room."""


def space(config: RunConfig, size: float | None) -> Iterator[Check]:
    """Room for checkpoints and exported weights, and for weights on their way to vLLM; ``size`` of these in GB."""
    need = (size or 0.0) * 1e9
    folder = _nearest(Path(config.out or "runs").absolute())
    yield _disk(folder, config, need)
    shared = Path("/dev/shm")  # noqa: S108  # only looked at
    if not shared.is_dir():
        yield Check(
            "shared memory", "ok", "none", "weights go to vLLM through engine.sync_folder or a temporary folder"
        )
        return
    free = shutil.disk_usage(shared).free
    level: Level = "ok" if free > need else "note"
    do = "" if level == "ok" else "set engine.sync_folder to a folder with room"
    yield Check("shared memory", level, f"{human_bytes(free)} free", "weights go to vLLM through it", do)


def _nearest(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _disk(folder: Path, config: RunConfig, need: float) -> Check:
    """Weights and two moments a checkpoint, one being written beside those that are kept; then the exported model."""
    if problem := _unwritable(folder):
        do = "mend its permissions or make room there, or set out= to another folder"
        return Check("disk", "fail", str(folder), f"cannot be written: {problem}", do)
    free = shutil.disk_usage(folder).free
    one = 3 * (0.0 if config.model.lora_rank else need)
    least, all_of = one + need + _LEAST, one * (config.trainer.keep_checkpoints + 1) + 2 * need
    found = f"{human_bytes(free)} free under {folder}"
    if free < least:
        do = "make room, or set out= to a folder on another disk"
        return Check("disk", "fail", found, f"one checkpoint and the trained model take {human_bytes(least)}", do)
    means = f"checkpoints of this run may take {human_bytes(all_of)}" if need else "where runs are written"
    if free > max(_LITTLE, all_of):
        return Check("disk", "ok", found, means)
    do = "make room, set out= to another disk, or lower trainer.keep_checkpoints and trainer.store_max_mb"
    return Check("disk", "note", found, f"{means}, and stored trees {config.trainer.store_max_mb} MB", do)


def _unwritable(folder: Path) -> str:
    """Why nothing can be written in a folder, by writing: permissions do not stop root, a read-only disk does."""
    if not folder.is_dir():
        return "it is a file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "permission denied, or a read-only disk"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def run_folder(config: RunConfig) -> Iterator[Check]:
    """What lies at ``out``: nothing, or a run, which goes on only with ``resume`` and its own configuration."""
    from turntree.trainers.run_folder import RunFolder

    if not config.out or not Path(config.out).is_dir():
        return
    run = RunFolder(config.out)
    try:
        if not run.exists:
            present = sorted(p.name for p in run.path.iterdir())
            if present:
                do = "set another out=, unless it is an evaluation that goes on"
                yield Check("run folder", "note", str(run.path), "holds other files, beside which nothing starts", do)
            return
        if not config.resume:
            do = "set resume=true to go on with it, or another out="
            yield Check("run folder", "fail", str(run.path), "holds a run already", do)
            return
        yield _resumed(run.path, config)
    except (TurnTreeError, OSError) as error:
        yield Check("run folder", "fail", str(run.path), str(error), "as it says, or set another out=")


def _resumed(path: Path, config: RunConfig) -> Check:
    from turntree.trainers.checkpoint import resumable_checkpoint, verify_checkpoint
    from turntree.trainers.fingerprint import check_fingerprint, config_fingerprint
    from turntree.trainers.progress import RESUME_KEYS
    from turntree.trainers.run_folder import RunFolder

    run = RunFolder.open(path)
    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        newest = resumable_checkpoint(run.checkpoints)
    if newest is None:
        return Check("run folder", "ok", str(path), "a run without a checkpoint yet: it starts over")
    manifest = verify_checkpoint(newest)
    check_fingerprint(manifest["fingerprint"], config_fingerprint(asdict(config), RESUME_KEYS), source=newest)
    if damaged:
        do = "delete the damaged one, or leave it: its step is done again"
        return Check("run folder", "note", f"{path}: {damaged[0].message}", f"goes on from {newest.name}", do)
    return Check("run folder", "ok", str(path), f"goes on from {newest.name}")
