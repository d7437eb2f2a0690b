"""Kept trajectories in the student's tokens: exact ids, written texts, turns that are not learnt, what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.grammar import HermesGrammar, TagGrammar
from turntree.errors import DataError
from turntree.trainers.coldstart import read_kept
from turntree.trainers.coldstart.student import Student, lessons
from turntree.trainers.packing import pack_groups

SEARCH = {"text": "<search> a </search>", "action": "search", "observation": "<information>b</information>"}
WRONG = {"text": "no idea", "action": "invalid", "observation": "Write an action."}
ANSWER = {"text": "<answer> b </answer>", "action": "answer", "observation": ""}


def student(grammar: Any = None, *, style: Any = "chat", room: int = 2000) -> Student:
    grammar = TagGrammar() if grammar is None else grammar
    dialogue = Dialogue(ByteTokenizer(), style=style)
    return Student(dialogue, tuple(grammar.stop), grammar, room, 100, "bytes")


def row(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"question_id": "q", "prompt": "Who?", "turns": list(turns), **more}


def learnt(one: Student, given: dict[str, Any]) -> tuple[str, list[str]]:
    """All text that the student sees, and each run of tokens that it learns."""
    (pack,) = pack_groups([one.group(given, uid="q")], max_pack_tokens=4000)
    ids, mask = pack["tokens", "ids"].tolist(), pack["tokens", "loss_mask"].tolist()
    runs: list[list[int]] = [[]]
    for i, on in zip(ids, mask, strict=True):
        if on:
            runs[-1].append(i)
        elif runs[-1]:
            runs.append([])
    tokenizer = ByteTokenizer()
    return tokenizer.decode(ids), [tokenizer.decode(run) for run in runs if run]


def test_planner_turns_are_learnt_and_observations_are_not() -> None:
    text, runs = learnt(student(), row(SEARCH, ANSWER))
    assert runs == [SEARCH["text"], ANSWER["text"]]
    assert text.startswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<search>")
    assert "<|im_start|>user\n<information>b</information><|im_end|>" in text, "through the student's own dialogue"


def test_a_turn_without_a_stop_string_learns_its_end() -> None:
    _, runs = learnt(student(HermesGrammar()), row({"text": "It is b.", "action": "answer", "observation": ""}))
    assert runs == ["It is b.<|im_end|>"]


def test_turns_that_were_not_executed_are_context() -> None:
    text, runs = learnt(student(), row(WRONG, SEARCH, WRONG, ANSWER, WRONG))
    assert runs == [SEARCH["text"], ANSWER["text"]]
    assert text.count("no idea") == 2, "what follows the last turn that is learnt is left out"
    assert "Write an action." in text
    with pytest.raises(DataError, match="no turn of it was executed"):
        student().group(row(WRONG, WRONG), uid="q")


def test_sampled_tokens_are_taken_as_they_are_in_the_same_vocabulary_only() -> None:
    ids = [*b"<search> a </search>", 10, 257]
    exact = row({**SEARCH, "ids": ids}, ANSWER, vocabulary="bytes")
    assert learnt(student(), exact)[1] == ["<search> a </search>\n<|im_end|>", ANSWER["text"]]
    other = {**exact, "vocabulary": "of another teacher"}
    assert learnt(student(), other)[1] == [SEARCH["text"], ANSWER["text"]]


def test_what_the_students_grammar_does_not_read_is_named_or_dropped() -> None:
    hermes = student(HermesGrammar())
    good = {"text": '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>', "action": "search"}
    rows = [row(SEARCH, ANSWER), row({**good, "observation": "b"}, {**ANSWER, "text": "b"}, question_id="fits")]
    with pytest.raises(DataError, match=r"demonstration q, turn 1: .*HermesGrammar reads .* sft\.unfit=drop"):
        lessons(rows, hermes)
    found = lessons(rows, hermes, drop=True)
    assert [one["question_id"] for one in found.rows] == ["fits"]
    assert "the teacher meant search" in found.dropped[0][1]
    with pytest.raises(DataError, match="found 1 of which none fits"):
        lessons(rows[:1], hermes, drop=True)
    assert lessons([], hermes, empty=True).groups == ()


def test_a_trajectory_that_is_too_long_is_no_shorter_one() -> None:
    with pytest.raises(DataError, match=r"sampling\.max_context_tokens=60"):
        lessons([row(SEARCH, ANSWER)], student(room=60))


def test_kept_files_are_read_with_care(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    file.write_text(json.dumps(row({"text": "a\u2028", "observation": ""})) + "\n\n")
    assert read_kept(file)[0]["turns"][0]["text"] == "a\u2028"
    (tmp_path / "run" / "coldstart").mkdir(parents=True)
    with pytest.raises(DataError, match=r"expected kept\.jsonl in the folder"):
        read_kept(tmp_path / "run")
    (tmp_path / "run" / "coldstart" / "kept.jsonl").write_bytes(file.read_bytes())
    assert read_kept(tmp_path / "run") == read_kept(file)
    for bad in ("{", "[1]", '{"question_id": "q", "prompt": "p", "turns": []}', json.dumps(row({"text": "a"})),
                json.dumps(row({**ANSWER, "ids": [-1]})), json.dumps(row({**ANSWER, "text": None}))):  # fmt: skip
        file.write_text(json.dumps(row(ANSWER)) + "\n" + bad + "\n")
        with pytest.raises(DataError, match=r"kept\.jsonl, line 2"):
            read_kept(file)
    file.write_text("")
    with pytest.raises(DataError, match="found none"):
        read_kept(file)
