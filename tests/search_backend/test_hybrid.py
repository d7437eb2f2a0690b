from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search_backend.dense_models import WORDS, write_static
from turntree.errors import ConfigError, RetrievalError
from turntree.search_backend import Passage, SearchBackend, save_corpus
from turntree.search_backend.hybrid import STATIC_WEIGHTS, Fusion, HybridBackend, fuse, tune_weights
from turntree.search_backend.index import build_index, estimate_index, find_kind, open_index, read_manifest
from turntree.search_backend.survey import survey

PASSAGES = [Passage(f"d{i}", WORDS[i], f"{WORDS[2 * i]} {WORDS[i + 50]} {WORDS[i + 90]}") for i in range(120)]


class Fixed:
    """Gives the passages of a ranking."""

    def __init__(self, ranking: Sequence[str]) -> None:
        self.ranking, self.fingerprint = ranking, "-".join(ranking)
        self.asked: list[int] = []

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.asked.append(k)
        return [[Passage(id, id, "text", 1.0) for id in self.ranking[:k]] for _ in queries]


rankings = st.permutations("abcdef").flatmap(lambda p: st.integers(0, 6).map(lambda n: p[:n]))


@settings(max_examples=200, deadline=None)
@given(rankings, rankings, st.floats(0.01, 1), st.floats(0.01, 1))
def test_fused_scores_are_the_formula(one: list[str], two: list[str], a: float, b: float) -> None:
    found = fuse({"one": one, "two": two}, Fusion({"one": a, "two": b}))
    assert {id for id, _ in found} == set(one) | set(two)
    for id, score in found:
        parts = [w / (60 + 1 + ids.index(id)) for ids, w in ((one, a), (two, b)) if id in ids]
        assert score == pytest.approx(sum(parts))
    assert [s for _, s in found] == sorted((s for _, s in found), reverse=True)


@settings(max_examples=100, deadline=None)
@given(rankings, st.floats(0.01, 5), st.floats(0, 100))
def test_one_ranking_and_two_equal_ones_keep_their_order(ids: list[str], weight: float, constant: float) -> None:
    alone = fuse({"one": ids}, Fusion({"one": weight}, constant))
    twice = fuse({"one": ids, "two": ids}, Fusion({"one": weight, "two": 2 * weight}, constant))
    assert [id for id, _ in alone] == [id for id, _ in twice] == ids


def test_equal_scores_go_to_the_better_rank_then_the_first_part() -> None:
    fusion = Fusion({"one": 1.0, "two": 1.0})
    assert [id for id, _ in fuse({"one": ["a", "b"], "two": ["c", "d"]}, fusion)] == ["a", "c", "b", "d"]


def test_a_backend_asks_each_part_once_and_deep_enough() -> None:
    one, two = Fixed("abcd"), Fixed("dcb")
    backend = HybridBackend({"one": one, "two": two}, Fusion({"one": 1.0, "two": 1.0}, depth=3))
    assert isinstance(backend, SearchBackend)
    first, second = backend.search(["q", "q"], k=2)
    assert [p.id for p in first] == ["b", "c"]  # equal scores: the first part ranks b higher
    assert first == second
    assert first[0].score == pytest.approx(1 / 62 + 1 / 63)
    backend.search(["q"], k=4)
    assert one.asked == two.asked == [3, 4]
    with pytest.raises(RetrievalError, match="k >= 1"):
        backend.search(["q"], k=0)
    assert HybridBackend({"one": one, "two": two}).fingerprint != backend.fingerprint
    silent = HybridBackend({"one": one, "two": Fixed("z")}, Fusion({"one": 1.0, "two": 0.0}))
    assert [p.id for p in silent.search(["q"], k=9)[0]] == list("abcd")


