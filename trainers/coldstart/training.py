"""Supervised training on what a cold start kept: ``turntree sft``, and ``algorithm.source=teacher`` in the trainer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Engine
from turntree.agents.models import load_tokenizer, save_model
from turntree.agents.scorer import Finisher, Scorer, close_all
from turntree.agents.solutions import solutions
from turntree.agents.teacher import Demonstration, Teacher, trajectories
from turntree.envs.core import TurnCore
from turntree.envs.search_qa import SearchQACore
from turntree.errors import ConfigError, EngineError
from turntree.trainers.append import json_line
from turntree.trainers.atomic import atomic_file, written
from turntree.trainers.build import Bench, build_bench, run_path
from turntree.trainers.checkpoint import config_fingerprint
from turntree.trainers.coldstart.criteria import load_criterion, reads_answers
from turntree.trainers.coldstart.filters import load_filters
from turntree.trainers.coldstart.job import Report, make, make_in_memory, prepare
from turntree.trainers.coldstart.played import Key, Played, Slot, vocabulary
from turntree.trainers.coldstart.rows import DROPPED, KEPT, STATISTICS, kept_file, read_kept, verdict_row
from turntree.trainers.coldstart.select import best_of, judge
from turntree.trainers.coldstart.student import Lessons, Student, lessons
from turntree.trainers.coldstart.teachers import Outcome, Seat, in_flight, play_engine, play_oracle, teacher_sampling
from turntree.trainers.config import RunConfig
from turntree.trainers.distributed.ranks import Ranks
from turntree.trainers.distributed.setup import AdamW, build_strategy, join_run
from turntree.trainers.interrupt import stop_on_interrupt
from turntree.trainers.loggers import check_packages, open_trackers
from turntree.trainers.remote import refuse_training
from turntree.trainers.report.run_page import write_page
from turntree.trainers.rollout import Prompt, Rollout, RolloutStats
from turntree.trainers.run_folder import MetricsLog, RunFolder
from turntree.trainers.run_lock import only_writer
from turntree.trainers.seeds import derive_seed
from turntree.trainers.sft import SftResult, train_sft
from turntree.trainers.tree import Group, Node, Tree

__all__ = ["ColdStart", "cold_start", "demonstrations", "teach"]

#: Options that a resumed cold start must share with the one it continues; how often it saves may change.
RESUME_KEYS = (
    "seed",
    "model",
    "agent.name",
    "agent.language",
    "env.id",
    "env.args",
    "env.questions",
    "env.max_turns",
    "env.max_searches",
    "env.max_observation_tokens",
    "env.grammar",
    "env.grammar_args",
    "env.prompt",
    "env.language",
    "env.normalizer",
    "env.tools",
    "search",
    "coldstart",
    "sft.steps",
    "sft.demonstrations",
    "sft.unfit",
    "sft.batch_size",
    "sft.learning_rate",
    "sft.warmup_steps",
    "sft.weight_decay",
    "sft.adam_beta2",
    "sft.laziness",
    "sft.error",
    "trainer.max_grad_norm",
)


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Where the cold start ended.

    ``teacher_em``: mean exact match of what was learnt from, None where nobody knows it. For tasks that are no
    questions it is the mean of their metric, whose name is ``metric``. ``demonstrations``: how many were learnt from,
    ``unfit``: how many were kept but did not fit the student.
    """

    folder: Path
    model: Path
    result: SftResult
    teacher_em: float | None
    demonstrations: int
    metric: str = "em"
    unfit: int = 0


def teach(core: TurnCore[Any], questions: Sequence[Any], config: RunConfig) -> list[Demonstration]:
    """The oracle's first trajectories for ``questions``; of other tasks, their own solutions."""
    seed = derive_seed(config.seed, "teacher")
    if not isinstance(core, SearchQACore):
        return solutions(core, questions, seed=seed)
    teacher = Teacher(laziness=config.sft.laziness, error=config.sft.error)
    return trajectories(core, questions, teacher=teacher, seed=seed)


# -- turntree sft -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Data:
    """The rows to learn from; ``files`` are written beside them once there is a folder."""

    rows: Sequence[Mapping[str, Any]]
    metric: str = "em"
    folder: RunFolder | None = None
    files: Callable[[Path], None] = lambda _: None


