"""Real Ray on this machine: the trees of one process whatever happens to workers and machines, and training goes on."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from turntree.agents.engines.protocol import Prefix, Request, SamplingParams
from turntree.envs.worlds import generate_world
from turntree.errors import ConfigError, EngineError
from turntree.trainers.cluster.connect import Connection, connect
from turntree.trainers.cluster.pool import WorkerPool
from turntree.trainers.cluster.rollout import ClusterRollout
from turntree.trainers.cluster_config import ClusterConfig
from turntree.trainers.config import RunConfig
from turntree.trainers.rollout import Rollout
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.store import TreeStore

sys.path.insert(0, str(Path(__file__).parents[2]))  # workers get this path, and cluster_kits from it

kits: Any = importlib.import_module("cluster_kits")

pytestmark = pytest.mark.slow

KIT = "cluster_kits:ScriptedKit"

DEADLY = '''
"""A reward that ends its process once: in the middle of a rollout."""

import os
import signal
from pathlib import Path

CALLS = []


def deadly(outcome, *, fault):
    import ray

    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:  # not a worker
        return len(outcome.observations) / 4
    CALLS.append(1)
    if len(CALLS) < 5:
        return len(outcome.observations) / 4
    try:
        Path(fault).unlink()
    except FileNotFoundError:
        return len(outcome.observations) / 4
    os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cluster") / "world"
    generate_world("quickstart", seed=0, split="train", entities=80, questions=20).save(found)
    return found


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Connection]:
    """One Ray for the module's tests; runs that ask for their own use it."""
    connection = connect(ClusterConfig(name="ray", workers=4))
    yield connection
    connection.close()


def two(**options: Any) -> ClusterConfig:
    return ClusterConfig(name="ray", workers=2, **options)


def grow_on(pool: WorkerPool, count: int = 8, *, kit: Any, version: int = 0) -> tuple[Rollout, dict[str, float]]:
    try:
        pool.publish(None, version)
        grown = ClusterRollout(pool, kits.PLAN)
        return grown(kit.prompts(count)), grown.take_metrics()
    finally:
        pool.close()


# Trees ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("each", [None, 1, 3])
def test_workers_grow_the_trees_of_one_process(world: Path, each: int | None) -> None:
    kit = kits.ScriptedKit(str(world))
    local = kit.roll(kit.prompts(8))
    rollout, metrics = grow_on(WorkerPool(two(prompts_per_task=each), KIT, (str(world),)), kit=kit)
    assert kits.fingerprint(rollout) == kits.fingerprint(local)
    counts = dataclasses.replace(rollout.stats, tool_attempts=local.stats.tool_attempts)
    assert counts == local.stats  # identical calls of a batch are handed to tools once, and batches differ
    assert metrics["cluster/requeued_trees"] == metrics["cluster/doubled_trees"] == metrics["cluster/age/max"] == 0


@pytest.mark.usefixtures("ray_here")
def test_a_killed_worker_costs_no_tree_and_doubles_none(world: Path, tmp_path: Path) -> None:
    kit, fault = kits.ScriptedKit(str(world)), tmp_path / "fault"
    fault.write_text("kill", encoding="utf-8")
    rollout, metrics = grow_on(WorkerPool(two(), KIT, (str(world), str(fault))), kit=kit)
    assert kits.fingerprint(rollout) == kits.fingerprint(kit.roll(kit.prompts(8)))
    assert 0 < metrics["cluster/requeued_trees"] < 24  # what had arrived is not grown again
    assert metrics["cluster/restarts"] == 1
    assert metrics["cluster/doubled_trees"] == 0


@pytest.mark.usefixtures("ray_here")
def test_a_worker_that_hangs_is_taken_for_lost(world: Path, tmp_path: Path) -> None:
    kit, fault = kits.ScriptedKit(str(world)), tmp_path / "fault"
    fault.write_text("hang", encoding="utf-8")
    rollout, metrics = grow_on(WorkerPool(two(timeout_s=20.0), KIT, (str(world), str(fault))), kit=kit)
    assert kits.fingerprint(rollout) == kits.fingerprint(kit.roll(kit.prompts(8)))
    assert metrics["cluster/restarts"] >= 1


@pytest.mark.usefixtures("ray_here")
def test_without_restarts_the_last_lost_worker_ends_the_run(world: Path, tmp_path: Path) -> None:
    kit, fault = kits.ScriptedKit(str(world)), tmp_path / "fault"
    fault.write_text("kill", encoding="utf-8")
    pool = WorkerPool(ClusterConfig(name="ray", workers=1, restarts=0), KIT, (str(world), str(fault)))
    with pytest.raises(EngineError, match=r"all 1 rollout workers are lost .* resume=true"):
        grow_on(pool, kit=kit)


@pytest.mark.usefixtures("ray_here")
def test_trees_that_cost_two_workers_end_the_run(world: Path, tmp_path: Path) -> None:
    """They would cost the next ones too."""
    kit, fault = kits.ScriptedKit(str(world)), tmp_path / "fault"
    fault.write_text("deadly", encoding="utf-8")
    pool = WorkerPool(ClusterConfig(name="ray", workers=1), KIT, (str(world), str(fault)))
    with pytest.raises(EngineError, match=r"trees were lost with two workers, .* resume=true"):
        grow_on(pool, kit=kit)
    assert pool.restarts == 1


