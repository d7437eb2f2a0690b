"""An append-only file of finished trajectories: what was written stays, whenever the process dies."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turntree.errors import CheckpointError, DataError
from turntree.trainers.atomic import atomic_file, sync_folder, write_json
from turntree.trainers.checkpoint import check_fingerprint
from turntree.trainers.coldstart.played import Key

__all__ = ["AppendFile", "Journal", "json_line"]

SCHEMA = 1
_SYNC_S = 1.0
"""Seconds after which what was appended is pushed to the disk. A process that dies loses nothing; a machine that does
loses at most this much."""


def json_line(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON Lines. A lone surrogate, which UTF-8 has no bytes for, becomes an escape."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class AppendFile:
    """JSON Lines that only grow, each line by one write. A line that a dying machine left unfinished is cut off.

    Raises ``CheckpointError`` for a whole line that is no JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = self._whole_lines()
        self._synced = time.monotonic()

    def _whole_lines(self) -> int:
        """Where the last whole line ends; the rest goes."""
        size = os.fstat(self._file).st_size
        end, block = size, 1 << 16
        while end:
            start = max(0, end - block)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)
        return end

    def lines(self) -> Iterable[tuple[int, int, dict[str, Any]]]:
        """(offset, length in bytes, row) of each line."""
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield offset, len(line), self._parse(line, f", line {number}")
                offset += len(line)

    def append(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Write a row; its offset and length.

        A row that could not be written whole leaves nothing behind; then ``CheckpointError``.
        """
        data, offset = json_line(row), self._end
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], offset + written)
        except OSError as error:
            os.ftruncate(self._file, offset)
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror}; what it holds is whole: make room, and go on with "
                "resume=true"
            ) from error
        self._end += len(data)
        if time.monotonic() - self._synced > _SYNC_S:
            self.sync()
        return offset, len(data)

    def read(self, offset: int, length: int) -> dict[str, Any]:
        """The row at an offset."""
        return self._parse(self.raw(offset, length))

    def raw(self, offset: int, length: int) -> bytes:
        """The line at an offset."""
        return os.pread(self._file, length, offset)

    def sync(self) -> None:
        """Push everything to the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Push everything to the disk and let go; a second call does nothing."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1

    def _parse(self, line: bytes, where: str = "") -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise CheckpointError(
                f"{self.path}{where} is damaged: expected a JSON object a line, found {line[:80]!r}; delete that line, "
                "and what it held is done again"
            )
        return row


class Journal:
    """The trajectories in ``folder``, each once; one process at a time.

    ``trajectories.jsonl`` holds them in the order in which they ended, and in the order of the questions once
    :meth:`settle` was called. ``journal.json`` holds what they depend on.

    Raises ``CheckpointError`` where another process writes the folder, or what is there was made in another way.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Not flock: a child process that outlives a killed parent must not hold the folder.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(f"another process plays in {folder}; wait for it, or choose another folder") from None
        try:
            self._check(fingerprint)
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _check(self, fingerprint: Mapping[str, Any]) -> None:
        path = self.folder / "journal.json"
        if not path.is_file():
            if (self.folder / "trajectories.jsonl").is_file():
                raise CheckpointError(f"{path} is missing, so nobody knows how the trajectories beside it were made")
            write_json(path, {"schema": SCHEMA, "fingerprint": dict(fingerprint)})
            return
        try:
            saved = json.loads(path.read_bytes())
            schema, made = saved["schema"], saved["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); choose another folder") from error
        if schema != SCHEMA:
            raise CheckpointError(f"{path} has schema {schema}, this version reads {SCHEMA}")
        check_fingerprint(made, fingerprint, source=self.folder)

    def _open(self) -> None:
        self._file = AppendFile(self.folder / "trajectories.jsonl")
        self._places: dict[Key, tuple[int, int]] = {}
        for offset, length, row in self._file.lines():
            try:
                self._places.setdefault(Key(str(row["question_id"]), int(row["sample"])), (offset, length))
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file.path} holds a row that is no trajectory ({error!r}); delete it"
                ) from error

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, key: Key, row: Mapping[str, Any]) -> None:
        """Add a trajectory. Raises ``DataError`` for one that is there."""
        if key in self._places:
            raise DataError(f"trajectory {key.sample} of question {key.question!r} was played already")
        self._places[key] = self._file.append(row)

    def read(self, key: Key) -> dict[str, Any]:
        """The row of a trajectory."""
        return self._file.read(*self._places[key])

    def settle(self, order: Iterable[Key]) -> None:
        """Put the trajectories into ``order``, whatever the order they ended in; others follow by name and sample."""
        wanted = [key for key in dict.fromkeys(order) if key in self._places]
        given = set(wanted)
        wanted += sorted(key for key in self._places if key not in given)
        if wanted == sorted(self._places, key=lambda key: self._places[key]):
            self._file.sync()
            sync_folder(self.folder)
            return
        with atomic_file(self._file.path) as file:
            for key in wanted:
                file.write(self._file.raw(*self._places[key]))
        self._file.close()
        self._open()

    def close(self) -> None:
        """Let go of the folder."""
        self._file.close()
        os.close(self._lock)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
