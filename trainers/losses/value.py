"""The regression of a value head to returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses.occurrences import Denominators, Occurrences, aggregate

__all__ = ["ValueLoss", "explained_variance", "value_loss"]


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """``loss`` is a scalar with a graph, this batch's share of the mini-batch's; ``clip_fraction`` and ``mean`` (of
    the values) are detached shares; ``moments`` [5] add up too, see :func:`explained_variance`."""

    loss: Tensor
    clip_fraction: Tensor
    mean: Tensor
    moments: Tensor


def value_loss(occurrences: Occurrences, denominators: Denominators, *, clip: float | None = 0.5) -> ValueLoss:
    """Half the squared error of values, clipped around the old ones: the omega-weighted token mean of
    max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.

    PPO's value loss as in verl ``compute_value_loss``; ``clip=None`` leaves the clipped term out, and without
    ``old_value`` the current values serve. A turn that several trajectories share regresses to the omega-weighted mean
    of its returns. Raises ``ConfigError`` without ``value`` or ``ret``, or for a clip below 0.
    """
    if clip is not None and not clip >= 0:
        raise ConfigError(f"value_clip must be at least 0, or None for no clip, found {clip}")
    occ = occurrences.kept()
    if occ.value is None or occ.ret is None:
        raise ConfigError(
            "the value loss needs values and returns; train with a value head and a rule that gives returns"
        )
    value, ret = occ.value, occ.ret
    plain = (value - ret).square()
    worst, clipped = plain, torch.zeros_like(plain)
    if clip is not None:
        old = (value if occ.old_value is None else occ.old_value).detach()
        bounded = (value.clamp(old - clip, old + clip) - ret).square()
        worst, clipped = torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)

    def mean(x: Tensor) -> Tensor:
        return aggregate(x, occ, denominators, how="token-mean")

    w, v, r = (x.detach().double() for x in (occ.weight, value, ret))
    pieces = (w, w * r, w * r * r, w * (r - v), w * (r - v).square())
    return ValueLoss(
        loss=0.5 * mean(worst),
        clip_fraction=mean(clipped.detach()),
        mean=mean(value.detach()),
        moments=torch.stack([x.sum() for x in pieces]),
    )


def explained_variance(moments: Tensor) -> float:
    """1 - Var(R - V) / Var(R) from the summed ``moments`` of a mini-batch's packs; 0 where all returns are equal."""
    count, r1, r2, e1, e2 = moments.double().tolist()
    if count <= 0:
        return 0.0
    returns, errors = r2 / count - (r1 / count) ** 2, e2 / count - (e1 / count) ** 2
    return 1.0 - errors / returns if returns > 1e-12 * r2 / count else 0.0
