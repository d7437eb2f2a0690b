"""BM25 as an index folder: vocabulary and score matrix are mapped from disk, passages stay in their store."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from turntree.errors import ConfigError
from turntree.search_backend.analyzer import Analyzer, BM25Settings
from turntree.search_backend.bm25 import bm25_fingerprint, check_request, search_terms, warn_empty
from turntree.search_backend.files import map_array
from turntree.search_backend.keys import KeyTable
from turntree.search_backend.machine import cores
from turntree.search_backend.passage import Passage
from turntree.search_backend.postings import DATA, INDICES, INDPTR, write_matrix
from turntree.search_backend.scoring import Engine, Matrix, Scorer
from turntree.search_backend.store import CorpusStore, Progress
from turntree.search_backend.survey import Estimate, Survey
from turntree.search_backend.terms import count_terms

__all__ = ["KIND", "BM25Kind", "MappedBM25"]

_SEVERAL = 50_000  # passages from which several processes read them
_HEAPS = 0.55  # growth of the vocabulary with the number of passages, measured on English paragraphs


class MappedBM25:
    """BM25 over an index folder; a :class:`SearchBackend`.

    Results and fingerprint are those of :class:`BM25Backend` over the same passages and settings. Safe to share
    between threads and forks; pickling carries the path. ``engine`` and ``threads``: see :class:`Scorer`.
    """

    def __init__(
        self,
        store: CorpusStore,
        folder: Path,
        settings: BM25Settings,
        *,
        engine: Engine = "auto",
        threads: int | None = None,
    ) -> None:
        self.store, self.settings = store, settings
        self._arguments = (store, folder.absolute(), settings, engine, threads)
        self._analyzer = Analyzer(settings)
        self._vocabulary = _Vocabulary(folder)
        data, indices, indptr = (map_array(folder / name) for name in (DATA, INDICES, INDPTR))
        matrix = Matrix(data, indices, indptr, len(store))
        self._scorer = Scorer(matrix, engine=engine, threads=threads)
        self._fingerprint = bm25_fingerprint(store.fingerprint, settings)
        if not len(data):
            warn_empty(len(store), stacklevel=4)

    @property
    def fingerprint(self) -> str:
        """Hash of passages and settings: 16 hexadecimal digits."""
        return self._fingerprint

    @property
    def engine(self) -> str:
        """What scores: ``numpy`` or ``numba``."""
        return self._scorer.engine

    @property
    def threads(self) -> int:
        """Queries of a batch that numba scores at a time."""
        return self._scorer.threads

    def term_number(self, term: str) -> int | None:
        """The column of an analysed term in the score matrix, or None."""
        return self._vocabulary.number(term)

    def __len__(self) -> int:
        return len(self.store)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, self._arguments)

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """Up to ``k`` passages for each query, best first; passages without any query term are never returned.

        Raises :class:`RetrievalError` for queries that are not strings and for ``k < 1``.
        """
        check_request(queries, k)
        return search_terms(queries, k, self._analyzer, self._vocabulary.number, self._scorer, self.store)


def _reopen(
    store: CorpusStore, folder: Path, settings: BM25Settings, engine: Engine, threads: int | None
) -> MappedBM25:
    return MappedBM25(store, folder, settings, engine=engine, threads=threads)


class _Vocabulary:
    """From a term to its number, by mapped files."""

    def __init__(self, folder: Path) -> None:
        self._keys = KeyTable(folder, "terms")
        self._ends = map_array(folder / "term_ends.npy")
        path = folder / "terms.bin"
        self._letters = np.memmap(path, dtype=np.uint8, mode="r") if len(self._ends) else np.zeros(0, np.uint8)
        self.number = functools.lru_cache(maxsize=1 << 16)(self._find)

    def _find(self, term: str) -> int | None:
        letters = term.encode("utf-8", "surrogatepass")
        return next((n for n in self._keys.candidates(letters) if self._spelling(n) == letters), None)

    def _spelling(self, number: int) -> bytes:
        start = int(self._ends[number - 1]) if number else 0
        return self._letters[start : int(self._ends[number])].tobytes()


class BM25Kind:
    """The kind ``bm25``. Options are the fields of :class:`BM25Settings`."""

    name = "bm25"

    def settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        known = [field.name for field in dataclasses.fields(BM25Settings)]
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"bm25 has no option {unknown!r}; expected some of {known}")
        settings = BM25Settings(**options)
        Analyzer(settings)  # an unknown stemmer, a missing extra
        return asdict(settings)

    def packages(self, settings: Mapping[str, Any]) -> Sequence[str]:
        return ("bm25s", "PyStemmer", *(("jieba",) if settings["segmenter"] == "jieba" else ()))

    def alternatives(self, corpus: Survey, settings: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return ()

    def estimate(self, corpus: Survey, settings: Mapping[str, Any]) -> Estimate:
        analyzer = Analyzer(BM25Settings(**settings))
        count_terms(corpus.sample[:10], analyzer)  # what starts once is not part of the rate
        began = time.perf_counter()
        block = count_terms(corpus.sample, analyzer)
        size = max(len(corpus.sample), 1)
        rate = (time.perf_counter() - began) / size
        growth = max(corpus.passages / size, 1.0)
        postings = round(len(block.numbers) / size * corpus.passages)
        terms = round(len(block.terms) * growth**_HEAPS)
        matrix = 8 * postings + 44 * terms
        workers = _workers(corpus.passages)
        sorting = min(max(256_000_000, 8 * postings // 12), 8 * postings)
        return Estimate(
            build_memory=round(150e6 + (workers > 1) * workers * 150e6 + 200 * terms + 12 * corpus.passages + sorting),
            disk=matrix + 8 * postings + 8 * corpus.passages,
            load_memory=round(120e6 + 8 * corpus.passages),
            mapped=matrix,
            seconds=rate * 1.3 * corpus.passages / workers + 6e-8 * postings,
            notes=(f"about {terms} terms and {postings} postings",),
        )

    def build(
        self, store: CorpusStore, folder: Path, settings: Mapping[str, Any], progress: Progress
    ) -> dict[str, Any]:
        return dict(write_matrix(store, folder, BM25Settings(**settings), progress, workers=_workers(len(store))))

    def open(self, store: CorpusStore, folder: Path, manifest: Mapping[str, Any], **options: Any) -> MappedBM25:
        unknown = next((name for name in options if name not in ("engine", "threads")), None)
        if unknown is not None:
            raise ConfigError(f"a bm25 index has no search option {unknown!r}; expected engine or threads")
        return MappedBM25(store, folder, BM25Settings(**self.settings(manifest["settings"])), **options)


def _workers(passages: int) -> int:
    return min(cores(), 16) if passages >= _SEVERAL else 1


KIND = BM25Kind()
"""The index kind ``bm25``."""
