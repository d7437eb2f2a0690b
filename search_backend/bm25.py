"""In-process BM25 (bm25s) for words and, as character bigrams, for scripts that are written without spaces."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from turntree.errors import ConfigError, RetrievalError
from turntree.search_backend.corpus import load_corpus
from turntree.search_backend.passage import Passage

__all__ = ["BM25Backend", "BM25Settings"]

# Lucene's English list, which Pyserini and bm25s use too.
_ENGLISH = """a an and are as at be but by for if in into is it no not of on or such that the their then there these
they this to was will with"""
STOP_WORDS = frozenset(_ENGLISH.split())
_ANALYZER = 1  # raise when tokens change, so that fingerprints change too
_POSSESSIVE = re.compile(r"['’]s\b")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
# Thai, Lao, Burmese, Khmer; kana, Bopomofo, Han with its extensions, Hangul.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\u3005-\u3007\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff"
)


@dataclass(frozen=True, slots=True)
class BM25Settings:
    """How texts are scored.

    ``k1`` and ``b`` are BM25's term saturation and length normalisation. ``stemmer`` is a Snowball language of
    PyStemmer or None; ``stop_words`` drops Lucene's English stop words.
    """

    k1: float = 0.9
    b: float = 0.4
    stemmer: str | None = "english"
    stop_words: bool = True

    def __post_init__(self) -> None:
        numbers = all(isinstance(value, (int, float)) for value in (self.k1, self.b))
        if not (numbers and self.k1 >= 0 and 0 <= self.b <= 1):
            raise ConfigError(f"BM25: expected k1 >= 0 and 0 <= b <= 1, found k1={self.k1!r}, b={self.b!r}")


class _Options(TypedDict, total=False):
    """The fields of :class:`BM25Settings` as keyword arguments."""

    k1: float
    b: float
    stemmer: str | None
    stop_words: bool


class BM25Backend:
    """BM25 over titles and texts of a fixed list of passages; a :class:`SearchBackend`.

    Equal scores keep corpus order, so results are deterministic. Safe to share between threads; pickling carries
    the passages and rebuilds the index.
    """

    def __init__(self, passages: Sequence[Passage], settings: BM25Settings | None = None) -> None:
        self.settings = settings or BM25Settings()
        self.passages = tuple(passages)
        self._analyzer = _Analyzer(self.settings)
        self._vocabulary: dict[str, int] = {}
        self._index = self._build()
        self._fingerprint = _fingerprint(self.passages, self.settings)

    @classmethod
    def from_passages(cls, passages: Sequence[Passage], **settings: Unpack[_Options]) -> BM25Backend:
        """Index passages that are already in memory; keyword arguments are the fields of :class:`BM25Settings`."""
        return cls(passages, BM25Settings(**settings))

    @classmethod
    def from_corpus(cls, path: str | Path, **settings: Unpack[_Options]) -> BM25Backend:
        """Index a ``corpus.jsonl`` file; raises :class:`DataError` where it cannot be read."""
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
        _check_request(queries, k)
        found: dict[str, list[Passage]] = {}
        for query in queries:
            if query not in found:
                found[query] = self._search_one(query, k)
        return [list(found[query]) for query in queries]

    def _search_one(self, query: str, k: int) -> list[Passage]:
        ids = [self._vocabulary[t] for t in self._analyzer.query(query) if t in self._vocabulary]
        if not ids:
            return []
        scores: npt.NDArray[np.float32] = self._index.get_scores_from_ids(ids)
        return [replace(self.passages[i], score=float(scores[i])) for i in _best(scores, k)]

    def _build(self) -> Any:
        rows = [
            [self._vocabulary.setdefault(t, len(self._vocabulary)) for t in self._analyzer.passage(p.title, p.text)]
            for p in self.passages
        ]
        if not self._vocabulary:
            warnings.warn(
                f"BM25: the corpus has {len(rows)} passages and no searchable word; every search finds nothing",
                stacklevel=4,
            )
            return None
        import bm25s  # imported here: its start-up cost is not for those who bring another backend

        index = bm25s.BM25(k1=self.settings.k1, b=self.settings.b, backend="numpy", csc_backend="numpy")
        index.index((rows, self._vocabulary), create_empty_token=False, show_progress=False)
        return index


class _Analyzer:
    """Text to terms: NFKC, case folded, words stemmed, unspaced scripts as character bigrams."""

    def __init__(self, settings: BM25Settings) -> None:
        self._stop = STOP_WORDS if settings.stop_words else frozenset[str]()
        self._stem = _stemmer(settings.stemmer)

    def query(self, text: str) -> list[str]:
        """Terms of a query; a query of stop words only keeps them, since titles keep theirs ("It", "The The")."""
        content, stop = self._split(text, unigrams=False)
        return content or stop

    def passage(self, title: str, text: str) -> list[str]:
        """Terms of title and text."""
        head, stop = self._split(title, unigrams=True)
        return head + stop + self._split(text, unigrams=True)[0]

    def _split(self, text: str, *, unigrams: bool) -> tuple[list[str], list[str]]:
        content: list[str] = []
        stop: list[str] = []
        for match in _token_pattern().finditer(_normalise(text)):
            word = match.group()
            if match.lastgroup == "unspaced":
                content += _ngrams(word, unigrams=unigrams)
            elif word in self._stop:
                stop.append(word)
            else:
                content.append(self._stem(word))
        return content, stop


def _normalise(text: str) -> str:
    visible = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _POSSESSIVE.sub("", visible)


def _ngrams(run: str, *, unigrams: bool) -> list[str]:
    """Bigrams of a run. Passages also get its characters, which one-character queries are looked up by."""
    if len(run) == 1:
        return [run]
    return [run[i : i + 2] for i in range(len(run) - 1)] + (list(run) if unigrams else [])


@lru_cache(maxsize=1)
def _token_pattern() -> re.Pattern[str]:
    """Runs of an unspaced script, or words with their combining marks (which ``\\w`` leaves out).

    Spelled out as ranges: one plain character class matches fifty times faster than a class with exceptions.
    """
    unspaced = re.compile(f"[{_UNSPACED}]")
    codes = [i for i in range(0x20000) if _in_word(chr(i)) and not unspaced.match(chr(i))]
    starts = [i for i, before in zip(codes, [-2, *codes]) if i != before + 1]
    ends = [i for i, after in zip(codes, [*codes[1:], -2]) if i != after - 1]
    words = "".join(f"{chr(i)}-{chr(j)}" for i, j in zip(starts, ends))
    return re.compile(f"(?P<word>[{words}]+)|(?P<unspaced>[{_UNSPACED}]+)")


def _in_word(char: str) -> bool:
    return char.isalnum() or unicodedata.category(char)[0] == "M"


def _stemmer(language: str | None) -> Callable[[str], str]:
    """A memoised stemmer. PyStemmer's objects are not safe to share between threads, hence the lock."""
    if language is None:
        return str
    import Stemmer

    if language not in Stemmer.algorithms():
        raise ConfigError(f"BM25: expected a stemmer of {Stemmer.algorithms()} or None, found {language!r}")
    stem_word, lock = Stemmer.Stemmer(language).stemWord, threading.Lock()

    @lru_cache(maxsize=1 << 18)
    def stem(word: str) -> str:
        with lock:
            return sys.intern(stem_word(word))

    return stem


def _best(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Indices of the ``k`` highest positive scores; equal scores in index order."""
    floor = np.partition(scores, -k)[-k] if k < len(scores) else np.float32(0)
    candidates = np.flatnonzero((scores >= floor) & (scores > 0))
    return candidates[np.argsort(-scores[candidates], kind="stable")[:k]]


def _check_request(queries: Sequence[str], k: int) -> None:
    if isinstance(queries, (str, bytes)) or not isinstance(queries, Sequence):
        raise RetrievalError(f"expected a sequence of query strings, found {queries!r:.60}; wrap one query in a list")
    bad = next((q for q in queries if not isinstance(q, str)), None)
    if bad is not None or any(q is None for q in queries):
        raise RetrievalError(f"expected query strings, found a {type(bad).__name__}: {bad!r:.60}")
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise RetrievalError(f"expected a number of passages k >= 1, found {k!r}")


def _fingerprint(passages: Sequence[Passage], settings: BM25Settings) -> str:
    digest = hashlib.sha256(json.dumps(["bm25", _ANALYZER, asdict(settings)]).encode())
    for passage in passages:
        digest.update(json.dumps([passage.id, passage.title, passage.text]).encode())
    return digest.hexdigest()[:16]
