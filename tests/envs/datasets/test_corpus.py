"""Inline contexts become a corpus: each passage once, supporting ids right even where titles repeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs.datasets import corpus_from_contexts, load_questions
from turntree.envs.task import thaw
from turntree.errors import DataError
from turntree.search_backend import load_corpus


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    return path


def musique(id: str, paragraphs: list[tuple[str, str, bool]], steps: list[tuple[str, str, int]]) -> dict[str, Any]:
    return {
        "id": id,
        "question": f"Q {id}",
        "answer": "A",
        "paragraphs": [
            {"idx": i, "title": t, "paragraph_text": x, "is_supporting": s} for i, (t, x, s) in enumerate(paragraphs)
        ],
        "question_decomposition": [{"question": q, "answer": a, "paragraph_support_idx": i} for q, a, i in steps],
    }


def test_titles_with_several_paragraphs_stay_apart(tmp_path: Path) -> None:
    one = musique("2hop__1", [("T", "a", True), ("T", "b", False), ("U", "c", True)], [("x", "1", 0), ("#1 y", "2", 2)])
    two = musique("2hop__2", [("T", "b", True), ("T", "a", False)], [("z", "3", 0)])
    found = corpus_from_contexts(write(tmp_path / "m.jsonl", one, two), out=tmp_path / "out")
    assert [(p.id, p.title, p.text) for p in found.passages] == [
        ("m-00000", "T", "a"),
        ("m-00001", "T", "b"),
        ("m-00002", "U", "c"),
    ]
    assert [q.metadata["supporting_ids"] for q in found.questions] == [("m-00000", "m-00002"), ("m-00001",)]
    assert thaw(found.questions[0].metadata["steps"]) == [
        {"query": "x", "answer": "1", "supporting_id": "m-00000"},
        {"query": "1 y", "answer": "2", "supporting_id": "m-00002"},
    ]
    assert [s["support"] for s in found.questions[0].metadata["decomposition"]] == ["m-00000", "m-00002"]
    assert load_corpus(tmp_path / "out" / "corpus.jsonl") == list(found.passages)
    assert load_questions(tmp_path / "out" / "questions.jsonl") == list(found.questions)
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["passages"] == 3


def test_of_two_passages_of_a_title_the_one_with_the_sentence_counts(tmp_path: Path) -> None:
    row = {
        "_id": "1",
        "question": "Q",
        "answer": "A",
        "supporting_facts": [["T", 2]],
        "context": [["T", ["short"]], ["T", ["a", "b", "c"]]],
    }
    found = corpus_from_contexts(write(tmp_path / "w.jsonl", row), prefix="w")
    assert found.questions[0].metadata["supporting_ids"] == ("w-00001",)


def test_evidences_become_steps_where_every_passage_is_known(tmp_path: Path) -> None:
    row = {
        "_id": "1",
        "question": "Q",
        "answer": "1987",
        "supporting_facts": [["Low (song)", 0], ["Dillon", 0]],
        "evidences": [["Low", "performer", "Dillon"], ["Dillon", "born", "1987"]],
        "context": [["Low (song)", ["A song", "by Dillon"]], ["Dillon", ["Born 1987."]], ["Low", ["No."]]],
    }
    unknown = row | {"_id": "2", "evidences": [["Somebody", "born", "1987"]]}
    first, second = corpus_from_contexts(write(tmp_path / "w.jsonl", row, unknown)).questions
    assert [(s["query"], s["supporting_id"]) for s in first.metadata["steps"]] == [
        ("Low performer", "w-00000"),
        ("Dillon born", "w-00001"),
    ]
    assert "steps" not in second.metadata


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    context = [["T", ["x"]]]
    rows = [
        {"id": "no", "question": "Q", "answer": "A", "supporting_facts": [["Far", 0]]},
        {"id": "yes", "question": "Q", "answer": "A", "supporting_facts": [["T", 0], ["Far", 0]], "context": context},
        {"id": "open", "question": "Q", "context": context},
    ]
    path = write(tmp_path / "h.jsonl", *rows)
    with pytest.raises(DataError, match=r"line 3: .*answers"):
        corpus_from_contexts(path)
    found = corpus_from_contexts(path, unanswerable="skip")
    assert (found.without_context, found.unanswered) == (("no",), ("open",))
    assert found.unresolved == {"yes": ("Far",)}
    assert found.meta()["unresolved_titles"] == 1
    with pytest.raises(DataError, match="expected questions with passages"):
        corpus_from_contexts(write(tmp_path / "n.jsonl", rows[0]))


passages = st.lists(st.tuples(st.sampled_from("TUV"), st.sampled_from("abc"), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(passages, min_size=1, max_size=4))
def test_every_passage_once_and_every_supporting_one_found(
    tmp_path_factory: pytest.TempPathFactory, contexts: list[list[tuple[str, str, bool]]]
) -> None:
    rows = [musique(f"q{i}", context, []) for i, context in enumerate(contexts)]
    found = corpus_from_contexts(write(tmp_path_factory.mktemp("c") / "c.jsonl", *rows))
    by_id = {p.id: (p.title, p.text) for p in found.passages}
    assert len(set(by_id.values())) == len(found.passages)
    assert set(by_id.values()) == {(t, x) for context in contexts for t, x, _ in context}
    for question, context in zip(found.questions, contexts):
        ids = question.metadata["supporting_ids"]
        assert {by_id[i] for i in ids} == {(t, x) for t, x, supporting in context if supporting}
