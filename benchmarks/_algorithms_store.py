"""Finished runs of the algorithm benchmark: curves that are stored once and never run twice, several made at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Store", "Trace"]

Result = TypeVar("Result")


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

    A key holds everything that a run depends on, so that a changed option is another run. ``pool``: processes that make
    what is missing, as it can be pickled then; without it this one does, in turn.
    """

    def __init__(self, folder: Path, pool: Executor | None = None) -> None:
        self.folder = folder
        self.pool = pool
        self._files: dict[str, dict[str, Trace]] = {}
        self.ran = 0

    def traces(self, file: str, runs: Sequence[tuple[Mapping[str, Any], Callable[[], Trace]]]) -> list[Trace]:
        """The stored run of each (key, how to make it); what there is none of is made, and stored as it ends."""
        known = self._known(file)
        keys, makes = {_name(key): key for key, _ in runs}, {_name(key): make for key, make in runs}
        for name, trace in self.made({name: make for name, make in makes.items() if name not in known}):
            known[name] = trace
            line = {"key": dict(keys[name]), "tokens": trace.tokens, "calls": trace.calls, "em": trace.em}
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._path(file).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps({**line, "extra": trace.extra}, ensure_ascii=False, allow_nan=False) + "\n")
            self.ran += 1
        return [known[_name(key)] for key, _ in runs]

    def made(self, calls: Mapping[str, Callable[[], Result]]) -> Iterator[tuple[str, Result]]:
        """What each call returns, with its name, as they end."""
        if self.pool is None:
            yield from ((name, call()) for name, call in calls.items())
            return
        futures = {self.pool.submit(call): name for name, call in calls.items()}
        yield from ((futures[future], future.result()) for future in as_completed(futures))

    def has(self, file: str, key: Mapping[str, Any]) -> bool:
        """Whether :meth:`traces` would find the run."""
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
