"""Evaluation: one trajectory a question, scored question by question, with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Engine, SamplingParams
from turntree.agents.scorer import Finisher, Scorer
from turntree.envs.core import TurnCore
from turntree.envs.scorers import AnswerMetrics
from turntree.trainers.atomic import atomic_file, write_json, written
from turntree.trainers.distributed.ranks import ALONE, Ranks
from turntree.trainers.evaluation.play import INTERRUPTED, Players, play
from turntree.trainers.evaluation.rows import ANSWERS, EvalRow, read_rows
from turntree.trainers.evaluation.summary import summarize
from turntree.trainers.rollout import Limits

__all__ = ["INTERRUPTED", "EvalRow", "Evaluation", "evaluate", "read_rows", "shown", "write_rows"]


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

    def summary(self) -> dict[str, Any]:
        """Means over the scored questions with 95 % intervals; ``failed`` questions are not scored.

        Wilson's intervals for EM, sub-EM and success, which are shares, and a bootstrap for everything else.
        """
        found = summarize(self.rows, metric=self.metric, seed=self.seed)
        return {**found, "unplayed": self.unplayed, "stopped": self.stopped or None}

    def save(self, folder: Path, *, extra: dict[str, Any] | None = None) -> None:
        """Write ``evaluation.jsonl`` (one row a question), then ``evaluation.json`` (summary), each whole or not there.

        Numbers that do not exist (the mean of no question, the interval of one) are null.
        """
        write_rows(folder / "evaluation.jsonl", self.rows)
        document = {**self.summary(), "sampling": self.sampling, "seed": self.seed, **(extra or {})}
        write_json(folder / "evaluation.json", or_null(document))


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
    scorers: Mapping[str, AnswerMetrics] | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Play every question once, in order, and score it: with the official metrics where there are gold answers.

    Tasks of other kinds are named by their ``id`` if they have one, else by their place from 0.
    Where there is a ``finisher``, the answer that it wrote is scored, also of an episode that ended without one; where
    it failed, the question failed. A ``scorer`` gives the rewards and their parts; where it fails, the row has none.
    ``scorers`` are further scorers of answers (:mod:`turntree.envs.scorers`), whose numbers stand beside.
    Sampling parameters are exactly the ones given (validation never inherits those of training). ``on_batch`` gets
    the number of questions played so far.

    ``done`` holds rows by question id that are taken as they are; the others are drawn as if all were played. With
    ``keep_partial``, what was played before a cost limit, a dead engine or Ctrl-C is returned, and says so. Several
    ``ranks`` share the questions of a batch; each gets all rows.
    """
    players = Players(core, engine, dialogue, sampling, limits, seed, finisher, scorer, scorers or {}, ranks)
    report = on_batch or (lambda played: None)
    played = play(
        questions,
        players,
        batch=batch,
        done={name: (row,) for name, row in (done or {}).items()},
        on_rows=lambda count, rows: report(count),
        keep_partial=keep_partial,
    )
    rows = tuple(rows[0] for rows in played.rows)
    return Evaluation(rows, asdict(sampling), seed, played.unplayed, played.stopped, core.metric)


def shown(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The numbers of a summary that say how good it was, the metric first: EM and F1, or success and reward."""
    metric = str(summary["metric"])
    names = ("em", "f1") if metric in ANSWERS else ("success", "reward")
    return tuple(dict.fromkeys((metric, *(name for name in names if name in summary))))


def write_rows(path: Path, rows: Sequence[EvalRow]) -> None:
    """One JSON object a line, whole or not there."""
    with written(path), atomic_file(path) as file:
        for row in rows:
            file.write(row_bytes(row))


def row_bytes(row: EvalRow) -> bytes:
    """A line. A lone surrogate cannot be UTF-8; written as an escape it is still JSON."""
    return (json.dumps(asdict(row), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def or_null(value: Any) -> Any:
    """Plain JSON: numbers that do not exist are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: or_null(found) for key, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [or_null(found) for found in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
