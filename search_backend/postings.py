"""The score matrix of BM25 written to disk in memory that hardly grows with the corpus.

First the passages' counted terms are appended to files as they come; then the postings are sorted by term, a range
of terms at a time, and scored. The result is bm25s's own layout, number by number, and bm25s can load it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from turntree.search_backend.analyzer import BM25Settings
from turntree.search_backend.files import append_array, cut, read_json, write_array, write_json
from turntree.search_backend.keys import key_hash, write_keys
from turntree.search_backend.store import CorpusStore, Progress
from turntree.search_backend.terms import BLOCK, TermBlock, read_blocks

__all__ = ["DATA", "INDICES", "INDPTR", "PARAMS", "write_matrix"]

DATA, INDICES, INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
PARAMS = "params.index.json"
"""bm25s's file of settings."""

_STATE = "state.json"
_POSTINGS, _LENGTHS, _DISTINCT = "postings.tmp", "lengths.tmp", "distinct.tmp"
_TERMS, _TERM_ENDS = "terms.bin", "term_ends.tmp"
_TEMPORARY = (_STATE, _POSTINGS, _LENGTHS, _DISTINCT, _TERM_ENDS)
_SORT_BYTES = 256_000_000  # of postings that are sorted at a time, at least
_SORT_PASSES = 12  # at most, over all postings


@dataclass
class _State:
    """What was written so far. ``sorted_terms``: terms whose postings are in their final place."""

    rows: int = 0
    postings: int = 0
    terms: int = 0
    term_bytes: int = 0
    sorted_terms: int = 0
    sorted_postings: int = 0


def write_matrix(
    store: CorpusStore, folder: Path, settings: BM25Settings, progress: Progress, *, workers: int = 1
) -> dict[str, int]:
    """Write vocabulary and matrix to ``folder``; goes on where a stopped call was. Returns their sizes."""
    if (folder / PARAMS).is_file():
        _tidy(folder)
        return _sizes(folder)
    state = _State(**read_json(folder / _STATE, what="a build's state")) if (folder / _STATE).is_file() else _State()
    _count(store, folder, settings, state, progress, workers)
    frequencies = _document_frequencies(folder, state)
    write_array(folder / INDPTR, np.concatenate([[0], np.cumsum(frequencies)]).astype(np.int64))
    _write_vocabulary(folder)
    _sort(folder, settings, state, frequencies, progress)
    # bm25s's own parameters; that the file is there says that all others are.
    params = {
        "k1": settings.k1, "b": settings.b, "delta": 0.5, "method": "lucene", "idf_method": "lucene",
        "dtype": "float32", "int_dtype": "int32", "backend": "numpy", "num_docs": state.rows,
    }  # fmt: skip
    write_json(folder / PARAMS, params)
    _tidy(folder)
    return _sizes(folder)


def _sizes(folder: Path) -> dict[str, int]:
    terms = len(np.load(folder / INDPTR, mmap_mode="r")) - 1
    return {"terms": terms, "postings": len(np.load(folder / INDICES, mmap_mode="r"))}


def _tidy(folder: Path) -> None:
    for name in _TEMPORARY:
        (folder / name).unlink(missing_ok=True)


# -- counting -------------------------------------------------------------------------------------------------


def _count(
    store: CorpusStore, folder: Path, settings: BM25Settings, state: _State, progress: Progress, workers: int
) -> None:
    sizes = {
        _POSTINGS: 8 * state.postings, _LENGTHS: 4 * state.rows, _DISTINCT: 4 * state.rows,
        _TERMS: state.term_bytes, _TERM_ENDS: 8 * state.terms,
    }  # fmt: skip
    for name, size in sizes.items():
        cut(folder / name, size)
    if state.rows == len(store):
        return
    vocabulary = {term.decode(): i for i, term in enumerate(_terms(folder))}
    progress("terms", state.rows, len(store), "")
    for block in read_blocks(store, settings, state.rows, workers=workers):
        _append(block, folder, state, vocabulary)
        progress("terms", state.rows, len(store), f"{state.terms} terms")


def _append(block: TermBlock, folder: Path, state: _State, vocabulary: dict[str, int]) -> None:
    numbers = np.array([vocabulary.setdefault(t, len(vocabulary)) for t in block.terms], dtype=np.int32)
    new = [t.encode() for t, n in zip(block.terms, numbers.tolist()) if n >= state.terms]
    ends = state.term_bytes + np.cumsum([len(t) for t in new], dtype=np.int64)
    postings = np.stack([numbers[block.numbers], block.counts], axis=1)
    for name, data in (
        (_POSTINGS, postings.astype("<i4")),
        (_LENGTHS, block.lengths.astype("<i4")),
        (_DISTINCT, block.distinct.astype("<i4")),
        (_TERMS, np.frombuffer(b"".join(new), dtype=np.uint8)),
        (_TERM_ENDS, ends.astype("<i8")),
    ):
        with (folder / name).open("ab") as file:
            append_array(file, data)
    state.rows += len(block.lengths)
    state.postings += len(postings)
    state.terms = len(vocabulary)
    state.term_bytes = int(ends[-1]) if new else state.term_bytes
    write_json(folder / _STATE, asdict(state))


def _terms(folder: Path) -> Iterator[bytes]:
    blob, start = (folder / _TERMS).read_bytes(), 0
    for end in np.fromfile(folder / _TERM_ENDS, dtype="<i8").tolist():
        yield blob[start:end]
        start = end


