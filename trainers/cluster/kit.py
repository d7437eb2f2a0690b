"""What a rollout needs besides prompts and a plan's choice of trees: engine, environments, search client, judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch

from turntree.agents.engines.protocol import Engine
from turntree.agents.scorer import close_all
from turntree.trainers.agent import summarizer_usage
from turntree.trainers.build import build_bench, finisher, growth_plan, limits, scorer
from turntree.trainers.cluster.wire import Ticket
from turntree.trainers.cluster_config import ClusterConfig
from turntree.trainers.config import RunConfig
from turntree.trainers.rollout import Rollout, grow
from turntree.trainers.tally import Tally
from turntree.trainers.task import build_task, rollout_sampling
from turntree.trainers.tree import Tree

__all__ = ["ConfiguredKit", "Kit", "worker_config"]


class Kit(Protocol):
    """What a worker works with."""

    @property
    def engine(self) -> Engine: ...

    @property
    def model(self) -> torch.nn.Module | None:
        """The network whose weights follow the trainer's; None for an engine without one."""
        ...

    def grow(self, ticket: Ticket, on_counted: Callable[[Tree, Tally], None]) -> Rollout:
        """Grow the ticket's trees; ``on_counted`` gets each when it is finished."""
        ...

    def usage(self) -> Mapping[str, float]:
        """What a summariser used so far."""
        ...

    def close(self) -> None: ...


def worker_config(config: RunConfig) -> RunConfig:
    """The run as a worker makes it: an engine of its own in its process, on its own device, and no trainer.

    Next to vLLM, which has its own copy of the weights, the network that takes the trainer's stays on CPU.
    """
    on_gpu = config.cluster.gpus_per_worker > 0 and config.engine.name == "hf"
    device = "cuda" if on_gpu else "cpu"
    trainer = replace(config.trainer, device=device, activation_checkpointing="none", strategy="single", ranks=None)
    return replace(config, cluster=ClusterConfig(), trainer=trainer)


class ConfiguredKit:
    """The kit of a run's configuration. Task and judges are made when the first trees are asked for."""

    def __init__(self, config: RunConfig) -> None:
        self.config = worker_config(config)
        self.bench = build_bench(self.config)

    @property
    def engine(self) -> Engine:
        return self.bench.engine

    @property
    def model(self) -> torch.nn.Module | None:
        return self.bench.model

    @cached_property
    def _parts(self) -> dict[str, Any]:
        config, bench = self.config, self.bench
        core = build_task(config, bench.tokenizer).core
        return {
            "core": core,
            "plan": growth_plan(config.algorithm, vocab_size=bench.model.config.vocab_size),
            "sampling": rollout_sampling(config, core),
            "scorer": scorer(config, core),
            "finisher": finisher(config, bench),
        }

    def grow(self, ticket: Ticket, on_counted: Callable[[Tree, Tally], None]) -> Rollout:
        return grow(
            ticket.prompts,
            engine=self.engine,
            dialogue=self.bench.dialogue,
            limits=limits(self.config),
            run_seed=self.config.seed,
            on_counted=on_counted,
            only=ticket.only,
            **self._parts,
        )

    def usage(self) -> Mapping[str, float]:
        return summarizer_usage(self._parts["finisher"])

    def close(self) -> None:
        judges = self.__dict__.get("_parts", {})
        close_all(judges.get("scorer"), judges.get("finisher"))
        self.bench.close()
