"""Weights from the trainer's GPU to vLLM's workers without a file: NCCL, or CUDA IPC on one GPU."""

from __future__ import annotations

import importlib
import socket
from typing import Any

from turntree.errors import ConfigError

__all__ = ["open_transfer"]


class _Client:
    """What a transfer says to a ``vllm.LLM`` of this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


def open_transfer(llm: Any, module: Any, *, kind: str) -> Any:
    """A sender of ``module``'s weights to ``llm``; its ``send_weights()`` is one update.

    ``kind``: ``nccl`` (trainer and workers on GPUs of their own) or ``ipc`` (they share one). Raises ``ConfigError``
    where the module is on no GPU.
    """
    transfer: Any = importlib.import_module("vllm.distributed.weight_transfer")
    device = next(module.parameters()).device
    if device.type != "cuda":
        raise ConfigError(f"engine.sync={kind} sends from GPU to GPU, the model is on {device}; use engine.sync=folder")
    return transfer.WeightTransferTrainerFactory.trainer_init(
        _init_info(llm, kind), client=_Client(llm), source=transfer.ModuleSource(module)
    )


def _init_info(llm: Any, kind: str) -> Any:
    backend: Any = importlib.import_module(f"vllm.distributed.weight_transfer.{kind}_engine")
    if kind == "ipc":
        return backend.IPCTrainerInitInfo(rank=0)
    workers = llm.llm_engine.vllm_config.parallel_config.world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return backend.NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=workers + 1, rank=0)