def cold_start(
    config: RunConfig, *, on_step: Callable[[int, float], None] | None = None, report: Report = lambda *_: None
) -> ColdStart:
    """Run it as configured (``sft.*``, ``coldstart.*``, ``model.path``) and write a Hugging Face folder.

    Learns from ``sft.data``, else from what ``coldstart.*`` plays on ``env.questions`` and keeps; ``report`` hears of
    that. The run folder holds the trajectories, the losses, a resumable checkpoint and, once it is done, ``model/`` and
    ``summary.json``. The first Ctrl-C finishes the optimiser step and saves before ``KeyboardInterrupt`` is raised;
    the second one stops at once.

    Raises:
        ConfigError: an option does not fit.
        DataError: the questions have no gold steps, or a trajectory does not fit the student (see ``sft.unfit``).
        EngineError: the teacher's engine died, or its cost limit was reached; ``resume`` goes on.
        CheckpointError: the run folder is in use (without ``resume``) or belongs to another configuration (with it).
    """
    config, ranks = join_run(config)
    check_packages(config.trainer.loggers)
    data = _shared_data(config, report, ranks)
    bench = build_bench(replace(config, engine=replace(config.engine, name="hf")))
    learnt = lessons(data.rows, Student.of(config, bench.dialogue), drop=config.sft.unfit == "drop")
    own = config.sft
    adamw = AdamW(own.learning_rate, own.adam_beta2, own.weight_decay, clip=config.trainer.max_grad_norm)
    strategy = build_strategy(config, ranks, bench.model, None, adamw=adamw)

    # Only now, so that a run which is refused leaves no folder behind, unless a teacher's work is in it.
    def make_folder() -> RunFolder:
        made = data.folder or RunFolder.create(run_path(config, "sft"), config, resume=config.resume)
        data.files(made.path)
        return made

    folder = ranks.main(make_folder)
    writer = only_writer(folder.path, ranks=ranks)
    with stop_on_interrupt("optimiser step") as interrupted, ranks.naming_losses(), writer:
        result = train_sft(
            bench.model,
            learnt.groups,
            config=config.sft,
            seed=config.seed,
            max_pack_tokens=config.trainer.max_pack_tokens,
            max_grad_norm=config.trainer.max_grad_norm,
            checkpoints=folder.checkpoints,
            resume=config.resume,
            fingerprint={**config_fingerprint(asdict(config), RESUME_KEYS), "trajectories": _digest(learnt.rows)},
            on_step=on_step,
            should_stop=interrupted.is_set,
            strategy=strategy,
            check=config.trainer.check_packed,
        )
        if ranks.any(interrupted.is_set()) and result.steps < config.sft.steps:
            raise KeyboardInterrupt
        return ranks.main(lambda: _finish(config, folder, bench, result, learnt, metric=data.metric))


def _shared_data(config: RunConfig, report: Report, ranks: Ranks) -> _Data:
    """What is learnt from, on every rank. An engine that teaches plays on the first one alone."""
    if ranks.size == 1 or config.sft.data or config.coldstart.teacher == "oracle":
        return _data(config, report)

    def played() -> tuple[Sequence[Mapping[str, Any]], str, RunFolder | None]:
        own = _data(config, report)
        return own.rows, own.metric, own.folder

    return _Data(*ranks.main(played))


def _data(config: RunConfig, report: Report) -> _Data:
    """Read what is learnt from, or let the teacher make it."""
    if config.sft.data:
        refuse_training(config)
        return _Data(read_kept(config.sft.data))
    own = config.coldstart
    asked = own.questions or config.sft.demonstrations
    config = replace(config, coldstart=replace(own, questions=asked))
    if not config.model.path:
        raise ConfigError(
            "model.path is empty: expected a Hugging Face folder (try `turntree model tiny --out DIR` or "
            "`turntree model smollm2 --out DIR`)"
        )
    if own.teacher == "oracle":
        refuse_training(config)
        plan = prepare(config)
        made = make_in_memory(plan)

        def files(folder: Path) -> None:
            inside = folder / "coldstart"
            _save(inside / KEPT, made.rows)
            _save(inside / DROPPED, made.dropped)
            statistics = json.dumps(made.statistics.to_json(), indent=2, ensure_ascii=False) + "\n"
            with atomic_file(inside / STATISTICS) as file:
                file.write(statistics.encode())

        return _Data(made.rows, plan.core.metric, files=files)
    load_tokenizer(Path(config.model.path))  # a student that is missing shows before the teacher plays
    plan = prepare(config)
    folder = RunFolder.create(run_path(config, "sft"), config, resume=config.resume)
    made = make(plan, folder.path / "coldstart", report=report)
    if made.statistics.stopped:
        raise EngineError(
            f"{made.statistics.missing}: {made.statistics.stopped}; go on with "
            f"resume=true, or learn from what there is: sft.data={folder.path / 'coldstart'}"
        )
    return _Data(read_kept(folder.path / "coldstart"), plan.core.metric, folder)


