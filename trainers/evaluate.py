"""Evaluation: one trajectory a question, scored question by question, with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Engine, SamplingParams
from turntree.agents.scorer import Finisher
from turntree.envs.core import TurnCore
from turntree.envs.metrics import exact_match, f1_score, sub_exact_match
from turntree.envs.task import Question
from turntree.trainers.atomic import atomic_file, write_json
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, Rollout, grow
from turntree.trainers.stats import bootstrap_mean, share_interval
from turntree.trainers.tree import Node

__all__ = ["EvalRow", "Evaluation", "evaluate"]


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
    """All rows, in the order of the questions. Questions that failed for infrastructure reasons are counted apart."""

    rows: tuple[EvalRow, ...]
    sampling: dict[str, Any]
    seed: int

    def summary(self) -> dict[str, Any]:
        """Means over the scored questions with 95 % intervals; ``failed`` questions are not scored.

        The intervals are Wilson's for EM and sub-EM, which are shares, and a bootstrap for F1.
        """
        scored = [row for row in self.rows if row.status != "failed"]
        out: dict[str, Any] = {"n": len(scored), "failed": len(self.rows) - len(scored)}
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
) -> Evaluation:
    """Play every question once, in order, and score it with the official metrics.

    Where there is a ``finisher``, the answer that it wrote is scored, also of an episode that ended without one.
    Sampling parameters are exactly the ones given (validation never inherits those of training). ``on_batch`` gets
    the number of questions played so far.
    """
    rows: list[EvalRow] = []
    for start in range(0, len(questions), batch):
        chunk = questions[start : start + batch]
        prompts = [Prompt(uid=f"eval/{start + i}", task=question) for i, question in enumerate(chunk)]
        rollout = grow(
            prompts,
            core=core,
            engine=engine,
            dialogue=dialogue,
            plan=GrowthPlan(),
            sampling=sampling,
            limits=limits,
            run_seed=seed,
            finisher=finisher,
        )
        rows.extend(_rows(chunk, rollout))
        if on_batch is not None:
            on_batch(len(rows))
    return Evaluation(rows=tuple(rows), sampling=asdict(sampling), seed=seed)


def _rows(questions: Sequence[Question], rollout: Rollout) -> list[EvalRow]:
    leaves = {group.uid: group.trees[0].leaves()[0] for group in rollout.groups}
    uids = [group.uid for group in rollout.groups]
    return [_row(question, leaves[uid]) for question, uid in zip(questions, uids, strict=True)]


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
