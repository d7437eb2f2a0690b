"""One optimiser step over the packs of a mini-batch, as TorchRL's ``Trainer`` asks for it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper

from turntree.trainers.diagnosis import Skipped
from turntree.trainers.distributed.share import fingerprint
from turntree.trainers.distributed.strategy import Single, Strategy
from turntree.trainers.losses import Denominators
from turntree.trainers.objectives import PolicyObjective, combine_metrics
from turntree.trainers.packing import Pack
from turntree.trainers.updates import update

_log = logging.getLogger(__name__)

__all__ = ["PolicyStepper"]


class PolicyStepper(OptimizationStepper):  # type: ignore[misc]
    """One optimiser step over the packs of a mini-batch, with global denominators.

    ``optimizer`` is a torch optimiser of the objective's parameters, or the strategy of a run, which has one and clips.
    A step whose gradient is not finite is skipped and counted (``skipped``, ``in_a_row``); weights and moments stay as
    they were, and ``on_skip`` is told. ``updates`` counts every step, skipped ones too; the warm-up follows it.
    """

    def __init__(
        self,
        objective: PolicyObjective,
        optimizer: torch.optim.Optimizer | Strategy,
        *,
        max_grad_norm: float = 0.0,
        warmup_steps: int,
        on_skip: Callable[[Skipped], None] | None = None,
    ) -> None:
        self.objective = objective
        self.on_skip = on_skip
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = Single(objective.network, optimizer, parameters=objective.parameters(), clip=max_grad_norm)
        self.optimizer: Strategy = optimizer
        self.warmup_steps = warmup_steps
        self.learning_rates = [group["lr"] for group in optimizer.param_groups]
        self.updates = 0
        self.skipped = 0
        self.in_a_row = 0
        self.history: list[dict[str, float]] = []

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDict:
        del trainer
        packs: list[Pack] = sub_batch.get_non_tensor("packs")
        self._set_learning_rate()
        if self.optimizer.ranks.size > 1:
            self.optimizer.ranks.agree("the packs of a mini-batch", fingerprint(packs))
        # Every rank knows all packs of the mini-batch: what it divides by is global.
        denominators = Denominators.of(packs)

        def loss(pack: Pack) -> tuple[torch.Tensor, TensorDictBase]:
            out = self.objective(pack, denominators)
            total = functools.reduce(torch.add, (out[name] for name in self.objective.out_keys))
            return total, out.detach().cpu()

        outputs, norm = update(self.optimizer, packs, loss)
        self.updates += 1
        self.in_a_row = 0 if math.isfinite(norm) else self.in_a_row + 1
        if self.in_a_row:
            self.skipped += 1
            _log.warning("update %d was skipped: the norm of its gradient is %s", self.updates, norm)
            if self.on_skip is not None:
                self.on_skip(Skipped(packs, outputs, norm))
        metrics = {**combine_metrics(outputs), "grad_norm": norm}
        self.history.append(metrics)
        return TensorDict({k: torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()}, batch_size=[])

    def take_metrics(self) -> dict[str, float]:
        """Means over the updates since the last call; empty without any."""
        taken, self.history = self.history, []
        return {key: math.fsum(m[key] for m in taken) / len(taken) for key in (taken[0] if taken else ())}

    def _set_learning_rate(self) -> None:
        factor = min(1.0, (self.updates + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates):
            group["lr"] = rate * factor
