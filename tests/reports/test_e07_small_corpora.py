"""A corpus smaller than k gives what there is; an empty one gives nothing, with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from turntree.search_backend import BM25Backend, Passage, save_corpus
from turntree.search_backend.index import build_index


@pytest.mark.parametrize("n", [1, 2])
def test_e07_k_larger_than_the_corpus(n: int) -> None:
    backend = BM25Backend.from_passages([Passage(str(i), "", f"river number {i}") for i in range(n)])
    assert len(backend.search(["river"], k=3)[0]) == n


@pytest.mark.parametrize("passages", [[], [Passage("0", "...", "!")]])
def test_e07_nothing_to_find(passages: list[Passage]) -> None:
    with pytest.warns(UserWarning, match=f"the corpus has {len(passages)} passages"):
        backend = BM25Backend.from_passages(passages)
    assert backend.search(["river", "lake"], k=3) == [[], []]


@pytest.mark.parametrize("n", [1, 2])
def test_e07_an_index_folder_with_k_larger_than_the_corpus(tmp_path: Path, n: int) -> None:
    save_corpus(tmp_path / "corpus.jsonl", [Passage(str(i), "", f"river number {i}") for i in range(n)])
    backend = build_index(tmp_path / "corpus.jsonl", tmp_path / "index", kind="bm25")
    assert len(backend.search(["river"], k=3)[0]) == n


@pytest.mark.parametrize("text", ["", '{"id": "0", "text": "!"}'])
def test_e07_an_index_folder_with_nothing_to_find(tmp_path: Path, text: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match="no searchable word; every search finds nothing"):
        backend = build_index(tmp_path / "corpus.jsonl", tmp_path / "index", kind="bm25")
    assert backend.search(["river", "lake"], k=3) == [[], []]
