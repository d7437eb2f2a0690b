"""Lines of compressed files, one at a time and none longer than a limit: a small file may hold a large one."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

__all__ = ["MAX_LINE", "LongLineError", "file_lines", "zstd_lines"]

MAX_LINE = 1 << 30
"""Bytes of the longest line that is read: a tree of twenty million tokens."""
_ZSTD = b"\x28\xb5\x2f\xfd"
_GZIP = b"\x1f\x8b"
_PIECE = 1 << 10
"""Compressed bytes taken at once. Four of them can stand for 128 KiB, so these for at most 32 MiB."""
_CHUNK = 1 << 20
"""Bytes taken at once where that is what they take up."""


class LongLineError(ValueError):
    """A line longer than ``MAX_LINE``."""


def file_lines(path: Path) -> Iterator[bytes]:
    """Lines with their ends, decompressed by content: zstandard, gzip or none. Raises as :func:`zstd_lines`."""
    with path.open("rb") as raw:
        magic = raw.read(len(_ZSTD))
    if magic == _ZSTD:
        yield from zstd_lines(path)
        return
    with gzip.open(path, "rb") if magic[:2] == _GZIP else path.open("rb") as file:
        yield from _lines(iter(lambda: file.read(_CHUNK), b""))


def zstd_lines(path: Path) -> Iterator[bytes]:
    """Lines with their ends; frames may be strung together, as ``cat`` does.

    Raises:
        zstandard.ZstdError: the file is corrupt, or was not written by zstandard.
        EOFError: it ends before its last frame does.
        LongLineError: a line is longer than ``MAX_LINE``.
    """
    yield from _lines(_decompressed(path))


def _decompressed(path: Path) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor().decompressobj()
    with path.open("rb") as handle:
        while piece := handle.read(_PIECE):
            while piece:
                if decoder.eof:
                    decoder = zstandard.ZstdDecompressor().decompressobj()
                yield decoder.decompress(piece)
                piece = decoder.unused_data
    if not decoder.eof:
        raise EOFError("a truncated one")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    size = number = 0
    for piece in pieces:
        *whole, last = piece.split(b"\n")
        for part in whole:
            number += 1
            yield b"".join((*held, part, b"\n"))
            held, size = [], 0
        held.append(last)
        size += len(last)
        if size > MAX_LINE:
            raise LongLineError(f"line {number + 1} with more than {MAX_LINE:,} bytes")
    if size:
        yield b"".join(held)
