"""Finished runs of the algorithm benchmark: curves that are stored once and never run twice, several made at a time."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from turntree.errors import DataError

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
    """A folder of JSON lines, one file an arm and world, one line a finished run.

    A key holds everything that a run depends on, so that a changed option is another run. ``pool``: processes that make
    what is missing, as it can be pickled then; without it this one does, in turn. Processes that write the same file
    lose nothing, but may make the same run twice.
    """

    def __init__(self, folder: Path, pool: Executor | None = None) -> None:
        self.folder = folder
        self.pool = pool
        self._files: dict[str, dict[str, Trace]] = {}
        self.ran = 0

    def check(self) -> None:
        """Whether runs can be stored, before any is made. Raises ``DataError``."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise DataError(
                f"runs are kept in {self.folder}: expected a folder that can be written, found {error.strerror}; "
                "choose another one"
            ) from error

    def traces(self, file: str, runs: Sequence[tuple[Mapping[str, Any], Callable[[], Trace]]]) -> list[Trace]:
        """The stored run of each (key, how to make it); what there is none of is made, and stored as it ends.

        If one fails, those that are under way are stored still, no further ones begin, and its exception is raised.
        """
        known = self._known(file)
        keys, makes = {_name(key): key for key, _ in runs}, {_name(key): make for key, make in runs}
        for name, trace in self.made({name: make for name, make in makes.items() if name not in known}):
            known[name] = trace
            line = {"key": dict(keys[name]), "tokens": trace.tokens, "calls": trace.calls, "em": trace.em}
            text = json.dumps({**line, "extra": trace.extra}, ensure_ascii=False, allow_nan=False)
            self.folder.mkdir(parents=True, exist_ok=True)
            _append(self._path(file), text.encode() + b"\n")
            self.ran += 1
        return [known[_name(key)] for key, _ in runs]

    def made(self, calls: Mapping[str, Callable[[], Result]]) -> Iterator[tuple[str, Result]]:
        """What each call returns, with its name, as they end. An exception is raised after what was under way ended."""
        if self.pool is None:
            yield from ((name, call()) for name, call in calls.items())
            return
        futures = {self.pool.submit(call): name for name, call in calls.items()}
        failed: BaseException | None = None
        for future in as_completed(futures):
            error = None if future.cancelled() else future.exception()
            if error is not None and failed is None:
                failed = error
                failed.add_note(f"This was {futures[future]}")
                for other in futures:
                    other.cancel()
            elif error is None and not future.cancelled():
                yield futures[future], future.result()
        if failed is not None:
            raise failed

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


@contextmanager
def _held(path: Path, mode: str) -> Iterator[IO[bytes]]:
    """The file, without a buffer, which no other process has in this way until the block ends. On a file system without
    locks nothing is kept out."""
    with path.open(mode, buffering=0) as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle


def _append(path: Path, line: bytes) -> None:
    """A line that cannot be written whole, as on a full disk, is taken back."""
    with _held(path, "a+b") as handle:
        end = _cut(handle)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[handle.write(rest) :]
        except BaseException:
            handle.truncate(end)
            raise


def _cut(handle: IO[bytes]) -> int:
    """Cut off a last line without an end, of a process that was killed while it wrote; the size that is left."""
    size = handle.seek(0, os.SEEK_END)
    if size:
        handle.seek(size - 1)
        if handle.read(1) != b"\n":
            handle.seek(0)
            size = handle.read().rfind(b"\n") + 1
            handle.truncate(size)
    return size


def _read(path: Path) -> list[tuple[str, Trace]]:
    if not path.is_file():
        return []
    with _held(path, "r+b") as handle:
        _cut(handle)
        handle.seek(0)
        data = handle.read()
    # Not splitlines: a key may hold what ends lines elsewhere, such as U+2028.
    return [_parsed(line, f"{path}, line {i}") for i, line in enumerate(data.split(b"\n")[:-1], 1)]


def _parsed(line: bytes, where: str) -> tuple[str, Trace]:
    try:
        row = json.loads(line)
        return _name(row["key"]), Trace(tuple(row["tokens"]), tuple(row["calls"]), tuple(row["em"]), row["extra"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}: expected a finished run as JSON with key, tokens, calls, em and extra, found {line[:60]!r} "
            f"({error}); delete this line, and its run is made again"
        ) from error
