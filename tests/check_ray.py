"""One start of Ray on this machine: all that a run needs of it, checked. Run by ``make smoke``."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from turntree.envs.worlds import generate_world
from turntree.trainers.cluster.connect import Connection, connect
from turntree.trainers.cluster.pool import WorkerPool
from turntree.trainers.cluster.rollout import ClusterRollout
from turntree.trainers.cluster_config import ClusterConfig

sys.path.insert(0, str(Path(__file__).parent))  # workers get this path, and cluster_kits from it

kits: Any = importlib.import_module("cluster_kits")
KIT = "cluster_kits:ScriptedKit"


def check(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"ray smoke: {message}")


def listening() -> set[str]:
    """The addresses, in /proc's hexadecimal form, on which this process's children listen."""
    inodes = set[str]()
    for fd in (link for pid in descendants() for link in _links(pid)):
        if fd.startswith("socket:["):
            inodes.add(fd[8:-1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def descendants() -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _links(pid: int) -> list[str]:
    try:
        return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def check_loopback() -> None:
    if not Path("/proc/net/tcp").is_file():
        return
    own = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    found = listening()
    check(bool(found), "no listening socket of Ray was found")
    check(found <= own, f"Ray listens to other machines: {sorted(found - own)}")


def check_rollouts(cluster: ClusterConfig, folder: Path) -> None:
    world, fault = folder / "world", folder / "fault"
    kit = kits.ScriptedKit(str(world))
    prompts = kit.prompts(8)
    local = kit.roll(prompts)
    fault.write_text("kill", encoding="utf-8")
    pool = WorkerPool(cluster, KIT, (str(world), str(fault)))
    try:
        pool.publish(None, 0)
        grown = ClusterRollout(pool, kits.PLAN)
        rollout = grown(prompts)
        check_loopback()
        check(not fault.exists(), "no worker was killed")
        check(kits.fingerprint(rollout) == kits.fingerprint(local), "the trees differ from those of one process")
        check(grown.take_metrics()["cluster/requeued_trees"] > 0, "the lost worker's trees were not handed out again")
        pool.publish(lambda: {"weight": torch.zeros(3)}, 1)
        again = grown(prompts[:2])
        versions = {node.version for group in again.groups for tree in group.trees for node in tree.root.walk()}
        check(versions == {0, 1}, f"new weights did not arrive: {versions}")  # a root has no turn, and version 0
    finally:
        pool.close()


def main() -> None:
    started = time.monotonic()
    cluster = ClusterConfig(name="ray", workers=2)
    with tempfile.TemporaryDirectory(prefix="turntree-ray-smoke-") as tmp:
        generate_world("quickstart", seed=0, split="train", entities=80, questions=20).save(Path(tmp) / "world")
        connection: Connection = connect(cluster)
        up = time.monotonic() - started
        try:
            check_rollouts(cluster, Path(tmp))
        finally:
            connection.close()
    print(f"ray smoke passed in {time.monotonic() - started:.0f} s: start {up:.0f} s")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(300, exit=True)  # a smoke that hangs is a smoke that failed
    main()
