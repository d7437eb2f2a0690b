"""Different queries must find different documents, and a document must be found by its own title."""

from __future__ import annotations

from turntree.envs.worlds import generate_world
from turntree.search_backend import BM25Backend


def test_e05_known_items_are_found_and_results_differ() -> None:
    passages = generate_world("standard", seed=5, entities=180, questions=0).passages
    backend = BM25Backend.from_passages(passages)
    wanted = passages[::9]
    found = backend.search([p.title for p in wanted], k=3)
    assert sum(p.id in [hit.id for hit in hits] for p, hits in zip(wanted, found, strict=True)) == len(wanted) == 22
    assert len({tuple(hit.id for hit in hits) for hits in found}) == len(wanted)
