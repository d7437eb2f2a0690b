"""Evaluation: one trajectory a question, scored question by question, with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Engine, SamplingParams
from turntree.agents.scorer import Finisher
from turntree.envs.core import TurnCore
from turntree.envs.metrics import exact_match, f1_score, sub_exact_match
from turntree.envs.task import Question
from turntree.errors import CostLimitError, DataError, EngineError
from turntree.trainers.atomic import atomic_file, write_json
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.stats import bootstrap_mean, share_interval
from turntree.trainers.tree import Node

__all__ = ["INTERRUPTED", "EvalRow", "Evaluation", "evaluate", "read_rows"]

INTERRUPTED = "interrupted"
"""``Evaluation.stopped`` after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One scored question. ``prediction`` is None where the episode ended without an answer."""

    id: str
    question: str
    golden_answers: list[str]
    prediction: str | None
    em: float
    f1: float
    sub_em: float
    status: str
    stop_reason: str
    format_valid: bool
    turns: int
    searches: int
    generated_tokens: int
    supporting_found: float | None
    hops: int | None
    type: str | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All rows, in the order of the questions. Questions that failed for infrastructure reasons are counted apart.

    ``stopped`` says why ``unplayed`` questions have no row ('' : all were played).
    """

    rows: tuple[EvalRow, ...]
    sampling: dict[str, Any]
    seed: int
    unplayed: int = 0
    stopped: str = ""

    def summary(self) -> dict[str, Any]:
        """Means over the scored questions with 95 % intervals; ``failed`` questions are not scored.

        The intervals are Wilson's for EM and sub-EM, which are shares, and a bootstrap for F1.
        """
        scored = [row for row in self.rows if row.status != "failed"]
        out: dict[str, Any] = {"n": len(scored), "failed": len(self.rows) - len(scored)}
        out |= {"unplayed": self.unplayed, "stopped": self.stopped or None}
        for key in ("em", "f1", "sub_em"):
            values = [float(getattr(row, key)) for row in scored]
            interval = bootstrap_mean(values, seed=self.seed) if key == "f1" else share_interval(values)
            out[key] = interval.mean
            out[f"{key}_low"], out[f"{key}_high"] = interval.low, interval.high
        for key in ("turns", "searches", "generated_tokens", "format_valid"):
            out[f"{key}_mean"] = _mean(float(getattr(row, key)) for row in scored)
        out["answered_share"] = _mean(float(row.prediction is not None) for row in scored)
        out["supporting_found"] = _mean(row.supporting_found for row in scored if row.supporting_found is not None)
        hops = sorted({row.hops for row in scored if row.hops is not None})
        out["em_by_hops"] = {str(h): _mean(row.em for row in scored if row.hops == h) for h in hops}
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
    questions: Sequence[Question],
    *,
    core: TurnCore[Any],
    engine: Engine,
    dialogue: Dialogue,
    sampling: SamplingParams,
    limits: Limits,
    seed: int = 0,
    batch: int = 64,
    finisher: Finisher | None = None,
    on_batch: Callable[[int], None] | None = None,
    done: Mapping[str, EvalRow] | None = None,
    keep_partial: bool = False,
) -> Evaluation:
    """Play every question once, in order, and score it with the official metrics.

    Where there is a ``finisher``, the answer that it wrote is scored, also of an episode that ended without one.
    Sampling parameters are exactly the ones given (validation never inherits those of training). ``on_batch`` gets
    the number of questions played so far.

    ``done`` holds rows by question id that are taken as they are; the others are drawn as if all were played. With
    ``keep_partial``, what was played before a cost limit, a dead engine or Ctrl-C is returned, and says so.
    """
    rows: dict[int, EvalRow] = {i: row for i, q in enumerate(questions) if (row := (done or {}).get(q.id)) is not None}
    left = [i for i in range(len(questions)) if i not in rows]
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
                finisher=finisher,
            )
        except (EngineError, KeyboardInterrupt) as error:
            if not keep_partial or (not rows and not isinstance(error, KeyboardInterrupt)):
                raise
            stopped = str(error) if isinstance(error, EngineError) else INTERRUPTED
            break
        leaves = [group.trees[0].leaves()[0] for group in rollout.groups]
        played = [(i, leaf) for i, leaf in zip(chunk, leaves, strict=True) if not _unpaid(leaf)]
        rows.update((i, _row(questions[i], leaf)) for i, leaf in played)
        if on_batch is not None:
            on_batch(len(rows))
        if len(played) < len(chunk):
            stopped = next(str(leaf.info["message"]) for leaf in leaves if _unpaid(leaf))
            break
    ordered = tuple(rows[i] for i in sorted(rows))
    return Evaluation(ordered, asdict(sampling), seed, unplayed=len(questions) - len(rows), stopped=stopped)


def read_rows(path: Path) -> dict[str, EvalRow]:
    """Rows of an ``evaluation.jsonl`` by question id, without those that failed: these are played again.

    Raises ``DataError`` for a line that is no such row.
    """
    names = {f.name for f in fields(EvalRow)}
    rows: dict[str, EvalRow] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.keys() != names:
            raise DataError(f"{path}, line {number}: expected a row of an evaluation, found {line[:80]!r}")
        if row["status"] != "failed":
            rows[row["id"]] = EvalRow(**row)
    return rows


def _unpaid(leaf: Node) -> bool:
    """Whether the episode broke off because the endpoint's cost was reached: it is neither scored nor failed."""
    return leaf.status == "failed" and leaf.info.get("error") == CostLimitError.__name__


def _row(question: Question, leaf: Node) -> EvalRow:
    path = leaf.trajectory()
    answer = leaf.info.get("answer") if leaf.status != "failed" else None  # a finisher may answer after a truncation
    golds = list(question.golden_answers)
    text = answer if answer is not None else ""
    answered = answer is not None
    metadata = question.metadata
    return EvalRow(
        id=question.id,
        question=question.question,
        golden_answers=golds,
        prediction=answer,
        em=exact_match(text, golds) if answered else 0.0,
        f1=f1_score(text, golds) if answered else 0.0,
        sub_em=sub_exact_match(text, golds) if answered else 0.0,
        status=leaf.status,
        stop_reason=str(leaf.info.get("stop_reason", "")),
        format_valid=bool(leaf.info.get("format_valid", False)),
        turns=len(path),
        searches=sum("retrieved" in node.info for node in path),
        generated_tokens=sum(len(node.turn_ids) for node in path),
        supporting_found=_supporting_found(question, path),
        hops=metadata.get("hops"),
        type=metadata.get("type"),
    )


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
