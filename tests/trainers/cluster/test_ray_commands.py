"""Whole commands with workers: several training ranks, Ctrl-C, lost workers and ranks; nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.quickstart import write_tiny_model
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.store import TreeStore

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc"),
]

MakeConfig = Callable[..., RunConfig]
LIMIT_S = 900

HELD = '''
"""A reward that is not given while a file is there."""

import time
from pathlib import Path


def held(outcome, *, gate):
    while Path(gate).exists():
        time.sleep(0.05)
    return len(outcome.observations) / 4
'''

LEFT = """
import json, sys, time
from turntree.trainers.cluster.connect import connect
from turntree.trainers.cluster_config import ClusterConfig

ray = connect(ClusterConfig(name="ray", address=sys.argv[1])).ray
from ray.util import placement_group_table

end = time.monotonic() + 60
while True:
    groups = [g["state"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
    busy = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
    if not (groups or busy) or time.monotonic() > end:
        break
    time.sleep(0.2)
print(json.dumps({"groups": groups, "busy": busy}))
"""


@dataclass
class Head:
    """A cluster of one machine that a user started, with a token; ``env`` lets a process in."""

    address: str
    process: subprocess.Popen[bytes]
    env: dict[str, str]

    def left(self) -> Any:
        """Placement groups and CPUs in use, once there are none, or after a minute."""
        done = subprocess.run(
            [sys.executable, "-c", LEFT, self.address], env=self.env, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    def workers(self) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if title(pid).startswith("ray::RolloutWorker")]


@pytest.fixture(scope="module")
def environment(bed: Any) -> dict[str, str]:
    """Of processes that find the bed's rules."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray would end workers of a machine that is short of memory for other reasons.
    found["RAY_memory_monitor_refresh_ms"] = "0"
    return {**found, "PYTHONPATH": f"{bed.rules}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def head(environment: dict[str, str]) -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))  # sockets in it have short paths
    env = {
        **environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0",
    }  # fmt: skip
    options = ["--node-ip-address=127.0.0.1", "--port=0", "--num-cpus=4", f"--temp-dir={folder}", "--block"]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", *options, "--disable-usage-stats"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        [*command, "--include-dashboard=false"],
        env=env,
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    note = folder / "ray_current_cluster"
    wait_until(lambda: note.is_file() and note.read_text() != "")
    yield Head(note.read_text().strip(), process, env)
    children = descendants(process.pid)
    process.terminate()
    process.wait(timeout=60)
    for pid in children:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def wait_until(true: Callable[[], bool], *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(*overrides, env=...)``: turntree train in a process group of its own, as a shell starts it."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, env: dict[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "turntree", "train", *arguments]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True
            )
        )
        return started[-1]

    yield run
    for process in started:
        left = [process.pid, *descendants(process.pid)] if process.poll() is None else []
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    wait_until(
        lambda: latest_checkpoint(run / "checkpoints") is not None or process.poll() is not None, seconds=LIMIT_S
    )
    assert process.poll() is None, process.communicate()[1][-3000:]


def saved(run: Path) -> int:
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    return load_checkpoint(found).step


def shapes(run: Path) -> list[Any]:
    """What was sampled, without the rounding of log-probs that depends on batches."""
    return [
        (s.step, s.tree.prompt_uid, s.tree.index, [(n.path, n.turn_ids, n.reward, n.text) for n in s.tree.nodes()])
        for s in TreeStore(run / "trees").read()
    ]


RANKS = ("trainer.strategy=deepspeed", "trainer.ranks=2", "trainer.prompts_per_update=2", "trainer.max_pack_tokens=300")
NOTHING = {"groups": [], "busy": 0.0}


def test_ranks_with_workers_grow_the_trees_of_one_process_though_one_is_lost(
    start: Start, bed: Any, make_config: MakeConfig, head: Head, tmp_path: Path
) -> None:
    steps = ["trainer.steps=8", "trainer.save_every=1"]
    ray = ["cluster=ray", f"cluster.address={head.address}", "cluster.workers=1"]
    process = start(*bed.args, *steps, *RANKS, *ray, f"out={tmp_path / 'ranks'}", env=head.env)
    wait_for_checkpoint(tmp_path / "ranks", process)
    workers = head.workers()
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    train(make_config(*steps, *RANKS[2:], f"out={tmp_path / 'local'}"))
    said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said[1][-3000:]
    assert shapes(tmp_path / "ranks") == shapes(tmp_path / "local")
    rows, local = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("ranks", "local"))
    assert rows[-1]["cluster/restarts"] == 1
    assert rows[-1]["cluster/workers"] == 2
    assert [row["cluster/doubled_trees"] for row in rows] == [0] * 8
    for a, b in zip(rows, local, strict=True):
        assert a["budget/generated_tokens"] == b["budget/generated_tokens"]
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], rel=1e-3, abs=1e-4)
    assert head.left() == NOTHING
    assert head.workers() == []


