from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.datasets import load_questions, read_questions, save_questions
from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError, DataError, MissingExtraError


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet_module = pytest.importorskip("pyarrow.parquet")
    parquet_module.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


GOOD = {"id": "a", "question": "Q?", "golden_answers": ["x", "y"], "metadata": {"hops": 2, "steps": [{"query": "q"}]}}


def test_flashrag_rows_keep_order_answers_and_metadata(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", GOOD, GOOD | {"id": "b"}, {"id": 3, "question": "R", "golden_answers": "one"})
    questions = load_questions(path)
    assert [q.id for q in questions] == ["a", "b", "3"]
    assert questions[0].golden_answers == ("x", "y")
    assert questions[0].metadata["steps"][0]["query"] == "q"
    assert questions[2] == Question("3", "R", ("one",))
    assert load_questions(path, limit=2) == questions[:2]
    assert load_questions(path, limit=0) == []


def test_saved_questions_load_back(tmp_path: Path) -> None:
    questions = [
        Question("ü", "谁？", ("a", "b"), FrozenDict({"x": [1, {"y": None}]})),
        Question("2", 'Say "hi"', ("c",)),
    ]
    save_questions(tmp_path / "q.jsonl", questions)
    assert load_questions(tmp_path / "q.jsonl") == questions


def test_missing_ids_are_derived_from_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text('\ufeff{"question": "Q", "golden_answers": [1, 1.5, " ", "1"]}\n\n', encoding="utf-8")
    assert load_questions(path) == [Question("dev-1", "Q", ("1", "1.5"))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Q", "judgement": "same"}, r"found the keys \['judgement', 'question'\]"),
        (GOOD | {"golden_answers": []}, r"expected a list of answers under 'golden_answers', found \[\]"),
        (GOOD | {"golden_answers": [" "]}, "expected a list of answers"),
        (GOOD | {"golden_answers": ["x", None]}, "expected a list of answers"),
        (GOOD | {"golden_answers": {"other": "x"}}, "expected a list of answers"),
        (GOOD | {"metadata": [1]}, "expected an object under 'metadata'"),
        (GOOD | {"id": ["a"]}, "expected a non-empty string or integer id"),
        ([GOOD], r"found a list of rows with the keys \['golden_answers'"),
        (7, "found a int"),
    ],
)
def test_bad_rows_are_refused_with_their_place(tmp_path: Path, row: object, message: str) -> None:
    path = jsonl(tmp_path / "q.jsonl", GOOD, row)
    with pytest.raises(DataError, match=message) as caught:
        load_questions(path)
    assert f"{path}, line 2" in str(caught.value)


def test_repeated_ids_are_kept_and_made_unique(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", GOOD, GOOD, GOOD | {"id": "a-2"}, GOOD)
    found = read_questions(path)
    assert [q.id for q in found.questions] == ["a", "a-2", "a-2-2", "a-3"]
    assert found.renamed == 3


def test_files_that_are_no_question_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text('{"question": "Q",\n')
    with pytest.raises(DataError, match=r"line 2: expected JSON Lines, JSON, parquet.*found broken JSON"):
        load_questions(path)
    path.write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(DataError, match="line 1: expected UTF-8 text"):
        load_questions(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty file"):
        load_questions(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises((DataError, MissingExtraError)):
        load_questions(path)
    with pytest.raises(DataError, match="expected a readable question file"):
        load_questions(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="limit"):
        load_questions(path, limit=-1)


def test_search_r1_parquet(tmp_path: Path) -> None:
    """The layout of Search-R1's nq_search: the prompt wraps the question, which stands beside it."""
    rows = [
        {
            "id": f"test_{i}",
            "question": f"who wrote book {i}",
            "golden_answers": [f"Author {i}", "A."],
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"Answer the given question ... Question: who wrote book {i}?\n"}],
            "reward_model": {"ground_truth": {"target": [f"Author {i}", "A."]}, "style": "rule"},
            "extra_info": {"index": i, "split": "test"},
        }
        for i in range(3)
    ]
    questions = load_questions(parquet(tmp_path / "test.parquet", rows))
    assert [q.id for q in questions] == ["nq_test_0", "nq_test_1", "nq_test_2"]
    assert questions[1].question == "who wrote book 1"
    assert questions[1].golden_answers == ("Author 1", "A.")
    assert questions[1].metadata["extra_info"]["split"] == "test"


def test_verl_parquet_falls_back_to_prompt_and_target(tmp_path: Path) -> None:
    row = {
        "data_source": "lab/qa",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
        "reward_model": {"ground_truth": {"target": ["me"]}},
    }
    assert load_questions(parquet(tmp_path / "dev.parquet", [row])) == [
        Question("lab_qa_dev_1", "Who?", ("me",), FrozenDict({"data_source": "lab/qa"}))
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [{"role": "system", "content": "x"}]}, "row 1: .* found no question among the keys"),
        (
            {"reward_model": {"style": "rule"}},
            "row 1: expected 'reward_model.ground_truth.target'.* found no answers among the keys",
        ),
        ({"reward_model": {"ground_truth": {"target": [""]}}}, "row 1: expected a list of answers"),
        ({"prompt": [{"role": "user", "content": " "}]}, "row 1: expected a question"),
    ],
)
def test_bad_parquet_rows_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": {"target": ["a"]}}}
    with pytest.raises(DataError, match=message):
        load_questions(parquet(tmp_path / "x.parquet", [row | change]))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "x.parquet", [{"question": "Q", "golden_answers": ["a"]}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"turntree\[parquet\]"):
        load_questions(path)


PUBLISHED = {
    "musique_agentic_rag/test.parquet": "Who is the spouse of the Green performer?",
    "nq_agentic_rag/test.parquet": "when was the last time anyone was on the moon",
    "nq_1k/test.jsonl": "what is the name of the weapon the grim reaper carries",
    "popqa_1k/test.jsonl": "Who was the composer of Easy Living?",
    "flashrag_quickstart/nq_test.jsonl": "who got the first nobel prize in physics",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_load(shared_data: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    questions = load_questions(shared_data / "real" / name)
    assert questions[0].question == PUBLISHED[name]
    assert len({q.id for q in questions}) == len(questions)


def test_joined_aliases_of_a_bare_ground_truth_are_not_the_answer(shared_data: Path) -> None:
    pytest.importorskip("pyarrow")
    (question,) = load_questions(shared_data / "real" / "nq_agentic_rag" / "test.parquet", limit=1)
    assert question.golden_answers == ("14 December 1972 UTC", "December 1972")
