"""One grammar reads turns and judges episodes: the documented table, row by row, and totality over anything."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import Action, Grammar, TagGrammar, TurnRecord
from turntree.envs.grammar import GRAMMARS, is_other_dialect
from turntree.errors import ConfigError, DataError
from turntree.search_backend import Passage

GRAMMAR = TagGrammar()
STRICT = TagGrammar(think="required")
PIECES = [
    "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>",
    "Paris", " ", "\n", "<Search>", "< answer >", "中文👍", "<tool_call>", "<", ">", "</",
]  # fmt: skip
TRANSCRIPTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)

TABLE = [
    ("<search>q</search>", "search", "q"),
    ("<think>t</think>\n<search> q \n</search>", "search", "q"),
    ("<answer> 巴黎 👍 </answer>", "answer", "巴黎 👍"),
    ("<search>a</search>junk<information>fake</information><answer>b</answer>", "search", "a"),
    ("<answer>London</answer><answer>Paris</answer>", "answer", "London"),
    ("<search>a</search><search>b</search>", "search", "a"),
    ("<answer>maybe <answer>Paris</answer></answer>", "answer", "Paris"),
    ("<search>a <search>b</search>", "search", "b"),
    ("<search>lost <answer>Paris</answer>", "answer", "Paris"),
    ("<think><answer>draft</answer></think><answer>Paris</answer>", "answer", "Paris"),
    ("<answer>draft</answer></think><answer>Paris</answer>", "answer", "Paris"),
    ("thought</think><search>q</search>", "search", "q"),
    ("<think>t</think><think>u</think><answer>Paris</answer>", "answer", "Paris"),
    ("<think>open <search>q</search>", "search", "q"),
    ("</answer><answer>Paris</answer>", "answer", "Paris"),
    ("<answer>a<think>b</think>c</answer><answer>Paris</answer>", "answer", "Paris"),
    ("a < b and <answer>1 < 2</answer>", "answer", "1 < 2"),
    ("<search> </search>", "invalid", "empty_query"),
    ("<answer></answer><answer>Paris</answer>", "invalid", "empty_answer"),
    ("<answer>a <search> b</answer>", "invalid", "nested_tags"),
    ("<answer>a<information>b</information></answer>", "invalid", "nested_tags"),
    ("<search>q", "invalid", "unclosed_search"),
    ("<think>t</think><answer>Paris", "invalid", "unclosed_answer"),
    ("q</search>", "invalid", "unopened_search"),
    ("Paris</answer>", "invalid", "unopened_answer"),
    ("<think><answer>Paris</answer></think>", "invalid", "action_in_thought"),
    ("<Answer>Paris</Answer>", "invalid", "misspelt_tag"),
    ("<ANSWER>Paris</ANSWER>", "invalid", "misspelt_tag"),
    ("< answer >Paris</ answer >", "invalid", "misspelt_tag"),
    ("<search/>", "invalid", "misspelt_tag"),
    ('<tool_call>{"name": "search"}</tool_call>', "invalid", "no_action"),
    ("The answer is Paris.", "invalid", "no_action"),
    ("<think>only a thought</think>", "invalid", "no_action"),
    ("", "invalid", "empty_turn"),
    (" \n", "invalid", "empty_turn"),
]


@pytest.mark.parametrize(("text", "kind", "argument"), TABLE)
def test_table(text: str, kind: str, argument: str) -> None:
    parsed = GRAMMAR.parse(text)
    assert parsed.action == Action(kind, argument)
    if kind != "invalid":
        assert parsed.span is not None
        block = text[slice(*parsed.span)]
        assert re.fullmatch(rf"<{kind}>\s*{re.escape(argument)}\s*</{kind}>", block)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>t</think><search>q</search>", Action("search", "q")),
        ("t</think><search>q</search>", Action("search", "q")),
        ("<think>open <search>q</search>", Action("invalid", "inside_think")),
        ("<search>q</search>", Action("invalid", "missing_think")),
        ("<search>q", Action("invalid", "unclosed_search")),
    ],
)
def test_a_closed_thought_can_be_required(text: str, action: Action) -> None:
    assert STRICT.parse(text).action == action


def test_notes_say_what_was_odd() -> None:
    assert GRAMMAR.parse("<search>a</search>\n ").notes == ()
    assert GRAMMAR.parse("<search>a</search> more").notes == ("overrun",)
    assert GRAMMAR.parse("<think>x<search>a</search>").notes == ("inside_think",)


@given(TRANSCRIPTS)
def test_parsing_and_judging_are_total(text: str) -> None:
    for grammar in (GRAMMAR, STRICT):
        parsed = grammar.parse(text)
        assert parsed.action.kind in ("search", "answer", "invalid")
        assert parsed.action.argument == parsed.action.argument.strip() != ""
        assert "\n" in grammar.correction(parsed.action.argument)
    validity = GRAMMAR.validity_of_text(text)
    assert validity.valid == (validity.reason == "")
    record = TurnRecord(text, parsed.action)
    assert GRAMMAR.validity([record, record]).valid in (True, False)


@given(before=TRANSCRIPTS, after=TRANSCRIPTS)
def test_what_follows_the_first_closed_action_is_never_executed(before: str, after: str) -> None:
    first = GRAMMAR.parse(before)
    if first.span is not None and "think" not in after and "</think>" not in before:
        assert GRAMMAR.parse(before + after).action == first.action


@pytest.mark.parametrize(
    "piece", ["<", "< ", " ", "\n", "<think>", "<search>", "</search>", "<answer></think>", "x_", "?_"]
)
def test_reading_takes_linear_time(piece: str) -> None:
    """Half a million characters of a pathological turn are read at once, not in minutes."""
    text = "<" + piece * (500_000 // len(piece))
    start = time.process_time()
    GRAMMAR.parse(text)
    GRAMMAR.validity_of_text(text)
    GRAMMAR.results([Passage("1", "", text)])
    GRAMMAR.prompt(text + "a")
    assert time.process_time() - start < 10


TAGLESS = st.text(max_size=20).map(lambda text: re.sub(r"[<>]", "", text))


@given(TAGLESS, st.sampled_from(["search", "answer"]), TAGLESS.map(str.strip).filter(bool))
def test_written_turns_are_read_back(thought: str, kind: str, argument: str) -> None:
    for grammar in (GRAMMAR, STRICT):
        parsed = grammar.parse(grammar.write(thought, Action(kind, argument)))
        assert parsed.action == Action(kind, argument)
        assert parsed.notes == ()


@given(TRANSCRIPTS)
def test_a_valid_format_is_read_as_an_answer(text: str) -> None:
    """The parser and the judge cannot disagree: a valid one-turn episode answers."""
    record = TurnRecord(text, GRAMMAR.parse(text).action)
    if GRAMMAR.validity([record]).valid and GRAMMAR.parse(text).action.argument != "empty_answer":
        assert GRAMMAR.parse(text).action.kind == "answer"
        assert GRAMMAR.validity_of_text(text).valid


def test_golden_format_scores(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "qa_em.json").read_text(encoding="utf-8"))
    for case in [*cases["format_scores"], *cases["real_prompt_bug"]["cases"]]:
        if "valid" in case:  # cases that judge the prompt's own tags have none
            validity = GRAMMAR.validity_of_text(case["body"])
            assert validity.valid == case["valid"], (case, validity)


def episode(*turns: tuple[str, str]) -> list[TurnRecord]:
    return [TurnRecord(text, GRAMMAR.parse(text).action, kind=kind) for text, kind in turns]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("<think>t</think><search>q</search>", "results"), ("<think>t</think><answer>a</answer>", "none")], ""),
        ([("<think>t</think>\n<answer>a</answer>", "none")], ""),
        ([], "incomplete:start"),
        ([("<think>t</think><search>q</search>", "results")], "incomplete:information"),
        ([("<answer>a</answer>", "none")], "unexpected_tag:start"),
        ([("<think>t</think> so <answer>a</answer>", "none")], "unexpected_text:after_think"),
        ([("<think>t</think><answer>a</answer> done", "none")], "unexpected_text:end"),
        ([("<think>t</think><search>q</search><information>i</information>", "results")], "fabricated_information"),
        ([("<think>t</think><search></search>", "correction")], "corrected:empty_query"),
        ([("<think>a<search>q</search>", "results")], "unexpected_tag:in_think"),
    ],
)
def test_an_episode_is_judged_by_who_wrote_what(turns: list[tuple[str, str]], reason: str) -> None:
    validity = GRAMMAR.validity(episode(*turns))
    assert (validity.valid, validity.reason) == (reason == "", reason)


def test_results_are_numbered_lines_between_the_tags() -> None:
    text = GRAMMAR.results([Passage("1", "T", "first"), Passage("2", "标题", "二")]).text
    assert text == "\n\n<information>Doc 1(Title: T) first\nDoc 2(Title: 标题) 二</information>\n\n"


def test_nothing_found_is_said() -> None:
    assert "No results" in GRAMMAR.results([]).text


@given(TRANSCRIPTS, TRANSCRIPTS)
def test_retrieved_text_cannot_hold_tags(title: str, text: str) -> None:
    observation = GRAMMAR.results([Passage("1", title, text), Passage("2", text, title)])
    assert re.findall(r"<\s*/?\s*(?:think|search|information|answer)\s*/?\s*>", observation.body, re.IGNORECASE) == []
    assert GRAMMAR.parse(observation.body).action.kind == "invalid"


def test_chat_control_tokens_in_passages_are_neutralised() -> None:
    observation = GRAMMAR.results([Passage("1", "<|im_end|>", "a <｜User｜> b <|x y|> c <b>")])
    assert "<|im_end|>" not in observation.text
    assert "<｜User｜>" not in observation.text
    assert "<|x y|> c <b>" in observation.text


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        ("who wrote Hamlet", "who wrote Hamlet?"),
        (" who wrote Hamlet? ", "who wrote Hamlet?"),
        ("Name the author.", "Name the author."),
        ("Tell me!", "Tell me!"),
        ("谁写了《红楼梦》？", "谁写了《红楼梦》？"),
        ("请说出作者。", "请说出作者。"),
        ("快说！", "快说！"),
        ("谁写了《红楼梦》", "谁写了《红楼梦》？"),
        ("作者是谁？👍", "作者是谁？👍"),
        ('Who said "Who is it?"', 'Who said "Who is it?"'),
        ('Who wrote "Hamlet"', 'Who wrote "Hamlet"?'),
        ("what is C++", "what is C++?"),
    ],
)
def test_a_question_mark_is_added_only_where_it_lacks(question: str, asked: str) -> None:
    assert GRAMMAR.prompt(question).endswith(f"Question: {asked}")


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_an_error(question: str) -> None:
    with pytest.raises(DataError, match="empty"):
        GRAMMAR.prompt(question)


def test_the_grammar_is_a_value_with_a_fingerprint() -> None:
    assert isinstance(GRAMMAR, Grammar)
    assert TagGrammar() == GRAMMARS["tags"]()
    assert TagGrammar().fingerprint == GRAMMAR.fingerprint != STRICT.fingerprint
    with pytest.raises(ConfigError, match="did you mean 'required'"):
        TagGrammar(think="require")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>',
        'I will call {"name": "search", "parameters": {"query": "x"}}',
        "Thought: x\nAction: Search[Hamlet]",
        "<function=search>x</function>",
        '[TOOL_CALLS] [{"name": "search"}]',
        "<|python_tag|>search.call(query='x')",
        "<｜tool▁calls▁begin｜>",
        "```python\nprint(1)\n```",
    ],
)
def test_calls_in_other_dialects_are_flagged(text: str) -> None:
    assert GRAMMAR.parse(text).other_dialect


@pytest.mark.parametrize("text", ["The answer is 3.", "Some action: none.", "<search>tool_call</search>", ""])
def test_plain_text_and_own_calls_are_not_flagged(text: str) -> None:
    assert not GRAMMAR.parse(text).other_dialect
    assert not is_other_dialect(text)
