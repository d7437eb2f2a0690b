"""The files of a selection: ``kept.jsonl`` and ``dropped.jsonl``, one trajectory a line, and reading them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turntree.errors import DataError
from turntree.trainers.coldstart.select import Verdict

__all__ = ["DROPPED", "KEPT", "STATISTICS", "kept_file", "read_kept", "verdict_row"]

KEPT, DROPPED, STATISTICS = "kept.jsonl", "dropped.jsonl", "statistics.json"


def verdict_row(verdict: Verdict, *, metric: str) -> dict[str, Any]:
    """A trajectory with what was decided of it; ``metric``: the number that the task is judged by, such as ``em``.

    One that failed has no turns.
    """
    head: dict[str, Any] = {
        "question_id": verdict.key.question,
        "sample": verdict.key.sample,
        "reason": verdict.reason,
        "detail": verdict.detail,
        "score": verdict.score,
        "rank": verdict.rank,
    }
    if verdict.judged is None:
        return head
    played = verdict.judged.played
    finished = played.finished
    exact = bool(played.ids)
    turns = [
        {"text": turn.text, "action": turn.action, "observation": turn.observation}
        | ({"ids": list(played.ids[i])} if exact else {})
        for i, turn in enumerate(finished.turns)
    ]
    return (
        head
        | {
            "scores": dict(verdict.judged.parts),
            "metric": played.number(metric),
            "reward": finished.reward,
            "calls": played.calls,
            "tokens": played.tokens,
            "status": finished.status,
            "question": getattr(finished.task, "question", None),
            "golden_answers": list(getattr(finished.task, "golden_answers", ())),
            "answer": finished.answer,
            "prompt": finished.prompt,
            "turns": turns,
        }
        | ({"vocabulary": played.vocabulary} if exact else {})
    )


def read_kept(path: str | Path) -> list[dict[str, Any]]:
    """The rows of ``kept.jsonl``, or of a folder that holds one (also that of a cold start, in ``coldstart``).

    Any JSON Lines serve whose rows have ``question_id``, ``prompt`` and ``turns`` with ``text`` and ``observation``
    each. Raises ``DataError`` naming file and line.
    """
    file = kept_file(Path(path))
    rows: list[dict[str, Any]] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"sft.data: cannot read {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_checked(line, f"{file}, line {number}"))
    if not rows:
        raise DataError(f"sft.data: expected trajectories in {file}, found none; see dropped.jsonl for the reasons")
    return rows


def kept_file(path: Path) -> Path:
    """The file that a path means: itself, or the one in a folder. Raises ``DataError`` where there is none."""
    if not path.exists():
        raise DataError(f"sft.data={path}: expected a file of kept trajectories or its folder, found nothing there")
    if not path.is_dir():
        return path
    places = [path / KEPT, path / "coldstart" / KEPT]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"sft.data={path}: expected {KEPT} in the folder, found none; turntree coldstart writes it when it is done"
        )
    return found


def _checked(line: str, where: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
        texts = [
            row["question_id"],
            row["prompt"],
            *(turn[key] for turn in row["turns"] for key in ("text", "observation")),
        ]
        ids = [i for turn in row["turns"] for i in turn.get("ids", ())]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{where}: expected a trajectory with question_id, prompt and turns (text, observation), found "
            f"{line[:100]!r} ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(row, Mapping) or not row["turns"] or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: expected texts in question_id, prompt and each of at least one turn")
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise DataError(f"{where}: expected token ids as whole numbers of at least 0")
    return dict(row)
