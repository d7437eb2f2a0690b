"""The workers as an engine: for validation and whatever else the trainer generates, and the way weights take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turntree.agents.engines.protocol import Generation, Request, check_requests
from turntree.trainers.cluster.pool import State, WorkerPool
from turntree.trainers.cluster_config import ClusterConfig
from turntree.trainers.config import RunConfig

__all__ = ["ClusterEngine", "cluster_engine"]


class ClusterEngine:
    """Generates on the workers of a pool. ``state`` gives the trainer's weights whenever they are published."""

    def __init__(self, pool: WorkerPool, state: State | None) -> None:
        self.pool = pool
        self.state = state
        self._published = False

    @property
    def version(self) -> int:
        return self.pool.version

    def update_weights(self, version: int) -> None:
        """Broadcast the trainer's weights as ``version``; workers take them when their present rollout is over."""
        self.pool.publish(self.state, version)
        self._published = True

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in order. Raises the first exception that a worker's engine gave for one."""
        generations: list[Generation] = []
        for _, reply in self.as_completed(requests):
            if isinstance(reply, Exception):
                raise reply
            generations.append(reply)
        return generations

    def as_completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation | Exception]]:
        """(place, reply): an exception stands for a request that failed by itself."""
        check_requests(requests)
        if not self._published:
            self.update_weights(self.version)
        return iter(enumerate(self.pool.generate(requests)))

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def cluster_engine(config: RunConfig, state: State) -> ClusterEngine:
    """The engine of ``cluster=ray``; no process starts before it is used."""
    cluster: ClusterConfig = config.cluster
    maker = "turntree.trainers.cluster.kit:ConfiguredKit"
    return ClusterEngine(WorkerPool(cluster, maker, (config,), trainer_device=config.trainer.device), state)
