"""What the command line does with a configuration: progress bars, tables, files."""

from __future__ import annotations

import importlib
import json
import shlex
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from turntree.errors import ConfigError, EngineError
from turntree.trainers.compose import compose

if TYPE_CHECKING:
    from turntree.envs.worlds.names import Split

__all__ = [
    "Stopped",
    "resumable",
    "run_audit",
    "run_check_env",
    "run_doctor",
    "run_evaluate",
    "run_explain",
    "run_model",
    "run_quickstart",
    "run_sft",
    "run_train",
    "run_view",
    "run_world",
]

console = Console()


def say(text: str) -> None:
    """A line for people: never wrapped, and brackets in paths and overrides are no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Stopped(KeyboardInterrupt):
    """Ctrl-C ended a command that can go on; the message says how."""


def _resume_hint(command: str, overrides: Sequence[str]) -> str:
    kept = [o for o in overrides if not o.startswith("resume=")]
    return "go on with: " + shlex.join(["turntree", command, *kept, "resume=true"])


@contextmanager
def resumable(command: str, overrides: Sequence[str]) -> Iterator[None]:
    """Ctrl-C inside ends the command with the words to continue it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise stop if isinstance(stop, Stopped) else Stopped(f"stopped; {_resume_hint(command, overrides)}") from None


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )


def run_train(overrides: Sequence[str]) -> None:
    """``turntree train``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    from turntree.trainers.learner import train
    from turntree.trainers.report.run import step_note, write_report

    with resumable("train", overrides):
        with stage_bars() as report:

            def show(step: int, metrics: dict[str, float]) -> None:
                report("train", step, config.trainer.steps, step_note(metrics))

            result = train(config, on_step=show)
        write_report(result.folder)
        say(f"run folder: {result.folder}")
        if result.interrupted:
            raise Stopped(f"stopped after step {result.progress.step}; {_resume_hint('train', overrides)}")


def run_sft(overrides: Sequence[str]) -> None:
    """``turntree sft``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    from turntree.trainers.coldstart import cold_start

    with resumable("sft", overrides), stage_bars() as report:
        done = cold_start(config, on_step=lambda step, loss: report("sft", step, config.sft.steps, f"loss {loss:.3f}"))
    losses = done.result.losses
    say(
        f"teacher {'EM' if done.metric == 'em' else done.metric} {done.teacher_em:.3f} on "
        f"{done.demonstrations} demonstrations; loss "
        f"{losses[-1] if losses else float('nan'):.3f} after {done.result.steps} steps; model: {done.model}"
    )


def run_evaluate(overrides: Sequence[str]) -> None:
    """``turntree evaluate``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    from turntree.trainers.evaluate import INTERRUPTED
    from turntree.trainers.scoring import score

    folder = Path(config.out) if config.out else _free(Path("runs/evaluation"))
    with stage_bars() as report:
        s = score(config, folder, report=lambda done, total: report("evaluate", done, total, ""), keep_partial=True)
    say(f"{_figures(s)}  n={s['n']} failed={s['failed']}  -> {folder / 'evaluation.json'}")
    if s["stopped"]:
        kept = [*(o for o in overrides if not o.startswith("out=")), f"out={folder}"]
        left = f"{s['unplayed']} questions were not played: {s['stopped']}; {_resume_hint('evaluate', kept)}"
        raise Stopped(left) if s["stopped"] == INTERRUPTED else EngineError(left)


def _figures(summary: dict[str, Any]) -> str:
    """What an evaluation found, with intervals: EM and F1, or the task's own metric, success and reward."""
    from turntree.trainers.evaluate import shown

    words = {"em": "EM", "f1": "F1"}
    return "  ".join(
        f"{words.get(key, key)} {summary[key]:.3f} [{summary[f'{key}_low']:.3f}, {summary[f'{key}_high']:.3f}]"
        for key in shown(summary)
    )


