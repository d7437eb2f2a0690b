"""Two machines, as Ray sees them, on this one: one is lost in the middle of a rollout."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.worlds import generate_world
from turntree.errors import EngineError
from turntree.trainers.cluster.pool import WorkerPool
from turntree.trainers.cluster.rollout import ClusterRollout
from turntree.trainers.cluster_config import ClusterConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

kits: Any = importlib.import_module("cluster_kits")

pytestmark = pytest.mark.slow

KIT = "cluster_kits:ScriptedKit"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without room for workers and two nodes with room for one each, all on loopback."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a Cluster asks for no token that `ray start` left behind
    from turntree.trainers.cluster.connect import import_ray

    ray = import_ray()
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield made
    ray.shutdown()
    made.shutdown()  # type: ignore[no-untyped-call]


def test_a_lost_machine_costs_no_tree_and_a_new_one_takes_its_place(cluster: Any, tmp_path: Path) -> None:
    world, fault = tmp_path / "world", tmp_path / "fault"
    generate_world("quickstart", seed=0, split="train", entities=80, questions=20).save(world)
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1))}
    kit = kits.ScriptedKit(str(world))
    config = ClusterConfig(name="ray", address=cluster.address, workers=2, placement="strict_spread", restarts=8)
    fault.write_text("hang", encoding="utf-8")
    pool = WorkerPool(config, KIT, (str(world), str(fault)))
    removed: list[str] = []

    def remove() -> None:
        name = kits.wait_for(fault.with_suffix(".node"))
        cluster.remove_node(nodes[name], allow_graceful=False)
        removed.append(name)

    killer = threading.Thread(target=remove)
    killer.start()
    try:
        pool.publish(None, 0)
        grown = ClusterRollout(pool, kits.PLAN)
        rollout = grown(kit.prompts(8))
        killer.join(timeout=60)
        metrics = grown.take_metrics()
        assert len(removed) == 1
        assert kits.fingerprint(rollout) == kits.fingerprint(kit.roll(kit.prompts(8)))
        assert metrics["cluster/requeued_trees"] > 0
        # The other machine goes on alone, then a new one joins and gets the lost one's worker.
        assert kits.fingerprint(grown(kit.prompts(4))) == kits.fingerprint(kit.roll(kit.prompts(4)))
        cluster.add_node(num_cpus=1)
        pool.publish(None, 1)
        # A worker that was sent to the lost machine before its loss was noticed is replaced once more.
        assert any(all([pool.settle(seat, timeout_s=5.0) for seat in list(pool.seats)]) for _ in range(40))  # noqa: C419
        rollout = grown(kit.prompts(8, first=8))
        assert grown.take_metrics()["cluster/workers"] == 2
        assert {n.version for g in rollout.groups for t in g.trees for n in t.nodes() if n.turn_ids} == {1}
    finally:
        pool.close()
        killer.join(timeout=60)


def test_workers_that_do_not_fit_are_an_error_that_says_what_is_free(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1)
    config = ClusterConfig(name="ray", address=cluster.address, workers=2, start_timeout_s=3.0)
    with pytest.raises(EngineError, match=r"no room for 2 workers of \{'CPU': 1.0\} each .* free: 1 CPU, 0 GPU"):
        WorkerPool(config, KIT, (str(tmp_path),)).publish(None, 0)


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(EngineError, match=r"cluster.address=auto: no Ray cluster let this process in .* `ray start"):
        WorkerPool(ClusterConfig(name="ray", address="auto"), KIT, ()).publish(None, 0)
