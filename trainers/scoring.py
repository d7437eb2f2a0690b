"""Evaluation as configured: the whole of ``turntree evaluate``, and the scores of quickstart and comparisons.

Every set is played once by the agent as it is; then, where asked for, sampled, as trees and without tools. Each way has
a file of rows of its own, and joins the set's ``evaluation.json`` when it is done.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from turntree.agents.engines.endpoint import Usage
from turntree.agents.scorer import close_all
from turntree.agents.weights import weights_hash
from turntree.envs.metrics import Normalizer
from turntree.envs.scorers import load_scorer
from turntree.envs.task import Question
from turntree.errors import CheckpointError, ConfigError
from turntree.trainers.agent import summarizer_usage
from turntree.trainers.atomic import atomic_file, write_json, written
from turntree.trainers.build import Bench, build_bench, finisher, limits, scorer
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import resolve_engine
from turntree.trainers.evaluate import or_null
from turntree.trainers.evaluation.baselines import constant_score, most_frequent_answer
from turntree.trainers.evaluation.journal import check_facts
from turntree.trainers.evaluation.modes import (
    Folder,
    closed_book,
    drop_journal,
    honest_scorer,
    plan_facts,
    play_saved,
    sample_plan,
    tree_plan,
)
from turntree.trainers.evaluation.passport import content_hash, make_passport
from turntree.trainers.evaluation.play import Played, Players, Valuer
from turntree.trainers.evaluation.sampled import sample_summary, tree_summary
from turntree.trainers.evaluation.sets import EvalSet, load_sets
from turntree.trainers.evaluation.summary import breakdown, summarize
from turntree.trainers.evaluation.table import csv_text, markdown
from turntree.trainers.evaluation.value import load_valuer
from turntree.trainers.remote import RemoteBench, remote_bench
from turntree.trainers.rollout import GrowthPlan
from turntree.trainers.run_lock import only_writer
from turntree.trainers.task import Task, build_task, eval_sampling, provenance

__all__ = ["Scores", "score", "score_sets"]

_log = logging.getLogger(__name__)

Report = Callable[[str, int, int], None]
"""Called with a stage, the questions done and their number."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The document of each set that was played, in order; ``stopped`` says why the last one is not whole."""

    documents: dict[str, dict[str, Any]]
    stopped: str = ""
    missing: tuple[str, ...] = ()


def score(
    config: RunConfig,
    folder: Path,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
    keep_partial: bool = False,
) -> dict[str, Any]:
    """Score the model on the test tasks (else the dev ones), write ``folder`` and return the document.

    ``report(done, total)`` is called after each batch of questions. With ``keep_partial``, what was played before a
    cost limit, an engine that died or Ctrl-C is written too, and ``stopped`` says why. With ``config.resume`` only what
    is missing in ``folder``, or failed, is played. Raises ``CheckpointError`` when the results there were made in
    another way.
    """
    one = replace(config, eval=replace(config.eval, sets=[], set_options={}))
    stage = lambda name, done, total: report(done, total)  # noqa: E731
    return score_sets(one, folder, report=stage, keep_partial=keep_partial).documents[""]


def score_sets(
    config: RunConfig,
    folder: Path,
    *,
    report: Report = lambda stage, done, total: None,
    keep_partial: bool = False,
) -> Scores:
    """Score the model on every set of ``eval.sets``, each into a folder of its own, and write tables of all.

    Without sets it is :func:`score`. With ``keep_partial`` a set that stopped is the last one. Raises
    ``CheckpointError`` where another process works in ``folder``.
    """
    config, why = resolve_engine(config, trains=False)
    sets = load_sets(config)
    where = {one.name: folder / one.name if one.name else folder for one in sets}
    saved = {name: _saved(path) if config.resume else {} for name, path in where.items()}
    documents: dict[str, dict[str, Any]] = {}
    with closing(_bench(config, _spent(saved.values()))) as bench, only_writer(folder):
        desk = _Desk(bench, why, report, keep_partial)
        for place, one in enumerate(sets):
            documents[one.name] = _SetRun(desk, one, Folder(where[one.name], config.resume), saved[one.name]).run()
            _write_tables(folder, documents)
            if stopped := documents[one.name]["stopped"]:
                return Scores(documents, stopped, tuple(s.name for s in sets[place + 1 :]))
    return Scores(documents)


