from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.agents.teacher import Teacher, trajectories
from turntree.envs.datasets import gold_steps, load_questions
from turntree.envs.search_qa import Limits, SearchQACore
from turntree.envs.task import FrozenDict, Question
from turntree.search_backend import BM25Backend, Passage, load_corpus


def steps(question: str, answers: list[str], **metadata: Any) -> list[tuple[str, str]]:
    frozen = Question("q", question, tuple(answers), FrozenDict(metadata)).metadata
    return [(step["query"], step["answer"]) for step in gold_steps(question, answers, frozen)]


def test_steps_of_a_generated_world_stay_as_they_are() -> None:
    own = ({"query": "a", "answer": "b", "supporting_id": "1"},)
    assert gold_steps("Q?", ["b"], {"steps": own, "supporting_titles": ["A"]}) == own
    # a number of steps, as FRAMES-like sets have it, is not the steps
    assert steps("Who is A?", ["b"], steps=2, supporting_titles=["A"]) == [("A", "b")]


def test_decompositions_are_searched_with_the_answers_before() -> None:
    rows = [
        {"question": "Hello >> performer", "answer": "Hank", "support": "p1"},
        {"question": "Where did #1 live?", "answer": "Rome"},
    ]
    assert steps("Q?", ["Rome"], decomposition=rows) == [("Hello performer", "Hank"), ("Where did Hank live?", "Rome")]
    first, second = gold_steps("Q?", ["Rome"], {"decomposition": rows})
    assert (first.get("supporting_id"), second.get("supporting_id")) == ("p1", None)
    rows[0]["answer"] = ""  # as in the test split
    assert steps("Q?", ["Rome"], decomposition=rows) == []


def test_triples_are_searched_by_subject_and_relation() -> None:
    triples = [["Low", "performer", "Dillon"], ["Dillon", "date of birth", "1987"]]
    assert steps("Q?", ["1987"], evidences=triples) == [("Low performer", "Dillon"), ("Dillon date of birth", "1987")]


def test_titles_named_in_the_question_come_first() -> None:
    question = "Where was the drummer of Band born?"
    assert steps(question, ["Rome"], supporting_titles=["Ava Bo (musician)", "band (group)"]) == [
        ("band", "Ava Bo"),
        ("Ava Bo", "Rome"),
    ]
    # the answer's own page after the page that leads to it
    assert steps("Who sang?", ["Ava"], supporting_titles=["Ava", "Song"]) == [("Who sang?", "Ava"), ("Ava", "Ava")]


def test_compared_titles_bring_themselves() -> None:
    both = ["B (film)", "A"]
    assert steps("Are A and B both films?", ["yes"], supporting_titles=both) == [("A", "A"), ("B", "B (film)")]
    assert steps("Which is older?", ["A"], type="comparison", supporting_titles=both) == [
        ("Which is older?", "B (film)"),
        ("A", "A"),
    ]


def test_nothing_is_guessed() -> None:
    assert steps("Who?", ["x"]) == []
    assert steps("Who?", [], supporting_titles=["A"]) == []


@given(
    st.text(min_size=1).filter(str.strip),
    st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=3),
    st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=4, unique=True),
    st.sampled_from(["comparison", "bridge"]),
)
def test_every_title_is_searched_once_and_the_last_step_tells_it(
    question: str, answers: list[str], titles: list[str], kind: str
) -> None:
    made = gold_steps(question, answers, {"type": kind, "supporting_titles": titles})
    assert sorted(step["parts"][0] for step in made) == sorted(titles)
    assert all(step["query"].strip() and step["answer"] for step in made)


def test_a_teacher_plays_them() -> None:
    passages = [
        Passage("1", "Band (group)", "Band is a group whose drummer is Ava Bo."),
        Passage("2", "Ava Bo", "Ava Bo was born in a town by the sea."),
        Passage("3", "Cy", "Cy is a painter."),
    ]
    core = SearchQACore(BM25Backend.from_passages(passages), limits=Limits(max_turns=4))
    question = Question(
        "q1",
        "Where was the  drummer of Band born ?",
        ("Rome",),
        FrozenDict({"supporting_titles": ["Ava Bo", "Band (group)"]}),
    )
    (played,) = trajectories(core, [question], teacher=Teacher(), seed=0)
    assert [turn.text for turn in played.turns] == [
        "<think> find Band </think> <search> Band </search>",
        "<think> Ava Bo . find Ava Bo </think> <search> Ava Bo </search>",
        "<think> Rome </think> <answer> Rome </answer>",
    ]
    assert played.em == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["musique_train", "hotpotqa_train", "2wiki_dev"])
def test_real_questions_can_be_taught(shared_data: Path, name: str) -> None:
    """Every question has steps, and the teacher that follows them is right on most."""
    folder = shared_data / "bench" / name
    questions = load_questions(folder / "questions.jsonl")[:60]
    core = SearchQACore(BM25Backend.from_passages(load_corpus(folder / "corpus.jsonl")), limits=Limits(max_turns=6))
    played = trajectories(core, questions, teacher=Teacher(), seed=0)
    assert sum(d.em for d in played) / len(played) > 0.6
