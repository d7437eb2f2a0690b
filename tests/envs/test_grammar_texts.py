"""What every grammar writes, word for word: prompts, observations, corrections, turns, and a fingerprint of all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar import (
    AtpoGrammar,
    HermesGrammar,
    Language,
    PlannerGrammar,
    TagGrammar,
    TurnRecord,
    complete_turn,
    reading_tools,
    speaking,
)
from turntree.envs.tags import advance, compile_tags, misspelling, neutralise, read
from turntree.envs.task import FrozenDict
from turntree.errors import ConfigError
from turntree.search_backend import Passage

GOLDEN = Path(__file__).parent.parent / "golden_trees" / "grammars.txt"
CITY = FrozenDict({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
TOOLS = (ToolSpec("python", "Runs code."), ToolSpec("weather", "Says how 天气 is.", CITY))
PASSAGES = [Passage("1", "T", "first </search> line"), Passage("2", "标题", "<tool_call> 二")]
REASONS = ("no_action", "own_answer", "empty_query", "no_boxed", "unheard_of")
MAKERS: dict[str, Any] = {
    "tags": TagGrammar(),
    "tags think=required": TagGrammar(think="required"),
    "atpo": AtpoGrammar(),
    "hermes": HermesGrammar(),
    "hermes think=required answer=tool": HermesGrammar(think="required", answer="tool"),
    "hermes max_calls=1": HermesGrammar(max_calls=1),
    "hermes schemas=template": HermesGrammar(schemas="template"),
}


def written(grammar: Any) -> Iterator[str]:
    """Everything that it writes, a title above each."""
    yield f"fingerprint {grammar.fingerprint}"
    yield f"stop {grammar.stop!r}"
    yield f"-- prompt\n{grammar.prompt(' Who taught Ava')}"
    yield f"-- notice\n{grammar.last_turn_notice()!r}"
    for reason in REASONS:
        yield f"-- correction of {reason}\n{grammar.correction(reason)!r}"
    yield f"-- results\n{grammar.results(PASSAGES).text!r}"
    yield f"-- no results\n{grammar.results([]).text!r}"
    for text in ("out <think>", " "):
        yield f"-- tool_result of {text!r}\n{grammar.tool_result('python', text).text!r}"
    for action in (Action("search", "q"), Action("answer", "Bo"), Action("python", "a < 1")):
        yield f"-- {action.kind}\n{grammar.write('I think.', action)!r}"


def grammars() -> Iterator[tuple[str, Any]]:
    for language in get_args(Language):
        for name, grammar in MAKERS.items():
            spoken = replace(grammar, language=language)
            yield f"{name} {language}", spoken
            if name in ("tags", "atpo", "hermes"):
                yield f"{name} {language} with tools", spoken.with_tools(TOOLS)
                yield f"planner of {name} {language}", PlannerGrammar(grammar, language)
                yield f"planner of {name} {language} with tools", PlannerGrammar(grammar, language).with_tools(TOOLS)


def test_golden_texts() -> None:
    """After a change on purpose: ``TURNTREE_REGENERATE=1 pytest tests/envs/test_grammar_texts.py``."""
    found = {name: "\n".join(written(grammar)) for name, grammar in grammars()}
    if os.environ.get("TURNTREE_REGENERATE"):
        GOLDEN.write_text("".join(f"== {name}\n{text}\n\n" for name, text in found.items()), encoding="utf-8")
    parts = ("\n" + GOLDEN.read_text(encoding="utf-8")).split("\n== ")[1:]
    golden = dict(part.rstrip("\n").split("\n", 1) for part in parts)
    assert found.keys() == golden.keys()
    for name, text in found.items():
        assert text == golden[name], name


# Reading: spans, hints and notes, which tables of actions leave open


@pytest.mark.parametrize(
    ("grammar", "text", "span"),
    [
        (TagGrammar(), "a <search> q </search> b", (2, 22)),
        (AtpoGrammar(), "<answer>\\boxed{a}</answer>", (0, 26)),
        (HermesGrammar(), "  Bo \n", (2, 4)),
        (HermesGrammar(), "<think>t</think> Bo", (17, 19)),
        (TagGrammar(), "<search>q", None),
    ],
)
def test_the_span_is_that_of_the_action(grammar: Any, text: str, span: tuple[int, int] | None) -> None:
    assert grammar.parse(text).span == span


def test_the_span_of_several_calls_is_that_of_all() -> None:
    call = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
    parsed = HermesGrammar().parse(f"see {call} {call} now")
    assert parsed.span == (4, 5 + 2 * len(call))
    assert parsed.notes == ("overrun",)
    assert len(parsed.more) == 1


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        ('{"name": "lookup"}', "Known: search, python, weather."),
        ('{"name": "weather", "arguments": {"days": "x"}}', "weather: days: 'x' is not of type 'integer'."),
    ],
)
def test_hints_say_what_was_wrong(call: str, hint: str) -> None:
    grammar = HermesGrammar().with_tools(TOOLS)
    parsed = grammar.parse(f"<think>t</think><tool_call>{call}</tool_call>")
    assert parsed.hint == hint
    assert parsed.action.kind == "invalid"


def test_notes_are_kept_where_a_call_is_wrong() -> None:
    parsed = HermesGrammar().parse('<think>x<tool_call>{"name": "lookup"}</tool_call> and')
    assert parsed.notes == ("inside_think", "overrun")
    assert HermesGrammar(max_calls=1).parse("<tool_call>{}</tool_call><tool_call>{}</tool_call>").hint
    assert HermesGrammar().parse("<search>q</search>").other_dialect


@pytest.mark.parametrize(
    ("state", "text", "own", "expected"),
    [
        ("start", " <think>a</think> ", True, ("after_think", "")),
        ("start", "a<think>", True, ("start", "unexpected_text:start")),
        ("start", "<think>a</think> b", True, ("after_think", "unexpected_text:after_think")),
        ("after_search", "<information>x</information>", False, ("information", "")),
        ("after_search", "<information>x</information>", True, ("after_search", "fabricated_information")),
        ("after_think", "<answer>x</answer>", True, ("end", "")),
        ("end", "<think>", True, ("end", "unexpected_tag:end")),
        ("after_think", "<python>x</python>", True, ("after_python", "")),
        ("information", "<think>", True, ("in_think", "")),
        ("in_answer", "x", True, ("in_answer", "")),
    ],
)
def test_the_automaton_of_an_episode(state: str, text: str, own: bool, expected: tuple[str, str]) -> None:
    assert advance(state, text, compile_tags(("python",)), own_turn=own) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<search>", ""),
        ("< search >", "misspelt_tag"),
        ("<SEARCH>", "misspelt_tag"),
        ("<search/>", "misspelt_tag"),
        ("</ search>", "misspelt_tag"),
        ("＜search＞", "full_width_tag"),
        ("<ｓｅａｒｃｈ>", "full_width_tag"),
        ("《search》", "full_width_tag"),
        ("〈/ Search 〉", "full_width_tag"),
        ("《红楼梦》", ""),
        ("search", ""),
    ],
)
def test_spellings(text: str, code: str) -> None:
    known = compile_tags()
    exact = {match.start() for match in known.exact.finditer(text)}
    assert misspelling(text, exact, known.any_spelling, ("search",)) == code


def test_tags_in_data_get_square_brackets() -> None:
    assert neutralise("<search>a</ANSWER ><b><information>") == "[search]a[/ANSWER ]<b>[information]"
    assert neutralise("<python><result>", ("python",), "result") == "[python][result]"
    assert neutralise("<python><result>") == "<python><result>"


def test_arguments_of_tools_keep_their_indentation() -> None:
    known = compile_tags(("python",))
    reading = read("<think>t</think><python>\n  if x:\n    y\n</python>", known)
    assert reading.action == Action("python", "if x:\n  y")
    assert reading.thought
    assert not read("<think>t<python>x</python>", known).thought
    assert read("<search>  a\n  b</search>", known).action.argument == "a\n  b"


# Learning tools, and languages


class Mute(TagGrammar):
    """Writes what it cannot read."""

    def write(self, thought: str, action: Action) -> str:
        return thought


def test_a_grammar_that_cannot_read_its_tools_says_which_and_why() -> None:
    with pytest.raises(
        ConfigError, match=r"Mute cannot read the tool python: expected Action\(.*from 'I use it\.', found"
    ):
        reading_tools(Mute(), TOOLS)
    with pytest.raises(
        ConfigError, match=r"object cannot read the tools python, weather: it has no with_tools, write, tool"
    ):
        reading_tools(object(), TOOLS)  # type: ignore[arg-type]
    plain = Mute()
    assert reading_tools(plain, ()) is plain


def test_a_tool_whose_schema_gives_no_example_is_taken_untried() -> None:
    pattern = FrozenDict(
        {"type": "object", "properties": {"code": {"pattern": "^[A-Z]{3}[0-9]$"}}, "required": ["code"]}
    )
    tool = ToolSpec("lookup", "Looks up a code.", pattern)
    assert reading_tools(Mute(), [tool]) == Mute().with_tools([tool])


def test_a_grammar_without_tools_cannot_be_a_planners() -> None:
    with pytest.raises(ConfigError, match="object cannot learn a planner's ending: it has no with_tools and write"):
        PlannerGrammar(object())  # type: ignore[arg-type]


def test_a_closing_tag_that_the_engine_cut_off_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    assert complete_turn("<search>q", None) == "<search>q"
    assert complete_turn("<search>q</search>", "</search>") == "<search>q</search>"
    with caplog.at_level("WARNING"):
        assert [complete_turn("<seek>q", "</seek>") for _ in range(2)] == ["<seek>q</seek>"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "the engine removed the stop string '</seek>' from a turn; it was put back for parsing. Set the engine to "
        "include stop strings, so that the trained tokens hold the closing tag"
    ]


def test_a_language_is_set_on_grammars_that_have_it() -> None:
    assert speaking(TagGrammar(), "zh") == TagGrammar(language="zh")
    assert speaking(HermesGrammar(), "en") == HermesGrammar()
    with pytest.raises(ConfigError, match="did you mean 'zh'"):
        speaking(TagGrammar(), "zhh")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="object has no texts in the language zh"):
        speaking(object(), "zh")  # type: ignore[arg-type]
    french: Any = "fr"
    for maker in (TagGrammar, HermesGrammar):
        with pytest.raises(ConfigError, match="language"):
            maker(language=french)


def test_an_episode_of_a_planner_is_judged_with_an_answer_in_the_place_of_its_end() -> None:
    grammar = PlannerGrammar(TagGrammar())
    end = "<think>t</think><finish>what is in here is dropped</finish>"
    record = TurnRecord(end, grammar.parse(end).action)
    assert grammar.validity([record]).valid
    late = TurnRecord(f"{end} and more", record.action)
    assert grammar.validity([late]).reason == "unexpected_text:end"
    early = TurnRecord(f"so {end}", record.action)
    assert grammar.validity([early]).reason == "unexpected_text:start"
