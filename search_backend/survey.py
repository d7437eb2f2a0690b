"""How large a corpus is, without reading it all: what estimates of memory, disk and time start from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from turntree.errors import DataError
from turntree.search_backend.layouts import compressed_bytes, detect_layout, read_passages
from turntree.search_backend.passage import Passage
from turntree.search_backend.store import CorpusStore, is_store

__all__ = ["Estimate", "Survey", "survey"]

_SAMPLE = 2000
_GZIP_RATIO = 2.6  # of English text in JSON; only where the sample ends before the file does


@dataclass(frozen=True)
class Survey:
    """Passages and bytes of id, title and text, exact or extrapolated from ``sample``, the first passages.

    ``disk``: bytes that a corpus store of it takes that is not there yet; ``seconds``: time to write it.
    """

    passages: int
    text_bytes: int
    exact: bool
    sample: tuple[Passage, ...]
    disk: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """What an index needs.

    ``build_memory``: bytes at the peak of the build; ``disk``: bytes of its files at the peak, temporary ones
    included; ``load_memory``: bytes that searching needs for itself (mapped files are not counted: the system drops
    their pages when memory is short); ``mapped``: bytes of mapped files, which searches run fastest with in memory;
    ``seconds``: a rough time on this machine; ``notes``: sentences for people.
    """

    build_memory: int
    disk: int
    load_memory: int
    mapped: int
    seconds: float
    notes: tuple[str, ...] = ()


def survey(corpus: str | Path | CorpusStore) -> Survey:
    """Measure a store exactly; extrapolate a file from its first passages.

    Raises :class:`DataError` where the first passages cannot be read.
    """
    if isinstance(corpus, CorpusStore) or is_store(corpus):
        store = corpus if isinstance(corpus, CorpusStore) else CorpusStore.open(corpus)
        return Survey(len(store), store.text_bytes, True, tuple(store[:_SAMPLE]))
    path = Path(corpus)
    sample, offset, complete = _sample(path)
    read = sum(len(part.encode("utf-8", "replace")) for p in sample for part in (p.id, p.title, p.text))
    factor = 1.0 if complete else max(1.0, _size(path) / max(offset, 1))
    rows = len(sample) if complete else _rows(path, round(len(sample) * factor))
    text = round(read * rows / max(len(sample), 1))
    return Survey(rows, text, complete, sample, disk=text + 44 * rows, seconds=2 + rows * 2.5e-5)


def _sample(path: Path) -> tuple[tuple[Passage, ...], int, bool]:
    rows = list(itertools.islice(read_passages(path), _SAMPLE + 1))
    passages = tuple(passage for _, passage in rows[:_SAMPLE])
    offset = rows[-1][0].offset if rows else 0
    if not offset:  # documents and parquet know entries only: their text is most of their bytes
        offset = sum(len(p.text.encode("utf-8", "replace")) + len(p.title) + 40 for p in passages)
    return passages, offset, len(rows) <= _SAMPLE


def _size(path: Path) -> float:
    try:
        size = path.stat().st_size
        packed = compressed_bytes(path) or detect_layout(path) == "parquet"
        return size * (_GZIP_RATIO if packed else 1.0)
    except OSError as error:
        raise DataError(f"expected a readable corpus at {path}, found {error}; check the path") from error


def _rows(path: Path, guess: int) -> int:
    """Parquet says how many rows it has; others are extrapolated."""
    if detect_layout(path) != "parquet":
        return guess
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(path).num_rows)
