"""What a cold start kept and dropped, in numbers: for a file, and as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turntree.trainers.coldstart.select import Verdict

__all__ = ["Statistics", "spread"]

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
PASS = 0.5
"""The score from which on a trajectory counts as passed where ``coldstart.min_score`` gives none."""


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Number, sum, mean, and minimum, quartiles and maximum; None where there is nothing."""
    names = ("min", "q25", "median", "q75", "max")
    if not values:
        return {"n": 0, "sum": 0, "mean": None, **dict.fromkeys(names)}
    data = np.asarray(values, dtype=np.float64)
    quantiles = [float(value) for value in np.quantile(data, _QUANTILES)]
    return {"n": len(values), "sum": float(data.sum()), "mean": float(data.mean()), **dict(zip(names, quantiles))}


@dataclass(slots=True)
class Statistics:
    """Counts, taken in question by question with :meth:`add`.

    ``pass_score``: what a trajectory must score to count in the pass rates. ``unplayed``: trajectories that were asked
    for and not played, because of what ``stopped`` says ('' : nothing). ``usage``: requests, tokens and cost.
    """

    criterion: str
    metric: str
    samples: int
    pass_score: float = PASS
    reasons: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    questions: list[dict[str, Any]] = field(default_factory=list)
    unplayed: int = 0
    stopped: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    _numbers: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    def add(self, name: str, verdicts: Sequence[Verdict]) -> None:
        """Take in all trajectories of a question."""
        for verdict in verdicts:
            self.reasons[verdict.reason] += 1
            if verdict.judged is None:
                self.failures[verdict.detail.partition(":")[0]] += 1
                continue
            played = verdict.judged.played
            self._count("calls", played.calls, verdict)
            self._count("turns", len(played.finished.turns), verdict)
            self._count("tokens", played.tokens, verdict)
            for part, value in verdict.judged.parts.items():
                self._count(f"part/{part}", value, verdict)
            if (number := played.number(self.metric)) is not None:
                self._count(f"metric/{self.metric}", number, verdict)
            if verdict.score is not None:
                self._count("score", verdict.score, verdict)
        scores = [score for verdict in verdicts if (score := verdict.score) is not None]
        passed = sum(score >= self.pass_score for score in scores)
        self.questions.append(
            {
                "question_id": name,
                "samples": len(verdicts),
                "scored": len(scores),
                "passed": passed,
                "pass_rate": passed / len(scores) if scores else None,
                "best": max(scores, default=None),
                "kept": sum(verdict.kept for verdict in verdicts),
            }
        )

    def _count(self, name: str, value: float, verdict: Verdict) -> None:
        everything, kept = self._numbers.setdefault(name, ([], []))
        everything.append(value)
        if verdict.kept:
            kept.append(value)

    @property
    def generated(self) -> int:
        """Trajectories that were played, failed ones included: those kept and those dropped."""
        return self.reasons.total()

    @property
    def kept(self) -> int:
        return self.reasons["kept"]

    @property
    def failed(self) -> int:
        return self.reasons["failed"]

    @property
    def missing(self) -> str:
        """What is still to be played, in words."""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.unplayed} trajectories were not played{failed}"

    def mean(self, name: str, *, kept: bool = True) -> float | None:
        """Mean of a number over the kept trajectories, or over all."""
        found = self._numbers.get(name, ([], []))[kept]
        return sum(found) / len(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON. Of every number, ``all`` trajectories that have it and the ``kept`` ones."""
        rates = [row["pass_rate"] for row in self.questions if row["pass_rate"] is not None]
        return {
            "criterion": self.criterion,
            "samples": self.samples,
            "questions": len(self.questions),
            "questions_kept": sum(row["kept"] > 0 for row in self.questions),
            "generated": self.generated,
            "kept": self.kept,
            "dropped": self.generated - self.kept,
            "failed": self.failed,
            "unplayed": self.unplayed,
            "stopped": self.stopped or None,
            "reasons": dict(sorted(self.reasons.items())),
            "failures": dict(sorted(self.failures.items())),
            "pass_score": self.pass_score,
            "pass_rate": spread(rates),
            "numbers": {
                name: {"all": spread(everything), "kept": spread(kept)}
                for name, (everything, kept) in sorted(self._numbers.items())
            },
            "usage": dict(self.usage),
            "by_question": self.questions,
        }

    def lines(self) -> list[str]:
        """A table for people."""
        document = self.to_json()
        rates = document["pass_rate"]
        solved = sum(bool(row["passed"]) for row in self.questions)
        out = [
            f"{self.generated} trajectories of {len(self.questions)} questions ({self.samples} each): "
            f"{self.kept} kept, {self.generated - self.kept} dropped; {document['questions_kept']} questions have one",
            *(f"  {reason:<18}{count:>8}" for reason, count in self.reasons.most_common()),
            f"  {self.criterion} >= {self.pass_score:g}: {_short(rates['mean'])} of a question's samples on average, "
            f"some sample of {solved} questions",
            f"  {'':<24}{'mean':>10}{'min':>10}{'q25':>10}{'median':>10}{'q75':>10}{'max':>10}",
        ]
        for name, both in document["numbers"].items():
            for which in ("all", "kept"):
                row = both[which]
                cells = "".join(f"{_short(row[key]):>10}" for key in ("mean", "min", "q25", "median", "q75", "max"))
                out.append(f"  {name + ', ' + which:<24}{cells}")
        out += [f"  failed, {kind}: {count}" for kind, count in sorted(self.failures.items())]
        used = self.usage
        if used.get("requests"):
            cost = f", cost {used['cost']:.6g}" if used.get("cost") else ""
            out.append(
                f"  {used['requests']} requests, {used['prompt_tokens']} prompt tokens, {used['completion_tokens']} "
                f"generated tokens{cost}"
            )
        return out


def _short(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
