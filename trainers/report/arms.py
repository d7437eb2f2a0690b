"""The table of a comparison of arms: means over questions and seeds with 95 % intervals, as JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turntree.trainers.atomic import atomic_file, write_json
from turntree.trainers.evaluate import EvalRow, read_rows
from turntree.trainers.report.tables import markdown_table
from turntree.trainers.stats import Interval, bootstrap_mean, paired_difference, share_interval

__all__ = ["MEASURES", "Arm", "Comparison", "nested_mean"]

MEASURES: dict[str, Callable[[EvalRow], float | None]] = {
    "em": lambda row: row.em,
    "f1": lambda row: row.f1,
    "completeness": lambda row: row.parts.get("completeness"),
    "searches": lambda row: float(row.searches),
    "tokens": lambda row: float(row.generated_tokens),
    "turns": lambda row: float(row.turns),
    "format_valid": lambda row: float(row.format_valid),
}
"""What is measured of every question: of the agent or planner; a summariser's tokens are counted apart."""

SHARES = ("em", "completeness", "format_valid")

TITLES = {
    "direct": "DIRECT (no tools)",
    "sft": "end-to-end SFT",
    "rl": "end-to-end RL",
    "planner_sft": "planner SFT (RLTR's cold start)",
    "rltr": "RLTR",
}

#: Differences that are tested question by question, the first minus the second.
PAIRS = (("rltr", "rl"), ("rltr", "planner_sft"), ("rl", "sft"), ("sft", "direct"))


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of one seed.

    ``ids``: the scored questions; ``values``: of each measure one value a question (None: not measured). ``budget``:
    what its training used. ``summarizer``: what its summariser used. ``failed``: questions that could not be scored.
    """

    name: str
    seed: int
    ids: list[str]
    values: dict[str, list[float | None]]
    budget: dict[str, Any] = field(default_factory=dict)
    summarizer: dict[str, float] = field(default_factory=dict)
    failed: int = 0

    @staticmethod
    def of(name: str, seed: int, evaluation: Path, budget: Mapping[str, Any]) -> Arm:
        """From the folder of a finished evaluation."""
        document = json.loads((evaluation / "evaluation.json").read_text(encoding="utf-8"))
        rows = list(read_rows(evaluation / "evaluation.jsonl").values())
        values = {measure: [read(row) for row in rows] for measure, read in MEASURES.items()}
        used = dict(document.get("summarizer_usage", {}))
        return Arm(name, seed, [row.id for row in rows], values, dict(budget), used, int(document["failed"]))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms of all seeds, and the budget that each was given."""

    arms: tuple[Arm, ...]
    budget: dict[str, Any]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({arm.seed for arm in self.arms}))

    @property
    def names(self) -> tuple[str, ...]:
        """The arms, in the order in which they came."""
        return tuple(dict.fromkeys(arm.name for arm in self.arms))

    def of(self, name: str) -> tuple[Arm, ...]:
        """One arm, a seed each."""
        return tuple(arm for arm in self.arms if arm.name == name)

    def interval(self, name: str, measure: str) -> Interval:
        """Mean of a measure over questions and seeds."""
        values = [[v for v in arm.values[measure] if v is not None] for arm in self.of(name)]
        return _interval(tuple(tuple(v) for v in values if v), share=measure in SHARES)

    def difference(self, first: str, second: str, measure: str) -> dict[str, Any] | None:
        """``first - second`` over the questions that both answered in the same seed; None without any."""
        a: list[float] = []
        b: list[float] = []
        for seed in self.seeds:
            one, two = (self._by_question(name, seed, measure) for name in (first, second))
            shared = [question for question in one if question in two]
            a += [one[question] for question in shared]
            b += [two[question] for question in shared]
        if not a:
            return None
        found = paired_difference(b, a)
        return {**_plain(found.difference), "wins": found.wins, "losses": found.losses, "ties": found.ties}

    def _by_question(self, name: str, seed: int, measure: str) -> dict[str, float]:
        arm = next((arm for arm in self.of(name) if arm.seed == seed), None)
        pairs = zip(arm.ids, arm.values[measure]) if arm is not None else ()
        return {question: value for question, value in pairs if value is not None}

    # -- as files -----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything of the table as plain JSON; numbers that do not exist are null."""
        return {
            "seeds": list(self.seeds),
            "confidence": 0.95,
            "budget": self.budget,
            "arms": {name: self._arm_json(name) for name in self.names},
            "differences": {
                f"{first}-{second}": {m: self.difference(first, second, m) for m in ("em", "f1", "completeness")}
                for first, second in PAIRS
                if first in self.names and second in self.names
            },
        }

    def _arm_json(self, name: str) -> dict[str, Any]:
        arms = self.of(name)
        return {
            **{measure: _plain(self.interval(name, measure)) for measure in MEASURES},
            "failed": sum(arm.failed for arm in arms),
            "per_seed": [
                {
                    "seed": arm.seed,
                    **{m: _mean([v for v in arm.values[m] if v is not None]) for m in MEASURES},
                    "training": arm.budget,
                    "summarizer": arm.summarizer,
                }
                for arm in arms
            ],
        }

    def rows(self) -> list[dict[str, Any]]:
        """The table: one row an arm, plain columns."""
        return [self._row(name) for name in self.names]

    def _row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"arm": name, "seeds": " ".join(str(arm.seed) for arm in self.of(name))}
        row["questions"] = sum(len(arm.ids) for arm in self.of(name))
        row["failed"] = sum(arm.failed for arm in self.of(name))
        for measure in MEASURES:
            found = _plain(self.interval(name, measure))
            row |= {measure: found["mean"], f"{measure}_low": found["low"], f"{measure}_high": found["high"]}
        asked = max(row["questions"], 1)
        tokens = [a.summarizer.get(k, 0.0) for a in self.of(name) for k in ("prompt_tokens", "completion_tokens")]
        row["summarizer_tokens"] = sum(tokens) / asked
        row["summarizer_cost"] = sum(arm.summarizer.get("cost", 0.0) for arm in self.of(name))
        for key in ("sft_demonstrations", "rl_steps", "trajectories", "generated_tokens", "tool_calls"):
            row[f"training_{key}"] = _mean([float(arm.budget.get(key, 0)) for arm in self.of(name)])
        return row

    def markdown(self) -> str:
        """The table and what it rests on, for people."""
        head = ["arm", "EM", "F1", "completeness", "searches", "tokens", "summariser tokens", "training tokens"]
        cells = [
            [
                TITLES.get(row["arm"], row["arm"]),
                *(_cell(row, m) for m in ("em", "f1", "completeness")),
                *(_cell(row, m, ".2f") for m in ("searches",)),
                _cell(row, "tokens", ".1f"),
                f"{row['summarizer_tokens']:.1f}",
                f"{row['training_generated_tokens'] or 0:,.0f}",
            ]
            for row in self.rows()
        ]
        lines = [markdown_table(head, cells), "", *self._notes(), ""]
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        b = self.budget
        n = max((len(arm.ids) for arm in self.arms), default=0)
        limit = f", at most {b['max_generated_tokens']:,} tokens" if b.get("max_generated_tokens") else ""
        notes = [
            f"Means over {n} questions and the seeds {', '.join(map(str, self.seeds))}, with 95 % intervals. Searches "
            "and tokens (of the agent or planner) are per question; training tokens are those sampled in RL, a mean "
            "over seeds.",
            "",
            f"Equal budgets: {b['sft_steps']} SFT steps on up to {b['sft_demonstrations']} demonstrations; RL with "
            f"{b['algorithm']}, {b['rl_steps']} steps of {b['prompts_per_step']} prompts and "
            f"{b['trajectories_per_prompt']} trajectories each{limit}; episodes of at most {b['max_turns']} turns.",
        ]
        for pair, found in self.to_json()["differences"].items():
            said = [f"{m} {_signed(found[m])}" for m in ("em", "f1", "completeness") if found[m] is not None]
            notes += ["", f"{pair.replace('-', ' - ')}, question by question: {'; '.join(said)}."]
        return notes

    def save(self, folder: Path) -> None:
        """Write ``comparison.json``, ``comparison.md`` and ``comparison.csv``, each whole or not there."""
        write_json(folder / "comparison.json", self.to_json())
        with atomic_file(folder / "comparison.md") as file:
            file.write(self.markdown().encode())
        text, rows = io.StringIO(), self.rows()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        with atomic_file(folder / "comparison.csv") as file:
            file.write(text.getvalue().encode())


