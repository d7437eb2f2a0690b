"""JSON Lines that only grow: what was written stays, whenever the process dies, and every line is whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turntree.errors import CheckpointError

__all__ = ["AppendFile", "json_line"]

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
        return self.append_lines(json_line(row))

    def append_lines(self, data: bytes) -> tuple[int, int]:
        """As :meth:`append`, of lines that were made already, all of them or none."""
        offset = self._end
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
