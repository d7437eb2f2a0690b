"""Finished runs of the algorithm benchmark: curves that are stored once and never run twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Store", "Trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """A learning curve: exact match after ``tokens`` sampled tokens and ``calls`` tool calls, all of one length.

    ``extra`` holds single numbers of the run, such as its seconds.
    """

    tokens: tuple[int, ...]
    calls: tuple[int, ...]
    em: tuple[float, ...]
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.calls) == len(self.em) > 0:
            raise ValueError(
                f"a curve needs as many tokens, calls and EM, and at least one; found {len(self.tokens)}, "
                f"{len(self.calls)} and {len(self.em)}"
            )

    def area(self, budget: float) -> float:
        """Mean exact match over the first ``budget`` tokens, straight lines between points and flat after the last."""
        points = [(t, y) for t, y in zip(self.tokens, self.em) if t < budget]
        at_end = self.em_at(budget)
        total = 0.0
        for (t, y), (next_t, next_y) in zip(points, [*points[1:], (budget, at_end)]):
            total += (next_t - t) * (y + next_y) / 2
        return total / budget

    def em_at(self, tokens: float) -> float:
        """Exact match after ``tokens``, interpolated."""
        before = self.tokens[0], self.em[0]
        for t, y in zip(self.tokens, self.em):
            if t >= tokens:
                share = (tokens - before[0]) / (t - before[0]) if t > before[0] else 1.0
                return before[1] + share * (y - before[1])
            before = t, y
        return before[1]


class Store:
    """A folder of JSON lines, one file an arm and world, one line a finished run. One process writes a file.

    A key holds everything that a run depends on, so that a changed option is another run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, dict[str, Trace]] = {}
        self.ran = 0

    def trace(self, file: str, key: Mapping[str, Any], make: Callable[[], Trace]) -> Trace:
        """The stored run of ``key``; made and stored first where there is none."""
        known, name = self._known(file), _name(key)
        if name not in known:
            known[name] = made = make()
            line = {"key": dict(key), "tokens": made.tokens, "calls": made.calls, "em": made.em, "extra": made.extra}
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._path(file).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self.ran += 1
        return known[name]

    def has(self, file: str, key: Mapping[str, Any]) -> bool:
        """Whether :meth:`trace` would find the run."""
        return _name(key) in self._known(file)

    def _path(self, file: str) -> Path:
        return self.folder / f"{file}.jsonl"

    def _known(self, file: str) -> dict[str, Trace]:
        if file not in self._files:
            self._files[file] = dict(_read(self._path(file)))
        return self._files[file]


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _read(path: Path) -> list[tuple[str, Trace]]:
    """A last line without an end is of a process that was killed while it wrote: it is cut off."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    rows = [json.loads(line) for line in whole.decode().splitlines()]
    return [
        (_name(row["key"]), Trace(tuple(row["tokens"]), tuple(row["calls"]), tuple(row["em"]), row["extra"]))
        for row in rows
    ]