@dataclass(frozen=True, slots=True)
class _Desk:
    """What all sets share."""

    bench: Bench | RemoteBench
    why: str
    report: Report
    keep_partial: bool


class _SetRun:
    """One set, from its task to its document."""

    def __init__(self, desk: _Desk, one: EvalSet, folder: Folder, saved: Mapping[str, Any]) -> None:
        self.desk, self.one, self.folder, self.saved = desk, one, folder, saved
        self.config = one.config
        self.task = self._task(one.config)
        self.metric = self.task.core.metric
        self.normalizer: Normalizer = getattr(self.task.core, "normalizer", "squad")
        self.spent_before = asdict(desk.bench.engine.usage) if isinstance(desk.bench, RemoteBench) else {}
        self.document: dict[str, Any] = {}
        self.played: list[str] = []
        # Before anything is played, so that options that do not fit cost nothing.
        self.valuer = self._valuer() if self.config.eval.drawn else None
        self.plan = tree_plan(self.config, self._vocabulary()) if self.config.eval.tree else None

    def run(self) -> dict[str, Any]:
        with ExitStack() as parts:
            players = self._players(self.config, self.task, parts)
            facts = self._facts(self.config, self.task)
            played = self._play("evaluation", self.task, players, {**facts, **_how(players)}, saved=self.saved)
            rows = [row for rows in played.rows for row in rows]
            self.document = {
                **summarize(rows, metric=self.metric, seed=self.config.seed),
                "unplayed": played.unplayed,
                "stopped": played.stopped or None,
                **_how(players),
                **facts,
                "breakdown": breakdown(rows, metric=self.metric, seed=self.config.seed),
                **self._passport(players),
                **({"ways": self.saved["ways"]} if self.saved.get("ways") else {}),
            }
            self._baselines()
            self._count(players)
            self._write()
            if not played.stopped:
                self._further(players, facts)
            self._count(players)
        self._write()
        return self.document

    def _further(self, players: Players, facts: Mapping[str, Any]) -> None:
        """Samples, trees, closed book, as asked for; the first that stops is the last."""
        if self.config.eval.drawn:
            self._several(players, facts)
        if self.config.eval.closed_book and not self.document["stopped"]:
            self._closed_book()

    # -- ways of playing ----------------------------------------------------------------------------------------------

    def _several(self, players: Players, facts: Mapping[str, Any]) -> None:
        options = self.config.eval
        sampling = replace(players.sampling, temperature=options.temperature, top_p=options.top_p)
        drawn = replace(players, sampling=sampling)
        flat = self._more("samples", drawn, facts, sample_plan(self.config))
        if flat is None:
            return
        how = {"temperature": options.temperature, "top_p": options.top_p}
        samples = sample_summary(flat.rows, metric=self.metric, normalizer=self.normalizer, seed=self.config.seed)
        self.document["sampled"] = {**samples, **how}
        self._write()
        if self.plan is None:
            return
        grown = replace(drawn, scorer=honest_scorer(self.config, players.scorer, self.metric))
        trees = self._more("trees", grown, facts, self.plan)
        if trees is None:
            return
        self.document["tree"] = {
            **plan_facts(self.plan, self.config),
            **how,
            **tree_summary(
                trees.rows,
                flat.rows,
                how=options.choose,
                metric=self.metric,
                normalizer=self.normalizer,
                seed=self.config.seed,
            ),
        }

    def _more(self, name: str, players: Players, facts: Mapping[str, Any], plan: GrowthPlan) -> Played | None:
        """Several trajectories of each question; None where it stopped, and the document says so."""
        about = {**facts, **_how(players), **plan_facts(plan, self.config), "value_head": self.config.eval.value_head}
        marker = self.saved.get("ways", {}).get(name, {})
        played = self._play(name, self.task, players, about, saved=marker, plan=plan, valuer=self.valuer)
        self.document.setdefault("ways", {})[name] = json.loads(json.dumps(about))
        return None if self._stops(name, played) else played

    def _closed_book(self) -> None:
        if not isinstance(self.task.questions[0], Question):
            raise ConfigError(
                "eval.closed_book asks questions without tools, but these tasks are no questions; leave it out"
            )
        config = closed_book(self.config)
        task = self._task(config)
        with ExitStack() as parts:
            players = self._players(config, task, parts)
            facts = {**self._facts(config, task), **_how(players)}
            marker = self.saved.get("ways", {}).get("closed_book", {})
            played = self._play("closed_book", task, players, facts, saved=marker)
        self.document.setdefault("ways", {})["closed_book"] = json.loads(json.dumps(facts))
        if not self._stops("closed_book", played):
            rows = [row for rows in played.rows for row in rows]
            self.document["closed_book"] = summarize(rows, metric=self.metric, seed=self.config.seed)

    def _play(
        self,
        name: str,
        task: Task,
        players: Players,
        facts: Mapping[str, Any],
        *,
        saved: Mapping[str, Any],
        plan: GrowthPlan | None = None,
        valuer: Valuer | None = None,
    ) -> Played:
        if saved and self.folder.resume:
            check_facts(saved, facts, folder=self.folder.path)
        stage = f"{self.one.name} {name}".strip() if name != "evaluation" else self.one.name or "evaluate"
        played = play_saved(
            name,
            task.questions,
            players,
            self.folder,
            facts=facts,
            saved=bool(saved),
            plan=plan,
            batch=self.config.eval.batch,
            valuer=valuer,
            report=lambda done, total: self.desk.report(stage, done, total),
            keep_partial=self.desk.keep_partial,
        )
        self.played.append(name)
        return played

    def _stops(self, name: str, played: Played) -> bool:
        if played.stopped:
            self.document |= {"stopped": played.stopped, "unplayed": played.unplayed, "stopped_in": name}
        return bool(played.stopped)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _task(self, config: RunConfig) -> Task:
        one = self.one
        given = (one.file, one.questions) if one.file is not None and one.questions is not None else None
        return build_task(config, self.desk.bench.tokenizer, split="test", given=given)

    def _players(self, config: RunConfig, task: Task, parts: ExitStack) -> Players:
        writer = finisher(config, self.desk.bench, evaluating=True)
        parts.callback(close_all, writer)
        judge = scorer(config, task.core) if config.reward.in_evaluation or not config.reward.scorer else None
        parts.callback(close_all, judge)
        named = {name: load_scorer(name, what="eval.scorers") for name in config.eval.scorers}
        return Players(
            core=task.core,
            engine=self.desk.bench.engine,
            dialogue=self.desk.bench.dialogue,
            sampling=eval_sampling(config, task.core),
            limits=limits(config),
            seed=config.seed,
            finisher=writer,
            scorer=judge,
            scorers=named,
        )

    def _facts(self, config: RunConfig, task: Task) -> dict[str, Any]:
        """What results must share to be of one evaluation."""
        bench = self.desk.bench
        facts = {**provenance(config, task), "protocol": "tokens", "dialogue": bench.dialogue.report.text()}
        facts |= {"engine": config.engine.name, "scorers": list(config.eval.scorers)}
        if self.one.questions is not None:
            facts |= {"ids": self.one.data["ids"], "content": content_hash(self.one.questions)}
        if not isinstance(bench, RemoteBench):  # whose files may have changed under the same name
            facts |= {"weights_hash": weights_hash(config.model.path), "dtype": config.model.dtype}
        if isinstance(bench, RemoteBench):
            facts |= bench.provenance(config)
        elif config.engine.name == "vllm_server":
            facts["weights"] = _hand_over(bench)
        return facts

    def _passport(self, players: Players) -> dict[str, Any]:
        config, bench = self.config, self.desk.bench
        model: dict[str, Any] = {"engine": config.engine.name, "dtype": config.model.dtype}
        if isinstance(bench, RemoteBench):
            model |= {"path": config.engine.model, "url": config.engine.base_url, "weights": ""}
        else:
            model |= {"path": config.model.path, "weights": weights_hash(config.model.path)}
        made = make_passport(
            config,
            self.task.core,
            data=self.one.data,
            sampling=asdict(players.sampling),
            model=model,
            dialogue=bench.dialogue.report.text(),
        )
        return {"passport": made.to_json()}

    def _vocabulary(self) -> int | None:
        bench = self.desk.bench
        return None if isinstance(bench, RemoteBench) else int(bench.model.config.vocab_size)

    def _valuer(self) -> Valuer | None:
        options, bench = self.config.eval, self.desk.bench
        if options.tree and "scorer" in options.choose and not self.config.reward.scorer:
            raise ConfigError(
                "eval.choose names scorer, but reward.scorer is empty: the environment's reward knows the gold answers"
            )
        if isinstance(bench, RemoteBench) and bench.protocol == "chat" and options.tree and "logprob" in options.choose:
            raise ConfigError(
                "eval.choose names logprob, but a chat endpoint gives none: use eval.choose=[majority] and "
                "eval.tree_rule=turntree.trainers.expansion:random_nodes, or openai.protocol=completions"
            )
        if not options.value_head:
            return None
        if isinstance(bench, RemoteBench):
            raise ConfigError("eval.value_head needs the model's hidden states: use engine=hf or vllm, not openai")
        return load_valuer(bench.model, options.value_head)

    def _baselines(self) -> None:
        """One constant answer to all questions: the most frequent one, and those of ``eval.constants``."""
        asked = [q for q in self.task.questions if isinstance(q, Question)]
        if not self.config.eval.baselines or not asked or self.metric != "em":
            return
        frequent = most_frequent_answer(asked, normalizer=self.normalizer)
        answers = [(frequent, True)] if frequent is not None else []
        answers += [(answer, False) for answer in self.config.eval.constants]
        self.document["constants"] = [
            {
                **constant_score(asked, answer, normalizer=self.normalizer, seed=self.config.seed),
                "most_frequent": most,
            }
            for answer, most in answers
        ]

    def _count(self, players: Players) -> None:
        """What an endpoint and a summariser took, that of earlier calls included."""
        if used := summarizer_usage(players.finisher):
            earlier = self.saved.get("summarizer_usage", {})
            self.document["summarizer_usage"] = {key: value + earlier.get(key, 0.0) for key, value in used.items()}
        if isinstance(self.desk.bench, RemoteBench):
            earlier, now = self.saved.get("usage", {}), asdict(self.desk.bench.engine.usage)
            own = {key: now[key] - self.spent_before[key] for key in now}
            self.document["usage"] = {key: value + earlier.get(key, 0) for key, value in own.items()}
        if self.desk.why:
            self.document["engine_reason"] = self.desk.why

    def _write(self) -> None:
        self.document = or_null(self.document)
        with written(self.folder.path / "evaluation.json"):
            write_json(self.folder.path / "evaluation.json", self.document)
        for name in self.played:
            drop_journal(self.folder.path, name)


