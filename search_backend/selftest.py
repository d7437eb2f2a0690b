"""Whether a new index works at all: passages are found by their own words, different queries find different ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from turntree.errors import SearchIndexError
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["SelfTest", "known_items", "self_test"]

_QUERIES = 64
_WORDS, _CHARACTERS = 24, 160  # of a passage that its query is made of
_LEAST_FOUND, _MOST_OVERLAP = 0.5, 0.9


@dataclass(frozen=True, slots=True)
class SelfTest:
    """``queries``: known items that were searched; ``found``: share of them among their own first ten results;
    ``overlap``: mean share of results that two different queries have in common.
    """

    queries: int
    found: float
    overlap: float

    @property
    def ok(self) -> bool:
        return not self.queries or (self.found >= _LEAST_FOUND and self.overlap <= _MOST_OVERLAP)


def self_test(backend: SearchBackend, passages: Sequence[Passage]) -> SelfTest:
    """Search for known items. Raises :class:`SearchIndexError` where the index cannot be right."""
    result = known_items(backend, passages)
    if not result.ok:
        raise SearchIndexError(
            f"self-test of the new index: expected at least {_LEAST_FOUND:.0%} of {result.queries} passages among the "
            f"results of their own words, and results of different queries to differ, found {result.found:.0%} and an "
            f"overlap of {result.overlap:.0%}; check the encoder, its prefixes and the settings"
        )
    return result


def known_items(backend: SearchBackend, passages: Sequence[Passage]) -> SelfTest:
    """Search for passages spread over the corpus, by their title and first words.

    A passage counts as found where one with the same title and text is: corpora repeat themselves.
    """
    step = max(1, len(passages) // _QUERIES)
    chosen = [passages[i] for i in range(0, len(passages), step)][:_QUERIES]
    items = {_query(p): p for p in chosen if any(c.isalnum() for c in p.title + p.text)}
    if not items:
        return SelfTest(0, 1.0, 0.0)
    results = backend.search(list(items), k=max(1, min(10, len(passages) // 4)))
    found = sum(
        (item.title, item.text) in {(p.title, p.text) for p in result} for item, result in zip(items.values(), results)
    )
    ids = [{p.id for p in result} for result in results if result]
    shares = [len(a & b) / len(a | b) for a, b in itertools.pairwise(ids)] if len(passages) >= 16 else []
    return SelfTest(len(items), found / len(items), sum(shares) / max(len(shares), 1))


def _query(passage: Passage) -> str:
    words = f"{passage.title} {passage.text}".split()[:_WORDS]
    return " ".join(words)[:_CHARACTERS]