def test_a_killed_rank_takes_all_workers_with_it_and_the_run_goes_on_in_one_process(
    start: Start, bed: Any, make_config: MakeConfig, head: Head, tmp_path: Path
) -> None:
    """One step ahead, so that workers are busy while ranks update; it goes on without workers, synchronously."""
    run = tmp_path / "run"
    ray = ["cluster=ray", f"cluster.address={head.address}", "cluster.workers=1", "cluster.mode=one_step_off"]
    endless = ["trainer.steps=500", "trainer.save_every=1"]
    process = start(*bed.args, *endless, *RANKS, *ray, f"out={run}", env=head.env)
    wait_for_checkpoint(run, process)
    pids, workers = descendants(process.pid), head.workers()
    ranks = [pid for pid in pids if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    assert len(workers) == 2
    os.kill(ranks[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    assert "RankError: rank 1 of 2" in errors
    assert "was killed by signal SIGKILL" in errors
    assert "resume=true" in errors
    assert "Traceback" not in errors
    wait_until(lambda: all(map(gone, [*pids, *workers])))
    assert head.left() == NOTHING
    ages = [row["cluster/age/max"] for row in read_metrics(run / "metrics.jsonl")]
    assert ages == [0, *[1] * (len(ages) - 1)]
    step = saved(run)
    result = train(make_config(*RANKS[2:], f"trainer.steps={step + 1}", f"out={run}", "resume=true"))
    assert result.progress.step == step + 1


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_ctrl_c_leaves_nothing_on_somebodys_cluster(
    mode: str, start: Start, bed: Any, head: Head, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ray = ["cluster=ray", f"cluster.address={head.address}", f"cluster.mode={mode}"]
    process = start(*bed.args, "trainer.steps=500", "trainer.save_every=500", *ray, f"out={run}", env=head.env)
    wait_until(lambda: bool(rows(run)) or process.poll() is not None, seconds=LIMIT_S)
    workers = head.workers()
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, errors[-3000:]
    assert "go on with: turntree train" in errors
    assert "Traceback" not in errors
    assert saved(run) == len(rows(run))
    wait_until(lambda: all(map(gone, workers)))
    assert head.left() == NOTHING


def rows(run: Path) -> list[Any]:
    file = run / "metrics.jsonl"
    return list(read_metrics(file)) if file.exists() else []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_a_ray_of_the_runs_own(
    times: int, start: Start, bed: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    """The first one waits for the step; the second one does not, here while all workers wait for a reward."""
    (tmp_path / "held_rules.py").write_text(HELD, encoding="utf-8")
    env = {**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}
    run, gate = tmp_path / "run", tmp_path / "gate"
    reward = ["reward.name=held_rules:held", f"reward.args.gate={gate}"]
    process = start(
        *bed.args, *reward, "trainer.steps=500", "trainer.save_every=1", "cluster=ray", f"out={run}", env=env
    )
    wait_for_checkpoint(run, process)
    pids = descendants(process.pid)
    assert sum(title(pid).startswith("ray::RolloutWorker") for pid in pids) == 2
    if times == 2:
        gate.touch()
        time.sleep(1.0)  # the step under way ends, and the next one cannot
    os.killpg(process.pid, signal.SIGINT)
    if times == 2:
        assert process.stderr is not None
        wait_until(lambda: "press it again" in os.read(process.stderr.fileno(), 65536).decode())  # type: ignore[union-attr]
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60 if times == 2 else LIMIT_S)
    assert process.returncode == 130, errors[-3000:]
    assert "go on with: turntree train" in errors
    assert "Traceback" not in errors
    wait_until(lambda: all(map(gone, pids)))
    assert saved(run) == len(rows(run))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make venv-vllm")
def test_vllm_in_workers_has_the_trainers_weights_also_after_a_loss(
    start: Start, bed: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    """Weights move by 1e-2 a step: with older ones the sampler's log-probs would be far from the trainer's."""
    run, model = tmp_path / "run", write_tiny_model(tmp_path / "model", seed=0, head_dim=32)
    engine = ["engine=vllm", "engine.max_concurrent_requests=8", "engine.args.max_num_batched_tokens=400"]
    options = [*bed.args, f"model.path={model}", "trainer.learning_rate=1e-2", "trainer.steps=500", *engine]
    process = start(*options, "cluster=ray", "cluster.workers=1", f"out={run}", env=environment)
    wait_until(lambda: len(rows(run)) >= 2 or process.poll() is not None, seconds=LIMIT_S)
    pids = descendants(process.pid)
    (worker,) = (pid for pid in pids if title(pid).startswith("ray::RolloutWorker"))
    cores = descendants(worker)
    assert any("EngineCore" in title(pid) for pid in cores)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: all(map(gone, cores)))
    lost = len(rows(run))
    wait_until(lambda: len(rows(run)) >= lost + 2 or process.poll() is not None, seconds=LIMIT_S)
    pids += descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, errors[-3000:]
    wait_until(lambda: all(map(gone, pids)))
    assert all(row["mismatch/max"] < 1e-3 for row in rows(run))
    assert [row["cluster/restarts"] for row in (rows(run)[1], rows(run)[-1])] == [0, 1]
    versions = {
        step: {n.version for s in TreeStore(run / "trees").read(step) for n in s.tree.nodes() if n.turn_ids}
        for step in (1, 2, lost + 2)
    }
    assert versions == {step: {step - 1} for step in versions}
