"""Losses of pairs of sibling turns."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses.occurrences import Denominators, share
from turntree.trainers.losses.policy import PolicyLoss

__all__ = ["Pairs", "step_dpo"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of turns sampled from the same state, all [P] float.

    ``winner_logp``, ``loser_logp``: log-prob of all model tokens of the turn; ``winner_ref``, ``loser_ref``: the
    reference's, detached; ``margin``: difference of their values, positive.
    """

    winner_logp: Tensor
    loser_logp: Tensor
    winner_ref: Tensor
    loser_ref: Tensor
    margin: Tensor

    def __post_init__(self) -> None:
        shapes = {f.name: tuple(getattr(self, f.name).shape) for f in fields(self)}
        if len(set(shapes.values())) != 1 or len(shapes["margin"]) != 1:
            raise ValueError(f"all columns of pairs need one shape [P], found {shapes}")


def step_dpo(pairs: Pairs, denominators: Denominators, *, beta: float = 0.1) -> PolicyLoss:
    """Step-level DPO: the mean over the mini-batch's pairs of -log sigmoid(m).

    m = beta ((lp_w - ref_w) - (lp_l - ref_l)). DPO, arXiv 2305.18290 eq. 7, on sibling turns, which share their prefix.
    Reports the share of pairs whose winner has the higher implicit reward (``pair_accuracy``, ties count half), the
    mean of m (``pair_logit``) and of the difference in value (``pair_margin``). Raises ``ConfigError`` for a ``beta``
    of at most 0.
    """
    if not 0 < beta < math.inf:
        raise ConfigError(f"beta must be positive and finite, found {beta}")
    logit = beta * ((pairs.winner_logp - pairs.winner_ref) - (pairs.loser_logp - pairs.loser_ref))
    reported = {
        "pair_accuracy": 0.5 * (1.0 + logit.sign()),
        "pair_logit": logit,
        "pair_margin": pairs.margin.to(logit.dtype),
    }
    return PolicyLoss(
        loss=share(-torch.nn.functional.logsigmoid(logit), denominators.pairs),
        metrics={name: share(values.detach(), denominators.pairs) for name, values in reported.items()},
    )


# How an objective knows that the loss is one of pairs.
step_dpo.__dict__["needs"] = "pairs"
