"""A cold start as a job: play what is missing, judge all of it, write what is kept and what is not.

::

    trajectories.jsonl  every finished trajectory, once (journal.json: what they depend on)
    turns.jsonl         turns of trajectories that are not finished, and the usage
    kept.jsonl  dropped.jsonl  statistics.json
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from turntree.agents.engines.endpoint import Usage
from turntree.agents.scorer import Failed, Scorer, close_all
from turntree.envs.core import TurnCore
from turntree.errors import ConfigError
from turntree.trainers.atomic import atomic_file, write_json, written
from turntree.trainers.build import run_path
from turntree.trainers.coldstart.criteria import check_criterion, load_criterion
from turntree.trainers.coldstart.filters import Filter, load_filters
from turntree.trainers.coldstart.journal import Journal, json_line
from turntree.trainers.coldstart.played import Key, Played, Slot, slots
from turntree.trainers.coldstart.rows import DROPPED, KEPT, STATISTICS, verdict_row
from turntree.trainers.coldstart.select import Verdict, best_of, judge
from turntree.trainers.coldstart.statistics import PASS, Statistics
from turntree.trainers.coldstart.teachers import (
    Outcome,
    facts,
    open_seat,
    play_engine,
    play_oracle,
    student_tokenizer,
    uid,
)
from turntree.trainers.coldstart.turns import RecordedEngine, TurnLog
from turntree.trainers.config import RunConfig
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.run_lock import only_writer
from turntree.trainers.task import Task, build_task, first

__all__ = ["Report", "Selection", "coldstart", "make", "make_in_memory", "prepare"]

_log = logging.getLogger(__name__)

Report = Callable[[str, int, int, str], None]
"""``report(stage, done, total, note)``: how far a stage has come."""

BATCH = 256
"""Trajectories that are judged at once, whole questions each time."""


class Store(Protocol):
    """Where finished trajectories are."""

    def find(self, slot: Slot) -> Played | None: ...


@dataclass(frozen=True, slots=True)
class Selection:
    """What a cold start left: ``rows`` that are kept (where it wrote no files), and the numbers of all of it."""

    statistics: Statistics
    folder: Path | None = None
    rows: tuple[dict[str, Any], ...] = ()
    dropped: tuple[dict[str, Any], ...] = ()

    @property
    def kept_file(self) -> Path | None:
        """What ``sft.data`` takes."""
        return None if self.folder is None else self.folder / KEPT


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be played, and how it is judged."""

    config: RunConfig
    task: Task
    slots: tuple[Slot, ...]
    filters: Mapping[str, Filter]

    @property
    def core(self) -> TurnCore[Any]:
        """The rules."""
        return self.task.core


def prepare(config: RunConfig, *, task: Task | None = None) -> Plan:
    """Check the options and load questions and environment; nothing is written. Raises ``ConfigError`` and others."""
    filters = load_filters(config.coldstart.filters)
    task = task or build_task(config, student_tokenizer(config))
    check_criterion(config, task.core)
    asked = first(task.questions, config.coldstart.questions)
    return Plan(config, task, tuple(slots(asked, config.coldstart.samples)), filters)


def coldstart(config: RunConfig, *, report: Report = lambda *_: None) -> Selection:
    """``turntree coldstart``: play, judge and write into the run folder ``out``, or go on there with ``resume``.

    What is there is never played again; samples and questions may be raised, and criterion, filters, ``keep`` and
    ``min_score`` changed when it goes on. ``report`` hears of trajectories and of judged questions.

    Raises:
        ConfigError: an option does not fit.
        CheckpointError: the folder is in use (without ``resume``), or holds trajectories made in another way (with it).
    """
    plan = prepare(config)
    folder = RunFolder.create(run_path(config, "coldstart"), config, resume=config.resume)
    selection = make(plan, folder.path, report=report)
    folder.save_config(config)
    document = selection.statistics.to_json()
    folder.write_summary({key: value for key, value in document.items() if key != "by_question"})
    return selection


# -- playing ----------------------------------------------------------------------------------------------------------


def make(plan: Plan, folder: Path, *, report: Report = lambda *_: None) -> Selection:
    """Play what is missing in ``folder``, then select from all of it and write the files there."""
    config, core = plan.config, plan.core
    with only_writer(folder), Journal(folder, facts(config, core, plan.task.source)) as journal:
        finished = [uid(slot.key) for slot in plan.slots if slot.key in journal]
        with closing(TurnLog(folder, finished=finished)) as log:
            outcome = _play(plan, journal, log, report)
            usage = log.usage
        journal.settle(slot.key for slot in plan.slots)
        with _criterion(plan, votes=folder / "votes.sqlite") as criterion:
            verdicts = _verdicts(plan, _Journalled(journal, core), criterion, outcome, report)
            statistics = _write(plan, verdicts, folder, outcome, usage)
    return Selection(statistics, folder)


