"""The workers of a run: placed, started, sent weights, replaced when they are lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from turntree.agents.engines.protocol import Generation, Request
from turntree.errors import EngineError, TurnTreeError
from turntree.trainers.cluster.connect import Connection, connect
from turntree.trainers.cluster.wire import WireRequest, pack_weights
from turntree.trainers.cluster.worker import RolloutWorker, site_here
from turntree.trainers.cluster_config import ClusterConfig

__all__ = ["Seat", "WorkerPool", "is_loss"]

_log = logging.getLogger(__name__)

State = Callable[[], Mapping[str, torch.Tensor]]
"""The trainer's weights, by the names of the model's own state dict."""


@dataclass(eq=False, slots=True)
class Seat:
    """A worker's place. ``waiting_for``: what it has to answer before it is given trees, its start or weights."""

    index: int
    actor: Any
    waiting_for: Any
    started: bool = False
    waiting_since: float = field(default_factory=time.monotonic)


def is_loss(error: Exception) -> bool:
    """Whether ``error`` says that a worker, its machine or what it made is gone, and not that its code failed."""
    from ray import exceptions

    lost = (
        exceptions.RayActorError,
        exceptions.ActorUnschedulableError,
        exceptions.ObjectLostError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.OutOfMemoryError,  # Ray ends workers of a machine that is short of memory
    )
    if isinstance(error, exceptions.RayActorError) and error.actor_init_failed:
        return False  # its own code failed, and would again
    return isinstance(error, lost) and not isinstance(error, exceptions.RayTaskError)


def first_line(error: Exception) -> str:
    """Ray's own messages go on for a dozen lines about processes and logs."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def own_error(error: Exception) -> Exception:
    """What a worker's code raised, as itself; anything else as an ``EngineError`` that shows where it came from."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, TurnTreeError):
        return cause
    traceback = str(getattr(error, "traceback_str", "")).strip()
    where = f"; in the worker:\n{traceback}" if traceback else ""
    return EngineError(f"a rollout worker failed: {type(cause or error).__name__}: {cause or error}{where}")