def _free(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that is not there yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def run_world(out: Path, *, seed: int, profile: str, split: Split, entities: int | None, questions: int | None) -> None:
    """``turntree world``."""
    from turntree.envs.worlds import generate_world

    world = generate_world(profile, seed=seed, split=split, entities=entities, questions=questions)
    world.save(out)
    say(f"{len(world.passages)} passages, {len(world.questions)} questions -> {out}")


def run_model(name: str, out: Path, *, seed: int, head_dim: int | None = None) -> None:
    """``turntree model``."""
    if name == "smollm2":
        from turntree.agents.smollm2 import unpack_smollm2

        unpack_smollm2(out)
    else:
        from turntree.trainers.quickstart import write_tiny_model

        write_tiny_model(out, seed=seed, head_dim=head_dim)
    say(f"model folder: {out}")


def run_view(run: Path, *, step: int | None, index: int | None, out: Path | None, listing: bool) -> None:
    """``turntree view``."""
    from turntree.trainers.report.run import list_trees, write_tree

    if listing:
        for line in list_trees(run):
            say(line)
        return
    path = write_tree(run, step=step, index=index, out=out)
    say(f"tree: {path}")
    if console.is_terminal:
        webbrowser.open(path.resolve().as_uri())


def run_explain(
    tree: Path, *, credit: str | None, arguments: Sequence[str], step: int | None, index: int | None
) -> None:
    """``turntree explain``."""
    from turntree.trainers.report.explain import explain_stored

    say(explain_stored(tree, credit=credit, arguments=dict(map(_argument, arguments)), step=step, index=index))


def _argument(text: str) -> tuple[str, Any]:
    """``key=value``, the value as JSON where it is some, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--arg {text!r} is not of the form key=value (such as --arg eps=1e-6)")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def run_doctor(overrides: Sequence[str], *, as_json: bool) -> None:
    """``turntree doctor``; ends the process with code 1 when the configured run cannot work."""
    config = compose(overrides)
    from turntree.trainers import doctor

    checks = doctor.diagnose(config)
    document = doctor.as_json(checks, config)
    if as_json:
        console.print_json(json.dumps(document))
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

    asked = load_checker(checker, dict(map(_argument, arguments)))
    poll = Poll(asked, votes=votes, quorum=quorum, early_stop=early_stop, seed=seed, cache=VoteCache(cache))
    if trajectories is not None:
        labelled = read_labelled(trajectories)
    else:
        labelled = world_trajectories(world or "", questions=questions, laziness=laziness, error=error, seed=seed)
    with closing(poll), stage_bars() if not as_json else nullcontext(_silent) as report:
        found, rows = audit(labelled, poll, name=checker, on_batch=lambda done, total: report("votes", done, total, ""))
    if out is not None:
        save_rows(out, rows)
    if as_json:
        console.print_json(json.dumps(found.to_json()))
        return
    for line in found.lines():
        say(line)


def _silent(stage: str, done: int, total: int, note: str) -> None:
    """No progress: the output is for a program."""


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
    env = open_env(name, dict(_argument(argument) for argument in arguments), what="ID")
    if how is not None or forker(env) is None:
        env = Forkable(env, how or "auto")
    report = report_fork(env, laws=laws or None, seed=seed, turns=turns)
    if as_json:
        console.print_json(json.dumps(report.to_json()))
    else:
        say(str(report))
    if not report.ok:
        raise SystemExit(1)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a module of the user's may fail in any way
        raise ConfigError(f"--import {module}: {type(error).__name__}: {error}") from error


def run_quickstart(overrides: Sequence[str]) -> None:
    """``turntree quickstart``."""
    preset = [] if any(o.startswith("experiment=") for o in overrides) else ["experiment=quickstart"]
    config = compose([*preset, *overrides])
    from turntree.trainers.quickstart import quickstart

    with resumable("quickstart", overrides):
        with stage_bars() as report:
            summary = quickstart(config, report=report)
        if summary.get("interrupted"):
            raise Stopped(f"stopped after step {summary['step']}; {_resume_hint('quickstart', overrides)}")
    console.print_json(json.dumps(summary))


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """One progress bar a stage; piped output gets a line each time a tenth of a stage is done."""
    with Progress(*_columns(), console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}
        tenths: dict[str, int] = {}

        def report(stage: str, done: int, total: int, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note="")
            bars.update(tasks[stage], completed=done, note=note)
            tenth = 10 * done // max(total, 1)
            if not console.is_terminal and tenths.get(stage) != tenth:
                tenths[stage] = tenth
                say(f"{stage}: {done}/{total} {note}")

        yield report
