"""Report F11: equal seeds gave different runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from turntree.trainers.learner import train
from turntree.trainers.store import TreeStore


def digest(run: Path) -> tuple[str, str]:
    """Hashes of all sampled trees and of the weights."""
    store = TreeStore(run / "trees")
    turns = [
        (step, s.tree.prompt_uid, s.tree.index, node.path, node.turn_ids, node.logprobs, node.reward)
        for step in store.steps()
        for s in sorted(store.read(step), key=lambda s: (s.tree.prompt_uid, s.tree.index))
        for node in s.tree.nodes()
    ]
    weights = (run / "model" / "model.safetensors").read_bytes()
    return hashlib.sha256(json.dumps(turns).encode()).hexdigest(), hashlib.sha256(weights).hexdigest()


def test_f11_equal_seeds_give_equal_trees_and_weights(make_config: Any, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("other", 4)):
        train(make_config("trainer.prompts_per_step=3", f"seed={seed}", f"out={tmp_path / name}"))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a")[0] != digest(tmp_path / "other")[0]