def _digest(rows: Sequence[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json_line({key: row.get(key) for key in ("question_id", "prompt", "turns")}))
    return digest.hexdigest()[:16]


def _finish(
    config: RunConfig, folder: RunFolder, bench: Bench, result: SftResult, learnt: Lessons, *, metric: str
) -> ColdStart:
    folder.save_config(config)
    _save(folder.path / "demonstrations.jsonl", [_demonstration(row) for row in learnt.rows])
    if learnt.dropped:
        _save(folder.path / "unfit.jsonl", [{**row, "detail": reason} for row, reason in learnt.dropped])
    _save_losses(config, folder, result)
    model = save_model(bench.model, bench.tokenizer, folder.path / "model")
    numbers = [float(row["metric"]) for row in learnt.rows if row.get("metric") is not None]
    score = sum(numbers) / len(numbers) if numbers else None
    done = ColdStart(folder.path, model, result, score, len(learnt.rows), metric, len(learnt.dropped))
    folder.write_summary(_summary(done, seed=config.seed))
    write_page(folder.path)
    return done


def _demonstration(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = [{"text": turn["text"], "observation": turn["observation"]} for turn in row["turns"]]
    head = {"question_id": row["question_id"], "prompt": row["prompt"], "turns": turns}
    return {**head, "reward": row.get("reward"), "em": row.get("metric")}


def _summary(done: ColdStart, *, seed: int) -> dict[str, Any]:
    losses = done.result.losses
    return {
        "steps": done.result.steps,
        "skipped": done.result.skipped,
        "seconds": done.result.seconds,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "demonstrations": done.demonstrations,
        "unfit": done.unfit,
        "teacher_em": done.teacher_em,
        "seed": seed,
    }


def _save_losses(config: RunConfig, folder: RunFolder, result: SftResult) -> None:
    options = config.trainer
    trackers = open_trackers(
        options.loggers, folder.path, arguments=options.logger_args, config=asdict(config), resume_step=0
    )
    with MetricsLog(folder.metrics_file, trackers=trackers, resume_step=0) as log:
        for step, loss in enumerate(result.losses, start=1):
            log.write(step, {"loss": loss})


def _save(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with written(path), atomic_file(path) as handle:
        for row in rows:
            handle.write(json_line(row))


# -- algorithm.source=teacher -----------------------------------------------------------------------------------------


def demonstrations(
    prompts: Sequence[Prompt],
    core: TurnCore[Any],
    dialogue: Dialogue,
    config: RunConfig,
    *,
    engine: Engine | None = None,
    finisher: Finisher | None = None,
) -> Rollout:
    """What is kept of the trajectories of ``prompts``, as a rollout for supervised training in the policy's trainer.

    A group has one tree a kept trajectory, none where nothing is kept. ``sft.data`` names a file of them; else the
    teacher plays: the oracle, for which nothing was sampled and nothing is counted, or ``engine`` with the policy's
    present weights (rejection sampling fine-tuning by any criterion), whose answers ``finisher`` writes where there is
    one and the criterion reads them.

    Raises ``ConfigError`` for another teacher than these: its trajectories come from a file.
    """
    student = Student.of_core(core, dialogue, config)
    stats: RolloutStats | None = None
    rows: Sequence[Sequence[Mapping[str, Any]]]
    if config.sft.data:
        file = kept_file(Path(config.sft.data))
        found = _file_by_question(str(file), file.stat().st_mtime)
        rows = [found.get(str(getattr(prompt.task, "id", "")), []) for prompt in prompts]
    else:
        rows, stats = _selected(prompts, core, config, _Policy(engine, dialogue, finisher))
    drop = config.sft.unfit == "drop"
    groups = tuple(_group(prompt, mine, student, drop=drop) for prompt, mine in zip(prompts, rows, strict=True))
    count = sum(len(group.trees) for group in groups)
    return Rollout(groups, stats or RolloutStats(prompts=len(groups), trees=count, trajectories=count))


def _group(prompt: Prompt, rows: Sequence[Mapping[str, Any]], student: Student, *, drop: bool) -> Group:
    learnt = lessons(rows, student, drop=drop, uid=lambda _: prompt.uid, empty=True)
    trees = [replace(group.trees[0], index=i) for i, group in enumerate(learnt.groups)]
    return Group(prompt.uid, trees or [Tree(Node(), prompt.uid)])


@functools.lru_cache(maxsize=2)
def _file_by_question(path: str, modified: float) -> dict[str, list[dict[str, Any]]]:
    del modified  # part of the key: a rewritten file is read again
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_kept(path):
        found.setdefault(row["question_id"], []).append(row)
    return found


@dataclass(frozen=True, slots=True)
class _Policy:
    """What lets the policy play."""

    engine: Engine | None
    dialogue: Dialogue
    finisher: Finisher | None


def _selected(
    prompts: Sequence[Prompt], core: TurnCore[Any], config: RunConfig, policy: _Policy
) -> tuple[list[list[Mapping[str, Any]]], RolloutStats | None]:
    """The kept rows of each prompt, and what sampling them took."""
    own = config.coldstart
    slots = [Slot(Key(prompt.uid, sample), prompt.task) for prompt in prompts for sample in range(own.samples)]
    found: dict[Key, Played] = {}
    outcome = Outcome({})
    if own.teacher == "oracle":
        found = {played.key: played for played in play_oracle(slots, core, config, policy.dialogue.tokenizer)}
    else:
        outcome = _play_policy(slots, core, config, policy, found)
    played = [found[slot.key] for slot in slots if slot.key in found]
    judged = judge(played, criterion=_criterion(config, core), filters=load_filters(own.filters))
    by_prompt: dict[str, list[Any]] = {prompt.uid: [] for prompt in prompts}
    for one in judged:
        by_prompt[one.played.key.question].append(one)
    kept = [
        [v for v in best_of(by_prompt[prompt.uid], keep=own.keep, min_score=own.min_score) if v.kept]
        for prompt in prompts
    ]
    return [[verdict_row(v, metric=core.metric) for v in verdicts] for verdicts in kept], outcome.stats


_OPEN: dict[str, Scorer | None] = {}
"""The criterion of the run in this process, under its options: a checker may hold a model, so no step loads it anew."""


def _criterion(config: RunConfig, core: TurnCore[Any]) -> Scorer | None:
    options = [asdict(config.coldstart), asdict(config.reward), core.fingerprint]
    key = json.dumps(options, default=str, sort_keys=True)
    if key not in _OPEN:
        for other in _OPEN.values():
            close_all(other)
        _OPEN.clear()
        _OPEN[key] = load_criterion(config, core)
    return _OPEN[key]


def _play_policy(
    slots: Sequence[Slot], core: TurnCore[Any], config: RunConfig, policy: _Policy, found: dict[Key, Played]
) -> Outcome:
    if policy.engine is None or config.coldstart.model or config.coldstart.dialogue:
        raise ConfigError(
            "algorithm.source=teacher with coldstart.teacher=engine samples from the policy itself; trajectories of "
            "another model are played once, by turntree coldstart, and named by sft.data"
        )
    seat = Seat(
        policy.engine,
        policy.dialogue,
        teacher_sampling(config, core),
        in_flight(config),
        config.seed,
        vocabulary(policy.dialogue.tokenizer),
        policy.finisher if reads_answers(config) else None,
    )

    def take(played: Played) -> None:
        found[played.key] = played

    outcome = play_engine(slots, core, seat, on_played=take, wave=len(slots))
    if outcome.stopped:
        raise EngineError(outcome.stopped)
    return outcome
