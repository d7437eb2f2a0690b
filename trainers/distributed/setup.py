"""From the options of a run to its ranks and its strategy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from turntree.errors import ConfigError, MissingExtraError
from turntree.trainers.distributed.ranks import ALONE, Ranks, join, world_size
from turntree.trainers.distributed.strategy import Single, Strategy

if TYPE_CHECKING:
    from torch import nn

    from turntree.trainers.config import RunConfig

__all__ = ["AdamW", "build_strategy", "join_run", "require_deepspeed"]


@dataclass(frozen=True, slots=True)
class AdamW:
    """The optimiser's options; ``clip``: norm to which gradients are clipped (0: not at all)."""

    learning_rate: float
    beta2: float
    weight_decay: float
    clip: float


def require_deepspeed() -> None:
    """Raises ``MissingExtraError`` where DeepSpeed is not installed; nothing of it is imported."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingExtraError(
            "trainer.strategy=deepspeed needs DeepSpeed, which is not installed; run: pip install 'turntree[deepspeed]'"
        )


def join_run(config: RunConfig) -> tuple[RunConfig, Ranks]:
    """The ranks of the run that this process is part of, and its options on this rank (its own GPU).

    Raises ``ConfigError`` for options that do not go with several ranks, ``RankError`` where the ranks do not meet.
    """
    trainer, size = config.trainer, world_size()
    if trainer.strategy == "single":
        if size > 1:
            raise ConfigError(
                f"{size} processes were started, but trainer.strategy=single trains in one: each would train a model "
                "of its own; set trainer.strategy=deepspeed"
            )
        return config, ALONE
    require_deepspeed()
    if trainer.ranks not in (None, size):
        raise ConfigError(
            f"trainer.ranks={trainer.ranks}, but this process is one of {size}: `turntree train` and `turntree sft` "
            "start the ranks themselves; anything else is started by torchrun --nproc-per-node, without trainer.ranks"
        )
    if size > 1:
        _check_several(config, size)
    ranks = join(device=trainer.device, timeout_s=config.deepspeed.timeout_s)
    if trainer.device == "cuda" and size > 1:
        config = replace(config, trainer=replace(trainer, device=f"cuda:{ranks.local_rank}"))
    return config, ranks


def _check_several(config: RunConfig, size: int) -> None:
    reasons = {
        "algorithm.adaptive moves budgets between all prompts of a rollout, which are on different ranks": (
            config.algorithm.adaptive is not None
        ),
        f"engine={config.engine.name} would be sent the weights by every rank; use engine=hf": (
            config.engine.name in ("vllm_server", "auto")
        ),
        "every rank would start a Ray of its own; start one with `ray start --head` and set cluster.address=auto": (
            config.cluster.name == "ray" and not config.cluster.address
        ),
    }
    for reason, found in reasons.items():
        if found:
            raise ConfigError(f"this run has {size} ranks, and {reason}")


def build_strategy(
    config: RunConfig, ranks: Ranks, network: nn.Module, value_head: nn.Module | None, *, adamw: AdamW
) -> Strategy:
    """What trains ``network`` (and the value head) as ``trainer.strategy`` says."""
    if config.trainer.strategy == "single":
        return _single(network, value_head, adamw)
    from turntree.trainers.distributed.deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(
        network,
        value_head,
        ranks=ranks,
        options=config.deepspeed,
        learning_rate=adamw.learning_rate,
        beta2=adamw.beta2,
        weight_decay=adamw.weight_decay,
        clip=adamw.clip,
    )


def _single(network: nn.Module, value_head: nn.Module | None, adamw: AdamW) -> Single:
    import torch

    head: Iterable[Any] = value_head.parameters() if value_head is not None else ()
    parameters = [p for p in (*network.parameters(), *head) if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=adamw.learning_rate, betas=(0.9, adamw.beta2), weight_decay=adamw.weight_decay
    )
    return Single(network, optimizer, parameters=parameters, clip=adamw.clip)