def _play(plan: Plan, journal: Journal, log: TurnLog, report: Report) -> Outcome:
    """Let the teacher play what the journal lacks."""
    config, core, total = plan.config, plan.core, len(plan.slots)
    asked = [slot for slot in plan.slots if slot.key not in journal]
    done = total - len(asked)
    report("coldstart", done, total, "")
    if not asked:
        return Outcome({})

    def take(played: Played) -> None:
        nonlocal done
        journal.append(played.key, played.to_json(core))
        log.forget(uid(played.key))
        done += 1
        report("coldstart", done, total, _note(log.usage))

    if config.coldstart.teacher == "oracle":
        for played in play_oracle(asked, core, config, student_tokenizer(config)):
            take(played)
        return Outcome({})
    with open_seat(config, core, spent=log.usage) as seat:
        return play_engine(asked, core, replace(seat, engine=RecordedEngine(seat.engine, log)), on_played=take)


def _note(usage: Usage) -> str:
    if not usage.requests:
        return ""
    cost = f", cost {usage.cost:.4g}" if usage.cost else ""
    return f"{usage.requests} calls, {usage.completion_tokens} tokens{cost}"


def make_in_memory(plan: Plan) -> Selection:
    """The same with the oracle, which is played again faster than it is read back; nothing is written."""
    if plan.config.coldstart.teacher != "oracle":
        raise ConfigError("only the oracle is played in memory; engines write each trajectory down")
    tokenizer = student_tokenizer(plan.config)
    store = _Memory({played.key: played for played in play_oracle(plan.slots, plan.core, plan.config, tokenizer)})
    statistics = _statistics(plan)
    metric = plan.core.metric
    kept: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    with _criterion(plan, votes=None) as criterion:
        for name, verdicts in _verdicts(plan, store, criterion, Outcome({}), lambda *_: None):
            statistics.add(name, verdicts)
            for verdict in verdicts:
                (kept if verdict.kept else dropped).append(verdict_row(verdict, metric=metric))
    return Selection(statistics, None, tuple(kept), tuple(dropped))


@dataclass(frozen=True, slots=True)
class _Memory:
    played: Mapping[Key, Played]

    def find(self, slot: Slot) -> Played | None:
        return self.played.get(slot.key)


@dataclass(frozen=True, slots=True)
class _Journalled:
    journal: Journal
    core: TurnCore[Any]

    def find(self, slot: Slot) -> Played | None:
        if slot.key not in self.journal:
            return None
        return Played.from_json(self.journal.read(slot.key), task=slot.task, core=self.core)


# -- selecting --------------------------------------------------------------------------------------------------------


@contextmanager
def _criterion(plan: Plan, *, votes: Path | None) -> Iterator[Scorer | None]:
    criterion = load_criterion(plan.config, plan.core, votes=votes)
    try:
        yield criterion
    finally:
        close_all(criterion)


def _verdicts(
    plan: Plan, store: Store, criterion: Scorer | None, outcome: Outcome, report: Report
) -> Iterator[tuple[str, list[Verdict]]]:
    """(question, the verdicts on its trajectories), question by question; unplayed slots have none."""
    own, samples = plan.config.coldstart, plan.config.coldstart.samples
    total = len(plan.slots) // samples
    batch = max(1, BATCH // samples)
    for start in range(0, total, batch):
        some = plan.slots[start * samples : (start + batch) * samples]
        played = [one for slot in some if (one := store.find(slot)) is not None]
        judged = {one.played.key: one for one in judge(played, criterion=criterion, filters=plan.filters)}
        for place in range(0, len(some), samples):
            mine = some[place : place + samples]
            failures = {slot.key: outcome.failures[slot.key] for slot in mine if slot.key in outcome.failures}
            found = [judged[slot.key] for slot in mine if slot.key in judged]
            yield mine[0].key.question, best_of(found, keep=own.keep, min_score=own.min_score, failures=failures)
        report("judge", min(start + batch, total), total, "")


def _statistics(plan: Plan) -> Statistics:
    own = plan.config.coldstart
    passing = PASS if own.min_score is None else own.min_score
    return Statistics(own.criterion, plan.core.metric, own.samples, pass_score=passing)


def _write(
    plan: Plan, verdicts: Iterator[tuple[str, Sequence[Verdict]]], folder: Path, outcome: Outcome, usage: Usage
) -> Statistics:
    statistics, metric = _statistics(plan), plan.core.metric
    with written(folder), atomic_file(folder / KEPT) as kept, atomic_file(folder / DROPPED) as dropped:
        for name, found in verdicts:
            statistics.add(name, found)
            for verdict in found:
                (kept if verdict.kept else dropped).write(json_line(verdict_row(verdict, metric=metric)))
    statistics.unplayed = len(plan.slots) - statistics.generated
    statistics.stopped = outcome.stopped
    statistics.usage = asdict(usage)
    with written(folder / STATISTICS):
        write_json(folder / STATISTICS, statistics.to_json())
    _warn(outcome.failures)
    return statistics


def _warn(failures: Mapping[Key, Failed]) -> None:
    if failures:
        _log.warning("%d trajectories failed and were dropped; resume=true plays them again", len(failures))
