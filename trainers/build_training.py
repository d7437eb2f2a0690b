"""The parts that only a training run has: validation task, reference, mini-batches, optimiser, objective."""

from __future__ import annotations

import copy
from typing import cast

import torch

from turntree.agents.lora import has_adapter
from turntree.errors import ConfigError
from turntree.trainers.build import AnyLoss, Bench, kl_reward, overlong, pair_chooser
from turntree.trainers.config import RunConfig
from turntree.trainers.credit import CreditRule
from turntree.trainers.distributed.ranks import Ranks
from turntree.trainers.distributed.setup import AdamW, build_strategy
from turntree.trainers.distributed.strategy import Strategy
from turntree.trainers.losses import Aggregation, Clip, RatioGradient, RatioLevel, TurnRatio
from turntree.trainers.objectives import ObjectiveArgs, PolicyObjective, loss_needs
from turntree.trainers.packing import SharedTurns
from turntree.trainers.preparation import Preparation
from turntree.trainers.task import Task, build_task, has_split

__all__ = [
    "build_objective",
    "build_preparation",
    "build_reference",
    "build_optimizer",
    "build_validation",
    "check_validation",
]


def build_validation(config: RunConfig, bench: Bench) -> Task | None:
    """The validation task; None where a run has none. Raises ``ConfigError`` where it is to validate and cannot."""
    check_validation(config)
    return build_task(config, bench.tokenizer, split="dev") if has_split(config, "dev") else None


def check_validation(config: RunConfig) -> None:
    """Raise ``ConfigError`` where a run is to validate and cannot."""
    if config.trainer.eval_every and not has_split(config, "dev"):
        raise ConfigError(
            "trainer.eval_every is set but there is nothing to validate on: name a file in env.dev_questions, or "
            "arguments of another environment in env.dev_args"
        )


def build_reference(config: RunConfig, bench: Bench, loss: AnyLoss | None) -> torch.nn.Module | None:
    """The frozen initial policy, also when a run goes on from a checkpoint; none where nothing compares with it."""
    pairs = loss is not None and loss_needs(loss) == "pairs"
    if config.algorithm.kl_coef == 0 and not pairs:
        return None
    if has_adapter(bench.model) and config.algorithm.reference_every is None:
        return cast("torch.nn.Module", bench.model)  # with the adapter off
    reference = cast("torch.nn.Module", copy.deepcopy(bench.model))
    return reference.eval().requires_grad_(False)


def build_preparation(
    config: RunConfig,
    bench: Bench,
    *,
    credit: CreditRule,
    loss: AnyLoss | None,
    reference: torch.nn.Module | None,
    value_head: torch.nn.Module | None,
    ranks: Ranks,
) -> Preparation:
    """How the run's rollouts become mini-batches."""
    algorithm, trainer = config.algorithm, config.trainer
    return Preparation(
        credit=credit,
        model=bench.model,
        reference=reference,
        value_head=value_head,
        max_pack_tokens=trainer.max_pack_tokens,
        groups_per_update=trainer.prompts_per_update or trainer.prompts_per_step,
        shared_turns=cast("SharedTurns", algorithm.shared_turns),
        min_scored_leaves=algorithm.min_scored_leaves,
        temperature=config.sampling.temperature,
        overlong=overlong(algorithm),
        kl_reward=kl_reward(algorithm),
        entropy_balance=algorithm.entropy_balance,
        pairs=pair_chooser(algorithm, loss, credit),
        ranks=ranks,
    )


def build_optimizer(config: RunConfig, bench: Bench, *, value_head: torch.nn.Module | None, ranks: Ranks) -> Strategy:
    """Where parameters and gradients live, and the optimiser."""
    options = config.trainer
    adamw = AdamW(options.learning_rate, options.adam_beta2, options.weight_decay, clip=options.max_grad_norm)
    return build_strategy(config, ranks, bench.model, value_head, adamw=adamw)


def objective_args(config: RunConfig) -> ObjectiveArgs:
    """What the configuration says of the objective, as arguments of :class:`PolicyObjective`."""
    algorithm = config.algorithm
    return {
        "ratio": cast("RatioLevel", algorithm.ratio),
        "turn_ratio": cast("TurnRatio", algorithm.turn_ratio),
        "ratio_gradient": cast("RatioGradient", algorithm.ratio_gradient),
        "clip": cast("Clip", algorithm.clip),
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "dual_clip": algorithm.dual_clip,
        "by_turns": algorithm.by_turns,
        "aggregation": cast("Aggregation", algorithm.aggregation),
        "sum_norm": algorithm.sum_norm,
        "kl_coef": algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        "kl_estimator": algorithm.kl_estimator,
        "entropy_coef": algorithm.entropy_coef,
        "value_coef": algorithm.value_coef,
        "value_clip": algorithm.value_clip,
        "temperature": config.sampling.temperature,
        "importance_cap": config.trainer.importance_cap,
    }


def build_objective(
    config: RunConfig,
    bench: Bench,
    *,
    loss: AnyLoss | None,
    value_head: torch.nn.Module | None,
    strategy: Strategy,
) -> PolicyObjective:
    """What the run minimises."""
    arguments = objective_args(config)
    return PolicyObjective(bench.model, value_head=value_head, loss=loss, forward=strategy.forward, **arguments)
