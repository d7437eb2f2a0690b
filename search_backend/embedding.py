"""The vectors of a corpus on disk: written in chunks, in constant memory, and gone on with after a stop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turntree.errors import DataError, SearchIndexError
from turntree.search_backend.encoder import Encoder, Vectors
from turntree.search_backend.faiss_index import FlatHeader
from turntree.search_backend.files import cut, read_json, write_json
from turntree.search_backend.passage import Passage
from turntree.search_backend.store import Progress

__all__ = ["CHUNK", "VectorFile", "embed_corpus"]

CHUNK = 2048
"""Passages that are encoded together; their batches, and so the last digits of their vectors, depend on it."""


@dataclass(frozen=True, slots=True)
class VectorFile:
    """Vectors of a corpus in row order, in a file that is also a flat FAISS index."""

    path: Path
    rows: int
    dimension: int

    @property
    def header(self) -> FlatHeader:
        return FlatHeader.of(self.rows, self.dimension)

    def read(self, start: int, stop: int) -> Vectors:
        """Vectors of a range of rows, copied: ``[stop - start, dimension]``."""
        stop = min(stop, self.rows)
        with self.path.open("rb") as file:
            file.seek(len(self.header.bytes) + 4 * start * self.dimension)
            found = np.fromfile(file, dtype="<f4", count=(stop - start) * self.dimension)
        if len(found) != (stop - start) * self.dimension:
            raise SearchIndexError(f"{self.path}: expected {self.rows} vectors, found fewer; remove it and build again")
        return found.reshape(-1, self.dimension)

    def chunks(self, size: int) -> Iterator[Vectors]:
        """All vectors in order."""
        for start in range(0, self.rows, size):
            yield self.read(start, start + size)

    def sample(self, count: int, seed: int) -> Vectors:
        """``count`` rows drawn without replacement, in row order: the same for the same seed."""
        if count >= self.rows:
            return self.read(0, self.rows)
        chosen = np.sort(np.random.default_rng(seed).choice(self.rows, count, replace=False, shuffle=False))
        found = np.empty((count, self.dimension), np.float32)
        block = max(1, (64 << 20) // (4 * self.dimension))
        for start in range(0, self.rows, block):
            low, high = np.searchsorted(chosen, (start, start + block))
            if low < high:
                found[low:high] = self.read(start, start + block)[chosen[low:high] - start]
        return found


def embed_corpus(
    passages: Sequence[Passage], encoder: Encoder, path: Path, journal: Path, *, progress: Progress
) -> VectorFile:
    """Write the vectors of all passages; ``journal`` holds how far it is.

    Called again after a stop it goes on at the last whole chunk and gives the same bytes. Without a journal and with
    a file of the right size it was finished. Raises :class:`SearchIndexError` where the journal is of another
    encoder, :class:`DataError` where the encoder gives values that are not finite.
    """
    target = VectorFile(path, len(passages), encoder.dimension)
    header = target.header
    identity = {"encoder": encoder.fingerprint, "dimension": encoder.dimension, "passages": len(passages)}
    done = _resume(path, journal, identity, header.file_bytes(target.rows, target.dimension))
    if done is None:
        return target
    if done == 0:
        write_json(journal, {**identity, "rows": 0})
        path.write_bytes(header.bytes)
    cut(path, header.file_bytes(done, target.dimension))
    with path.open("ab") as file:
        for start in range(done, target.rows, CHUNK):
            stop = min(start + CHUNK, target.rows)
            vectors = encoder.encode_passages([passages[row] for row in range(start, stop)])
            _require_finite(vectors, passages, start)
            file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
            file.flush()
            os.fsync(file.fileno())
            write_json(journal, {**identity, "rows": stop})
            progress("embed", stop, target.rows, f"{target.dimension} dimensions")
    return target


def _resume(path: Path, journal: Path, identity: dict[str, Any], whole: int) -> int | None:
    """Rows that are there, or None where all are."""
    if not journal.is_file():
        return None if path.is_file() and path.stat().st_size == whole else 0
    found = read_json(journal, what="the state of an embedding")
    rows = int(found.pop("rows", 0))
    if found != identity:
        raise SearchIndexError(
            f"{path.parent}: expected the vectors of {identity}, found those of {found} half made; build in another "
            "folder, or replace this one"
        )
    return rows


def _require_finite(vectors: Vectors, passages: Sequence[Passage], start: int) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise DataError(
            f"the encoder gives values that are not finite for passage {passages[start + int(bad[0])].id!r} (row "
            f"{start + int(bad[0])}); use dtype=float32 or bfloat16, or another device"
        )