def _how(players: Players) -> dict[str, Any]:
    return {"sampling": asdict(players.sampling), "seed": players.seed}


def _write_tables(folder: Path, documents: Mapping[str, dict[str, Any]]) -> None:
    texts = {"evaluation.md": markdown(documents), "evaluation.csv": csv_text(documents)}
    for name, text in texts.items():
        with written(folder / name), atomic_file(folder / name) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    if "" not in documents:
        write_json(folder / "evaluations.json", {"sets": documents})


def _bench(config: RunConfig, spent: Usage) -> Bench | RemoteBench:
    return remote_bench(config, spent=spent) if config.engine.name == "openai" else build_bench(config)


def _spent(saved: Any) -> Usage:
    """What all sets took before."""
    total = asdict(Usage())
    for document in saved:
        for key, value in document.get("usage", {}).items():
            total[key] += value
    return Usage(**total)


def _hand_over(bench: Bench) -> str:
    """Give a server the weights that are to be scored; whose are, where it takes none."""
    try:
        bench.engine.update_weights(0)
    except ConfigError as error:
        _log.warning("the server is scored with its own weights, be they those of model.path or not: %s", error)
        return "the server's own"
    return "model.path"


def _saved(folder: Path) -> dict[str, Any]:
    """The document of an evaluation that stopped, or finished; empty where there is none."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); choose another out, or leave resume out") from None
    return dict(document)
