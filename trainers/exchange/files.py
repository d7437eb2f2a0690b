"""JSON Lines in and out, plain, gzipped or with zstandard by the file's name; whole or not at all."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import zstandard

from turntree.errors import DataError
from turntree.trainers.atomic import atomic_file
from turntree.trainers.lines import LongLineError, file_lines

__all__ = ["json_line", "read_lines", "write_lines"]


def json_line(row: Any) -> bytes:
    """One row as UTF-8; what UTF-8 cannot hold (lone surrogates) is escaped, so nothing is lost."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:
        return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write lines, compressed for names in ``.zst`` or ``.gz``; returns how many. Equal lines, equal bytes.

    Without a line nothing is written: a file that is there stays as it is.
    """
    first = next(found := iter(lines), None)
    if first is None:
        return 0
    count = 0
    with atomic_file(path) as handle:
        if path.suffix == ".zst":
            target: Any = zstandard.ZstdCompressor(level=6, write_checksum=True).stream_writer(handle, closefd=False)
        elif path.suffix == ".gz":
            target = gzip.GzipFile(filename="", fileobj=handle, mode="wb", mtime=0)
        else:
            target = None
        for line in chain((first,), found):
            (target or handle).write(line)
            count += 1
        if target is not None:
            target.close()
    return count


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines that are not blank, decompressed by content.

    Raises :class:`DataError` for a file that is missing, cut off, corrupt, or holds a line of more than ``MAX_LINE``.
    """
    try:
        for number, line in enumerate(file_lines(path), start=1):
            if line.strip():
                yield number, line
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, LongLineError) as error:
        raise DataError(f"{path}: expected a complete file of JSON lines, found {error}; fetch it again") from error
