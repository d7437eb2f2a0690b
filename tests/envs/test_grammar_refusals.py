"""What is said when a setting, a tool, a language or an inner grammar is refused, and small helpers of grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar import (
    HermesGrammar,
    Observation,
    ParsedTurn,
    PlannerGrammar,
    TagGrammar,
    reading_tools,
    speaking,
)
from turntree.envs.grammar.base import passage_lines
from turntree.envs.grammar.planner import DONE
from turntree.envs.grammar.tag import close_question, given
from turntree.envs.grammar.words import fill
from turntree.envs.schemas import example_argument
from turntree.envs.task import FrozenDict
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import ConfigError
from turntree.search_backend import Passage

PYTHON = ToolSpec("python", "Runs code.")
CODE = FrozenDict({"type": "object", "properties": {"code": {"pattern": "^[A-Z]{3}[0-9]$"}}, "required": ["code"]})
CITY = FrozenDict({"type": "object", "properties": {"城市": {"type": "string"}, "days": {"type": "integer"}}})


def refused(what: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        what(*given, **named)
    return str(caught.value)


@pytest.mark.parametrize(
    ("maker", "setting", "message"),
    [
        (TagGrammar, {"think": "never"}, "unknown think setting 'never'; valid: optional, required"),
        (TagGrammar, {"language": "fr"}, "unknown language 'fr'; valid: en, zh"),
        (HermesGrammar, {"think": "never"}, "unknown think setting 'never'; valid: optional, required"),
        (HermesGrammar, {"answer": "oral"}, "unknown answer setting 'oral'; valid: text, tool"),
        (HermesGrammar, {"schemas": "no"}, "unknown schemas setting 'no'; valid: prompt, template"),
        (HermesGrammar, {"language": "fr"}, "unknown language 'fr'; valid: en, zh"),
        (HermesGrammar, {"max_calls": 0}, "max_calls: expected at least 1, found 0"),
        (
            PlannerGrammar,
            {"inner": TagGrammar(), "language": "fr"},
            "unknown language of the planner 'fr'; valid: en, zh",
        ),
        (
            PlannerGrammar,
            {"inner": TagGrammar(), "tools": (PYTHON, ToolSpec("finish", "Mine."))},
            "a tool is called 'finish', which is how a planner stops; give it another name",
        ),
        (
            PlannerGrammar,
            {"inner": object()},
            "the grammar object cannot learn a planner's ending: it has no with_tools and write",
        ),
    ],
)
def test_a_wrong_setting_is_refused_in_these_words(maker: Any, setting: dict[str, Any], message: str) -> None:
    assert refused(maker, **setting) == message


class Deaf(TagGrammar):
    """Learns no tools."""

    def with_tools(self, tools: Sequence[ToolSpec]) -> Any:
        return self


class Mute(TagGrammar):
    """Writes what it cannot read."""

    def write(self, thought: str, action: Action) -> str:
        return thought


class Shy(TagGrammar):
    """Teaches tools to a grammar that can write nothing."""

    def with_tools(self, tools: Sequence[ToolSpec]) -> Any:
        return Reader()


class Reader:
    def parse(self, text: str) -> ParsedTurn:
        return TagGrammar().parse(text)


def test_a_planner_says_what_the_grammar_inside_did_not_read() -> None:
    assert refused(PlannerGrammar, Deaf()) == (
        "the grammar Deaf cannot read a planner's ending: expected Action(kind='finish', argument='') from '<think> "
        "Nothing is missing. </think> <finish></finish>', found Action(kind='invalid', argument='no_action'); its "
        "parse() must read the calls of tools"
    )


def test_a_planner_speaks_one_language_and_lets_hermes_answer_by_text() -> None:
    inner: Any = PlannerGrammar(TagGrammar("required"), "zh").inner
    assert inner == TagGrammar("required", language="zh")
    inner = PlannerGrammar(HermesGrammar(answer="tool", max_calls=2, language="zh")).inner
    assert inner == HermesGrammar(answer="text", max_calls=2)


class Own:
    """Tags by delegation: a grammar that is no kind of this package's."""

    fingerprint = "own"
    stop = ("</search>",)

    def __init__(self, tags: TagGrammar) -> None:
        self.tags = tags
        self.prompt, self.parse, self.write = tags.prompt, tags.parse, tags.write
        self.results, self.tool_result, self.correction = tags.results, tags.tool_result, tags.correction
        self.last_turn_notice, self.validity = tags.last_turn_notice, tags.validity

    def with_tools(self, tools: Sequence[ToolSpec]) -> Own:
        return Own(self.tags.with_tools(tools))


def test_a_grammar_of_ones_own_keeps_its_language_and_prompt() -> None:
    own = Own(TagGrammar())
    planner = PlannerGrammar(own, "zh")
    assert planner.inner is own
    rule = "只收集事实：答案由别人来写，请不要自己写。要停止，请写 <finish></finish>。"
    told, _, last = planner.prompt("Who?").rpartition("\n\n")
    assert last == rule
    assert "<finish> ... </finish>" in told
    assert told.endswith("Question: Who?")
    assert planner.parse(planner.write("t", DONE)).action == DONE


