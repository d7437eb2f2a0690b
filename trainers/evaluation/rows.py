"""One line of an evaluation: a question, what was answered, every number of it, and the episode as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from turntree.envs.metrics import Normalizer, exact_match, f1_score, sub_exact_match
from turntree.envs.scorers import AnswerMetrics
from turntree.envs.task import FrozenDict, Question
from turntree.errors import DataError
from turntree.trainers.tree import Node

__all__ = ["ANSWERS", "NUMBERS", "SHARES", "UNSCORED", "EvalRow", "file_rows", "make_row", "parse_row", "read_rows"]

ANSWERS = ("em", "f1", "sub_em")
"""Scores of the answer."""
NUMBERS = (*ANSWERS, "reward", "success")
"""Scores with a mean."""
SHARES = ("em", "sub_em", "success")
"""Scores that are 0 or 1."""
UNSCORED = "unscored:"
"""Prefix of the part by which a scorer's failure travels to its row."""


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One scored question, or task of another kind. ``prediction`` is None where the episode ended without an answer.

    ``reward`` is what the environment gave, None where the episode failed; ``em``, ``f1`` and ``sub_em`` are None
    where there are no gold answers, ``success`` where the task knows of none. ``score`` is the number that runs of the
    task are judged by (``TurnCore.metric``). With a scorer ``reward`` and ``parts`` are its; ``unscored`` names the
    kind of its failure, which costs the question nothing else.

    ``supporting_found`` is the share of the question's supporting passages that was retrieved, ``supporting_all``
    whether all were. ``scores`` holds the numbers of further scorers as ``scorer/metric``. ``observation_tokens`` are
    those of what the environment returned. ``trajectory`` is the episode, a pair of turn and observation each.

    Where a question is played several times, ``sample`` counts its trajectories, ``logprob`` is the mean log-prob of
    the sampled tokens, ``value`` what a value head says of the end, and ``spent_tokens`` what all of them took
    together, shared turns once.
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
    observation_tokens: int = 0
    supporting_all: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    trajectory: list[list[str]] = field(default_factory=list)
    sample: int = 0
    logprob: float | None = None
    value: float | None = None
    spent_tokens: int | None = None

    @property
    def failed(self) -> bool:
        """Whether something outside the episode went wrong: it is not scored."""
        return self.status == "failed"


def make_row(
    question: Any,
    leaf: Node,
    *,
    name: str,
    metric: str,
    normalizer: Normalizer = "squad",
    scorers: Mapping[str, AnswerMetrics] | None = None,
) -> EvalRow:
    """The row of a finished trajectory; ``metric`` names the row's ``score``."""
    path = leaf.trajectory()
    failed = leaf.status == "failed"
    asked = question if isinstance(question, Question) else None
    answer = None if failed else leaf.info.get("answer")  # a finisher may answer after a truncation
    golds = list(asked.golden_answers) if asked is not None else []
    metadata = asked.metadata if asked is not None else FrozenDict()
    parts = {} if failed else dict(leaf.info.get("reward_parts", {}))
    unscored = next((part.removeprefix(UNSCORED) for part in parts if part.startswith(UNSCORED)), "")
    numbers: dict[str, Any] = {
        **_answer_scores(answer, golds, leaf, normalizer),
        "reward": None if unscored else leaf.reward,
        "success": _number(leaf, "success"),
    }
    found = _supporting_found(asked, path) if asked is not None else None
    return EvalRow(
        id=name,
        question=asked.question if asked is not None else _prompt(path),
        golden_answers=golds,
        prediction=answer,
        **numbers,
        score=numbers[metric] if metric in NUMBERS else _number(leaf, metric),
        status=leaf.status,
        stop_reason=str(leaf.info.get("stop_reason", "")),
        format_valid=bool(leaf.info.get("format_valid", False)),
        turns=len(path),
        searches=sum("retrieved" in node.info for node in path),
        generated_tokens=sum(len(node.turn_ids) for node in path),
        supporting_found=found,
        hops=metadata.get("hops"),
        type=metadata.get("type"),
        parts={part: float(value) for part, value in parts.items() if not part.startswith(UNSCORED)},
        unscored=unscored,
        observation_tokens=sum(len(node.observation_ids) for node in path),
        supporting_all=None if found is None else float(found == 1.0),
        scores=_further(answer, golds, scorers or {}) if golds and not failed else {},
        trajectory=[[node.text, node.observation] for node in path],
    )


def read_rows(path: Path) -> dict[str, EvalRow]:
    """Rows of an ``evaluation.jsonl`` by question id, without those that failed: these are played again.

    Raises ``DataError`` for a line that is no such row.
    """
    return {row.id: row for row in file_rows(path) if not row.failed}


def file_rows(path: Path) -> list[EvalRow]:
    """All rows of a file. Raises ``DataError`` for a line that is no such row."""
    # Not splitlines: a text may hold U+2028 and the like, which end no line of JSON.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [parse_row(line, where=f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def parse_row(line: str, *, where: str) -> EvalRow:
    """One line. Fields that later versions added may be missing. Raises ``DataError`` for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not _REQUIRED <= row.keys() <= _KNOWN:
        raise DataError(f"{where}: expected a row of an evaluation, found {line[:80]!r}")
    return EvalRow(**row)


_KNOWN = {f.name for f in fields(EvalRow)}
_REQUIRED = {f.name for f in fields(EvalRow) if f.default is MISSING and f.default_factory is MISSING}


def _answer_scores(
    answer: str | None, golds: Sequence[str], leaf: Node, normalizer: Normalizer
) -> dict[str, float | None]:
    """The official metrics where there are gold answers, else what the environment says."""
    if not golds:
        return {name: _number(leaf, name) for name in ANSWERS}
    rules = {"em": exact_match, "f1": f1_score, "sub_em": sub_exact_match}
    return {
        name: rule(answer, golds, normalizer=normalizer) if answer is not None else 0.0 for name, rule in rules.items()
    }


def _further(answer: str | None, golds: Sequence[str], scorers: Mapping[str, AnswerMetrics]) -> dict[str, float]:
    """The numbers of further scorers; no answer is 0 by each."""
    given = "" if answer is None else answer
    return {
        f"{name}/{key}": 0.0 if answer is None else float(value)
        for name, scorer in scorers.items()
        for key, value in scorer(given, golds).items()
    }


def _number(leaf: Node, name: str) -> float | None:
    """A number of the last turn's info; None where there is none, and of episodes that failed."""
    value = leaf.info.get(name) if leaf.status != "failed" else None
    return float(value) if isinstance(value, (bool, int, float)) else None


def _prompt(path: Sequence[Node]) -> str:
    root = path[0].parent if path else None
    return root.observation if root is not None else ""


def _supporting_found(question: Question, path: Sequence[Node]) -> float | None:
    """Share of the question's supporting passages among everything retrieved; None without gold passages.

    By id where the corpus was made for the questions, else by title, as for Wikipedia.
    """
    metadata = question.metadata
    retrieved = [passage for node in path for passage in node.info.get("retrieved", ())]
    if wanted := set(metadata.get("supporting_ids") or ()):
        return len(wanted & {passage["id"] for passage in retrieved}) / len(wanted)
    if titles := {_title(title) for title in metadata.get("supporting_titles") or ()}:
        return len(titles & {_title(passage.get("title", "")) for passage in retrieved}) / len(titles)
    return None


def _title(text: str) -> str:
    return " ".join(str(text).strip('"').casefold().split())
