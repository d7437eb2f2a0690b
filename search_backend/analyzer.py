"""Text to terms: NFKC, case folded, words stemmed, scripts without spaces as character bigrams or segmented words."""

from __future__ import annotations

import functools
import math
import re
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from turntree.errors import ConfigError, MissingExtraError

__all__ = ["ANALYZER_VERSION", "STOP_WORDS", "Analyzer", "BM25Settings"]

ANALYZER_VERSION = 1
"""Raised when tokens change, so that fingerprints change too."""

# Lucene's English list, which Pyserini and bm25s use too.
_ENGLISH = """a an and are as at be but by for if in into is it no not of on or such that the their then there these
they this to was will with"""
STOP_WORDS = frozenset(_ENGLISH.split())
"""Words that English queries are searched without."""
_SEGMENTERS = ("bigrams", "jieba")
_POSSESSIVE = re.compile(r"['’]s\b")
_ASCII_WORD = re.compile("[a-z0-9]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Thai, Lao, Burmese, Khmer; kana, Bopomofo, Han with its extensions, Hangul.
_UNSPACED = (
    f"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff{_HAN}\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff\uac00-\ud7af"
)
_ONLY_HAN = re.compile(f"[{_HAN}]+")


@dataclass(frozen=True, slots=True)
class BM25Settings:
    """How texts are scored.

    ``k1`` and ``b`` are BM25's term saturation and length normalisation. ``stemmer`` is a Snowball language of
    PyStemmer or None; ``stop_words`` drops Lucene's English stop words. ``segmenter`` cuts Chinese: ``bigrams`` of
    characters, or the words of ``jieba`` (extra ``chinese``); other scripts without spaces are bigrams always.
    """

    k1: float = 0.9
    b: float = 0.4
    stemmer: str | None = "english"
    stop_words: bool = True
    segmenter: str = "bigrams"

    def __post_init__(self) -> None:
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (self.k1, self.b))
        if not (numbers and 0 <= self.k1 < math.inf and 0 <= self.b <= 1):
            raise ConfigError(f"BM25: expected k1 >= 0 and 0 <= b <= 1, found k1={self.k1!r}, b={self.b!r}")
        if not isinstance(self.stop_words, bool):
            raise ConfigError(f"BM25: expected stop_words true or false, found {self.stop_words!r}")
        if self.segmenter not in _SEGMENTERS:
            raise ConfigError(f"BM25: expected a segmenter of {list(_SEGMENTERS)}, found {self.segmenter!r}")


class Analyzer:
    """The terms of queries and passages under some settings. Safe to share between threads."""

    def __init__(self, settings: BM25Settings) -> None:
        self._stop = STOP_WORDS if settings.stop_words else frozenset[str]()
        self._stem = _stemmer(settings.stemmer)
        self._segment = _jieba() if settings.segmenter == "jieba" else None

    def query(self, text: str) -> list[str]:
        """Terms of a query; a query of stop words only keeps them, since titles keep theirs ("It", "The The")."""
        content, stop = self._split(text, unigrams=False)
        return content or stop

    def passage(self, title: str, text: str) -> list[str]:
        """Terms of title and text."""
        head, stop = self._split(title, unigrams=True)
        return head + stop + self._split(text, unigrams=True)[0]

    def _split(self, text: str, *, unigrams: bool) -> tuple[list[str], list[str]]:
        if text.isascii():  # most English: the same words by a pattern that takes half the time
            words = _ASCII_WORD.findall(_POSSESSIVE.sub("", text.lower()))
            stop = [word for word in words if word in self._stop]
            return [self._stem(word) for word in words if word not in self._stop], stop
        content: list[str] = []
        stop = []
        for word, run in _token_pattern().findall(_normalise(text)):
            if run:
                content += self._unspaced(run, unigrams=unigrams)
            elif word in self._stop:
                stop.append(word)
            else:
                content.append(self._stem(word))
        return content, stop

    def _unspaced(self, run: str, *, unigrams: bool) -> list[str]:
        """Terms of a run. Passages also get its characters, which one-character queries are looked up by."""
        if len(run) == 1:
            return [run]
        if self._segment is None or not _ONLY_HAN.fullmatch(run):
            words = [run[i : i + 2] for i in range(len(run) - 1)]
        else:
            words = self._segment(run)
        return words + [c for c in run if unigrams]


def _normalise(text: str) -> str:
    visible = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _POSSESSIVE.sub("", visible)


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
    return re.compile(f"([{words}]+)|([{_UNSPACED}]+)")


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


@functools.cache
def _jieba() -> Callable[[str], list[str]]:
    """jieba's words with the words inside them, by its dictionary alone (its guesses at new words depend on context).

    Its own tokenizer, not the global one, and a private cache: the default is a file in a folder that others may write
    to, which it would load code objects from.
    """
    try:
        import jieba
    except ImportError as error:
        raise MissingExtraError("segmenter=jieba needs jieba: pip install 'turntree[chinese]'") from error
    tokenizer: Any = jieba.Tokenizer()
    level = jieba.default_logger.level
    with tempfile.TemporaryDirectory() as private:
        tokenizer.tmp_dir = private
        jieba.setLogLevel("ERROR")
        try:
            tokenizer.initialize()
        finally:
            jieba.setLogLevel(level)

    def segment(run: str) -> list[str]:
        return list(tokenizer.cut_for_search(run, HMM=False))

    return segment
