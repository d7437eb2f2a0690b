"""Rows in the words of each published layout: every answer arrives, nothing else is taken for one."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs.datasets import join_questions, load_questions, read_questions, save_questions
from turntree.envs.task import FrozenDict, Question, thaw
from turntree.errors import ConfigError, DataError

HOTPOT = {
    "_id": "5a",
    "question": "Who?",
    "answer": "Rush",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Band", 0], ["Drummer", 1]],
    "context": [["Band", ["One.", " Two."]], ["Drummer", ["Three.", " Four."]], ["Other", ["Five."]]],
}
WIKI2 = {
    "_id": "b0",
    "type": "compositional",
    "question": "When was the performer of Low born?",
    "answer": "1987",
    "answer_id": "Q18160687",
    "evidences": [["Low", "performer", "Dillon"], ["Dillon", "date of birth", "1987"]],
    "evidences_id": [],
    "entity_ids": "Q1_Q2",
    "top_rank_questions": ["Another question?"],
    "final_res": {"answer": {"text": "wrong", "confidence": 5}},
    "supporting_facts": [["Low (song)", 0], ["Dillon", 0]],
    "context": [["Low (song)", ["A song", "by Dillon"]], ["Dillon", ["Born 1987."]]],
}
MUSIQUE = {
    "id": "2hop__574419_270105",
    "question": "What is the seat of the county of Van Hook?",
    "answer": "Stanley",
    "answer_aliases": ["Stanley, ND", "Stanley"],
    "answerable": True,
    "question_decomposition": [
        {"id": 1, "question": "Van Hook >> county", "answer": "Mountrail County", "paragraph_support_idx": 1},
        {"id": 2, "question": "#1 >> capital", "answer": "Stanley", "paragraph_support_idx": 0},
    ],
    "paragraphs": [
        {"idx": 0, "title": "Mountrail", "paragraph_text": "Its seat is Stanley.", "is_supporting": True},
        {"idx": 1, "title": "Van Hook", "paragraph_text": "In Mountrail County.", "is_supporting": True},
        {"idx": 2, "title": "Mountrail", "paragraph_text": "A courthouse.", "is_supporting": False},
    ],
}
SQUAD = {
    "version": "v1.0",
    "data": [
        {
            "title": "战国",
            "paragraphs": [
                {
                    "context": "光荣开发。",
                    "qas": [
                        {"id": "Q0", "question": "谁？", "answers": [{"text": "光荣", "answer_start": 0}] * 3},
                        {"id": "Q1", "question": "谁？", "answers": [{"text": "光荣"}, {"text": "光荣公司"}]},
                    ],
                }
            ],
        }
    ],
}
CMRC = [
    {
        "context_id": "T0",
        "context_text": "光荣开发。",
        "title": "战国",
        "qas": [{"query_text": "谁？", "query_id": "T0_0", "answers": ["光荣"]}],
    }
]
TRIVIA = {
    "Data": [
        {
            "Question": "Who wrote it?",
            "QuestionId": "tc_1",
            "Answer": {
                "Value": "Mark Twain",
                "Aliases": ["Twain, Mark", "Mark Twain"],
                "NormalizedAliases": ["mark twain"],
                "NormalizedValue": "mark twain",
                "MatchedWikiEntityName": "Decoy",
                "Type": "WikipediaEntity",
                "HumanAnswers": ["Clemens"],
            },
        }
    ]
}
POPQA = {
    "id": "4222362",
    "question": "What is George's occupation?",
    "possible_answers": '["politician", "political leader", "pol\\u00edtico"]',
    "obj": "politician of another kind",
    "s_aliases": '["decoy"]',
    "o_aliases": "[]",
}
FRAMES = {
    "Unnamed: 0": 0,
    "Prompt": "If my wife ...?",
    "Answer": "Jane Ballou",
    "wikipedia_link_1": "https://en.wikipedia.org/wiki/President",
    "reasoning_types": "Multiple constraints",
    "wiki_links": "['https://en.wikipedia.org/wiki/First_Lady', 'https://en.wikipedia.org/wiki/Ad%C3%A8le']",
}
ROWS: dict[str, tuple[dict[str, Any], str, tuple[str, ...], str]] = {
    "hotpotqa": (HOTPOT, "5a", ("Rush",), "hotpotqa"),
    "2wiki": (WIKI2, "b0", ("1987",), "2wikimultihopqa"),
    "musique": (MUSIQUE, "2hop__574419_270105", ("Stanley", "Stanley, ND"), "musique"),
    "popqa": (POPQA, "4222362", ("politician", "political leader", "político"), "popqa"),
    "frames": (FRAMES, "file-1", ("Jane Ballou",), "frames"),
    "nq-open": ({"question": "q", "answer": ["14 December", "December"]}, "file-1", ("14 December", "December"),
                "question-answer"),
    "bamboogle": ({"Question": "Q?", "id": "bamboogle_1", "note": "update", "answer": ["james madison"]},
                  "bamboogle_1", ("james madison",), "question-answer"),
    "simpleqa": ({"id": "97", "question": "伏兔穴？", "answer": "足阳明胃经", "urls": ["https://a"]}, "97",
                 ("足阳明胃经",), "simpleqa"),
    "squad-hub": ({"id": "1", "title": "T", "context": "C", "question": "Q", "answers": {"text": ["a", "b", "a"],
                                                                                      "answer_start": [1, 2, 1]}},
                  "1", ("a", "b"), "squad"),
    "trivia-hub": ({"question_id": "tc", "question": "Q", "answer": {"value": "a", "aliases": ["b"], "type": "x"}},
                   "tc", ("a", "b"), "triviaqa"),
    "skr": ({"question": "q", "judgement": "same", "golden_answers": ["x"]}, "file-1", ("x",), "flashrag"),
}  # fmt: skip


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("container", ["lines", "list", "indented", "data", "gz"])
def test_a_row_is_read_in_any_json_container(tmp_path: Path, name: str, container: str) -> None:
    row, id, answers, layout = ROWS[name]
    path = tmp_path / "file.json"
    text = {
        "lines": json.dumps(row) + "\n" + json.dumps(row | {"id": "other"}) + "\n",
        "list": json.dumps([row, row]),
        "indented": json.dumps([row, row], indent=1),
        "data": json.dumps({"version": "1", "data": [row, row]}),
        "gz": json.dumps(row),
    }[container]
    path.write_bytes(gzip.compress(text.encode()) if container == "gz" else b"\xef\xbb\xbf" + text.encode())
    found = read_questions(path)
    question = found.questions[0]
    assert (question.id, question.golden_answers, found.layout) == (id, answers, layout)
    assert question.question == row.get("question", row.get("Question", row.get("Prompt")))
    assert len({q.id for q in found.questions}) == len(found.questions)


@pytest.mark.parametrize("name", ["hotpotqa", "2wiki", "musique", "popqa", "frames", "squad-hub"])
def test_a_row_is_read_from_parquet(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    row, _, answers, layout = ROWS[name]
    columns = {k: v for k, v in row.items() if k not in ("supporting_facts", "context", "evidences_id", "final_res")}
    if name == "hotpotqa":  # the hub keeps pairs by column
        columns |= {
            "supporting_facts": {"title": ["Band", "Drummer"], "sent_id": [0, 1]},
            "context": {"title": ["Band", "Drummer"], "sentences": [["One."], ["Three.", " Four."]]},
        }
    path = tmp_path / "file.bin"
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([columns]), path)
    found = read_questions(path)
    assert found.questions[0].golden_answers == answers
    if name == "hotpotqa":
        assert found.layout == layout
        assert found.questions[0].metadata["supporting_titles"] == ("Band", "Drummer")


@pytest.mark.parametrize("name", ROWS)
def test_reading_again_what_was_saved_changes_nothing(tmp_path: Path, name: str) -> None:
    once = load_questions(write(tmp_path / "file.json", ROWS[name][0]))
    save_questions(tmp_path / "again.jsonl", once)
    assert load_questions(tmp_path / "again.jsonl") == once


def test_gold_steps_and_titles_become_metadata(tmp_path: Path) -> None:
    (hotpot,) = load_questions(write(tmp_path / "h.json", HOTPOT))
    assert thaw(hotpot.metadata) == {
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Band", 0], ["Drummer", 1]],
        "supporting_titles": ["Band", "Drummer"],
    }
    (wiki,) = load_questions(write(tmp_path / "w.json", WIKI2))
    assert wiki.metadata["evidences"] == (("Low", "performer", "Dillon"), ("Dillon", "date of birth", "1987"))
    assert "context" not in wiki.metadata
    (musique,) = load_questions(write(tmp_path / "m.json", MUSIQUE))
    steps = musique.metadata["decomposition"]
    assert [s["query"] for s in steps] == ["Van Hook county", "Mountrail County capital"]
    assert [s["support_title"] for s in steps] == ["Van Hook", "Mountrail"]
    assert musique.metadata["supporting_titles"] == ("Mountrail", "Van Hook")
    assert (musique.metadata["hops"], musique.metadata["type"]) == (2, "2hop")
    (frames,) = load_questions(write(tmp_path / "f.json", FRAMES))
    assert frames.metadata["supporting_titles"] == ("First Lady", "Adèle")
    assert frames.metadata["type"] == "Multiple constraints"


def test_flashrag_keeps_contexts_by_column_in_its_metadata(tmp_path: Path) -> None:
    own = {
        "type": "bridge",
        "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 1]},
        "context": {"title": ["A", "B"], "content": [["x"], ["y", "z"]]},
        "evidences": {"fact": ["A"], "relation": ["r"], "entity": ["B"]},
    }
    row = {"id": "dev_0", "question": "Q", "golden_answers": ["B"], "metadata": own}
    found = read_questions(write(tmp_path / "q.jsonl", row))
    metadata = found.questions[0].metadata
    assert metadata["supporting_titles"] == ("A", "B")
    assert metadata["evidences"] == (("A", "r", "B"),)
    assert "context" not in metadata
    assert found.left_out == {"context": 1}


def test_squad_style_files(tmp_path: Path) -> None:
    questions = load_questions(write(tmp_path / "s.json", SQUAD))
    assert [(q.id, q.golden_answers) for q in questions] == [("Q0", ("光荣",)), ("Q1", ("光荣", "光荣公司"))]
    assert questions[0].metadata["supporting_titles"] == ("战国",)
    assert load_questions(write(tmp_path / "c.json", CMRC))[0].golden_answers == ("光荣",)
    nameless = json.loads(json.dumps(SQUAD))
    for qa in nameless["data"][0]["paragraphs"][0]["qas"]:
        del qa["id"]
    assert [q.id for q in load_questions(write(tmp_path / "n.json", nameless))] == ["n-1-1", "n-1-2"]


def test_trivia_as_its_authors_publish_it(tmp_path: Path) -> None:
    (question,) = load_questions(write(tmp_path / "t.json", TRIVIA))
    assert question.id == "tc_1"
    assert question.golden_answers == ("Mark Twain", "Twain, Mark", "Clemens", "mark twain")


# CSV ------------------------------------------------------------------------------------------------------------------


def table(path: Path, rows: list[list[str]], delimiter: str) -> Path:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(rows)
    path.write_text(out.getvalue(), encoding="utf-8")
    return path


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_tables_with_a_header(tmp_path: Path, delimiter: str) -> None:
    rows = [["", "Prompt", "Answer"], ["0", 'Say "a, b; c"\nor\td?', "x"], ["1", "Q?", "[1] y"]]
    questions = load_questions(table(tmp_path / "test.txt", rows, delimiter))
    assert [(q.question, q.golden_answers) for q in questions] == [
        ('Say "a, b; c"\nor\td?', ("x",)),
        ("Q?", ("[1] y",)),
    ]


def test_tables_without_a_header_hold_question_and_list(tmp_path: Path) -> None:
    rows = [["who?", "['a', \"b's\"]"], ["when?", "['1912']"]]
    questions = load_questions(table(tmp_path / "nq-test.qa.csv", rows, "\t"))
    assert [(q.question, q.golden_answers) for q in questions] == [("who?", ("a", "b's")), ("when?", ("1912",))]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["prompt", "answer"], ["Q", "x", "y"]], "line 2: expected 2 columns .* found 3"),
        ([["question", "answer"], ["Q", ""]], "line 2: expected a question under .* its answers under"),
        ([["title", "text"], ["Q", "x"]], "line 1: expected JSON Lines.* CSV/TSV with a header"),
        ([["question", "answer", "answer"], ["Q", "x", "y"]], "expected columns of different names"),
        ([["question", "answers"], ["Q", "['a' 'b']"]], "line 2: expected commas between the texts"),
        ([["question", "answers"], ["Q", "array(['a'], dtype=object)"]], "line 2: expected a list of texts"),
        ([["question", "possible_answers"], ["Q", '["a"']], "line 2: expected a list of answers"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, rows: list[list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_questions(table(tmp_path / "q.csv", rows, ","))


# What is not there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q"},
        {"question": "Q", "answer": ""},
        {"question": "Q", "golden_answers": [" "]},
        {"question": " ", "answer": "x"},
        MUSIQUE | {"answerable": False, "id": "2hop__1"},
        {"question": "Q", "context": "C", "answers": {"text": [], "answer_start": []}},
        {"paragraphs": [{"context": "C", "qas": [{"question": "Q", "answers": [], "plausible_answers": ["x"]}]}]},
        {"paragraphs": [{"context": "C", "qas": [{"question": "Q", "answers": ["x"], "is_impossible": True}]}]},
        {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": {"target": []}}},
    ],
)
def test_questions_without_an_answer_are_refused_or_counted(tmp_path: Path, row: dict[str, Any]) -> None:
    good = {"question": "G", "answer": "x"}
    path = write(tmp_path / "q.json", [good, row])
    with pytest.raises(DataError, match=r"row 2.*: expected .* found .*unanswerable='skip'"):
        load_questions(path)
    found = read_questions(path, unanswerable="skip")
    assert ([q.question for q in found.questions], found.skipped) == (["G"], 1)
    with pytest.raises(DataError, match="found 1 blank ones or ones without an answer, and no other"):
        load_questions(write(tmp_path / "only.json", [row]), unanswerable="skip")
    with pytest.raises(ConfigError, match="expected 'refuse' or 'skip'"):
        load_questions(path, unanswerable="keep")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"contents": '"T"\ntext', "id": "1"}, r"a corpus: search.corpus"),
        ({"question": "Q", "answer": True}, "found True"),
        ({"question": "Q", "answer": [["x"]]}, r"found \['x'\]"),
        ({"question": "Q", "answer": float("nan")}, "found nan"),
        ({"question": 7, "answer": "x"}, "expected a question, found 7"),
        ({"question": "Q", "answer": "x", "context": 3}, "field 'context': expected"),
        ({"question": "Q", "answer": "x", "context": [["T", 3]]}, "expected a list of sentences, found 3"),
        ({"question": "Q", "answer": "x", "paragraphs": [{"title": "T"}]}, "expected 'paragraph_text' or 'text'"),
        ({"title": "T", "paragraphs": [{"qas": [{"question": "Q"}]}]}, "paragraph 1: expected 'context' and 'qas'"),
    ],
)
def test_other_rows_are_refused_by_name(tmp_path: Path, value: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_questions(write(tmp_path / "q.json", [value]))


def test_instructions_around_a_question_are_not_part_of_it(tmp_path: Path) -> None:
    content = "Answer the given question. Example: Question: none. For example, <answer> X </answer>. Question: Who?\n"
    row = {"prompt": [{"role": "user", "content": content}], "reward_model": {"ground_truth": {"target": ["a"]}}}
    assert load_questions(write(tmp_path / "q.json", row))[0].question == "Who?"


# Laws -----------------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(), min_size=1, max_size=12).filter(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda v: st.lists(v, max_size=3), max_leaves=5
)
names = st.text(st.characters(codec="ascii", categories=("Lu", "Nd")), min_size=1, max_size=5)
questions = st.builds(
    Question,
    id=texts,
    question=texts,
    golden_answers=st.lists(texts, min_size=1, max_size=4, unique=True).map(tuple),
    metadata=st.dictionaries(names, values, max_size=3).map(FrozenDict),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(questions, min_size=1, max_size=5, unique_by=lambda q: q.id))
def test_what_is_saved_loads_back(tmp_path_factory: pytest.TempPathFactory, made: list[Question]) -> None:
    path = tmp_path_factory.mktemp("q") / "q.jsonl"
    save_questions(path, made)
    assert load_questions(path) == made
    path.write_text(json.dumps([q.to_json() for q in made], indent=1), encoding="utf-8")
    assert load_questions(path) == made


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(texts, st.lists(questions, max_size=4), min_size=1, max_size=3))
def test_joined_sets_have_unique_ids_and_lose_nothing(sets: dict[str, list[Question]]) -> None:
    joined = join_questions(sets)
    assert len({q.id for q in joined}) == len(joined) == sum(map(len, sets.values()))
    assert [q.golden_answers for q in joined] == [q.golden_answers for qs in sets.values() for q in qs]
    assert [q.metadata["dataset"] for q in joined] == [name for name, qs in sets.items() for _ in qs]


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, min_size=1, max_size=5))
def test_a_list_in_a_string_is_the_list(tmp_path_factory: pytest.TempPathFactory, answers: list[str]) -> None:
    path = tmp_path_factory.mktemp("q") / "q.json"
    wanted = tuple(dict.fromkeys(answers))
    for written in (json.dumps(answers), repr(answers)):
        row = {"question": "Q", "possible_answers": written}
        path.write_text(json.dumps(row), encoding="utf-8")
        assert load_questions(path)[0].golden_answers == wanted