@pytest.mark.parametrize(
    "bad",
    [
        {"weights": {"a": -1.0}},
        {"weights": {"a": 0.0}},
        {"weights": {"a": float("nan")}},
        {"constant": -1},
        {"depth": 0},
    ],
)
def test_bad_fusions_are_refused(bad: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hybrid: expected"):
        Fusion(**bad)
    with pytest.raises(ConfigError, match="a weight for each part"):
        HybridBackend({"one": Fixed("a")}, Fusion({"other": 1.0}))


def test_tuning_finds_the_part_that_knows() -> None:
    good, bad = [["a", "x"], ["b", "y"]], [["x", "z", "a"], ["y", "z", "b"]]
    weights, recall = tune_weights({"good": good, "bad": bad}, [["a"], ["b"]], cutoffs=(1,))
    assert recall == 1.0
    assert weights["good"] > weights["bad"]
    weights, _ = tune_weights({"one": good, "two": good}, [["a"], ["b"]])
    assert weights == {"one": 0.5, "two": 0.5}  # nothing to choose by: the middle
    with pytest.raises(ConfigError, match="two parts"):
        tune_weights({"good": good}, [["a"], ["b"]])


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hybrid")
    save_corpus(root / "corpus.jsonl", PASSAGES)
    write_static(root / "encoder")
    return root


def test_an_index_holds_both_and_fuses_them(bed: Path, tmp_path: Path) -> None:
    options = {"encoder": str(bed / "encoder"), "bm25.k1": 1.3, "factory": "SQ8", "depth": 30}
    backend = build_index(bed / "corpus.jsonl", tmp_path / "index", kind="hybrid", options=options)
    manifest = read_manifest(tmp_path / "index")
    assert manifest["settings"]["bm25"]["k1"] == 1.3
    assert manifest["settings"]["dense"]["factory"] == "SQ8"
    assert (manifest["settings"]["weight_bm25"], manifest["settings"]["depth"]) == (STATIC_WEIGHTS["bm25"], 30)
    assert {name.partition("/")[0] for name in manifest["files"]} == {"bm25", "dense"}
    query = ["word3 word60"]
    parts = {
        "bm25": open_index(tmp_path / "index", weight_dense=0.0),
        "dense": open_index(tmp_path / "index", weight_bm25=0.0),
    }
    ranked = {name: [p.id for p in part.search(query, k=30)[0]] for name, part in parts.items()}
    wanted = fuse(ranked, Fusion(dict(STATIC_WEIGHTS), depth=30))[:5]
    found = backend.search(query, k=5)[0]
    assert [p.id for p in found] == [id for id, _ in wanted]
    assert [p.score for p in found] == pytest.approx([score for _, score in wanted])
    assert pickle.loads(pickle.dumps(backend)).search(query, k=5)[0] == found
    assert len({backend.fingerprint, *(part.fingerprint for part in parts.values())}) == 3
    with pytest.raises(ConfigError, match="no search option 'k1'"):
        open_index(tmp_path / "index", k1=2)


def test_a_part_that_was_built_is_not_built_again(bed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"encoder": str(bed / "encoder")}
    whole = build_index(bed / "corpus.jsonl", tmp_path / "whole", kind="hybrid", options=options)
    dense, bm25 = find_kind("dense"), find_kind("bm25")

    def stop(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(dense), "build", stop)
        with pytest.raises(KeyboardInterrupt):
            build_index(bed / "corpus.jsonl", tmp_path / "index", kind="hybrid", options=options)
    monkeypatch.setattr(type(bm25), "build", stop)
    again = build_index(bed / "corpus.jsonl", tmp_path / "index", kind="hybrid", options=options)
    assert again.fingerprint == whole.fingerprint
    files = [
        {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        for root in (tmp_path / "whole", tmp_path / "index")
    ]
    assert files[0] == files[1]


def test_estimates_add_up_and_alternatives_are_settings(bed: Path) -> None:
    options = {"encoder": str(bed / "encoder"), "weight_bm25": 0.7, "bm25.k1": 1.5, "factory": "HNSW32"}
    needs = estimate_index(bed / "corpus.jsonl", kind="hybrid", options=options)
    one = estimate_index(bed / "corpus.jsonl", kind="dense", options={"encoder": str(bed / "encoder")})
    assert needs.mapped > one.mapped
    assert any(note.startswith("dense: embedding") for note in needs.notes)
    kind = find_kind("hybrid")
    for way in kind.alternatives(survey(bed / "corpus.jsonl"), kind.settings(options)):
        chosen = kind.settings(way)
        assert (chosen["weight_bm25"], chosen["bm25"]["k1"]) == (0.7, 1.5)
        assert json.loads(json.dumps(chosen)) == chosen


def test_scores_are_those_of_the_fusion_not_of_a_part() -> None:
    (found,) = HybridBackend({"one": Fixed("ab")}).search(["q"], k=1)[0]
    assert found.score == pytest.approx(1 / 61)
