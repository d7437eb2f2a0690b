"""The real files: each is read as it was when the numbers below were written down, or refused by name.

``tests/golden/published_questions.json`` holds counts and hashes only; ``python tests/envs/datasets/test_published.py``
writes it anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.datasets import corpus_from_contexts, load_questions, read_questions
from turntree.errors import DataError, MissingExtraError
from turntree.search_backend import load_corpus

GOLDEN = Path(__file__).parents[2] / "golden" / "published_questions.json"
REFUSED = {
    "flashrag_sample/sample_data.jsonl": r"line 1: expected a question .* \(that is a corpus",
    "search_r1_example/corpus.jsonl": r"line 1: expected a question .* \(that is a corpus",
    "search_r1_example/case.txt": r"line 1: expected JSON Lines, JSON, parquet, or CSV/TSV",
    "hotpotqa_react/hotpot_test_v1_simplified.json": r"row 1: expected .* answers .*found the keys \['question'\]",
    "nq_open/NQ-open.efficientqa.dev.1.1.no-annotations.jsonl": r"line 1: expected .* found the keys \['question'\]",
}
PARTLY = {
    "cmrc2018/cmrc2018_trial.json": "found a blank one",
    "flashrag_quickstart/skr_training.json": r"expected a list of answers under 'golden_answers', found \[''\]",
}


def facts(path: Path) -> dict[str, Any]:
    """Numbers about a file: how many questions, answers and steps, and a hash over its first and last rows."""
    found = read_questions(path, unanswerable="skip")
    questions = found.questions
    sample = [q.to_json() for q in (*questions[:10], *questions[-10:])]
    return {
        "layout": f"{found.container}, {found.layout}",
        "questions": len(questions),
        "skipped": found.skipped,
        "answers": sum(len(q.golden_answers) for q in questions),
        "most_answers": max(len(q.golden_answers) for q in questions),
        "with_titles": sum("supporting_titles" in q.metadata for q in questions),
        "with_steps": sum("decomposition" in q.metadata or "evidences" in q.metadata for q in questions),
        "sample": hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:16],
    }


def published(data: Path) -> list[str]:
    files = [p for p in sorted((data / "real").glob("*/*")) if p.name != "SOURCE.md"]
    return [f"{p.parent.name}/{p.name}" for p in files]


def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return loaded


def test_no_published_file_is_left_out(shared_data: Path) -> None:
    assert set(published(shared_data)) == set(golden()) | set(REFUSED)


@pytest.mark.parametrize("name", golden() if GOLDEN.exists() else ())
def test_published_questions_are_read_as_before(shared_data: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = shared_data / "real" / name
    assert facts(path) == golden()[name]
    if name in PARTLY:
        with pytest.raises(DataError, match=PARTLY[name]):
            load_questions(path)
    else:
        assert len(load_questions(path)) == golden()[name]["questions"]


@pytest.mark.parametrize("name", REFUSED)
def test_files_without_questions_or_answers_are_refused(shared_data: Path, name: str) -> None:
    with pytest.raises(DataError, match=REFUSED[name]):
        load_questions(shared_data / "real" / name)


PAIRS = {
    "nq_agentic_rag/test.parquet": "nq_open/NQ-open.dev.jsonl",
    "nq_agentic_rag/test.jsonl": "nq_agentic_rag/nq_test_questions_and_answers.json",
    "musique_agentic_rag/test.parquet": "musique_agentic_rag/musique_test_questions_and_answers.json",
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_set_in_two_layouts_is_the_same_set(shared_data: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    found = [
        [(q.question, q.golden_answers) for q in load_questions(shared_data / "real" / path)]
        for path in (name, PAIRS[name])
    ]
    assert found[0] == found[1]


def test_contexts_of_musique_become_the_corpus_that_the_bench_has(shared_data: Path) -> None:
    bench = shared_data / "bench" / "musique_dev"
    made = corpus_from_contexts(shared_data / "real" / "musique_migres" / "musique.json")
    known = load_questions(bench / "questions.jsonl")
    assert len(made.questions) == len(known)
    assert made.meta()["unresolved_titles"] == 0
    # The bench has these passages and further ones, with other spaces.
    known_passages = {"".join(f"{p.title}{p.text}".split()) for p in load_corpus(bench / "corpus.jsonl")}
    assert sum("".join(f"{p.title}{p.text}".split()) in known_passages for p in made.passages) > 0.99 * len(
        made.passages
    )
    wanted = {q.question: len(q.metadata["supporting_ids"]) for q in known}
    assert {q.question: len(q.metadata["supporting_ids"]) for q in made.questions} == wanted
    assert all(len(q.metadata["steps"]) == q.metadata["hops"] for q in made.questions)
    titles: dict[str, int] = {}
    for passage in made.passages:
        titles[passage.title] = titles.get(passage.title, 0) + 1
    assert sum(count > 1 for count in titles.values()) > 100


if __name__ == "__main__":
    data = Path(os.environ.get("TURNTREE_SHARED", Path(__file__).parents[4] / "shared")) / "data"
    rows = {}
    for name in published(data):
        try:
            rows[name] = facts(data / "real" / name)
        except (DataError, MissingExtraError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    GOLDEN.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
