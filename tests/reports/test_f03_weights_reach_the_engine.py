"""Report F03: an option about memory switched the hand-over of weights off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turntree.trainers.learner import train
from turntree.trainers.store import TreeStore


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("engine.max_cached_tokens=1",),
        ("engine.max_batch_rows=1",),
        ("engine.max_batch_rows=2", "engine.max_cached_tokens=64"),
        ("trainer.max_concurrent_trees=1",),
        ("trainer.activation_checkpointing=true",),
    ],
)
def test_f03_every_rollout_has_the_weights_of_the_update_before(
    make_config: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    train(make_config(*options, "trainer.prompts_per_step=2", "trainer.steps=3", f"out={run}"))
    store = TreeStore(run / "trees")
    versions = [
        {node.version for stored in store.read(step) for node in stored.tree.nodes() if node.parent is not None}
        for step in store.steps()
    ]
    assert versions == [{0}, {1}, {2}]
