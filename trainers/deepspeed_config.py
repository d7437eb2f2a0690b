"""The options of ``trainer.strategy=deepspeed``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turntree.errors import ConfigError
from turntree.trainers.options import opt

__all__ = ["DeepSpeedConfig"]

#: What other options or turntree itself decide, as keys of DeepSpeed's configuration.
_OWN = {
    "train_batch_size": "trainer.prompts_per_update",
    "train_micro_batch_size_per_gpu": "trainer.max_pack_tokens",
    "gradient_accumulation_steps": "trainer.max_pack_tokens",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.learning_rate, weight_decay and adam_beta2",
    "scheduler": "trainer.warmup_steps",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "activation_checkpointing": "trainer.activation_checkpointing",
}
_OWN_ZERO = {
    "stage": "deepspeed.stage",
    "offload_optimizer": "deepspeed.offload_optimizer",
    "offload_param": "deepspeed.offload_params",
}


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What ``trainer.strategy=deepspeed`` spreads over its ranks, and where it lies."""

    stage: int = opt(2, "ZeRO stage: 1 spreads moments over the ranks, 2 gradients too, 3 weights too.")
    offload_optimizer: bool = opt(False, "moments and the optimiser's weights lie in CPU memory and are stepped there.")
    offload_params: bool = opt(False, "weights that are not in use lie in CPU memory (stage 3).")
    timeout_s: float = opt(1800.0, "seconds that ranks wait for each other before the run ends with an error.")
    args: dict[str, Any] = opt({}, "further keys of DeepSpeed's own configuration (zero_optimization.overlap_comm).")

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ConfigError(f"deepspeed.stage={self.stage}: expected 1, 2 or 3")
        if self.offload_params and self.stage != 3:
            raise ConfigError(
                f"deepspeed.offload_params=true needs weights that are spread over the ranks, but deepspeed.stage="
                f"{self.stage}; set it to 3"
            )
        if not self.timeout_s > 0:
            raise ConfigError(f"deepspeed.timeout_s={self.timeout_s}: expected seconds above 0")
        zero = self.args.get("zero_optimization", {})
        taken = [(key, _OWN[key]) for key in self.args if key in _OWN]
        if isinstance(zero, dict):
            taken += [(f"zero_optimization.{key}", _OWN_ZERO[key]) for key in zero if key in _OWN_ZERO]
        if taken:
            key, option = taken[0]
            raise ConfigError(f"deepspeed.args.{key} is decided by {option}; set that instead")
