"""What a plan is checked against: processors, memory and GPUs of the machines of a run."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.errors import ConfigError
from turntree.search_backend.machine import available_memory, cores
from turntree.trainers.options import at_least, did_you_mean

__all__ = ["GPUS", "Machine", "gpu_memory", "this_machine"]

GB = 10**9

GPUS = {"h200": 141, "h100": 80, "a100": 80, "a100-40": 40, "l40s": 48, "a6000": 48, "rtx4090": 24, "l4": 24, "t4": 16}
"""Memory of a GPU by name, in GB as its maker says it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``count`` equal machines: bytes of memory, processor cores, GPUs and bytes of memory of each GPU."""

    memory: int
    cores: int
    gpus: int = 0
    gpu_memory: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("memory", 1), ("cores", 1), ("gpus", 0), ("count", 1)):
            at_least(f"machine.{name}", getattr(self, name), minimum)
        if self.gpus and self.gpu_memory <= 0:
            raise ConfigError(f"{self.gpus} GPUs without their memory: give it too, such as --gpu h100 or --gpu 80")

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.count


def gpu_memory(text: str) -> int:
    """Bytes of a GPU given by name or as a number of GB. Raises ``ConfigError`` for anything else."""
    if text.lower() in GPUS:
        return GPUS[text.lower()] * GB
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 10_000:
        raise ConfigError(
            f"--gpu {text!r}: expected GB of memory or one of {', '.join(GPUS)}.{did_you_mean(text.lower(), GPUS)}"
        )
    return int(size * GB)


def this_machine() -> Machine:
    """What this process can have now; imports torch to ask for GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    memory = min((torch.cuda.get_device_properties(i).total_memory for i in range(gpus)), default=0)
    return Machine(available_memory(), cores(), gpus, memory)
