"""``turntree doctor``: what this machine can run, what that means, and what to do about the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from turntree.agents.engines.choose import Choice, Machine, choose, inspect_machine
from turntree.envs.search_code_qa import SEARCH_CODE_QA
from turntree.errors import ConfigError
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import folders, machine, services
from turntree.trainers.doctor.check import Check, Level, as_json, lines
from turntree.trainers.doctor.engines import model_gb, resolve_engine, server_kind
from turntree.trainers.doctor.model import model, model_problem
from turntree.trainers.doctor.options import options

__all__ = ["Check", "as_json", "diagnose", "lines", "model_gb", "refused", "resolve_engine", "server_kind"]

_SERVERS = ("vllm_server", "openai")


def diagnose(config: RunConfig, here: Machine | None = None) -> list[Check]:
    """All checks of the machine under a configuration; ``here`` is this machine unless it is given.

    The configured server and retriever are asked once, ports are tried, and the rules that the configuration names are
    made as a run makes them. Nothing is kept, and nothing of a model's weights is loaded.
    """
    here = here or inspect_machine(server=server_kind(config))
    size = model_gb(config.model.path)
    choice = choose(here, model_gb=size, trains=False)
    name = choice.engine if config.engine.name == "auto" else config.engine.name
    device_is_gpu = config.trainer.device.startswith("cuda")
    search = list(_tried("search", lambda: _search(config)))
    return [
        machine.python(sys.version_info[:2]),
        *machine.packages(),
        machine.gpu(here, wanted=device_is_gpu and name not in _SERVERS),
        machine.threads(config.trainer.threads),
        machine.memory(here.memory_gb),
        machine.vllm(here, wanted=name == "vllm"),
        services.server(config, here, wanted=name in _SERVERS),
        *_tried("model", lambda: [model(config, here, size, local=name in ("hf", "vllm"))]),
        *_tried("disk", lambda: folders.space(config, size)),
        *_tried("run folder", lambda: folders.run_folder(config)),
        *search,
        *_tried("retriever", lambda: services.retriever(config)),
        *_tried("search store", lambda: services.search_store(config.search)),
        *services.ports(config),
        machine.links(),
        machine.sandbox(wanted=config.env.id == SEARCH_CODE_QA, options=config.env.args.get("python")),
        *_told_once(_tried("config", lambda: options(config, model_ok=_readable(config.model.path))), search),
        _engine(config, choice, trained=choose(here, model_gb=size, trains=True)),
    ]


def refused(standard: RunConfig, error: ConfigError) -> list[Check]:
    """The checks of the machine under the ``standard`` configuration, for options that make none: ``error`` fails."""
    fault = Check("config", "fail", "as given", str(error), "correct what it names; turntree train --help lists all")
    return [*(c for c in diagnose(standard) if c.name not in ("engine", "config")), fault]


def _tried(name: str, look: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The lines of a check. What stops the check itself (a name that is too long, a folder of somebody else's) is one
    too: the other checks are worth as much as before.
    """
    try:
        yield from look()
    except (OSError, ValueError) as error:
        yield Check(name, "fail", "could not be looked at", str(error), "correct the option that names it")


def _readable(path: str) -> bool:
    """Whether there is a model folder whose tokenizer can be tried."""
    try:
        return bool(path) and Path(path).is_dir() and model_problem(Path(path)) is None
    except OSError:
        return False


def _told_once(found: Iterator[Check], search: list[Check]) -> Iterator[Check]:
    """A corpus or index that is not there has a line already."""
    missing = any(c.level == "fail" for c in search)
    yield from (c for c in found if not (missing and c.means.startswith(("no corpus at", "no index at"))))


def _search(config: RunConfig) -> Iterator[Check]:
    """What fits of ``search.corpus`` or ``search.index``; only a configured one that is not there fails."""
    from turntree.trainers.doctor.corpus import search_lines

    for line in search_lines(config):
        level: Level = "ok" if line.fits else "fail" if line.name in ("corpus", "index") else "note"
        yield Check(line.name, level, line.found, line.means, line.do)


def _engine(config: RunConfig, choice: Choice, *, trained: Choice) -> Check:
    differs = f"; to train, engine={trained.engine}: {trained.reason}" if trained.engine != choice.engine else ""
    if config.engine.name == "auto":
        return Check("engine", "ok", f"engine=auto is {choice.engine}", choice.reason + differs)
    means = f"configured; engine=auto would be {choice.engine}: {choice.reason}{differs}"
    return Check("engine", "ok", f"engine={config.engine.name}", means)