def test_a_tool_that_is_not_read_back_is_named() -> None:
    untried = ToolSpec("lookup", "Looks up a code.", CODE)
    said = (
        f"the grammar Mute cannot read the tool python: expected {Action('python', str(example_argument(PYTHON)))} "
        "from 'I use it.', found Action(kind='invalid', argument='no_action'); its parse() must read what its write() "
        "writes, or use no tools"
    )
    assert refused(reading_tools, Mute(), [PYTHON]) == said
    assert refused(reading_tools, Mute(), [untried, PYTHON]) == said, "a tool without an example hides no other"
    assert " from '', found Action(kind='invalid', argument='empty_turn')" in refused(reading_tools, Shy(), [PYTHON])


def test_a_planner_passes_the_name_of_a_tool_on() -> None:
    class Named(TagGrammar):
        def tool_result(self, name: str, text: str) -> Observation:
            return Observation(f"{name}: ", text, "")

    assert PlannerGrammar(Named()).tool_result("python", "1").text == "python: 1"


def test_the_second_tool_is_tried_too() -> None:
    class Half(TagGrammar):
        def with_tools(self, tools: Sequence[ToolSpec]) -> Any:
            return Half(tools=tuple(tools[:1]))

    assert "cannot read the tool seek: " in refused(reading_tools, Half(), [PYTHON, ToolSpec("seek", "Seeks.")])


def test_a_grammar_without_tools_says_which_methods_it_lacks() -> None:
    class Teachable:
        def with_tools(self, tools: Any) -> Any:
            return self

    assert refused(reading_tools, Teachable(), [PYTHON, ToolSpec("seek", "Seeks.")]) == (
        "the grammar Teachable cannot read the tools python, seek: it has no write, tool_result; write these methods "
        "(see turntree.envs.grammar.ToolGrammar) or use no tools"
    )
    assert "it has no with_tools, write, tool_result;" in refused(reading_tools, object(), [PYTHON])


@dataclass(frozen=True)
class Terse:
    words: int = 3


class Tongue:
    language = "en"


@pytest.mark.parametrize("grammar", [object(), Terse(), Tongue()])
def test_english_is_every_grammars_own_and_other_languages_need_a_field(grammar: Any) -> None:
    assert speaking(grammar, "en") is grammar
    assert refused(speaking, grammar, "zh") == (
        f"the grammar {type(grammar).__name__} has no texts in the language zh: it is no dataclass with a field "
        "language; leave the language out, and give a prompt of your own"
    )
    assert refused(speaking, grammar, "fr") == "unknown language 'fr'; valid: en, zh"


def test_a_language_leaves_all_else() -> None:
    assert speaking(TagGrammar("required"), "zh") == TagGrammar("required", language="zh")
    assert speaking(TagGrammar(language="zh"), "en") == TagGrammar(language="zh")


def test_a_prompt_that_is_the_question_alone_stays_so() -> None:
    assert PlannerGrammar(WorldGrammar()).prompt(" Who? ") == " Who? "

    class Polite(WorldGrammar):
        def prompt(self, question: str) -> str:
            return f"Please: {question}"

    assert PlannerGrammar(Polite()).prompt("Who?") == (
        "Please: Who?\n\nOnly gather the facts: somebody else writes the answer, so never write it yourself. To stop, "
        "write <finish></finish>."
    )


@pytest.mark.parametrize(
    ("question", "closed"),
    [
        ("谁是 Bo", "谁是 Bo?"),
        ("谁是A", "谁是A?"),
        ("who is Ａ", "who is Ａ？"),
        ("who wrote 红", "who wrote 红？"),
        ("is it a? no", "is it a? no?"),
        ("what is it.)", "what is it.)"),
        ("？", "？"),
    ],
)
def test_the_last_character_decides_on_the_sign_of_a_question(question: str, closed: str) -> None:
    assert close_question(f" {question} ") == closed


def test_what_a_tool_is_given_is_said_in_its_own_letters() -> None:
    assert given(PYTHON, "en") == "..."
    for language in ("en", "zh"):
        said = given(ToolSpec("weather", "", CITY), language)
        assert json.loads(said[said.index("{") : said.rindex("}") + 1])["properties"].keys() == {"城市", "days"}
        assert "城市" in said
    listed = HermesGrammar().with_tools([ToolSpec("weather", "", CITY)])
    assert "城市" in listed.prompt("Who?")
    assert "城市" in PlannerGrammar(listed).prompt("Who?")
    assert "城市" in PlannerGrammar(TagGrammar()).with_tools(listed.tools).prompt("Who?")


def test_templates_keep_words_without_a_value() -> None:
    assert fill("{a} {b} {c d} {a}", a="{b}", c=1) == "{b} {b} {c d} {b}"


def test_passages_are_counted_from_one_and_cleaned() -> None:
    found = [Passage("1", "t", "x"), Passage("2", "", "y")]
    assert passage_lines(found, str.upper, language="en") == "Doc 1(Title: T) X\nDoc 2(Title: ) Y"
    assert passage_lines([], str.upper, language="en") == "No results were found for this query."
