"""From the terms of queries to their best passages, over the score matrix of BM25 in memory or mapped from disk."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from turntree.errors import ConfigError
from turntree.search_backend.machine import cores

__all__ = ["Engine", "Matrix", "Scorer", "best"]

Engine = Literal["auto", "numpy", "numba"]
"""Who scores."""

_log = logging.getLogger(__name__)
_WORTH_COMPILING = 20_000  # passages; below this numpy answers sooner than a compiler starts
Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


class Matrix:
    """BM25's score of every term in every passage, by term (bm25s's layout, compressed sparse columns).

    ``data``: float32 [postings]; ``indices``: int32 [postings], rows of passages, ascending within a term;
    ``indptr``: int64 [terms + 1], where terms begin.
    """

    __slots__ = ("data", "indices", "indptr", "rows")

    def __init__(self, data: npt.NDArray[Any], indices: npt.NDArray[Any], indptr: npt.NDArray[Any], rows: int) -> None:
        self.data, self.indices, self.indptr, self.rows = (_frozen(data), _frozen(indices), _frozen(indptr), rows)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Read-only, as mapped arrays are: the compiled kernel then has one form."""
    view = array.view()
    view.flags.writeable = False
    return view


class Scorer:
    """Finds the rows with the highest scores; equal scores in row order.

    ``engine``: ``numba`` (extra ``fast-bm25``; compiled, several queries at a time), ``numpy``, or ``auto``: numba
    where it is installed and the corpus large enough to pay for its start. Both give the same scores to the last
    bit. ``threads``: queries that are scored at a time by numba (default: all cores). Safe to share between threads
    and forks.
    """

    def __init__(self, matrix: Matrix, *, engine: Engine = "auto", threads: int | None = None) -> None:
        if engine not in ("auto", "numpy", "numba"):
            raise ConfigError(f"BM25: expected engine auto, numpy or numba, found {engine!r}")
        whole = isinstance(threads, int) and not isinstance(threads, bool)
        if threads is not None and (not whole or threads < 1):
            raise ConfigError(f"BM25: expected threads >= 1, found {threads!r}")
        self.matrix = matrix
        self.engine: Literal["numpy", "numba"] = _choose(engine, matrix.rows)
        self.threads = threads or cores()

    def best(self, queries: Sequence[Sequence[int]], k: int) -> list[tuple[Rows, Scores]]:
        """Rows and scores of the ``k`` best passages for each query, given as numbers of its terms."""
        if not self.matrix.rows:
            return [(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in queries]
        if self.engine == "numba":
            return self._best_compiled(queries, min(k, self.matrix.rows))
        return [self._best_numpy(terms, k) for terms in queries]

    def _best_numpy(self, terms: Sequence[int], k: int) -> tuple[Rows, Scores]:
        matrix = self.matrix
        scores = np.zeros(matrix.rows, dtype=np.float32)
        for term in terms:
            start, end = matrix.indptr[term], matrix.indptr[term + 1]
            # A term's rows differ, so that plain indexing adds the same numbers as np.add.at, and faster.
            scores[matrix.indices[start:end]] += matrix.data[start:end]
        rows = best(scores, k)
        return rows, scores[rows]

    def _best_compiled(self, queries: Sequence[Sequence[int]], k: int) -> list[tuple[Rows, Scores]]:
        from turntree.search_backend.kernel import best_rows

        m = self.matrix
        terms = np.fromiter((t for q in queries for t in q), dtype=np.int64)
        starts = np.cumsum([0, *map(len, queries)], dtype=np.int64)
        rows, scores = np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)
        counts = np.zeros(len(queries), np.int64)

        def part(begin: int, end: int) -> None:
            buffer = np.zeros(m.rows, np.float32)
            best_rows(m.data, m.indices, m.indptr, terms, starts, begin, end, buffer, rows, scores, counts)

        size = max(1, -(-len(queries) // (4 * self.threads)))
        parts = [(i, min(i + size, len(queries))) for i in range(0, len(queries), size)]
        if len(parts) == 1 or self.threads == 1:
            part(0, len(queries))
        else:
            list(_pool(self.threads, os.getpid()).map(lambda p: part(*p), parts))
        return [(rows[i, :n], scores[i, :n]) for i, n in enumerate(counts.tolist())]


def best(scores: Scores, k: int) -> Rows:
    """Indices of the ``k`` highest positive scores; equal scores in index order."""
    found = np.flatnonzero(scores)
    if k < len(found):
        values = scores[found]
        found = found[values >= np.partition(values, -k)[-k]]
    return found[np.argsort(-scores[found], kind="stable")[:k]]


@functools.lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """One pool a process: the threads of a forked process's parent are not there."""
    return ThreadPoolExecutor(threads, thread_name_prefix="bm25")


def _choose(engine: Engine, rows: int) -> Literal["numpy", "numba"]:
    if engine == "numpy" or (engine == "auto" and rows < _WORTH_COMPILING):
        return "numpy"
    if importlib.util.find_spec("numba") is not None:
        return "numba"
    _say_slow()
    return "numpy"


@functools.cache
def _say_slow() -> None:
    _log.warning("BM25 searches with numpy, one query at a time; pip install 'turntree[fast-bm25]' for numba")
