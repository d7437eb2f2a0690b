"""Commands that run a model: train, coldstart, sft, evaluate, quickstart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.commands.console import Stopped, console, free_path, resumable, resume_hint, say, say_json, stage_bars
from turntree.errors import EngineError
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.distributed.launch import follow_launcher, is_first_rank, launch, starts_ranks

__all__ = ["run_coldstart", "run_evaluate", "run_quickstart", "run_sft", "run_train"]


def _in_ranks(command: str, overrides: Sequence[str], config: RunConfig) -> bool:
    """Whether the ranks that ``trainer.ranks`` asks for were started, and have done the work."""
    follow_launcher()
    if not starts_ranks(config.trainer.ranks):
        return False
    from turntree.trainers.distributed.setup import require_deepspeed

    require_deepspeed()
    with resumable(command, overrides):
        launch(command, overrides, ranks=config.trainer.ranks or 1, resume=resume_hint(command, overrides))
    return True


def run_train(overrides: Sequence[str]) -> None:
    """``turntree train``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    if _in_ranks("train", overrides, config):
        return
    from turntree.trainers.learner import train
    from turntree.trainers.report.run import write_report
    from turntree.trainers.report.tables import steps_table

    with resumable("train", overrides):
        with stage_bars(tabled=["train"]) as report:
            table = steps_table(console)

            def show(step: int, metrics: dict[str, float]) -> None:
                table(step, metrics)
                report("train", step, config.trainer.steps, "")

            result = train(config, on_step=show)
        if not is_first_rank():
            return
        write_report(result.folder)
        say(f"run folder: {result.folder}")
        say(f"report: {result.folder / 'report.html'}")
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
        raise EngineError(f"{statistics.missing}: {statistics.stopped}; {hint}")
    if statistics.failed:
        say(f"{statistics.failed} trajectories failed; to play them again, {resume_hint('coldstart', kept)}")


def run_sft(overrides: Sequence[str]) -> None:
    """``turntree sft``."""
    config = compose(overrides)  # before the heavy imports, so that mistakes show at once
    if _in_ranks("sft", overrides, config):
        return
    from turntree.trainers.coldstart import cold_start

    with resumable("sft", overrides), stage_bars() as report:
        done = cold_start(
            config,
            on_step=lambda step, loss: report("sft", step, config.sft.steps, f"loss {loss:.3f}"),
            report=report,
        )
    if not is_first_rank():
        return
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
    from turntree.trainers.evaluation.table import paper_table
    from turntree.trainers.scoring import score_sets

    folder = Path(config.out) if config.out else free_path(Path("runs/evaluation"))
    with stage_bars() as report:
        found = score_sets(
            config, folder, report=lambda stage, done, total: report(stage, done, total, ""), keep_partial=True
        )
    for name, s in found.documents.items():
        document = folder / name / "evaluation.json"
        say(f"{name}{': ' if name else ''}{_figures(s)}  n={s['n']} failed={s['failed']}  -> {document}")
    metrics = dict.fromkeys(m for s in found.documents.values() for m in (("em", "f1") if s["metric"] == "em" else ()))
    for metric in metrics if len(found.documents) > 1 or any(_further(s) for s in found.documents.values()) else ():
        say(f"\n{paper_table(found.documents, metric)}")
    if found.stopped:
        s = list(found.documents.values())[-1]
        kept = [*(o for o in overrides if not o.startswith("out=")), f"out={folder}"]
        sets = f", and the sets {', '.join(found.missing)}," if found.missing else ""
        left = f"{s['unplayed']} questions{sets} were not played: {found.stopped}; {resume_hint('evaluate', kept)}"
        raise Stopped(left) if found.stopped == INTERRUPTED else EngineError(left)


def _further(summary: dict[str, Any]) -> bool:
    """Whether there is more than one trajectory a question, or a score beside it that took some."""
    return any(key in summary for key in ("sampled", "tree", "closed_book"))


def _figures(summary: dict[str, Any]) -> str:
    """What an evaluation found, with intervals: EM and F1, or the task's own metric, success and reward."""
    from turntree.trainers.evaluate import shown

    words = {"em": "EM", "f1": "F1"}

    def number(key: str) -> str:
        value = summary.get(key)
        return "-" if value is None else f"{value:.3f}"

    return "  ".join(
        f"{words.get(key, key)} {number(key)} [{number(f'{key}_low')}, {number(f'{key}_high')}]"
        for key in shown(summary)
    )


def run_quickstart(overrides: Sequence[str]) -> None:
    """``turntree quickstart``."""
    preset = [] if any(o.startswith("experiment=") for o in overrides) else ["experiment=quickstart"]
    config = compose([*preset, *overrides])
    from turntree.trainers.quickstart import quickstart
    from turntree.trainers.report.tables import steps_table

    with resumable("quickstart", overrides):
        with stage_bars(tabled=["rl"]) as report:
            summary = quickstart(config, report=report, on_step=steps_table(console))
        if summary.get("interrupted"):
            raise Stopped(f"stopped after step {summary['step']}; {resume_hint('quickstart', overrides)}")
    say_json(summary)