def _write_vocabulary(folder: Path) -> None:
    """The table from a term to its number; terms that share a hash are told apart by their letters."""
    write_keys(folder, "terms", np.fromiter(map(key_hash, _terms(folder)), dtype=np.uint64))
    write_array(folder / "term_ends.npy", np.fromfile(folder / _TERM_ENDS, dtype="<i8"))


# -- sorting and scoring --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Postings of some passages. ``first``: row of the first passage; arrays as in :class:`TermBlock`."""

    first: int
    distinct: npt.NDArray[np.int32]
    terms: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


def _parts(folder: Path) -> Iterator[_Part]:
    """All postings in the order of passages, some at a time."""
    first = 0
    with (folder / _DISTINCT).open("rb") as distinct_file, (folder / _POSTINGS).open("rb") as postings_file:
        while len(distinct := np.fromfile(distinct_file, dtype="<i4", count=4 * BLOCK)):
            postings = np.fromfile(postings_file, dtype="<i4", count=2 * int(distinct.sum(dtype=np.int64)))
            yield _Part(first, distinct, postings[::2], postings[1::2])
            first += len(distinct)


def _document_frequencies(folder: Path, state: _State) -> npt.NDArray[np.int64]:
    """int64 [terms]: in how many passages each term occurs."""
    found = np.zeros(state.terms, np.int64)
    for part in _parts(folder):
        found += np.bincount(part.terms, minlength=state.terms)
    return found


def _sort(
    folder: Path, settings: BM25Settings, state: _State, frequencies: npt.NDArray[np.int64], progress: Progress
) -> None:
    idf = _idf(frequencies, state.rows)
    norms = _norms(folder, settings)
    files = ((DATA, np.dtype("<f4")), (INDICES, np.dtype("<i4")))
    heads = {name: _header(state.postings, kind) for name, kind in files}
    for name, head in heads.items():
        if state.sorted_postings:
            cut(folder / name, len(head) + 4 * state.sorted_postings)
        else:
            (folder / name).write_bytes(head)
    for begin, end in _ranges(frequencies, state):
        scores, rows = _sorted_range(folder, begin, end, frequencies, idf, norms)
        for name, data in ((DATA, scores), (INDICES, rows)):
            with (folder / name).open("ab") as file:
                append_array(file, data)
        state.sorted_terms, state.sorted_postings = end, state.sorted_postings + len(rows)
        write_json(folder / _STATE, asdict(state))
        progress("matrix", state.sorted_postings, state.postings, f"{end} of {state.terms} terms")


def _header(length: int, kind: np.dtype[Any]) -> bytes:
    """The first bytes of an ``.npy`` file of this many numbers, which follow piece by piece."""
    file = io.BytesIO()
    about = {"descr": kind.str, "fortran_order": False, "shape": (length,)}
    format_module: Any = np.lib.format
    format_module.write_array_header_1_0(file, about)
    return file.getvalue()


def _ranges(frequencies: npt.NDArray[np.int64], state: _State) -> Iterator[tuple[int, int]]:
    """Ranges of terms whose postings are sorted together; they depend on the corpus alone."""
    most = max(_SORT_BYTES // 8, -(-state.postings // _SORT_PASSES))
    ends = np.cumsum(frequencies)
    begin = 0
    while begin < state.terms:
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + most, side="right")))
        if begin >= state.sorted_terms:
            yield begin, end
        begin = end


def _sorted_range(
    folder: Path,
    begin: int,
    end: int,
    frequencies: npt.NDArray[np.int64],
    idf: npt.NDArray[np.float32],
    norms: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Scores and rows of the postings of the terms from ``begin`` to ``end``, by term and row."""
    heads = np.concatenate([[0], np.cumsum(frequencies[begin:end])])
    scores = np.zeros(int(heads[-1]), np.float32)
    rows = np.zeros(int(heads[-1]), np.int32)
    for part in _parts(folder):
        row = np.repeat(np.arange(part.first, part.first + len(part.distinct), dtype=np.int32), part.distinct)
        inside = np.flatnonzero((part.terms >= begin) & (part.terms < end))
        order = inside[np.argsort(part.terms[inside], kind="stable")]
        term, row, count = part.terms[order], row[order], part.counts[order]
        each = np.bincount(term - begin, minlength=end - begin)
        firsts = np.cumsum(each) - each
        place = heads[term - begin] + np.arange(len(term)) - firsts[term - begin]
        # The order of bm25s's operations, and their precision: float32 only at the end.
        scores[place] = idf[term] * (count.astype(np.float32) / (norms[row] + count.astype(np.float32)))
        rows[place] = row
        heads[:-1] += each
    return scores, rows


def _idf(frequencies: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.float32]:
    """Lucene's: ln(1 + (N - n + 0.5) / (n + 0.5))."""
    values = (math.log(1 + (rows - n + 0.5) / (n + 0.5)) for n in frequencies.tolist())
    return np.fromiter(values, dtype=np.float32, count=len(frequencies))


def _norms(folder: Path, settings: BM25Settings) -> npt.NDArray[np.float64]:
    """float64 [passages]: k1 (1 - b + b length / mean length)."""
    lengths = np.fromfile(folder / _LENGTHS, dtype="<i4")
    mean = (lengths.mean(dtype=np.float64) if len(lengths) else 0) or np.float64(1)  # passages without a word
    norms: npt.NDArray[np.float64] = settings.k1 * ((1 - settings.b) + settings.b * lengths.astype(np.float64) / mean)
    return norms


def load_params(folder: Path) -> dict[str, Any]:
    """bm25s's parameters of a finished matrix."""
    params: dict[str, Any] = json.loads((folder / PARAMS).read_text(encoding="utf-8"))
    return params