def nested_mean(
    groups: Sequence[Sequence[float]], *, share: bool = False, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean over all values of ``groups`` (seeds, each with its questions) and its 95 % interval.

    Of one group that of :mod:`turntree.trainers.stats`: Wilson's for a ``share`` of zeros and ones, else a bootstrap.
    Of several a bootstrap of two levels (Davison and Hinkley 1997, section 3.8): groups are drawn, then values within
    each, so that runs that differ by their seed widen it. Groups count equally.
    """
    if len(groups) < 2:
        values = list(groups[0]) if groups else []
        if share and values and set(values) <= {0.0, 1.0}:
            return share_interval(values)
        return bootstrap_mean(values, resamples=resamples, seed=seed)
    rng = np.random.default_rng(seed)
    data = [np.asarray(group, dtype=np.float64) for group in groups]
    # The mean of each group under resampling, once for every place that it can be drawn to.
    drawn = np.stack([_means(values, resamples, len(data), rng) for values in data])
    picks = rng.integers(len(data), size=(resamples, len(data)))
    places = np.arange(len(data))
    means = drawn[picks, np.arange(resamples)[:, None], places].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(np.mean([values.mean() for values in data]))
    return Interval(mean, float(low), float(high), sum(map(len, groups)))


@functools.lru_cache(maxsize=256)
def _interval(groups: tuple[tuple[float, ...], ...], *, share: bool) -> Interval:
    return nested_mean(groups, share=share)


def _means(values: Any, resamples: int, places: int, rng: np.random.Generator) -> Any:
    """Means of resampled ``values``, shape (resamples, places), drawn in chunks of bounded memory."""
    flat = np.empty(resamples * places)
    rows = max(1, 2_000_000 // values.size)
    for start in range(0, flat.size, rows):
        size = min(rows, flat.size - start)
        flat[start : start + size] = values[rng.integers(values.size, size=(size, values.size))].mean(axis=1)
    return flat.reshape(resamples, places)


def _plain(interval: Interval) -> dict[str, Any]:
    numbers = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {key: None if math.isnan(value) else value for key, value in numbers.items()} | {"n": interval.n}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _cell(row: Mapping[str, Any], measure: str, spec: str = ".3f") -> str:
    mean, low, high = (row[key] for key in (measure, f"{measure}_low", f"{measure}_high"))
    if mean is None:
        return "-"
    return format(mean, spec) if low is None else f"{mean:{spec}} [{low:{spec}}, {high:{spec}}]"


def _signed(found: Mapping[str, Any]) -> str:
    low, high = found["low"], found["high"]
    return f"{found['mean']:+.3f}" + ("" if low is None else f" [{low:+.3f}, {high:+.3f}]")