@pytest.mark.usefixtures("ray_here")
def test_errors_of_the_users_own_code_arrive_as_themselves(world: Path, tmp_path: Path) -> None:
    kit, fault = kits.ScriptedKit(str(world)), tmp_path / "fault"
    fault.write_text("raise", encoding="utf-8")
    with pytest.raises(ConfigError, match="broke its contract"):
        grow_on(WorkerPool(two(), KIT, (str(world), str(fault))), kit=kit)
    with pytest.raises(ConfigError, match="nobody"):
        grow_on(WorkerPool(two(), "cluster_kits:nobody", ()), kit=kit)


@pytest.mark.usefixtures("ray_here")
def test_trees_beyond_the_bound_are_dropped_and_counted(world: Path) -> None:
    kit = kits.ScriptedKit(str(world))
    pool = WorkerPool(two(), KIT, (str(world), "", True))  # its engine stays at version 0
    rollout, metrics = grow_on(pool, kit=kit, version=2)
    assert rollout.groups == ()
    assert metrics["cluster/stale_trees"] == 24
    assert metrics["cluster/age/max"] == 2
    assert rollout.stats.trajectories == kit.roll(kit.prompts(8)).stats.trajectories  # used all the same
    kept, metrics = grow_on(WorkerPool(two(staleness=2), KIT, (str(world), "", True)), kit=kit, version=2)
    assert len(kept.groups) == 8
    assert metrics["cluster/stale_trees"] == 0


@pytest.mark.usefixtures("ray_here")
def test_one_step_off_sends_the_next_batch_ahead(world: Path) -> None:
    kit = kits.ScriptedKit(str(world))
    pool = WorkerPool(two(mode="one_step_off"), KIT, (str(world),))
    try:
        pool.publish(None, 0)
        batches = [kit.prompts(4, first=4 * i) for i in range(3)]
        grown = ClusterRollout(pool, kits.PLAN, upcoming=lambda i: batches[i] if i < 3 else None)
        ages = []
        for version, prompts in enumerate(batches, start=1):
            rollout = grown(prompts)
            assert kits.fingerprint(rollout) != ""
            assert len(rollout.groups) == 4
            ages.append(grown.take_metrics()["cluster/age/max"])
            pool.publish(None, version)
        assert ages == [0, 1, 1]
        assert grown.ahead is None
    finally:
        pool.close()


# Weights and validation -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_here")
def test_workers_generate_with_the_trainers_weights(make_config: Callable[..., RunConfig]) -> None:
    from turntree.trainers.build import build_bench

    local = build_bench(make_config())
    bench = build_bench(make_config("cluster=ray"))
    try:
        requests = [Request(Prefix((5, 6, 7)), SamplingParams(6, 1.0), seed=i, key=("p", i)) for i in range(5)]
        for version in (0, 1):
            local.engine.update_weights(version)
            bench.engine.update_weights(version)
            for own, there in zip(local.engine.generate(requests), bench.engine.generate(requests), strict=True):
                assert (there.ids, there.version) == (own.ids, version)
                assert there.logprobs == pytest.approx(own.logprobs, abs=1e-5)
                assert there.continuation.token_ids() == own.continuation.token_ids()
            for model in (local.model, bench.model):
                generator = torch.Generator().manual_seed(version)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    finally:
        bench.close()


# Whole runs -----------------------------------------------------------------------------------------------------------


def shapes(run: Path) -> list[Any]:
    """What was sampled, without the rounding of log-probs that depends on batches."""
    return [
        (s.step, s.tree.prompt_uid, s.tree.index, [(n.path, n.turn_ids, n.reward, n.text) for n in s.tree.nodes()])
        for s in TreeStore(run / "trees").read()
    ]


@pytest.mark.usefixtures("ray_here")
def test_training_goes_on_when_a_worker_is_killed(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turntree.trainers.learner import train

    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "deadly_rules.py").write_text(DEADLY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(rules))
    fault = tmp_path / "fault"
    reward = ["reward.name=deadly_rules:deadly", f"reward.args.fault={fault}"]
    train(make_config(*reward, f"out={tmp_path / 'local'}"))
    fault.touch()
    done = train(make_config(*reward, "cluster=ray", f"out={tmp_path / 'ray'}"))
    assert not fault.exists()
    assert done.progress.step == 2
    assert shapes(tmp_path / "ray") == shapes(tmp_path / "local")
    rows = list(read_metrics(tmp_path / "ray" / "metrics.jsonl"))
    assert rows[0]["cluster/requeued_trees"] > 0
    assert [row["cluster/restarts"] for row in rows] == [1, 1]
    assert all(row["timing_s/worker_gen/max"] > 0 for row in rows)
    local = list(read_metrics(tmp_path / "local" / "metrics.jsonl"))
    assert [r["budget/generated_tokens"] for r in rows] == [r["budget/generated_tokens"] for r in local]


@pytest.mark.usefixtures("ray_here")
def test_one_step_off_trains_on_weights_of_one_update_before_and_resumes(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    from turntree.trainers.learner import train

    options = ["cluster=ray", "cluster.mode=one_step_off", "trainer.importance_cap=2.0", f"out={tmp_path / 'run'}"]
    train(make_config(*options, "trainer.steps=3", "trainer.save_every=1"))
    train(make_config(*options, "trainer.steps=5", "resume=true"))
    store = TreeStore(tmp_path / "run" / "trees")
    versions = {
        step: {n.version for s in store.read(step) for n in s.tree.nodes() if n.turn_ids} for step in store.steps()
    }
    # The first rollout of a call has the newest weights: the batch that was under way was dropped.
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {3}, 5: {3}}
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["cluster/age/max"] for row in rows] == [0, 1, 1, 0, 1]
    uids = [s.tree.prompt_uid for s in store.read() if s.tree.index == 0]
    assert len(uids) == len(set(uids)) == 20
