"""Run folders with made-up numbers and trees, for the tests of reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainers.studio.stored import made_up
from turntree.trainers.atomic import write_json
from turntree.trainers.compose import compose
from turntree.trainers.run_folder import MetricsLog, RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group

PASSPORT: dict[str, Any] = {
    "data": {"dataset": "dev", "sha256": "aaa"},
    "scoring": {"metric": "em"},
    "model": {"weights": "w0"},
    "software": {"torch": "2"},
    "version": 1,
}


def made_run(
    folder: Path,
    *overrides: str,
    steps: int = 4,
    level: float = 0.2,
    rate: float = 100.0,
    evil: bool = False,
    trees: bool = False,
    validate: Sequence[int] = (0, 2, 4),
    passport: dict[str, Any] | None = None,
) -> Path:
    """A run whose validation EM is ``level + step / 10`` and that uses ``rate`` tokens a step."""
    config = compose([f"out={folder}", f"trainer.steps={steps}", *overrides])
    run = RunFolder.create(folder, config)
    passport = PASSPORT if passport is None else passport
    rng = np.random.default_rng(config.seed)
    write_json(folder / "passport.json", passport)
    with MetricsLog(run.metrics_file) as log:
        for step in range(1, steps + 1):
            log.write(step, _metrics(step, level, rate))
    for step in (s for s in validate if s <= steps):
        value = level + step / 10
        found = {"step": step, "n": 10, "metric": "em", "em": value, "em_low": value - 0.05, "em_high": value + 0.05}
        write_json(folder / "validation" / f"step-{step:06d}" / "evaluation.json", {**found, "passport": passport})
    if trees:
        store = TreeStore(run.trees)
        for step in (1, steps):
            groups = [Group(f"0/{i}", [made_up(rng, i, 6, evil=evil)]) for i in range(3)]
            store.write(step, groups, {}, {})
    return folder


def _metrics(step: int, level: float, rate: float) -> dict[str, float]:
    return {
        "critic/score/mean": level,
        "critic/rewards/mean": level + step / 20,
        "tree/reward/em": level,
        "num_turns/mean": 2.0,
        "tree/entropy": math.nan if step == 2 else 0.5,
        "actor/loss": -0.1 / step,
        "budget/generated_tokens": rate,
        "total/generated_tokens": rate * step,
        "total/tool_calls": 3.0 * step,
        "total/trajectories": 8.0 * step,
        "total/seconds": 10.0 * step,
        "total/updates": float(step),
    }
