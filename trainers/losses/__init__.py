"""Losses as pure functions of occurrences: 1-D tensors in, a small typed result out.

An occurrence is one sampled token of one trajectory; ``O`` of them are a batch. A turn that several trajectories share
occurs once in each, with a declared weight omega. Ratio level, clipping, KL estimator and aggregation are separate
arguments, so that an algorithm is a combination of them:

- GRPO, PPO, DAPO: token ratios (verl ``compute_policy_loss_vanilla``); dual clip after Ye et al. 2020.
- GSPO: sequence ratios (arXiv 2507.18071); AT2PO: turn ratios, both length-normalised.
- AEPO, GPPO, CISPO: other gradients where the clip binds.
- PPO's value loss; step-level DPO on pairs of sibling turns; weighted maximum likelihood.

Occurrences of weight 0 are inert: they enter no mean, ratio, metric or gradient, whatever they hold.
"""

from turntree.trainers.losses.clipping import cispo, clip_binds, clipped_surrogate
from turntree.trainers.losses.entropy import entropy_balanced
from turntree.trainers.losses.kl import KLEstimator, kl_estimate, kl_rewards
from turntree.trainers.losses.occurrences import Denominators, Occurrences, aggregate
from turntree.trainers.losses.policy import PolicyLoss, nll, policy_loss, ratio_metrics
from turntree.trainers.losses.preference import Pairs, step_dpo
from turntree.trainers.losses.ratios import importance_ratio
from turntree.trainers.losses.value import ValueLoss, explained_variance, value_loss
from turntree.trainers.surrogate import (
    AGGREGATIONS,
    CLIPS,
    LEVELS,
    Aggregation,
    Band,
    Clip,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    check_surrogate,
    make_bands,
)

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "Band",
    "CLIPS",
    "Clip",
    "Denominators",
    "KLEstimator",
    "LEVELS",
    "Occurrences",
    "Pairs",
    "PolicyLoss",
    "RatioGradient",
    "RatioLevel",
    "TurnRatio",
    "ValueLoss",
    "aggregate",
    "check_surrogate",
    "cispo",
    "clip_binds",
    "clipped_surrogate",
    "entropy_balanced",
    "explained_variance",
    "importance_ratio",
    "kl_estimate",
    "kl_rewards",
    "make_bands",
    "nll",
    "policy_loss",
    "ratio_metrics",
    "step_dpo",
    "value_loss",
]
