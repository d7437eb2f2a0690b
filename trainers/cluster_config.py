"""Options of where rollouts are grown."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.errors import ConfigError
from turntree.trainers.options import at_least, finite, one_of, opt

__all__ = ["ClusterConfig"]


@dataclass(frozen=True)
class ClusterConfig:
    """Where rollouts are grown: in the trainer's process, or by workers of a Ray cluster."""

    name: str = opt("local", "local (rollouts in the trainer's process) or ray (workers grow the trees).")
    address: str = opt("", "Ray cluster: HOST:PORT, or auto for this machine's ('' : one is started, on loopback).")
    workers: int = opt(1, "processes that grow trees, each with engine, environments and search client (of each rank).")
    cpus_per_worker: float = opt(1.0, "CPUs that Ray sets aside for a worker.")
    gpus_per_worker: float = opt(0.0, "GPUs of a worker (0: its engine runs on CPU; a fraction shares one).")
    placement: str = opt("pack", "workers on few machines (pack, strict_pack: one) or many (spread, strict_spread).")
    mode: str = opt("sync", "sync, or one_step_off: the next rollout is grown while the trainer updates.")
    staleness: int | None = opt(None, "updates that a tree's oldest turn may lie behind (null: 0, or 1 one_step_off).")
    prompts_per_task: int | None = opt(None, "prompts that a worker is given at a time (null: equal parts).")
    restarts: int = opt(8, "lost workers that are started anew in a run.")
    timeout_s: float = opt(1800.0, "seconds without a finished tree after which a busy worker counts as lost.")
    start_timeout_s: float = opt(600.0, "seconds that workers may take to start.")

    def __post_init__(self) -> None:
        finite("cluster", self)
        one_of("cluster.name", self.name, ("local", "ray"))
        one_of("cluster.placement", self.placement, ("pack", "spread", "strict_pack", "strict_spread"))
        one_of("cluster.mode", self.mode, ("sync", "one_step_off"))
        self._check_address()
        for name in ("workers", "prompts_per_task"):
            at_least(f"cluster.{name}", getattr(self, name), 1)
        for name in ("cpus_per_worker", "gpus_per_worker", "staleness", "restarts"):
            at_least(f"cluster.{name}", getattr(self, name), 0)
        for name in ("timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"cluster.{name}={getattr(self, name)}: expected seconds above 0")
        if self.gpus_per_worker > 1 and self.gpus_per_worker != int(self.gpus_per_worker):
            raise ConfigError(f"cluster.gpus_per_worker={self.gpus_per_worker}: above 1 it must be a whole number")
        if self.mode == "one_step_off" and self.staleness == 0:
            raise ConfigError(
                "cluster.mode=one_step_off trains on trees of the last weights but one: cluster.staleness=0 would drop "
                "all of them; set it to 1 (or null), or use mode=sync"
            )

    def _check_address(self) -> None:
        host, _, port = self.address.rpartition(":")
        if self.address in ("", "auto") or (host and "/" not in host and port.isdecimal() and 0 < int(port) < 65536):
            return
        raise ConfigError(
            f"cluster.address={self.address!r}: expected HOST:PORT of a cluster's head, such as 10.0.0.1:6379, or auto "
            "for the one of this machine, or nothing for one of the run's own"
        )

    @property
    def bound(self) -> int:
        """Updates that the oldest turn of a tree may lie behind the trainer."""
        if self.staleness is not None:
            return self.staleness
        return 1 if self.mode == "one_step_off" else 0
