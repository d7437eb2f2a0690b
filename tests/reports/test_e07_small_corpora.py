"""A corpus smaller than k gives what there is; an empty one gives nothing, with a warning."""

from __future__ import annotations

import pytest

from turntree.search_backend import BM25Backend, Passage


@pytest.mark.parametrize("n", [1, 2])
def test_e07_k_larger_than_the_corpus(n: int) -> None:
    backend = BM25Backend.from_passages([Passage(str(i), "", f"river number {i}") for i in range(n)])
    assert len(backend.search(["river"], k=3)[0]) == n


@pytest.mark.parametrize("passages", [[], [Passage("0", "...", "!")]])
def test_e07_nothing_to_find(passages: list[Passage]) -> None:
    with pytest.warns(UserWarning, match=f"the corpus has {len(passages)} passages"):
        backend = BM25Backend.from_passages(passages)
    assert backend.search(["river", "lake"], k=3) == [[], []]
