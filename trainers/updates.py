"""One optimiser step over all packs of a mini-batch, on one rank or many, that no bad gradient can ruin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from turntree.trainers.distributed.share import deal
from turntree.trainers.distributed.strategy import Strategy
from turntree.trainers.packing import Pack, column, table

__all__ = ["guarded_step", "update"]

T = TypeVar("T")

PIECE = 4096
"""Positions of a vocabulary projection at a time."""


def guarded_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], *, max_grad_norm: float
) -> float:
    """Clip the gradients to ``max_grad_norm`` (0: no clipping), step, and return their norm before clipping.

    With a norm that is NaN or infinite nothing is stepped: weights and moments stay as they were, the gradients are
    dropped, and the caller sees it by the value returned.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf"))
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def update(
    strategy: Strategy, packs: Sequence[Pack], loss: Callable[[Pack], tuple[Tensor, T]]
) -> tuple[list[T], float]:
    """Back-propagate the loss of every pack, then step once.

    Args:
        packs: of one mini-batch, the same on every rank; each rank works on its share. In a slot without a pack of its
            own it runs a dummy whose gradient is 0: ranks wait for each other inside the network.
        loss: the pack's share of the mini-batch's loss (shares add up to it), and what to report of the pack.

    Returns what ``loss`` reported of all packs, in an order that is the same on every rank, and the norm of the whole
    gradient before clipping; where it, or the loss of a pack, is not finite nothing was stepped.
    """
    ranks = strategy.ranks
    targets = [int(column(pack, "tokens", "loss_mask").sum()) for pack in packs]
    slots = deal([len(table(pack, "tokens")) for pack in packs], ranks.size)
    reports: list[T] = []
    for number, slot in enumerate(slots):
        strategy.begin(
            pieces=max(1, *(-(-targets[i] // PIECE) for i in slot if i is not None)), last=number == len(slots) - 1
        )
        index = slot[ranks.rank]
        if index is None:
            strategy.forward(_dummy())
            strategy.backward(None)
        else:
            value, report = loss(packs[index])
            # A loss may be infinite where its gradient is not: nothing may be learnt from it either.
            strategy.backward(value if torch.isfinite(value) else value * float("nan"))
            reports.append(report)
    norm = strategy.step()
    return [report for part in ranks.gather(reports) for report in part], norm


def _dummy() -> Pack:
    """Two tokens, the second of which is predicted from the first: as little as a network can run on."""
    columns = {
        "ids": torch.zeros(2, dtype=torch.int64),
        "position": torch.arange(2),
        "subtree_end": torch.full((2,), 2),
        "predecessor": torch.tensor([-1, 0]),
        "loss_mask": torch.tensor([False, True]),
    }
    return TensorDict({"tokens": TensorDict(columns, batch_size=[2])}, batch_size=[])
