"""Ray as this project uses it: one machine on loopback unless told otherwise, no usage statistics, no dashboard."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from turntree.errors import EngineError, MissingExtraError
from turntree.trainers.cluster_config import ClusterConfig

__all__ = ["Connection", "connect", "import_ray"]

_log = logging.getLogger(__name__)

# Off, Ray takes 127.0.0.1 for the machine's own address: then all its servers listen there, and nowhere else. Named
# for other systems, it does the same on Linux. An address given to ray.init would be replaced by the machine's.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_REACH_S = 10.0
"""Seconds that a cluster's machine has to take up a connection."""

_TRIES = 2
"""How often Ray asks a server that does not answer, for most of a minute each time; its own 20 take a quarter hour."""


def import_ray() -> ModuleType:
    """The module, without usage statistics. Raises ``MissingExtraError``, naming the extra."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its workers a niceness of 15, so that whatever else runs on the machine, the trainer too, starves them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # what failed is raised where it is asked for
    # Without a connection its calls would start a Ray of their own: a thread that asks once more while a run ends.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # A worker that asked for no GPU sees none. Said explicitly, since Ray is about to change what it does unasked.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(f"cluster=ray needs Ray ({error}): pip install 'turntree[ray]'") from error
    return ray


class Connection:
    """Ray, connected; ``close`` leaves a cluster that this process did not start as it was."""

    def __init__(self, ray: ModuleType, *, owned: bool) -> None:
        self.ray: Any = ray
        self.owned = owned

    def close(self) -> None:
        if self.owned and self.ray.is_initialized():
            self.ray.shutdown()


def connect(cluster: ClusterConfig, *, trainer_device: str = "cpu") -> Connection:
    """Connect to ``cluster.address``, or start Ray on this machine's loopback where there is none.

    A process that is connected already stays so. Raises ``MissingExtraError`` without Ray, ``EngineError`` where there
    is no cluster, or one that does not let us in.
    """
    if cluster.address:
        return _join(cluster)
    with _on_loopback():
        ray = import_ray()
        if ray.is_initialized():
            return Connection(ray, owned=False)
        with _other_gpus(cluster, trainer_device):
            try:
                ray.init(
                    address="local",
                    num_cpus=max(1, math.ceil(cluster.workers * cluster.cpus_per_worker)),
                    num_gpus=None if cluster.gpus_per_worker else 0,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    namespace="turntree",
                )
            except Exception as error:  # of Ray's many, a plain Exception among them
                raise EngineError(
                    f"Ray did not start on this machine ({_said(error)}): has it processor time, memory and "
                    "room in /dev/shm and the temporary folder (RAY_TMPDIR)? On a busy machine a second try may do"
                ) from error
    return Connection(ray, owned=True)


def _join(cluster: ClusterConfig) -> Connection:
    ray = import_ray()
    if ray.is_initialized():
        return Connection(ray, owned=False)
    try:
        with _few_tries(ray):
            _reach(ray, cluster.address)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="turntree")
    except Exception as error:  # of Ray's many: no cluster, another version, a wrong token
        raise EngineError(
            f"cluster.address={cluster.address}: no Ray cluster let this process in ({_said(error)}). Start one with "
            "`ray start --head` and give its address; where it asks for a token, set RAY_AUTH_MODE=token and share "
            "that token (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH) with this machine"
        ) from error
    return Connection(ray, owned=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400] or 'no reason given'}"


def _reach(ray: ModuleType, address: str) -> None:
    """Knock at the cluster's door, where Ray itself would go on for a quarter of an hour without an answer.

    `ray start` asks for a token where the user has one. Ray sends it to no address that is spelled out, since it could
    be anybody's; to this machine it may go.
    """
    services: Any = ray._private.services
    found = services.canonicalize_bootstrap_address(address)
    if found is None:  # Ray says by itself that there is none
        return
    host, _, port = found.rpartition(":")
    host = host.strip("[]")
    with socket.create_connection((host, int(port)), timeout=_REACH_S) as connection:
        here = connection.getpeername()[0] == connection.getsockname()[0]
    if here:
        ray._private.worker.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextmanager
def _few_tries(ray: ModuleType) -> Iterator[None]:
    constants: Any = ray._private.ray_constants
    known = constants.NUM_REDIS_GET_RETRIES
    constants.NUM_REDIS_GET_RETRIES = min(known, _TRIES)
    try:
        yield
    finally:
        constants.NUM_REDIS_GET_RETRIES = known


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray's servers, started inside, listen on loopback only."""
    before = os.environ.get(_LOOPBACK)
    os.environ[_LOOPBACK] = "0"
    try:
        ray = import_ray()
        # Where something imported Ray before, it has read the variable already.
        constants: Any = ray._private.ray_constants
        known, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
        try:
            yield
        finally:
            constants.ENABLE_RAY_CLUSTER = known
    finally:
        if before is None:
            del os.environ[_LOOPBACK]
        else:
            os.environ[_LOOPBACK] = before


@contextmanager
def _other_gpus(cluster: ClusterConfig, trainer_device: str) -> Iterator[None]:
    """Ray, started inside, hands out the GPUs that the trainer does not use, where workers take whole ones."""
    if cluster.gpus_per_worker < 1 or not trainer_device.startswith("cuda"):
        yield
        return
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    own = int(trainer_device.partition(":")[2] or 0)
    others = devices[:own] + devices[own + 1 :]
    if len(others) < cluster.workers * cluster.gpus_per_worker:
        raise EngineError(
            f"cluster.workers={cluster.workers} with cluster.gpus_per_worker={cluster.gpus_per_worker:g} need "
            f"{cluster.workers * cluster.gpus_per_worker:g} GPUs besides the trainer's, found {len(others)}; lower "
            "cluster.workers, or share the trainer's GPU with cluster.gpus_per_worker=0.5"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(others)
    try:
        yield
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
