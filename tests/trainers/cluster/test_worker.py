"""A worker in this process: what Ray would call, called."""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.engines.protocol import Prefix, Request, SamplingParams
from turntree.envs.worlds import generate_world
from turntree.errors import CheckpointError, ConfigError, EngineError, MissingExtraError
from turntree.trainers.cluster.connect import connect, import_ray
from turntree.trainers.cluster.pool import own_error
from turntree.trainers.cluster.rollout import joined_metrics
from turntree.trainers.cluster.wire import GrownTree, Ticket, WireRequest, WorkDone, rebuild_tree
from turntree.trainers.cluster.worker import RolloutWorker, site_here
from turntree.trainers.cluster_config import ClusterConfig
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.store import StoredTree, encode_line
from turntree.trainers.tree import Tree

KIT = "cluster_kits:ScriptedKit"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(__file__).parents[2]
    sys.path.insert(0, str(folder))
    found = tmp_path_factory.mktemp("cluster") / "world"
    generate_world("quickstart", seed=0, split="train", entities=80, questions=12).save(found)
    yield found
    sys.path.remove(str(folder))


def line(tree: Tree) -> bytes:
    return encode_line(StoredTree(0, tree, {}))


def test_trees_are_sent_as_they_finish_and_are_those_of_a_plain_rollout(world: Path) -> None:
    worker = RolloutWorker(site_here(), KIT, str(world))
    prompts = tuple(worker.kit.prompts(4))  # type: ignore[attr-defined]
    local = worker.kit.roll(prompts)  # type: ignore[attr-defined]
    ticket = Ticket(prompts, {p.uid: (0, 2) if i else (1,) for i, p in enumerate(prompts)})
    *news, end = list(worker.rollout(ticket))
    assert isinstance(end, WorkDone)
    assert end.tool_attempts > 0
    trees = {n.tree.id: (rebuild_tree(n.tree), n.tally) for n in news if isinstance(n, GrownTree)}
    assert trees.keys() == ticket.trees
    for group in local.groups:
        for tree in group.trees:
            if (group.uid, tree.index) in trees:
                grown, tally = trees[group.uid, tree.index]
                assert line(grown) == line(tree)
                assert tally.trajectories == len(tree.leaves())


def test_a_worker_of_another_version_says_so() -> None:
    site = dataclasses.replace(site_here(), version="0.0.9")
    with pytest.raises(EngineError, match=r"the trainer has turntree 0.0.9, this worker .* same version on every"):
        RolloutWorker(site, KIT).ready()


def test_a_run_that_is_refused_closes_its_engine(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook goes on after the error, and its next run needs the room of the workers."""
    from turntree.trainers.build import Bench
    from turntree.trainers.learner import train

    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    closed: list[Bench] = []
    monkeypatch.setattr(Bench, "close", lambda self: closed.append(self))
    with pytest.raises(CheckpointError):
        train(make_config(f"out={tmp_path}"))
    assert len(closed) == 1


class Lost(Exception):
    """As Ray wraps what a worker's code raised."""

    cause = KeyError("speed")
    traceback_str = 'Traceback\n  File "my_rules.py", line 3, in reward\nKeyError'


def test_errors_of_the_users_code_show_where_they_are_from() -> None:
    assert "KeyError: 'speed'; in the worker" in str(own_error(Lost()))
    assert 'File "my_rules.py", line 3' in str(own_error(Lost()))


@pytest.mark.parametrize("address", ["head", "10.0.0.1", "ray://10.0.0.1:10001", ":6379", "head:0", "head:x"])
def test_addresses_that_are_none_are_refused_before_anything_is_loaded(address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected HOST:PORT of a cluster's head"):
        compose(["cluster=ray", f"cluster.address='{address}'"])


def test_nobody_listens_there() -> None:
    """At once, where Ray itself tries for a quarter of an hour."""
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"no Ray cluster let this process in \(ConnectionRefusedError"):
            connect(ClusterConfig(name="ray", address=address))
        assert time.monotonic() - began < 60.0


def test_what_a_kit_raises_arrives_after_the_trees_that_were_finished(world: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.write_text("raise", encoding="utf-8")
    worker = RolloutWorker(site_here(), KIT, str(world), str(fault))
    prompts = tuple(worker.kit.prompts(4))  # type: ignore[attr-defined]
    arrived: list[Any] = []
    with pytest.raises(ConfigError, match="broke its contract"):
        arrived.extend(worker.rollout(Ticket(prompts, {p.uid: (0, 1, 2) for p in prompts})))


def test_weights_and_generation(world: Path) -> None:
    worker = RolloutWorker(site_here(), KIT, str(world))
    request = Request(Prefix((65, 66)), SamplingParams(64, 1.0), 1, ("p", 0))
    assert worker.load([{}], 3) >= 0.0
    (reply,) = worker.generate([WireRequest.of(request)])
    assert not isinstance(reply, Exception)
    assert reply.generation(request).version == 3


def test_a_wrong_maker_is_named() -> None:
    with pytest.raises(ConfigError, match="cluster_kits_of_nobody"):
        RolloutWorker(site_here(), "cluster_kits_of_nobody:Kit").ready()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'turntree\[ray\]'"):
        import_ray()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.mode=one_step_of", "Did you mean 'one_step_off'"),
        ("cluster.workers=0", "cluster.workers=0 is out of range"),
        ("cluster.gpus_per_worker=1.5", "must be a whole number"),
        ("cluster.timeout_s=0", "seconds above 0"),
        ("algorithm.adaptive=0.1", "no worker sees"),
        ("engine=openai", "cannot take the trainer's weights"),
        ("engine=vllm_server", "use engine=vllm"),
        ("engine.sleep=true engine=vllm", "frees memory for a trainer in the same process"),
    ],
)
def test_options_that_do_not_fit_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(["cluster=ray", "algorithm=tree_grpo", *override.split()])


def test_the_bound_follows_the_mode() -> None:
    assert ClusterConfig().bound == 0
    assert ClusterConfig(mode="one_step_off").bound == 1
    assert ClusterConfig(mode="one_step_off", staleness=3).bound == 3
    with pytest.raises(ConfigError, match="would drop all of them"):
        ClusterConfig(mode="one_step_off", staleness=0)


def test_a_worker_is_a_run_without_a_cluster() -> None:
    from turntree.trainers.cluster.kit import worker_config

    config: RunConfig = compose(["cluster=ray", "trainer.device=cuda:0", "cluster.gpus_per_worker=1"])
    assert worker_config(config).trainer.device == "cuda"
    assert worker_config(config).cluster.name == "local"
    on_cpu = compose(["cluster=ray", "trainer.device=cuda:0"])
    assert worker_config(on_cpu).trainer.device == "cpu"


def test_metrics_of_ranks_add_up() -> None:
    one = {"cluster/workers": 2.0, "cluster/age/max": 1.0, "timing_s/worker_gen/mean": 1.0, "timing_s/weights_put": 0.1}
    two = {"cluster/workers": 1.0, "cluster/age/max": 0.0, "timing_s/worker_gen/mean": 3.0, "timing_s/weights_put": 0.4}
    assert joined_metrics([one, two]) == {
        "cluster/workers": 3.0,
        "cluster/age/max": 1.0,
        "timing_s/worker_gen/mean": 2.0,
        "timing_s/weights_put": 0.4,
    }
