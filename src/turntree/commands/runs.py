"""Commands that run a model: train, coldstart, sft, evaluate, quickstart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.commands.console import Stopped, console, free_path, resumable, resume_hint, say, stage_bars
from turntree.errors import EngineError
from turntree.trainers.compose import compose

__all__ = ["run_coldstart", "run_evaluate", "run_quickstart", "run_sft", "run_train"]


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
            raise Stopped(f"stopped after step {result.progress.step}; {resume_hint('train', overrides)}")


def run_coldstart(overrides: Sequence[str]) -> None:
    """``turntree coldstart``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    from turntree.trainers.coldstart import coldstart

    with resumable("coldstart", overrides), stage_bars() as report:
        done = coldstart(config, report=report)
    statistics = done.statistics
    for line in statistics.lines():
        say(line)
    say(f"kept: {done.kept_file}")
    kept = [*(o for o in overrides if not o.startswith("out=")), f"out={done.folder}"]
    if statistics.stopped:
        hint = resume_hint("coldstart", kept)
        raise EngineError(f"{statistics.unplayed} trajectories were not played: {statistics.stopped}; {hint}")
    if statistics.failed:
        say(f"{statistics.failed} trajectories failed; to play them again, {resume_hint('coldstart', kept)}")


def run_sft(overrides: Sequence[str]) -> None:
    """``turntree sft``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    from turntree.trainers.coldstart import cold_start

    with resumable("sft", overrides), stage_bars() as report:
        done = cold_start(
            config,
            on_step=lambda step, loss: report("sft", step, config.sft.steps, f"loss {loss:.3f}"),
            report=report,
        )
    losses = done.result.losses
    score = "" if done.teacher_em is None else f" {done.teacher_em:.3f}"
    unfit = f" ({done.unfit} did not fit)" if done.unfit else ""
    say(
        f"teacher {'EM' if done.metric == 'em' else done.metric}{score} on "
        f"{done.demonstrations} demonstrations{unfit}; loss "
        f"{losses[-1] if losses else float('nan'):.3f} after {done.result.steps} steps; model: {done.model}"
    )


def run_evaluate(overrides: Sequence[str]) -> None:
    """``turntree evaluate``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    from turntree.trainers.evaluate import INTERRUPTED
    from turntree.trainers.scoring import score

    folder = Path(config.out) if config.out else free_path(Path("runs/evaluation"))
    with stage_bars() as report:
        s = score(config, folder, report=lambda done, total: report("evaluate", done, total, ""), keep_partial=True)
    say(f"{_figures(s)}  n={s['n']} failed={s['failed']}  -> {folder / 'evaluation.json'}")
    if s["stopped"]:
        kept = [*(o for o in overrides if not o.startswith("out=")), f"out={folder}"]
        left = f"{s['unplayed']} questions were not played: {s['stopped']}; {resume_hint('evaluate', kept)}"
        raise Stopped(left) if s["stopped"] == INTERRUPTED else EngineError(left)


def _figures(summary: dict[str, Any]) -> str:
    """What an evaluation found, with intervals: EM and F1, or the task's own metric, success and reward."""
    from turntree.trainers.evaluate import shown

    words = {"em": "EM", "f1": "F1"}
    return "  ".join(
        f"{words.get(key, key)} {summary[key]:.3f} [{summary[f'{key}_low']:.3f}, {summary[f'{key}_high']:.3f}]"
        for key in shown(summary)
    )


def run_quickstart(overrides: Sequence[str]) -> None:
    """``turntree quickstart``."""
    preset = [] if any(o.startswith("experiment=") for o in overrides) else ["experiment=quickstart"]
    config = compose([*preset, *overrides])
    from turntree.trainers.quickstart import quickstart

    with resumable("quickstart", overrides):
        with stage_bars() as report:
            summary = quickstart(config, report=report)
        if summary.get("interrupted"):
            raise Stopped(f"stopped after step {summary['step']}; {resume_hint('quickstart', overrides)}")
    console.print_json(json.dumps(summary))