class WorkerPool:
    """Workers of one run.

    ``maker`` (an import path) makes a worker's kit of ``arguments``. Nothing starts before it is needed: the first
    :meth:`publish`, :meth:`generate` or rollout does. Safe to use from two threads: a rollout may be under way in one
    while the trainer publishes or validates in the other.

    Raises ``EngineError`` when workers do not start in time, or when all are lost and may not be started anew.
    """

    def __init__(
        self, cluster: ClusterConfig, maker: str, arguments: Sequence[Any], *, trainer_device: str = "cpu"
    ) -> None:
        self.cluster = cluster
        self.maker = maker
        self.arguments = tuple(arguments)
        self.trainer_device = trainer_device
        self.version = 0
        self.seats: list[Seat] = []
        self.restarts = 0
        self.closed = False
        self.times: dict[str, list[float]] = {"put": [], "pull": []}
        self._connection: Connection | None = None
        self._group: Any = None
        self._weights: list[Any] = []
        self._lock = threading.RLock()

    @property
    def ray(self) -> Any:
        """The module, connected, with the workers on their way."""
        with self._lock:
            if self.closed:
                raise EngineError("the rollout workers were closed; make a new pool")
            if self._connection is None:
                self._connection = connect(self.cluster, trainer_device=self.trainer_device)
                self._place()
            return self._connection.ray

    def _place(self) -> None:
        """Reserve a bundle of resources a worker, and start one in each."""
        from ray.util.placement_group import placement_group

        cluster = self.cluster
        bundle = {"CPU": cluster.cpus_per_worker, "GPU": cluster.gpus_per_worker}
        bundle = {kind: amount for kind, amount in bundle.items() if amount} or {"CPU": 0.001}
        self._group = placement_group([bundle] * cluster.workers, strategy=cluster.placement.upper())
        if not self._group.wait(timeout_seconds=cluster.start_timeout_s):
            has = self.ray.available_resources()
            free = ", ".join(f"{has.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU"))
            self.close()
            raise EngineError(
                f"no room for {cluster.workers} workers of {bundle} each ({cluster.placement}) within "
                f"{cluster.start_timeout_s:g} s; free: {free}. Lower cluster.workers, cluster.cpus_per_worker or "
                "cluster.gpus_per_worker, or add machines"
            )
        self.seats = [self._seat(index) for index in range(cluster.workers)]

    def _seat(self, index: int) -> Seat:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote: Any = self.ray.remote(RolloutWorker).options(
            num_cpus=self.cluster.cpus_per_worker,
            num_gpus=self.cluster.gpus_per_worker,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        )
        actor = remote.remote(site_here(), self.maker, *self.arguments)
        # Calls of one caller are carried out in order: weights that are asked for now are there before the first tree.
        ready = actor.ready.remote() if not self._weights else actor.load.remote(self._weights, self.version)
        return Seat(index, actor, ready)

    # Weights

    def publish(self, state: State | None, version: int) -> None:
        """Send the trainer's weights to all workers as ``version``: put once, pulled by each when it is free."""
        ray, start = self.ray, time.monotonic()
        box = ray.put(pack_weights(state() if state is not None else {}))
        with self._lock:
            self._weights, self.version = [box], version
            self.times["put"].append(time.monotonic() - start)
            for seat in self.seats:
                seat.waiting_for = seat.actor.load.remote(self._weights, version)
                seat.waiting_since = time.monotonic()

    def settle(self, seat: Seat, *, timeout_s: float) -> bool:
        """Whether ``seat`` is up and has the newest weights, after at most ``timeout_s`` seconds.

        Raises what the worker raised; a lost worker is replaced, and the answer is no.
        """
        ray, asked = self.ray, seat.waiting_for
        if asked is None:
            return True
        done, _ = ray.wait([asked], timeout=timeout_s)
        limit = self.cluster.timeout_s if seat.started else self.cluster.start_timeout_s
        if not done:
            if time.monotonic() - seat.waiting_since > limit:
                what = "take its weights" if seat.started else "start"
                self.lose(seat, EngineError(f"it did not {what} within {limit:g} s"))
            return False
        try:
            answer = ray.get(asked)
        except ray.exceptions.RayError as error:
            if not is_loss(error):
                raise own_error(error) from error
            self.lose(seat, error)
            return False
        with self._lock:
            seat.started = True
            if seat.waiting_for is asked:  # nothing newer was published meanwhile
                seat.waiting_for = None
            if isinstance(answer, float):
                self.times["pull"].append(answer)
            return seat.waiting_for is None

    # Workers

    def lose(self, seat: Seat, error: Exception) -> None:
        """Give up a worker, and start another in its place while that is allowed."""
        ray = self.ray
        with self._lock:
            if seat not in self.seats:
                return
            self.seats.remove(seat)
            ray.kill(seat.actor, no_restart=True)
            again = self.restarts < self.cluster.restarts
            reason = first_line(error)
            _log.warning(
                "rollout worker %d is lost (%s); %s",
                seat.index,
                reason,
                "starting another" if again else "not replaced",
            )
            if again:
                self.restarts += 1
                self.seats.append(self._seat(seat.index))
            if not self.seats:
                raise EngineError(
                    f"all {self.cluster.workers} rollout workers are lost and cluster.restarts={self.cluster.restarts} "
                    f"is used up; the last one: {reason}. resume=true goes on from the newest checkpoint"
                ) from error

    def generate(self, requests: Sequence[Request]) -> list[Generation | Exception]:
        """One generation a request, in order, or the exception that stands for it.

        Turns of one tree go to the same worker, whose engine may remember their prefix. A lost worker's requests are
        asked again, once: the seed of a request decides its draw.
        """
        found: dict[int, Generation | Exception] = {}
        for attempt in range(2):
            left = [place for place in range(len(requests)) if place not in found]
            for place, reply in self._ask(requests, left, last=attempt == 1):
                found[place] = reply
        return [found[place] for place in range(len(requests))]

    def _ask(
        self, requests: Sequence[Request], places: Sequence[int], *, last: bool
    ) -> list[tuple[int, Generation | Exception]]:
        ray, out = self.ray, []
        with self._lock:
            seats = [seat for seat in self.seats if seat.started] or list(self.seats)
            shares = [[p for p in places if _bucket(requests[p].key, len(seats)) == i] for i in range(len(seats))]
            asked = [
                (seat, share, seat.actor.generate.remote([WireRequest.of(requests[p]) for p in share]))
                for seat, share in zip(seats, shares)
                if share
            ]
        for seat, share, answer in asked:
            try:
                replies = ray.get(answer, timeout=self.cluster.timeout_s)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                if not is_loss(error) and not isinstance(error, ray.exceptions.GetTimeoutError):
                    raise own_error(error) from error
                self.lose(seat, error)
                if last:
                    raise EngineError(
                        f"two workers were lost while they generated; the last one: {first_line(error)}"
                    ) from error
                continue
            for place, reply in zip(share, replies, strict=True):
                out.append((place, reply if isinstance(reply, Exception) else reply.generation(requests[place])))
        return out

    def take_times(self) -> dict[str, float]:
        """Seconds since the last call: of putting weights, and of the slowest worker's pull."""
        with self._lock:
            taken, self.times = self.times, {"put": [], "pull": []}
        return {
            "timing_s/weights_put": sum(taken["put"]),
            "timing_s/weights_pull": max(taken["pull"], default=0.0),
        }

    def close(self) -> None:
        """End the workers and give their resources back. Closing twice is fine."""
        with self._lock:
            self.closed = True
            connection, self._connection = self._connection, None
            seats, self.seats = self.seats, []
            group, self._group = self._group, None
            self._weights = []
        if connection is None or not connection.ray.is_initialized():
            return
        ray = connection.ray
        ending = [seat.actor.close.remote() for seat in seats if seat.started]
        ray.wait(ending, num_returns=len(ending), timeout=5.0) if ending else None
        for seat in seats:
            ray.kill(seat.actor, no_restart=True)
        if group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(group)
        connection.close()


def _bucket(key: Sequence[Any], parts: int) -> int:
    """The worker of a tree's turns."""
    from zlib import crc32

    return crc32(repr(tuple(key[:2])).encode("utf-8", "surrogatepass")) % parts
