"""Different queries must find different documents, and a document must be found by its own title."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.worlds import generate_world
from turntree.errors import SearchIndexError
from turntree.search_backend import BM25Backend, Passage, save_corpus
from turntree.search_backend.index import build_index, is_index
from turntree.search_backend.lexical import BM25Kind, MappedBM25
from turntree.search_backend.store import CorpusStore


def test_e05_known_items_are_found_and_results_differ() -> None:
    passages = generate_world("standard", seed=5, entities=180, questions=0).passages
    backend = BM25Backend.from_passages(passages)
    wanted = passages[::9]
    found = backend.search([p.title for p in wanted], k=3)
    assert sum(p.id in [hit.id for hit in hits] for p, hits in zip(wanted, found, strict=True)) == len(wanted) == 22
    assert len({tuple(hit.id for hit in hits) for hits in found}) == len(wanted)


def test_e05_an_index_that_finds_the_same_for_every_query_never_gets_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "e05_stuck", sys.modules[__name__])
    save_corpus(tmp_path / "corpus.jsonl", [Passage(str(i), f"Title {i}", f"text number{i}") for i in range(60)])
    with pytest.raises(SearchIndexError, match="self-test of the new index: expected at least 50% of 60 passages"):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "index", kind="e05_stuck:STUCK")
    assert not is_index(tmp_path / "index")


class _Stuck(BM25Kind):
    """Builds an index, and asks it the same whatever it is asked."""

    def open(self, store: CorpusStore, folder: Path, manifest: Mapping[str, Any], **options: Any) -> MappedBM25:
        backend = super().open(store, folder, manifest, **options)
        search = backend.search
        backend.search = lambda queries, *, k: search(["text"] * len(queries), k=k)  # type: ignore[method-assign]
        return backend


STUCK = _Stuck()
