"""Any text is a turn: every grammar reads it, loses nothing of it, and takes nothing out of passages for an action."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.material import INJECTED, NASTY, PIECES, Tape, fuzz, json_like, seconds, text_of
from turntree.envs.actions import ActionTags, PlainText
from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar import AtpoGrammar, HermesGrammar, PlannerGrammar, TagGrammar, TurnRecord
from turntree.envs.grammar.planner import DONE, FINISH
from turntree.envs.task import FrozenDict
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.search_backend.passage import Passage

WEATHER = ToolSpec(
    "weather",
    "Says how the weather is.",
    FrozenDict(
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
            "additionalProperties": False,
        }
    ),
)
SPECS = (ToolSpec("python", "Runs code."), WEATHER)
GRAMMARS: dict[str, Any] = {
    "tags": TagGrammar(),
    "tags_strict_tools": TagGrammar(think="required").with_tools(SPECS),
    "tags_zh_tools": TagGrammar(language="zh").with_tools(SPECS),
    "atpo": AtpoGrammar().with_tools(SPECS[:1]),
    "atpo_zh": AtpoGrammar(language="zh"),
    "world": WorldGrammar(),
    "hermes": HermesGrammar().with_tools(SPECS),
    "hermes_strict_tool": HermesGrammar(think="required", answer="tool", max_calls=2),
    "hermes_zh_one": HermesGrammar(language="zh", max_calls=1).with_tools(SPECS),
    "planner": PlannerGrammar(TagGrammar()).with_tools(SPECS),
    "planner_zh": PlannerGrammar(TagGrammar(language="zh"), language="zh"),
    "planner_hermes": PlannerGrammar(HermesGrammar()).with_tools(SPECS),
}
TAG_LIKE = {name: g for name, g in GRAMMARS.items() if isinstance(g, TagGrammar)}
HERMES = {name: g for name, g in GRAMMARS.items() if isinstance(g, HermesGrammar)}
PLANNERS = {name: g for name, g in GRAMMARS.items() if isinstance(g, PlannerGrammar)}
TASKS: dict[str, Any] = {
    "actions": ActionTags({"go": "where", "look": "around", "answer": "the end"}, bare=("look",)),
    "actions_strict": ActionTags({"go": "where"}, think="required"),
    "plain": PlainText(),
}


def two(tape: Tape, grammars: dict[str, Any]) -> list[Any]:
    """Two of the grammars, as the tape says."""
    return [tape.pick(tuple(grammars.values())) for _ in range(2)]


def kinds(grammar: Any) -> set[str]:
    planning = isinstance(grammar, PlannerGrammar)
    tools = {tool.name for tool in grammar.tools}
    return {"search", "invalid", FINISH if planning else "answer", *tools}


# Reading --------------------------------------------------------------------------------------------------------------


@fuzz("grammars", share=30)
def test_every_grammar_reads_every_turn_and_says_what_it_did_not_read(tape: Tape) -> None:
    grammars = two(tape, GRAMMARS)
    text = text_of(tape, PIECES)
    for grammar in grammars:
        parsed = grammar.parse(text)
        assert parsed == grammar.parse(text)
        assert {action.kind for action in parsed.actions} <= kinds(grammar)
        assert all(action.argument.strip() or action == DONE for action in parsed.actions)
        assert grammar.correction(parsed.action.argument).strip()
        if parsed.span is None:
            assert parsed.action.kind in ("invalid", FINISH)
            continue
        start, end = parsed.span
        assert 0 <= start < end <= len(text)
        # What stands behind an action is never silently dropped.
        if parsed.action.kind != "invalid" and "<" in text[start:end][:1]:
            assert ("overrun" in parsed.notes) == bool(text[end:].strip())


@fuzz("grammars", share=15)
def test_tags_give_all_that_stands_between_them(tape: Tape) -> None:
    grammars = two(tape, TAG_LIKE)
    text = text_of(tape, PIECES)
    for grammar in grammars:
        parsed = grammar.parse(text)
        if parsed.span is None or parsed.action.kind == "invalid":
            continue
        kind, argument = parsed.action.kind, parsed.action.argument
        block = text[slice(*parsed.span)]
        assert block.startswith(f"<{kind}>")
        assert block.endswith(f"</{kind}>")
        inside = block[len(kind) + 2 : -len(kind) - 3]
        if isinstance(grammar, AtpoGrammar) and kind == "answer":
            assert "\\boxed{" in inside
            assert argument in inside
            assert argument.count("{") == argument.count("}") or "\\boxed{" in argument
        else:
            assert argument == (inside if kind in ("search", "answer") else textwrap.dedent(inside)).strip()


@fuzz("grammars", share=10)
def test_hermes_gives_every_block_and_the_whole_answer(tape: Tape) -> None:
    grammars = two(tape, HERMES)
    text = text_of(tape, PIECES)
    for grammar in grammars:
        parsed = grammar.parse(text)
        if parsed.span is None or parsed.action.kind == "invalid":
            continue
        inside = text[slice(*parsed.span)]
        blocks = re.findall(r"<tool_call>(.*?)</tool_call>", inside, re.DOTALL)
        if not blocks:
            assert parsed.actions == (Action("answer", inside),)
            continue
        assert len(blocks) == len(parsed.actions)
        for block, action in zip(blocks, parsed.actions, strict=True):
            call = json.loads(block)
            assert call["name"] == action.kind
            given = call["arguments"]
            if list(given) in (["query"], ["answer"], ["input"]):
                (plain,) = given.values()
                plain = re.sub("[\ud800-\udfff]", "\ufffd", plain)
                assert action.argument == (plain if action.kind == "python" else plain.strip())


@fuzz("grammars", share=10)
def test_what_follows_an_action_does_not_change_it(tape: Tape) -> None:
    grammars = two(tape, GRAMMARS | TASKS)
    text = text_of(tape, PIECES)
    for grammar in grammars:
        parsed = grammar.parse(text)
        if parsed.span is None or parsed.action.kind == "invalid" or "</think>" in text[parsed.span[1] :]:
            continue
        again = grammar.parse(text[: parsed.span[1]])
        assert (again.actions, again.span) == (parsed.actions, parsed.span)


@fuzz("grammars", share=5)
def test_tasks_of_ones_own_read_every_turn(tape: Tape) -> None:
    text = text_of(tape, PIECES)
    for grammar in TASKS.values():
        parsed = grammar.parse(text)
        allowed = {"say", "invalid"} if isinstance(grammar, PlainText) else {*grammar.actions, "invalid"}
        assert parsed.action.kind in allowed
        assert grammar.correction(parsed.action.argument).strip()
        body = grammar.observation(text).body
        assert isinstance(grammar, PlainText) or grammar.parse(body).action.kind == "invalid"
    assert TASKS["plain"].parse(text).action.argument in (text.strip(), "empty_turn")


@fuzz("grammars", share=10)
def test_episodes_of_any_turns_are_judged(tape: Tape) -> None:
    grammars = two(tape, GRAMMARS)
    said = [text_of(tape.some(16), PIECES) for _ in range(1 + tape.byte() % 4)]
    for grammar in grammars:
        records = []
        for text in said:
            action = grammar.parse(text).action
            kind: Any = {"invalid": "correction", "answer": "none", FINISH: "none"}.get(action.kind, "results")
            records.append(TurnRecord(text, action, "seen", kind))
            if kind == "none":
                break
        validity = grammar.validity(records)
        assert validity.valid == (validity.reason == "")
        if validity.valid and not isinstance(grammar, AtpoGrammar):  # whose published rule looks at tags alone
            assert records[-1].action.kind in ("answer", FINISH) or records[-1].action.argument == "empty_answer"
            shown = getattr(getattr(grammar, "inner", grammar), "shown_tag", "tool_response")
            assert not any(re.search(f"</?{shown}>", record.text) for record in records)


# Writing --------------------------------------------------------------------------------------------------------------


def _tagless(text: str) -> str:
    return re.sub(r"[<>＜＞﹤﹥〈〉《》{}\\]", "", text)


@fuzz("grammars", share=10)
def test_written_turns_are_read_back_whole(tape: Tape) -> None:
    grammars = two(tape, GRAMMARS)
    thought, argument = _tagless(text_of(tape.some(20))), _tagless(text_of(tape.some(40))).strip()
    if not argument:
        return
    for grammar in grammars:
        for kind in {"search", "answer", "python"} & kinds(grammar):
            given = " ".join(argument.split()) if kind == "python" else argument
            if isinstance(grammar, HermesGrammar) or grammar in PLANNERS.values():
                given = re.sub("[\ud800-\udfff]", "\ufffd", given)
            if not given:
                continue
            written = grammar.write(thought, Action(kind, given))
            assert grammar.parse(written).actions == (Action(kind, given),), (type(grammar), written)


@fuzz("grammars", share=5)
def test_json_arguments_are_read_back_whole(tape: Tape) -> None:
    city = text_of(tape.some(30), PIECES)
    given = json.dumps({"city": city, "days": 1 + tape.byte()}, ensure_ascii=bool(tape.byte() % 2), sort_keys=True)
    for grammar in HERMES.values():
        if not grammar.tools or len(grammar.tools) < 2:
            continue
        found = grammar.parse(grammar.write("t", Action("weather", given))).action
        assert found.kind == "weather"
        expected = json.loads(re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(json.loads(given), ensure_ascii=False)))
        assert json.loads(found.argument) == expected


@fuzz("grammars", size=160, share=5)
def test_any_json_in_a_block_is_a_call_or_a_reason(tape: Tape) -> None:
    grammars = two(tape, HERMES)
    value = json_like(tape, keys=("name", "arguments", "query", "city", "days"), texts=("search", "weather", "answer"))
    try:
        block = json.dumps(value, ensure_ascii=False)
    except ValueError:  # an integer that Python does not print
        return
    for grammar in grammars:
        parsed = grammar.parse(f"<tool_call>{block}</tool_call>")
        if parsed.action.kind == "invalid":
            assert not re.search(r"[<＜]\s*/?\s*(think|tool_call|tool_response)", parsed.hint)
        else:
            assert value["name"] == parsed.action.kind


# Data is never an action ----------------------------------------------------------------------------------------------


def _spelt(names: str) -> re.Pattern[str]:
    return re.compile(rf"[<＜﹤]\s*[/／]?\s*(?:{names})\s*[/／]?\s*[>＞﹥]", re.IGNORECASE)


@fuzz("grammars", share=15)
def test_tags_in_passages_and_results_are_text(tape: Tape) -> None:
    grammars = two(tape, GRAMMARS)
    texts = [text_of(tape.some(24), (*INJECTED, *PIECES)) for _ in range(3)]
    passages = [Passage("1", texts[0], texts[1]), Passage("2", "", texts[2])]
    for grammar in grammars:
        for seen in (grammar.results(passages), grammar.tool_result("python", texts[1])):
            inner = grammar.inner if isinstance(grammar, PlannerGrammar) else grammar
            own = "think|tool_call|tool_response" if isinstance(inner, HermesGrammar) else None
            names = own or "|".join(
                ("think", "search", "answer", getattr(inner, "shown_tag", ""), *(t.name for t in grammar.tools))
            )
            if isinstance(grammar, PlannerGrammar) and own is None:
                names += "|finish"
            assert not _spelt(names).search(seen.body.translate(_NARROW))
            assert not re.search(r"<[|｜][^<>\s]{1,64}[|｜]>", seen.body)
            # A model that copies it word by word does not act either.
            action = grammar.parse(seen.body).action
            assert action.kind in ("invalid", "answer", FINISH) if own else action.kind == "invalid"
            # The frame itself is the environment's.
            assert seen.text == seen.head + seen.body + seen.tail


_NARROW = {code + 0xFEE0: code for code in range(0x21, 0x7F) if chr(code) not in "<>"}


# Length ---------------------------------------------------------------------------------------------------------------


def _uses(grammar: Any, text: str) -> Callable[[], None]:
    def run() -> None:
        parsed = grammar.parse(text)
        grammar.validity([TurnRecord(text, parsed.action, "seen", "results")])
        grammar.results([Passage("1", text, text)])
        grammar.tool_result("python", text)
        grammar.correction(text)

    return run


WRAPS = (
    "{}", "<search>{}</search>", "<tool_call>{}</tool_call>", "<{}", "《{}", "Action:{}",
    "<answer>\\boxed{{{}}}</answer>",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
def test_turns_of_a_megabyte_take_linear_time(wrap: str) -> None:
    for pattern in (
        " ",
        "\n",
        "<",
        "/",
        "{",
        "[",
        "\\boxed{",
        "<search>",
        "</search>",
        "《 ",
        "〈/ ",
        "a",
        "1,",
        "\u0301",
        *PIECES[:24],
    ):
        for name, grammar in GRAMMARS.items():
            small, large = (wrap.format(pattern * (size // len(pattern))) for size in (250_000, 1_000_000))
            bound = 9 * max(seconds(_uses(grammar, small)), 0.01)
            assert seconds(_uses(grammar, large), enough=bound) < bound, (name, wrap, pattern)


@fuzz("grammars", size=12, share=0.2)
def test_repeated_patterns_take_linear_time(tape: Tape) -> None:
    grammars = {tape.pick(tuple(GRAMMARS)), tape.pick(tuple(GRAMMARS))}
    before, pattern = text_of(tape.some(4), PIECES), text_of(tape, PIECES, most=4)
    if not pattern:
        return
    small, large = (before + pattern * (size // len(pattern)) for size in (8_000, 64_000))
    for name in grammars:
        grammar = GRAMMARS[name]
        run = _uses(grammar, large)
        run()
        if (taken := seconds(run)) > 0.25:  # a quadratic reading of 64,000 signs takes seconds
            assert taken < 20 * seconds(_uses(grammar, small)), (name, before, pattern[:80])


@pytest.mark.parametrize("piece", NASTY)
def test_questions_and_corrections_of_any_script(piece: str) -> None:
    for grammar in GRAMMARS.values():
        assert piece.strip() in grammar.prompt(f"a{piece}b") or piece.strip() == ""
        assert grammar.correction(piece).strip()
