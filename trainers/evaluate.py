"""Evaluation: one trajectory a question, scored question by question, with intervals."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Engine, SamplingParams
from turntree.agents.scorer import Failed, Finished, Finisher, Judged, Scorer, score
from turntree.envs.core import TurnCore
from turntree.envs.metrics import exact_match, f1_score, sub_exact_match
from turntree.envs.task import FrozenDict, Question
from turntree.errors import CostLimitError, DataError, EngineError
from turntree.trainers.atomic import atomic_file, write_json
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.stats import bootstrap_mean, share_interval
from turntree.trainers.tree import Node

__all__ = ["INTERRUPTED", "EvalRow", "Evaluation", "evaluate", "read_rows", "shown"]

_log = logging.getLogger(__name__)

ANSWERS = ("em", "f1", "sub_em")
NUMBERS = (*ANSWERS, "reward", "success")
SHARES = ("em", "sub_em", "success")

INTERRUPTED = "interrupted"
"""``Evaluation.stopped`` after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One scored question, or task of another kind. ``prediction`` is None where the episode ended without an answer.

    ``reward`` is what the environment gave, None where the episode failed; ``em``, ``f1`` and ``sub_em`` are None
    where there are no gold answers, ``success`` where the task knows of none. ``score`` is the number that runs of the
    task are judged by (``TurnCore.metric``). With a scorer ``reward`` and ``parts`` are its; ``unscored`` names the
    kind of its failure, which costs the question nothing else.
    """

    id: str
    question: str
    golden_answers: list[str]
    prediction: str | None
    em: float | None
    f1: float | None
    sub_em: float | None
    reward: float | None
    success: float | None
    score: float | None
    status: str
    stop_reason: str
    format_valid: bool
    turns: int
    searches: int
    generated_tokens: int
    supporting_found: float | None
    hops: int | None
    type: str | None
    parts: dict[str, float] = field(default_factory=dict)
    unscored: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All rows, in the order of the questions. Questions that failed for infrastructure reasons are counted apart.

    ``stopped`` says why ``unplayed`` questions have no row ('' : all were played). ``metric`` names the rows' score.
    """

    rows: tuple[EvalRow, ...]
    sampling: dict[str, Any]
    seed: int
    unplayed: int = 0
    stopped: str = ""
    metric: str = "em"

    def _has(self, name: str) -> bool:
        if name in ANSWERS and self.metric in ANSWERS:
            return True
        return name == self.metric or any(getattr(row, name) is not None for row in self.rows)

    def summary(self) -> dict[str, Any]:
        """Means over the scored questions with 95 % intervals; ``failed`` questions are not scored.

        Wilson's intervals for EM, sub-EM and success, which are shares, and a bootstrap for everything else.
        """
        scored = [row for row in self.rows if row.status != "failed"]
        out: dict[str, Any] = {"n": len(scored), "failed": len(self.rows) - len(scored)}
        out |= {"unplayed": self.unplayed, "stopped": self.stopped or None}
        out["metric"] = self.metric
        for key in dict.fromkeys((*filter(self._has, (*ANSWERS, "success", "reward")), self.metric)):
            found = (getattr(row, key if key in NUMBERS else "score") for row in scored)
            values = [float(value) for value in found if value is not None]
            interval = share_interval(values) if key in SHARES else bootstrap_mean(values, seed=self.seed)
            out[key] = interval.mean
            out[f"{key}_low"], out[f"{key}_high"] = interval.low, interval.high
        out |= self._parts(scored, taken=out)
        for key in ("turns", "searches", "generated_tokens", "format_valid"):
            out[f"{key}_mean"] = _mean(float(getattr(row, key)) for row in scored)
        out["answered_share"] = _mean(float(row.prediction is not None or row.status == "answered") for row in scored)
        out["supporting_found"] = _mean(row.supporting_found for row in scored if row.supporting_found is not None)
        hops = sorted({row.hops for row in scored if row.hops is not None})
        out["em_by_hops"] = {str(h): _mean(row.em or 0.0 for row in scored if row.hops == h) for h in hops}
        return out

    def _parts(self, scored: Sequence[EvalRow], *, taken: Iterable[str]) -> dict[str, Any]:
        """The parts of a scorer's rewards, each over the ``<part>_n`` questions that have it."""
        out: dict[str, Any] = {"unscored": unscored} if (unscored := sum(bool(r.unscored) for r in scored)) else {}
        for name in sorted({name for row in scored for name in row.parts} - {*taken, *NUMBERS}):
            values = [row.parts[name] for row in scored if name in row.parts]
            interval = bootstrap_mean(values, seed=self.seed)
            out |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            out[f"{name}_n"] = interval.n
        return out

    def save(self, folder: Path, *, extra: dict[str, Any] | None = None) -> None:
        """Write ``evaluation.jsonl`` (one row a question), then ``evaluation.json`` (summary), each whole or not there.

        Numbers that do not exist (the mean of no question, the interval of one) are null.
        """
        with atomic_file(folder / "evaluation.jsonl") as file:
            for row in self.rows:
                # A lone surrogate cannot be UTF-8; written as an escape it is still JSON.
                file.write((json.dumps(asdict(row), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        document = {**self.summary(), "sampling": self.sampling, "seed": self.seed, **(extra or {})}
        write_json(folder / "evaluation.json", {key: _or_null(value) for key, value in document.items()})


def evaluate(
    questions: Sequence[Any],
    *,
    core: TurnCore[Any],
    engine: Engine,
    dialogue: Dialogue,
    sampling: SamplingParams,
    limits: Limits,
    seed: int = 0,
    batch: int = 64,
    finisher: Finisher | None = None,
    scorer: Scorer | None = None,
    on_batch: Callable[[int], None] | None = None,
    done: Mapping[str, EvalRow] | None = None,
    keep_partial: bool = False,
) -> Evaluation:
    """Play every question once, in order, and score it: with the official metrics where there are gold answers.

    Tasks of other kinds are named by their ``id`` if they have one, else by their place from 0.
    Where there is a ``finisher``, the answer that it wrote is scored, also of an episode that ended without one; where
    it failed, the question failed. A ``scorer`` gives the rewards and their parts; where it fails, the row has none.
    Sampling parameters are exactly the ones given (validation never inherits those of training). ``on_batch`` gets
    the number of questions played so far.

    ``done`` holds rows by question id that are taken as they are; the others are drawn as if all were played. With
    ``keep_partial``, what was played before a cost limit, a dead engine or Ctrl-C is returned, and says so.
    """
    names = [_name(question, i) for i, question in enumerate(questions)]
    rows: dict[int, EvalRow] = {i: row for i, n in enumerate(names) if (row := (done or {}).get(n)) is not None}
    left = [i for i in range(len(questions)) if i not in rows]
    judge = None if scorer is None else _Lenient(scorer)
    stopped = ""
    for start in range(0, len(left), batch):
        chunk = left[start : start + batch]
        try:
            rollout = grow(
                [Prompt(uid=f"eval/{i}", task=questions[i]) for i in chunk],
                core=core,
                engine=engine,
                dialogue=dialogue,
                plan=GrowthPlan(),
                sampling=sampling,
                limits=limits,
                run_seed=seed,
                scorer=judge,
                finisher=finisher,
                answers="always",
            )
        except (EngineError, KeyboardInterrupt) as error:
            if not keep_partial or (not rows and not isinstance(error, KeyboardInterrupt)):
                raise
            stopped = str(error) if isinstance(error, EngineError) else INTERRUPTED
            break
        leaves = [group.trees[0].leaves()[0] for group in rollout.groups]
        played = [(i, leaf) for i, leaf in zip(chunk, leaves, strict=True) if not _unpaid(leaf)]
        rows.update((i, _row(questions[i], leaf, name=names[i], metric=core.metric)) for i, leaf in played)
        if on_batch is not None:
            on_batch(len(rows))
        if len(played) < len(chunk):
            stopped = next(str(leaf.info["message"]) for leaf in leaves if _unpaid(leaf))
            break
    ordered = tuple(rows[i] for i in sorted(rows))
    unplayed = len(questions) - len(rows)
    return Evaluation(ordered, asdict(sampling), seed, unplayed=unplayed, stopped=stopped, metric=core.metric)


@dataclass(frozen=True, slots=True)
class _Lenient:
    """A scorer whose failures fail no question: they are named by a part that :func:`_row` takes out again."""

    scorer: Scorer

    def __call__(self, finished: Sequence[Finished]) -> list[float | Judged]:
        outcomes = score(finished, scorer=self.scorer)  # checks the contract: one each, finite
        failures = [o.reward for o in outcomes if isinstance(o.reward, Failed)]
        if failures:
            first = failures[0]
            _log.warning("%d of %d were not scored; the first: %s: %s", len(failures), len(outcomes), *_said(first))
        return [
            Judged(0.0, {_UNSCORED + o.reward.kind: 1.0}) if isinstance(o.reward, Failed) else Judged(o.reward, o.parts)
            for o in outcomes
        ]


_UNSCORED = "unscored:"


def _said(failure: Failed) -> tuple[str, str]:
    return failure.kind, failure.message


def shown(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The numbers of a summary that say how good it was, the metric first: EM and F1, or success and reward."""
    metric = str(summary["metric"])
    names = ("em", "f1") if metric in ANSWERS else ("success", "reward")
    return tuple(dict.fromkeys((metric, *(name for name in names if name in summary))))


def read_rows(path: Path) -> dict[str, EvalRow]:
    """Rows of an ``evaluation.jsonl`` by question id, without those that failed: these are played again.

    Raises ``DataError`` for a line that is no such row.
    """
    names = {f.name for f in fields(EvalRow)}
    later = {"parts", "unscored"}
    rows: dict[str, EvalRow] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.keys() | later != names:
            raise DataError(f"{path}, line {number}: expected a row of an evaluation, found {line[:80]!r}")
        if row["status"] != "failed":
            rows[row["id"]] = EvalRow(**row)
    return rows


def _unpaid(leaf: Node) -> bool:
    """Whether the episode broke off because the endpoint's cost was reached: it is neither scored nor failed."""
    return leaf.status == "failed" and leaf.info.get("error") == CostLimitError.__name__


def _name(question: Any, index: int) -> str:
    return str(getattr(question, "id", index))


def _row(question: Any, leaf: Node, *, name: str, metric: str) -> EvalRow:
    path = leaf.trajectory()
    asked = question if isinstance(question, Question) else None
    answer = leaf.info.get("answer") if leaf.status != "failed" else None  # a finisher may answer after a truncation
    golds = list(asked.golden_answers) if asked is not None else []
    metadata = asked.metadata if asked is not None else FrozenDict()
    parts = dict(leaf.info.get("reward_parts", {})) if leaf.status != "failed" else {}
    unscored = next((name.removeprefix(_UNSCORED) for name in parts if name.startswith(_UNSCORED)), "")
    reward = None if unscored else leaf.reward
    numbers = {**_answer_scores(answer, golds, leaf), "reward": reward, "success": _number(leaf, "success")}
    judged_by = numbers[metric] if metric in NUMBERS else _number(leaf, metric)
    return EvalRow(
        id=name,
        question=asked.question if asked is not None else _prompt(path),
        golden_answers=golds,
        prediction=answer,
        **numbers,
        score=judged_by,
        status=leaf.status,
        stop_reason=str(leaf.info.get("stop_reason", "")),
        format_valid=bool(leaf.info.get("format_valid", False)),
        turns=len(path),
        searches=sum("retrieved" in node.info for node in path),
        generated_tokens=sum(len(node.turn_ids) for node in path),
        supporting_found=_supporting_found(asked, path) if asked is not None else None,
        hops=metadata.get("hops"),
        type=metadata.get("type"),
        parts={name: float(value) for name, value in parts.items() if not name.startswith(_UNSCORED)},
        unscored=unscored,
    )


def _answer_scores(answer: str | None, golds: Sequence[str], leaf: Node) -> dict[str, float | None]:
    """The official metrics where there are gold answers, else what the environment says."""
    if not golds:
        return {name: _number(leaf, name) for name in ANSWERS}
    rules = {"em": exact_match, "f1": f1_score, "sub_em": sub_exact_match}
    return {name: rule(answer, golds) if answer is not None else 0.0 for name, rule in rules.items()}


def _number(leaf: Node, name: str) -> float | None:
    """A number of the last turn's info; None where there is none, and of episodes that failed."""
    value = leaf.info.get(name) if leaf.status != "failed" else None
    return float(value) if isinstance(value, (bool, int, float)) else None


def _prompt(path: Sequence[Node]) -> str:
    root = path[0].parent if path else None
    return root.observation if root is not None else ""


def _supporting_found(question: Question, path: Sequence[Node]) -> float | None:
    """Share of the question's supporting passages among everything retrieved; None without gold passages."""
    wanted = set(question.metadata.get("supporting_ids") or ())
    if not wanted:
        return None
    found = {passage["id"] for node in path for passage in node.info.get("retrieved", ())}
    return len(wanted & found) / len(wanted)


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
