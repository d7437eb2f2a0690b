"""In-process BM25 (bm25s) for words and, as character bigrams, for scripts that are written without spaces."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from turntree.errors import RetrievalError
from turntree.search_backend.analyzer import ANALYZER_VERSION, Analyzer, BM25Settings
from turntree.search_backend.corpus import load_corpus
from turntree.search_backend.passage import Passage
from turntree.search_backend.scoring import Matrix, Scorer
from turntree.search_backend.store import corpus_fingerprint, scored_passages

__all__ = ["BM25Backend", "BM25Settings", "bm25_fingerprint", "check_request", "search_terms"]


class _Options(TypedDict, total=False):
    """The fields of :class:`BM25Settings` as keyword arguments."""

    k1: float
    b: float
    stemmer: str | None
    stop_words: bool
    segmenter: str


class BM25Backend:
    """BM25 over titles and texts of a fixed list of passages; a :class:`SearchBackend`.

    Equal scores keep corpus order, so results are deterministic. Safe to share between threads; pickling carries
    the passages and rebuilds the index. For corpora that do not fit in memory build an index folder
    (:func:`turntree.search_backend.index.build_index`): it gives the same results under the same fingerprint.
    """

    def __init__(self, passages: Sequence[Passage], settings: BM25Settings | None = None) -> None:
        self.settings = settings or BM25Settings()
        self.passages = tuple(passages)
        self._analyzer = Analyzer(self.settings)
        self._vocabulary: dict[str, int] = {}
        self._scorer = Scorer(self._build())
        self._fingerprint = bm25_fingerprint(corpus_fingerprint(self.passages), self.settings)

    @classmethod
    def from_passages(cls, passages: Sequence[Passage], **settings: Unpack[_Options]) -> BM25Backend:
        """Index passages that are already in memory; keyword arguments are the fields of :class:`BM25Settings`."""
        return cls(passages, BM25Settings(**settings))

    @classmethod
    def from_corpus(cls, path: str | Path, **settings: Unpack[_Options]) -> BM25Backend:
        """Index a corpus file (see :func:`load_corpus`); raises :class:`DataError` where it cannot be read."""
        return cls(load_corpus(path), BM25Settings(**settings))

    @property
    def fingerprint(self) -> str:
        """Hash of passages and settings: 16 hexadecimal digits."""
        return self._fingerprint

    def __len__(self) -> int:
        return len(self.passages)

    def __reduce__(self) -> tuple[Any, ...]:
        return (BM25Backend, (self.passages, self.settings))

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """Up to ``k`` passages for each query, best first; passages without any query term are never returned.

        Raises :class:`RetrievalError` for queries that are not strings and for ``k < 1``.
        """
        check_request(queries, k)
        return search_terms(queries, k, self._analyzer, self._vocabulary.get, self._scorer, self.passages)

    def _build(self) -> Matrix:
        rows = [
            [self._vocabulary.setdefault(t, len(self._vocabulary)) for t in self._analyzer.passage(p.title, p.text)]
            for p in self.passages
        ]
        if not self._vocabulary:
            warn_empty(len(rows), stacklevel=5)
            return Matrix(np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(1, np.int64), 0)
        import bm25s  # imported here: its start-up cost is not for those who bring another backend

        index = bm25s.BM25(k1=self.settings.k1, b=self.settings.b, backend="numpy", csc_backend="numpy")
        index.index((rows, self._vocabulary), create_empty_token=False, show_progress=False)
        return Matrix(index.scores["data"], index.scores["indices"], index.scores["indptr"], len(rows))


def search_terms(
    queries: Sequence[str],
    k: int,
    analyzer: Analyzer,
    number: Callable[[str], int | None],
    scorer: Scorer,
    passages: Sequence[Passage],
) -> list[list[Passage]]:
    """The passages of queries, each different query searched once. ``number`` gives a term's, or None."""
    different = list(dict.fromkeys(queries))
    terms = [[n for t in analyzer.query(query) if (n := number(t)) is not None] for query in different]
    found: dict[str, list[Passage]] = {}
    for query, (rows, scores) in zip(different, scorer.best(terms, k)):
        found[query] = scored_passages(passages, rows.tolist(), scores.tolist())
    return [list(found[query]) for query in queries]


def bm25_fingerprint(corpus: str, settings: BM25Settings) -> str:
    """Hash of a corpus's fingerprint and settings, for an index in memory and one on disk alike."""
    about = json.dumps(["bm25", ANALYZER_VERSION, asdict(settings), corpus])
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def warn_empty(passages: int, *, stacklevel: int) -> None:
    warnings.warn(
        f"BM25: the corpus has {passages} passages and no searchable word; every search finds nothing",
        stacklevel=stacklevel,
    )


def check_request(queries: Sequence[str], k: int) -> None:
    """Refuse what is not a batch of query strings, and ``k < 1``, with :class:`RetrievalError`."""
    if isinstance(queries, (str, bytes)) or not isinstance(queries, Sequence):
        raise RetrievalError(f"expected a sequence of query strings, found {queries!r:.60}; wrap one query in a list")
    bad = next((q for q in queries if not isinstance(q, str)), None)
    if bad is not None or any(q is None for q in queries):
        raise RetrievalError(f"expected query strings, found a {type(bad).__name__}: {bad!r:.60}")
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise RetrievalError(f"expected a number of passages k >= 1, found {k!r}")
