"""Whole readings: action, span, notes, dialect, further calls and hint of a turn at once, and no part of them alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar import AtpoGrammar, HermesGrammar, ParsedTurn, PlannerGrammar, TagGrammar, TurnRecord
from turntree.envs.grammar.atpo import boxed
from turntree.envs.grammar.planner import DONE
from turntree.envs.tags import Reading, advance, any_spelling, bracket, compile_tags, exactly, misspelling, read
from turntree.envs.task import FrozenDict

CITY = FrozenDict({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
TOOLS = (ToolSpec("python", "Runs code."), ToolSpec("weather", "Says how 天气 is.", CITY))
KNOWN = compile_tags(("python",))
Q, P = "<search>q</search>", "<python>x</python>"


def invalid(reason: str, span: tuple[int, int] | None = None, *notes: str, hint: str = "") -> ParsedTurn:
    return ParsedTurn(Action("invalid", reason), span, notes, hint=hint)


# -- tags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "action", "thought"),
    [
        # what is wrong first decides, in this order: full width, never opened or nested, never closed, in a thought
        ("<search>q＜/search＞", "full_width_tag", False),
        ("q</search>《answer》", "full_width_tag", False),
        ("<think><search>q</search></think>〈answer〉", "full_width_tag", True),
        ("q</search><answer>b", "unopened_search", False),
        ("<search>q <answer></search>", "nested_tags", False),
        ("<search>q<think>t</think></search>", "nested_tags", True),
        ("<search>q <answer>b", "unclosed_answer", False),
        ("<answer>b <search>q", "unclosed_search", False),
        ("<think><search>q</search></think><answer>b", "unclosed_answer", True),
        ("<think><search>q</search></think><Answer>", "action_in_thought", True),
        ("<search>q<Answer>", "unclosed_search", False),
        ("q</search> b</answer>", "unopened_answer", False),
        ("<search>a<answer></search></search>", "unopened_search", False),
        # a thought holds an action where it holds a closing tag of one, whatever follows
        ("<think><search>q</think>", "no_action", True),
        ("<think><information>i</information></think>", "no_action", True),
        ("<think><search>q</search><information>i</information></think>", "action_in_thought", True),
        ("<python>x</python></think>", "action_in_thought", True),
        ("<think>a</think><think><search>q</search></think>", "action_in_thought", True),
        ("<think>a</think>b<think>c", "no_action", True),
        ("<think>a", "no_action", False),
        ("<think>a</think>", "no_action", True),
        ("a</think>", "no_action", True),
        ("</think><Search>", "misspelt_tag", True),
        ("<think>a</think>＜python＞", "full_width_tag", True),
        ("<think>a</think><information>", "no_action", True),
        (" \n", "empty_turn", False),
    ],
)
def test_an_invalid_reading_says_the_first_reason_and_whether_there_was_a_thought(
    text: str, action: str, thought: bool
) -> None:
    assert read(text, KNOWN) == Reading(Action("invalid", action), None, (), thought)


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        (f"<think>t</think>{Q}", Reading(Action("search", "q"), (16, 34), (), True)),
        (f"<think>t{Q}", Reading(Action("search", "q"), (8, 26), ("inside_think",), False)),
        (f"<think>t{Q} x", Reading(Action("search", "q"), (8, 26), ("inside_think", "overrun"), False)),
        (f"<think>a</think><think>b{Q}", Reading(Action("search", "q"), (24, 42), ("inside_think",), True)),
        (f"{Q}{Q}", Reading(Action("search", "q"), (0, 18), ("overrun",), False)),
        (f"{Q}<think>t</think>", Reading(Action("search", "q"), (0, 18), ("overrun",), False)),
        (f"{Q}\n ", Reading(Action("search", "q"), (0, 18), (), False)),
        ("</think> <search>q</search>", Reading(Action("search", "q"), (9, 27), (), True)),
        ("<search> </search>", Reading(Action("invalid", "empty_query"), (0, 18), (), False)),
        ("<answer></answer> x", Reading(Action("invalid", "empty_answer"), (0, 17), ("overrun",), False)),
        ("<think>t<python>\n</python>", Reading(Action("invalid", "empty_call"), (8, 26), ("inside_think",), False)),
        ("<think>t</think><python>\n</python>", Reading(Action("invalid", "empty_call"), (16, 34), (), True)),
        (f"<think>{Q}<think>", Reading(Action("search", "q"), (7, 25), ("inside_think", "overrun"), False)),
        (f"<think>a</think>{Q}</think>", Reading(Action("search", "q"), (16, 34), ("overrun",), True)),
        (f"<think>a</think><think>{P}</think>{Q}", Reading(Action("search", "q"), (49, 67), (), True)),
        ("<search>a<search>b</search>", Reading(Action("search", "b"), (9, 27), (), False)),
        ("<search>a<answer>b</answer>", Reading(Action("answer", "b"), (9, 27), (), False)),
        ("<answer>a<information></answer> <search>b</search>", Reading(Action("search", "b"), (32, 50), (), False)),
        ("<answer>a<search></answer></search>", Reading(Action("invalid", "nested_tags"))),
    ],
)
def test_a_closed_action_is_read_with_its_place_and_what_was_odd(text: str, reading: Reading) -> None:
    assert read(text, KNOWN) == reading


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (f"<think>t</think>{P} x", ParsedTurn(Action("python", "x"), (16, 34), ("overrun",))),
        (f"{Q} x", invalid("missing_think", (0, 18), "overrun")),
        (f"<think>t{Q} x", invalid("inside_think", (8, 26), "inside_think", "overrun")),
        (f"<think>a</think><think>b{Q}", invalid("inside_think", (24, 42), "inside_think")),
        ("<search> </search> x", invalid("empty_query", (0, 18), "overrun")),
        ("<think>t<search> </search>", invalid("empty_query", (8, 26), "inside_think")),
        ("<search>q", invalid("unclosed_search")),
        ("nothing", invalid("no_action")),
    ],
)
def test_notes_and_span_are_kept_where_a_thought_lacks(text: str, parsed: ParsedTurn) -> None:
    assert TagGrammar(think="required").with_tools(TOOLS).parse(text) == parsed


@pytest.mark.parametrize("think", ["optional", "required"])
def test_only_a_turn_without_an_action_is_of_another_dialect(think: Any) -> None:
    grammar = TagGrammar(think=think)
    assert grammar.parse("<tool_call>{}") == ParsedTurn(Action("invalid", "no_action"), other_dialect=True)
    assert grammar.parse("<search>q <tool_call>{}") == invalid("unclosed_search")
    argued = grammar.parse("<think>t</think><search>no_action</search><tool_call>{}")
    assert argued == ParsedTurn(Action("search", "no_action"), (16, 42), ("overrun",))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("<answer> so \\boxed{ a } </answer>.", ParsedTurn(Action("answer", "a"), (0, 33), ("overrun",))),
        ("<answer>a</answer>.", invalid("no_boxed", (0, 18), "overrun")),
        ("<think>t<answer>\\boxed{ }</answer>", invalid("empty_answer", (8, 34), "inside_think")),
        ("<think>t<search>\\boxed{a}</search>", ParsedTurn(Action("search", "\\boxed{a}"), (8, 34), ("inside_think",))),
        ("<answer></answer>", invalid("empty_answer", (0, 17))),
        ("<tool_call>", ParsedTurn(Action("invalid", "no_action"), other_dialect=True)),
    ],
)
def test_an_answer_in_a_box_keeps_the_rest_of_its_reading(text: str, parsed: ParsedTurn) -> None:
    assert AtpoGrammar().parse(text) == parsed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{}", ""),
        ("x\\boxed{a}y", "a"),
        ("\\boxed{a}\\boxed{b}{c}", "b"),
        ("\\boxed{\\boxed{a}b}", "a"),
        ("\\boxed{{a}{b}}", "{a}{b}"),
        ("}\\boxed{a}", "a"),
        ("\\boxed{a}}", "a"),
        ("{\\boxed{a}", "a"),
        ("{a}", None),
        ("\\boxed{a", None),
        ("", None),
    ],
)
def test_the_last_box_that_closes(text: str, found: str | None) -> None:
    assert boxed(text) == found


# -- Hermes ----------------------------------------------------------------------------------------------------------


def call(inside: str) -> str:
    return f"<tool_call>{inside}</tool_call>"


SEARCH = call('{"name": "search", "arguments": {"query": " q "}}')
CODE = call('{"name": "python", "arguments": {"input": " x "}}')
ANSWER = call('{"name": "answer", "arguments": {"answer": " a "}}')
NOWHERE = call('{"name": "lookup"}')
KNOWS = "Known: search, python, weather."
N, C = len(SEARCH), len(CODE)
FOUND, RUN = Action("search", "q"), Action("python", " x ")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (SEARCH, ParsedTurn(FOUND, (0, N))),
        (f"a {CODE}\n{SEARCH} b", ParsedTurn(RUN, (2, 3 + N + C), ("overrun",), more=(FOUND,))),
        (f"<think>{CODE}{CODE}{SEARCH} b", ParsedTurn(RUN, (7, 7 + N + 2 * C), ("inside_think", "overrun"),
                                                      more=(RUN, FOUND))),
        (f"<think>a</think><think>b{SEARCH}", ParsedTurn(FOUND, (24, 24 + N), ("inside_think",))),
        (SEARCH * 8, ParsedTurn(FOUND, (0, 8 * N), more=(FOUND,) * 7)),
        (SEARCH * 9 + " b", invalid("too_many_calls", None, "overrun", hint="At most 8 may be made.")),
        (f"{SEARCH}<think>t</think>", ParsedTurn(FOUND, (0, N), ("overrun",))),
        (f"<think>{NOWHERE} b", invalid("unknown_tool", None, "inside_think", "overrun", hint=KNOWS)),
        (f"{SEARCH}{NOWHERE}", invalid("unknown_tool", hint=KNOWS)),
        (f"<think>{call('[1]')} b", invalid("bad_call", None, "inside_think", "overrun")),
        (call('{"name": 1, "arguments": {}}'), invalid("bad_call")),
        (call('{"name": "search", "arguments": []}'), invalid("bad_call")),
        (f"{call('{')} b", invalid("bad_json", None, "overrun",
         hint="expected JSON: Expecting property name enclosed in double quotes at character 1.")),
        (f"{call('{“name”}')} b", invalid("bad_json", None, "overrun", hint='JSON needs half-width signs: " : , { }')),
        (call('{"name": "search"}'), invalid("bad_arguments", hint="search: 'query' is a required property.")),
        (call('{"name": "weather"}'), ParsedTurn(Action("weather", "{}"), (0, 42))),
        (call('{"name": "weather", "arguments": {"days": "<think>"}}').replace("<think>", "\\u003cthink>"),
         invalid("bad_arguments", hint="weather: days: '[think]' is not of type 'integer'.")),
        (call('{"name": "search", "arguments": {"query": " "}}') + " b", invalid("empty_query", None, "overrun")),
        (call('{"name": "python", "arguments": {"input": " "}}') + " b", invalid("empty_call", None, "overrun")),
        # tags in an order that means nothing: no notes, and what is wrong first decides
        (f"{SEARCH}<tool_call>", invalid("unclosed_call")),
        (f"{SEARCH}<tool_call> <think></tool_call>", invalid("nested_tags")),
        ("<tool_call><tool_response></tool_call></tool_call>", invalid("nested_tags")),
        ("<tool_call></think></tool_call>", invalid("unopened_call")),
        ("<think>a <tool_response>", invalid("fabricated_result")),
        ("a</tool_call><tool_response>", invalid("unopened_call")),
        ("</tool_response></tool_call>", invalid("fabricated_result")),
        # no call
        ("Bo", ParsedTurn(Action("answer", "Bo"), (0, 2))),
        ("<think>Action: Search[x]</think> Bo \n", ParsedTurn(Action("answer", "Bo"), (33, 35))),
        ("a</think>Bo", ParsedTurn(Action("answer", "Bo"), (9, 11))),
        ("<think>a</think>b<think>c</think>d", ParsedTurn(Action("answer", "d"), (33, 34))),
        ("<think>a</think>b<think>c", invalid("unclosed_think")),
        ("<think>Bo", invalid("unclosed_think")),
        ("<search>q</search> <think>", ParsedTurn(Action("invalid", "no_action"), other_dialect=True)),
        ("<think>t</think><search>q</search>", ParsedTurn(Action("invalid", "no_action"), other_dialect=True)),
        ("<think><search>q</search></think>", invalid("empty_answer")),
        (f"<think>{SEARCH}<tool_response>r</tool_response></think>", invalid("action_in_thought")),
        (f"<think>a</think><think>{SEARCH}</think>", invalid("action_in_thought")),
        (f"<think>{SEARCH}<think>", ParsedTurn(FOUND, (7, 7 + N), ("inside_think", "overrun"))),
        (f"<think>a</think>{SEARCH}</think>", ParsedTurn(FOUND, (16, 16 + N), ("overrun",))),
        (f"<think>a</think><think>{CODE}</think>{SEARCH}", ParsedTurn(FOUND, (31 + C, 31 + C + N))),
        (f"<think>{SEARCH}</think> Bo", ParsedTurn(Action("answer", "Bo"), (16 + N, 18 + N))),
        ("<think><tool_response>r</tool_response></think>", invalid("empty_answer")),
        ("<think>a</think> ", invalid("empty_answer")),
        ("〈tool_call〉{}〈/tool_call〉", invalid("full_width_tag")),
        ("《 ／Tool_Call 》", invalid("full_width_tag")),
        ("＜tool_response＞", invalid("full_width_tag")),
        ("< think >Bo", invalid("misspelt_tag")),
        ("<tools>", invalid("misspelt_tag")),
        ("<TOOL_CALL><search>q</search>", invalid("misspelt_tag")),
        ("《think》", ParsedTurn(Action("answer", "《think》"), (0, 7))),
        ("\n ", invalid("empty_turn")),
    ],
)  # fmt: skip
def test_whole_readings_of_hermes(text: str, parsed: ParsedTurn) -> None:
    assert HermesGrammar().with_tools(TOOLS).parse(text) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (f"<think>t</think>{SEARCH}", ParsedTurn(FOUND, (16, 16 + N))),
        (f"{SEARCH} b", invalid("missing_think", None, "overrun")),
        (f"<think>{SEARCH} b", invalid("inside_think", None, "inside_think", "overrun")),
        (f"<think>a</think><think>b{SEARCH}", invalid("inside_think", None, "inside_think")),
        ("<think>a</think>b<think>c", invalid("unclosed_think")),
        ("<think>Bo", invalid("inside_think")),
        ("Bo", invalid("missing_think")),
        ("", invalid("missing_think")),
        ("<think>t</think>Bo", ParsedTurn(Action("answer", "Bo"), (16, 18))),
        ("<tool_call>", invalid("unclosed_call")),
    ],
)
def test_whole_readings_of_hermes_with_a_thought(text: str, parsed: ParsedTurn) -> None:
    assert HermesGrammar(think="required").parse(text) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (ANSWER, ParsedTurn(Action("answer", "a"), (0, len(ANSWER)))),
        (f"{ANSWER}{SEARCH} b", invalid("answer_not_alone", None, "overrun")),
        (f"<think>{SEARCH}{ANSWER}", invalid("answer_not_alone", None, "inside_think")),
        (call('{"name": "answer", "arguments": {"answer": ""}}'), invalid("empty_answer")),
        ("<think>t</think> Bo", invalid("no_action")),
        ("<think>t</think>", invalid("empty_answer")),
        (NOWHERE, invalid("unknown_tool", hint="Known: search, answer.")),
    ],
)
def test_whole_readings_of_hermes_with_a_tool_that_answers(text: str, parsed: ParsedTurn) -> None:
    assert HermesGrammar(answer="tool").parse(text) == parsed


def test_hermes_takes_as_many_calls_as_it_says() -> None:
    for most in (1, 2):
        grammar = HermesGrammar(max_calls=most)
        assert len(grammar.parse(SEARCH * most).actions) == most
        assert grammar.parse(SEARCH * (most + 1)).hint == f"At most {most} may be made."
    assert "Up to 2 calls may follow each other in one turn" in HermesGrammar(max_calls=2).prompt("Who?")
    assert "One call may be made in one turn" in HermesGrammar(max_calls=1).prompt("Who?")


def test_calls_are_written_one_below_the_other_and_as_they_are_said() -> None:
    grammar = HermesGrammar().with_tools(TOOLS)
    assert grammar.write("t", Action("search", "天 < b"), Action("weather", '{"city": "罗马"}')) == (
        '<think>\nt\n</think>\n\n<tool_call>\n{"name": "search", "arguments": {"query": "天 < b"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "罗马"}}\n</tool_call>'
    )
    assert '"query": "\\u003cthink> \\u003c b"' in grammar.write("t", Action("search", "<think> < b"))
    assert (
        HermesGrammar()
        .write("t", Action("dance", "q"))
        .endswith('<tool_call>\n{"name": "dance", "arguments": {"input": "q"}}\n</tool_call>')
    )


# -- the planner's ending --------------------------------------------------------------------------------------------

END = "<finish></finish>"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (END, ParsedTurn(DONE, (0, 17))),
        (f"{END} and more", ParsedTurn(DONE, (0, 17), ("overrun",))),
        (f"{END}{Q}", ParsedTurn(DONE, (0, 17), ("overrun",))),
        ("<think>t<finish> \n </finish>", ParsedTurn(DONE, (8, 28), ("inside_think",))),
        ("so <finish>Bo</finish>.", ParsedTurn(DONE, (3, 22), ("overrun",))),
        (f"{Q}{END}", ParsedTurn(Action("search", "q"), (0, 18), ("overrun",))),
        (f"<python></python>{END}", invalid("empty_call", (0, 17), "overrun")),
        ("<answer>Bo</answer>.", invalid("own_answer", (0, 19), "overrun")),
        ("<think>t<answer></answer>", invalid("own_answer", (8, 25), "inside_think")),
        ("<search>no_boxed</search>", ParsedTurn(Action("search", "no_boxed"), (0, 25))),
        ("<search>empty_answer</search>", ParsedTurn(Action("search", "empty_answer"), (0, 29))),
        ("<search>empty_call</search>", ParsedTurn(Action("search", "empty_call"), (0, 27))),
        ("<tool_call>", ParsedTurn(Action("invalid", "no_action"), other_dialect=True)),
    ],
)
def test_whole_readings_of_a_planner(text: str, parsed: ParsedTurn) -> None:
    assert PlannerGrammar(TagGrammar()).with_tools(TOOLS).parse(text) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (f"<think>t</think>{END}.", ParsedTurn(DONE, (16, 33), ("overrun",))),
        (f"{END}.", invalid("missing_think", (0, 17), "overrun")),
        (f"<think>t{END}", invalid("inside_think", (8, 25), "inside_think")),
    ],
)
def test_an_empty_ending_obeys_all_rules(text: str, parsed: ParsedTurn) -> None:
    assert PlannerGrammar(TagGrammar("required")).parse(text) == parsed


def test_a_planner_in_boxes_and_in_hermes() -> None:
    assert PlannerGrammar(AtpoGrammar()).parse("<answer>Bo</answer>") == invalid("own_answer", (0, 19))
    hermes = PlannerGrammar(HermesGrammar(answer="tool"))
    assert hermes.parse(" Done ") == ParsedTurn(DONE, (1, 5))
    assert hermes.parse("<think>t</think>") == ParsedTurn(DONE)
    assert hermes.parse(f"<think>{NOWHERE} b") == invalid(
        "unknown_tool", None, "inside_think", "overrun", hint="Known: search."
    )
    assert hermes.parse(ANSWER).action == Action("invalid", "unknown_tool")
    assert hermes.parse(SEARCH + CODE).hint == "Known: search."


# -- episodes --------------------------------------------------------------------------------------------------------


def judged(grammar: Any, *turns: tuple[str, str]) -> tuple[bool, str]:
    kinds: Any = {"r": "results", "c": "correction", "n": "none"}
    validity = grammar.validity([TurnRecord(text, grammar.parse(text).action, kind=kinds[k]) for text, k in turns])
    return validity.valid, validity.reason


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("<think>t</think><answer>a</answer>", "r")], "unexpected_tag:end"),
        ([("<think>t</think>", "r")], "unexpected_tag:after_think"),
        ([("", "r")], "unexpected_tag:start"),
        ([("<think>t</think>", "n")], "incomplete:after_think"),
        ([(f"<think>t</think>{Q}", "n"), ("<think>t</think>", "n")], "unexpected_tag:after_search"),
        ([("<think>t</think><search></search>", "c"), ("<answer>", "n")], "corrected:empty_query"),
        ([("x<search></search>", "c")], "unexpected_text:start"),
        ([("<think>t</think> x", "c")], "unexpected_text:after_think"),
        ([(f"<think>t</think>{P}", "r"), ("<think>t</think> <answer>a</answer> ", "n")], ""),
        ([("<think>t</think><answer>a</answer>", "n"), ("<think>", "n")], "unexpected_tag:end"),
        ([("<information>", "n")], "fabricated_information"),
    ],
)
def test_the_reason_names_what_was_wrong_first(turns: list[tuple[str, str]], reason: str) -> None:
    assert judged(TagGrammar().with_tools(TOOLS), *turns) == (reason == "", reason)


def test_a_transcript_is_judged_with_the_results_inside_it() -> None:
    found = "<information>x</information>"
    whole = f"<think>t</think>{Q}{found}<think>t</think><answer>a</answer>"
    grammar = TagGrammar()
    assert (grammar.validity_of_text(whole).valid, grammar.validity_of_text(whole).reason) == (True, "")
    assert grammar.validity_of_text(f"{whole}<think>").reason == "unexpected_tag:end"
    assert grammar.validity_of_text(f"<think>t</think>{Q}{found}").reason == "incomplete:information"
    assert grammar.validity_of_text(found).reason == "unexpected_tag:start"
    assert grammar.validity_of_text(" a").reason == "unexpected_text:start"


@pytest.mark.parametrize(
    ("state", "text", "own", "expected"),
    [
        ("after_think", "x", True, ("after_think", "unexpected_text:after_think")),
        ("after_think", f"{Q} x", True, ("after_search", "unexpected_text:after_search")),
        ("after_think", f"{Q} x <think>", True, ("after_search", "unexpected_text:after_search")),
        ("start", "<think>a</think><think>", True, ("after_think", "unexpected_tag:after_think")),
        ("in_search", "q</answer>", True, ("in_search", "unexpected_tag:in_search")),
        ("in_information", "q</information> ", False, ("information", "")),
        ("in_information", "q</information>", True, ("in_information", "fabricated_information")),
        ("in_think", "q<think>", False, ("in_think", "unexpected_tag:in_think")),
        ("end", " ", True, ("end", "")),
    ],
)
def test_a_refusal_leaves_the_state_before_it(state: str, text: str, own: bool, expected: tuple[str, str]) -> None:
    assert advance(state, text, KNOWN, own_turn=own) == expected


BOX = "<answer>\\boxed{a}</answer>"


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([(f"<think>t</think>{BOX}", "n")], ""),
        ([("<think>t</think><answer>\\box", "n"), ("ed{a}</answer>", "n")], ""),
        ([(f"<think>t</think></result>{BOX}", "n")], "fabricated_result"),
        ([(f"<think>t</think><result><search>q</search>{BOX}", "n")], "fabricated_result"),
        ([(f"<think>t</think><search>q</search>{BOX}", "n")], "call_without_result"),
        ([("<think>t</think><search>q</search>", "n"), ("<answer>a</answer>", "n")], "call_without_result"),
        ([(f"<think>t</think>{P}", "c"), (BOX, "n")], "call_without_result"),
        ([(f"<think>t</think>{P}", "r"), (BOX, "n")], ""),
        ([("<think>t</think>\\boxed{a}<answer>b</answer>", "n")], "no_boxed"),
        ([("<think>t</think></answer>\\boxed{a}<answer>", "n")], "no_boxed"),
        ([("<think>t</think><answer>", "n")], "no_answer"),
        ([("<think>t</think></answer>", "n")], "no_answer"),
        ([("<think>t</think>", "n")], "no_answer"),
        ([("<think>t</think><answer><answer>", "n")], "several_answers"),
        ([("<think>t</think></answer></answer>", "n")], "several_answers"),
        ([(f"<think>t</think>{BOX}{BOX}", "n")], "several_answers"),
        ([(f"<think>t</think>{BOX}</answer>", "n")], "several_answers"),
        ([(f"<think>t</think></think>{BOX}{BOX}", "n")], "unbalanced_think"),
        ([("<result>", "n")], "no_think"),
        ([("<think>t</think><result>", "n")], "no_answer"),
        ([("<think>a</think><think>b</think>" + BOX, "n")], ""),
    ],
)
def test_the_first_rule_of_atpo_that_is_broken_is_named(turns: list[tuple[str, str]], reason: str) -> None:
    assert judged(AtpoGrammar().with_tools(TOOLS), *turns) == (reason == "", reason)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("<think>t</think>Bo", "n")], ""),
        ([(SEARCH, "r"), (SEARCH, "r"), ("Bo", "n")], ""),
        ([(SEARCH, "r"), (SEARCH, "n"), ("Bo", "n")], "incomplete:call"),
        ([(f"<think>{SEARCH} b", "r")], "inside_think"),
        ([(f"{SEARCH} b", "r")], "unexpected_text"),
        ([(f"{SEARCH}</tool_response> b", "c")], "fabricated_result"),
        ([(f"{NOWHERE} b", "c")], "corrected:unknown_tool"),
        ([("<think>", "n")], "incomplete:call"),
        ([(SEARCH, "r"), (SEARCH, "r")], "incomplete:results"),
    ],
)
def test_the_first_rule_of_hermes_that_is_broken_is_named(turns: list[tuple[str, str]], reason: str) -> None:
    assert judged(HermesGrammar().with_tools(TOOLS), *turns) == (reason == "", reason)


def test_an_ending_is_judged_where_it_stands() -> None:
    tags = PlannerGrammar(TagGrammar())
    assert judged(tags, (f"<think>t</think>{Q}", "r"), (f"<think>t</think>{END}", "n")) == (True, "")
    early = (f"<think>t</think>{END}", "n"), (f"<think>t</think>{Q}", "r")
    assert judged(tags, *early) == (False, "unexpected_tag:after_finish")
    assert judged(tags) == (False, "incomplete:start")
    assert judged(tags, (END, "n")) == (False, "unexpected_tag:start")
    assert tags.validity([TurnRecord("no ending", DONE)]).reason == "unexpected_text:start"
    boxes = PlannerGrammar(AtpoGrammar())
    assert judged(boxes, (f"<think>t</think>{END}", "n")) == (True, "")
    hermes = PlannerGrammar(HermesGrammar())
    assert judged(hermes, (SEARCH, "r"), ("<think>t</think>Done", "n")) == (True, "")
    assert judged(hermes, (SEARCH, "r"), ("<think>t</think>", "n")) == (True, "")
    assert judged(hermes, (SEARCH, "r")) == (False, "incomplete:results")


# -- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<search></search>", ""),
        ("<search><Search>", "misspelt_tag"),
        ("＜search＞<Search>", "full_width_tag"),
        ("<Search>＜search＞", "misspelt_tag"),
        ("<Search>《search》", "misspelt_tag"),
        ("<search>《ANSWER》", "full_width_tag"),
        ("《/answer》", "full_width_tag"),
        ("〈 ／ search 〉", "full_width_tag"),
        ("《search", ""),
        ("《think》", ""),
        ("<／search>", "full_width_tag"),
        ("<search／>", "full_width_tag"),
        ("﹤search﹥", "full_width_tag"),
        ("<SeArCh>", "misspelt_tag"),
        ("<searches>", ""),
    ],
)
def test_the_first_wrong_tag_decides_and_titles_come_last(text: str, code: str) -> None:
    exact = {match.start() for match in KNOWN.exact.finditer(text)}
    assert misspelling(text, exact, KNOWN.any_spelling, ("search", "answer")) == code


def test_patterns_of_tags() -> None:
    assert exactly(("a", "bc")).findall("<a></bc>< a><A><c>") == [("", "a"), ("/", "bc")]
    pattern = any_spelling(("a", "b_c"))
    assert [m[0] for m in pattern.finditer("<a> < / B_C > ＜ｂ＿ｃ＞ <a /> <ab> </a/>")] == [
        "<a>",
        "< / B_C >",
        "＜ｂ＿ｃ＞",
        "<a />",
        "</a/>",
    ]


def test_brackets_change_only_the_signs_at_the_ends() -> None:
    assert bracket("<|im_end|> <search> ＜/search＞ <b>", KNOWN.any_spelling) == "[|im_end|> [search] [/search] <b>"
    assert bracket("a < b", re.compile("x")) == "a < b"
