"""Commands that look at what is there: stored trees, this machine, an environment, a checker."""

from __future__ import annotations

import importlib
import os
import webbrowser
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Literal

from turntree.commands.console import argument, console, say, say_json, silent, stage_bars
from turntree.errors import ConfigError
from turntree.trainers.compose import compose

__all__ = ["run_audit", "run_check_env", "run_doctor", "run_explain", "run_view"]


def run_view(
    run: Path,
    *,
    step: int | None,
    index: int | None,
    out: Path | None,
    listing: bool,
    model: Path | None,
    fork: bool,
    browser: bool,
    **address: Any,
) -> None:
    """``turntree view``."""
    if listing:
        from turntree.trainers.report.run import list_trees

        for line in list_trees(run):
            say(line)
        return
    if out is not None:
        from turntree.trainers.report.run import write_tree

        path = write_tree(run, step=step, index=index, out=out)
        say(f"tree: {path}")
        if console.is_terminal:
            webbrowser.open(path.resolve().as_uri())
        return
    from turntree.trainers.studio.serving import StudioSettings, serve_studio

    given = {name: value for name, value in address.items() if value is not None}
    settings = StudioSettings(fork=fork, model=model, **given)
    place = _place(run, step, index)

    def ready(url: str) -> None:
        say(f"tree studio of {run}: {url}{place} (Ctrl-C stops)")
        if browser and console.is_terminal:
            webbrowser.open(url + place)

    serve_studio(run, settings, ready=ready)


def _place(run: Path, step: int | None, index: int | None) -> str:
    """The studio's link to a stored tree, which must be there; empty without one."""
    if step is None and index is None:
        return ""
    from turntree.trainers.report.selection import step_trees, tree_at

    trees = step_trees(run, step)
    link = f"#/?step={trees[0].step}"
    return link if index is None or not tree_at(trees, index) else f"{link}&tree={index}"


def run_explain(
    tree: Path, *, credit: str | None, arguments: Sequence[str], step: int | None, index: int | None
) -> None:
    """``turntree explain``."""
    from turntree.trainers.report.explain import explain_stored

    say(explain_stored(tree, credit=credit, arguments=dict(map(argument, arguments)), step=step, index=index))


def run_doctor(overrides: Sequence[str], *, as_json: bool, corpus: str | None = None) -> None:
    """``turntree doctor``; ends the process with code 1 when the configured run cannot work."""
    from turntree.trainers import doctor

    try:
        config, error = compose([*overrides, *([f"search.corpus={corpus}"] if corpus else [])]), None
    except ConfigError as refusal:  # no configuration at all: the machine is looked at all the same
        config, error = compose(), refusal
    checks = doctor.diagnose(config) if error is None else doctor.refused(config, error)
    document = doctor.as_json(checks, config)
    if as_json:
        say_json(document)
    else:
        for line in doctor.lines(checks):
            say(line)
    if not document["ok"]:
        raise SystemExit(1)


def run_audit(
    *,
    world: Path | None,
    trajectories: Path | None,
    checker: str,
    arguments: Sequence[str],
    votes: int,
    quorum: int | None,
    early_stop: bool,
    cache: str,
    questions: int,
    laziness: float,
    error: float,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """``turntree audit-reward``."""
    if (world is None) == (trajectories is None):
        raise ConfigError("expected --world or --trajectories, one of the two")
    from turntree.agents.completeness import Poll, VoteCache, load_checker
    from turntree.trainers.audit import audit
    from turntree.trainers.labelled import read_labelled, save_rows, world_trajectories

    if out is not None:
        _check_writable(out)  # votes of a model are paid for
    asked = load_checker(checker, dict(map(argument, arguments)))
    poll = Poll(asked, votes=votes, quorum=quorum, early_stop=early_stop, seed=seed, cache=VoteCache(cache))
    if trajectories is not None:
        labelled = read_labelled(trajectories)
    else:
        labelled = world_trajectories(world or "", questions=questions, laziness=laziness, error=error, seed=seed)
    with closing(poll), stage_bars() if not as_json else nullcontext(silent) as report:
        found, rows = audit(labelled, poll, name=checker, on_batch=lambda done, total: report("votes", done, total, ""))
    if out is not None:
        save_rows(out, rows)
    if as_json:
        say_json(found.to_json())
        return
    for line in found.lines():
        say(line)


def _check_writable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: expected a file in a folder that can be made, found: {error}") from error
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        found = "a folder" if out.is_dir() else f"{out.parent} read-only"
        raise ConfigError(f"--out {out}: expected a file in a folder that can be written, found {found}")


def run_check_env(
    name: str,
    *,
    modules: Sequence[str],
    arguments: Sequence[str],
    how: Literal["auto", "state", "replay", "deepcopy"] | None,
    laws: Sequence[str],
    seed: int,
    turns: int,
    as_json: bool,
) -> None:
    """``turntree check env``; ends the process with code 1 when a law fails."""
    from turntree.envs.check import forker, report_fork
    from turntree.envs.forkable import Forkable
    from turntree.envs.registry import open_env

    for module in modules:
        _import(module)
    env = open_env(name, dict(map(argument, arguments)), what="ID")
    if how is not None or forker(env) is None:
        env = Forkable(env, how or "auto")
    report = report_fork(env, laws=laws or None, seed=seed, turns=turns)
    if as_json:
        say_json(report.to_json())
    else:
        say(str(report))
    if not report.ok:
        raise SystemExit(1)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a module of the user's may fail in any way
        raise ConfigError(f"--import {module}: {type(error).__name__}: {error}") from error
