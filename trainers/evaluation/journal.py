"""Rows as they are played, one line a question, so that a killed evaluation goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turntree.errors import CheckpointError
from turntree.trainers.append import AppendFile
from turntree.trainers.atomic import atomic_file, written
from turntree.trainers.evaluation.rows import EvalRow, parse_row

__all__ = ["Journal", "check_facts", "read_journal"]


class Journal:
    """An open journal. Lines are on the disk when :meth:`write` returns; delete it when they are written elsewhere."""

    def __init__(self, path: Path, facts: Mapping[str, Any], rows: Sequence[Sequence[EvalRow]] = ()) -> None:
        """Start over with ``rows``; ``facts`` say how they are made.

        A journal that is there already is replaced at once, so that a kill at this moment costs none of its rows.
        """
        self.path = path
        with written(path):
            with atomic_file(path) as file:
                file.write(_bytes({"facts": facts}) + _lines(rows))
            self._file = AppendFile(path)

    def write(self, rows: Sequence[Sequence[EvalRow]]) -> None:
        """Append the rows of some questions."""
        self._file.append_lines(_lines(rows))
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path, facts: Mapping[str, Any]) -> dict[str, tuple[EvalRow, ...]]:
    """Rows by question id; empty without a journal. A last line that was cut is dropped.

    Raises ``CheckpointError`` for rows that were made in another way than ``facts`` say.
    """
    if not path.is_file():
        return {}
    lines = path.read_bytes().split(b"\n")
    saved = _json(lines[0])
    if not isinstance(saved, dict) or not isinstance(saved.get("facts"), dict):
        if len(lines) == 1:  # nothing was played yet
            return {}
        raise CheckpointError(
            f"{path}, line 1 is damaged: expected how the rows were made, found {lines[0][:80]!r}; restore the file, "
            "or delete it, and its questions are played again"
        )
    check_facts(saved["facts"], facts, folder=path.parent)
    rows: dict[str, tuple[EvalRow, ...]] = {}
    for number, line in enumerate(lines[1:-1], 2):
        found = _json(line)
        if not isinstance(found, list) or not found:
            raise CheckpointError(
                f"{path}, line {number} is no list of rows; delete the file, and its questions are played again"
            )
        parsed = tuple(parse_row(json.dumps(row), where=f"{path}, line {number}") for row in found)
        rows[parsed[0].id] = parsed
    return rows


def check_facts(saved: Mapping[str, Any], facts: Mapping[str, Any], *, folder: Path) -> None:
    """Raises ``CheckpointError`` that names the facts in which results differ from what would be made now."""
    now = json.loads(json.dumps(facts))
    other = [
        f"{key} ({saved.get(key)!r:.60}, now {value!r:.60})" for key, value in now.items() if saved.get(key) != value
    ]
    if other:
        raise CheckpointError(
            f"the results in {folder} were made with other options: {'; '.join(other)}; give the same ones, or another "
            "out"
        )


def _lines(rows: Sequence[Sequence[EvalRow]]) -> bytes:
    return b"".join(_bytes([asdict(row) for row in found]) for found in rows)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _bytes(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
