"""Law 8: the same seed gives the same trees and metrics, however they are grown. One hash tells, for all of them."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.envs.worlds import generate_world
from turntree.trainers.cluster_config import ClusterConfig
from turntree.trainers.config import RunConfig
from turntree.trainers.plan import Limits
from turntree.trainers.rollout import Rollout, grow
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.store import StoredTree, TreeStore, encode_line

sys.path.insert(0, str(Path(__file__).parents[1]))  # workers get this path, and cluster_kits from it

kits: Any = importlib.import_module("cluster_kits")

PROMPTS = 8
# What says how long something took, and how often a tool was tried: that depends on what was asked at the same time.
UNEQUAL = ("timing_s/", "perf/", "total/seconds", "tool_attempts", "cluster/")


def digest(trees: Iterable[StoredTree], metrics: Any) -> str:
    """Everything of all trees in order, and the metrics that do not measure the machine."""
    hasher = hashlib.sha256()
    for stored in trees:
        hasher.update(encode_line(stored))
    hasher.update(json.dumps(metrics, sort_keys=True).encode())
    return hasher.hexdigest()


def of_rollout(rollout: Rollout) -> str:
    trees = [StoredTree(0, tree, {}) for group in rollout.groups for tree in group.trees]
    return digest(trees, _equal(rollout.stats.as_dict()))


def of_run(run: Path) -> str:
    return digest(TreeStore(run / "trees").read(), [_equal(row) for row in read_metrics(run / "metrics.jsonl")])


def _equal(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(UNEQUAL)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("determinism") / "world"
    generate_world("quickstart", seed=0, split="train", entities=80, questions=20).save(found)
    return found


def grown(world: Path, *, seed: int = 7, **limits: Any) -> str:
    kit = kits.ScriptedKit(str(world))
    rollout = grow(
        kit.prompts(PROMPTS),
        core=kit.core,
        engine=kit.engine,
        dialogue=Dialogue(kits.TOKENS),
        plan=kits.PLAN,
        sampling=SamplingParams(64, 1.0, stop=tuple(kit.core.stop)),
        limits=Limits(max_turn_tokens=64, max_context_tokens=4000, **limits),
        run_seed=seed,
    )
    return of_rollout(rollout)


def test_equal_seeds_and_any_concurrency_give_equal_trees_and_counts(world: Path) -> None:
    first = grown(world)
    assert grown(world) == first
    for concurrent in (1, 2, 5):
        for schedule in ("fixed", "overlap"):
            assert grown(world, max_concurrent_trees=concurrent, schedule=schedule) == first
    assert grown(world, max_batch_requests=1) == first
    assert grown(world, seed=8) != first


@pytest.mark.slow
def test_workers_of_ray_give_the_trees_and_counts_of_one_process(world: Path) -> None:
    from turntree.trainers.cluster.connect import connect
    from turntree.trainers.cluster.pool import WorkerPool
    from turntree.trainers.cluster.rollout import ClusterRollout

    first = grown(world)
    connection = connect(ClusterConfig(name="ray", workers=3))
    try:
        for workers, each in ((1, None), (3, 1), (2, 3)):
            config = ClusterConfig(name="ray", workers=workers, prompts_per_task=each)
            pool = WorkerPool(config, "cluster_kits:ScriptedKit", (str(world),))
            try:
                pool.publish(None, 0)
                rollout = ClusterRollout(pool, kits.PLAN)(kits.ScriptedKit(str(world)).prompts(PROMPTS))
            finally:
                pool.close()
            assert of_rollout(rollout) == first
    finally:
        connection.close()


def test_equal_seeds_give_equal_runs(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A real engine and real updates, in one process: trees with their log-probs, and every metric, bit for bit."""
    from turntree.trainers.learner import train

    for name, more in (("a", []), ("b", []), ("other", ["seed=4"])):
        train(make_config("trainer.prompts_per_step=2", "seed=3", *more, f"out={tmp_path / name}"))
    assert of_run(tmp_path / "a") == of_run(tmp_path / "b") != of_run(tmp_path / "other")
    names = set(_equal(next(iter(read_metrics(tmp_path / "a" / "metrics.jsonl")))))
    assert any("loss" in name for name in names)
    assert any("reward" in name for name in names)
