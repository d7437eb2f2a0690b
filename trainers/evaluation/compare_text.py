"""A comparison as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from turntree.trainers.evaluation.compare import Comparison, Flip, Measured
from turntree.trainers.evaluation.rows import EvalRow
from turntree.trainers.evaluation.summary import interval_json
from turntree.trainers.report.tables import markdown_table

__all__ = ["csv_text", "flip_json", "markdown", "to_json"]

_HEAD = ["metric", "A", "B", "B - A", "low", "high", "p", "wins", "losses", "ties", "n"]


def markdown(found: Comparison, *, flips: int = 10) -> str:
    """Tables by set, warnings, and the first ``flips`` wins and losses with both trajectories."""
    parts = [f"A: {found.a}\nB: {found.b}", f"{found.common} questions in common"]
    if found.warnings:
        parts.append("\n".join(f"- warning: {warning}" for warning in found.warnings))
    if also := {d.key for listed in found.differences.values() for d in listed if d.weight == "notes"}:
        parts.append(f"Also different: {', '.join(sorted(also))}")
    for name, measured in found.measured.items():
        title = f"## {name}" if name else "## All questions" if len(found.measured) > 1 else ""
        parts += [*([title] if title else []), markdown_table(_HEAD, [_told(m) for m in measured])]
    won, lost = ([f for f in found.flips if f.won is side] for side in (True, False))
    parts.append(f"{len(won) + len(lost)} questions flipped: B wins {len(won)}, B loses {len(lost)}")
    parts += [_flip(flip) for flip in (*won[:flips], *lost[:flips])]
    return "\n\n".join(parts) + "\n"


def csv_text(found: Comparison) -> str:
    """Every difference, in long form."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["a", "b", "set", "metric", "mean_a", "mean_b", "difference", *_HEAD[4:]])
    for name, measured in found.measured.items():
        writer.writerows([found.a, found.b, name, *_row(m)] for m in measured)
    return out.getvalue()


def to_json(found: Comparison) -> dict[str, Any]:
    """Plain JSON; flips by their ids, :func:`flip_json` holds the rest of them."""
    return {
        "a": found.a,
        "b": found.b,
        "common": found.common,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "warnings": list(found.warnings),
        "differences": {
            name: [{"key": d.key, "a": d.a, "b": d.b, "weight": d.weight} for d in listed]
            for name, listed in found.differences.items()
        },
        "measured": {name: {m.metric: _json(m) for m in measured} for name, measured in found.measured.items()},
        "wins": [list(flip.key) for flip in found.flips if flip.won],
        "losses": [list(flip.key) for flip in found.flips if not flip.won],
    }


def flip_json(flip: Flip) -> dict[str, Any]:
    """A flipped question with both answers and trajectories."""
    sides = {"a": (flip.score_a, flip.a), "b": (flip.score_b, flip.b)}
    return {
        "set": flip.key[0],
        "id": flip.key[1],
        "question": flip.a.question,
        "golden_answers": flip.a.golden_answers,
        "won": flip.won,
        **{
            side: {"score": score, "prediction": row.prediction, "trajectory": row.trajectory}
            for side, (score, row) in sides.items()
        },
    }


def _json(m: Measured) -> dict[str, Any]:
    counts = {"wins": m.wins, "losses": m.losses, "ties": m.ties}
    return {"a": m.a, "b": m.b, "difference": interval_json(m.difference), "p": m.p, **counts}


def _row(m: Measured) -> list[Any]:
    d = m.difference
    return [m.metric, m.a, m.b, d.mean, d.low, d.high, m.p, m.wins, m.losses, m.ties, d.n]


def _told(m: Measured) -> list[Any]:
    """A row for reading: a permutation test never finds a p of 0, and three digits would say so."""
    row = _row(m)
    return [*row[:6], "<0.001" if m.p < 0.001 else m.p, *row[7:]]


def _flip(flip: Flip) -> str:
    where = ": ".join(part for part in flip.key if part)
    verdict = "B wins" if flip.won else "B loses"
    head = (
        f"### {verdict}: {where}\n\n{_plain(flip.a.question)}\n\nGold: {' | '.join(map(_plain, flip.a.golden_answers))}"
    )
    sides = (("A", flip.a, flip.score_a), ("B", flip.b, flip.score_b))
    return "\n\n".join([head, *(_side(name, row, score) for name, row, score in sides)])


def _side(name: str, row: EvalRow, score: float) -> str:
    said = "no answer" if row.prediction is None else _plain(row.prediction)
    return f"{name}: {said} (score {score:g}, {row.stop_reason or row.status})\n\n{_fenced(_text(row.trajectory))}"


def _text(trajectory: Sequence[Sequence[str]]) -> str:
    return "\n".join(part.strip() for turn in trajectory for part in turn if part.strip())


def _plain(text: str) -> str:
    return " ".join(str(text).split())


def _fenced(text: str) -> str:
    """A block that no back-quotes inside can end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
