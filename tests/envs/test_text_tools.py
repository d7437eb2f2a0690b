"""Tools of a user's own in the question-answering task: read by their tags, shown as data, remembered in the state."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import Action, Outcome, SearchQAEnv, TagGrammar, ToolCall, ToolFailure, ToolResult, TurnRecord
from turntree.envs.check import check_fork
from turntree.envs.core import Effects, ToolSpec
from turntree.envs.grammar import ParsedTurn, ToolGrammar, reading_tools
from turntree.envs.tools import check_tool, load_tools, tool_spec
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import ConfigError, ToolError

SPECS = (ToolSpec("python", "runs Python code"), ToolSpec("look_up", "looks a word up"))
GRAMMAR = TagGrammar().with_tools(SPECS)
CALL = "<think>t</think><echo>{}</echo>"
PIECES = [
    "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>",
    "<python>", "</python>", "<look_up>", "</look_up>", "< Python >", "中文👍", " ", "\n",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=20).map("".join)


@dataclass
class Echo:
    """Says what it is told; ``remembers`` makes it count, ``down`` makes it fail."""

    effects: Effects = "none"
    remembers: bool = False
    down: bool = False
    description: str = "repeats what it is given"
    batches: list[list[str]] = field(default_factory=list)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        self.batches.append([call.argument for call in calls])
        return [self._one(call) for call in calls]

    def _one(self, call: ToolCall) -> ToolResult | ToolFailure:
        if self.down:
            return ToolFailure("down", "the echo is down")
        if not self.remembers:
            return ToolResult(call.argument)
        seen = (*(call.memory or ()), call.argument)
        return ToolResult(" ".join(seen), memory=list(seen))


@pytest.fixture
def make(make_env: Callable[..., SearchQAEnv]) -> Callable[..., SearchQAEnv]:
    return lambda tool=None, **options: make_env(tools={"echo": tool or Echo()}, **options)


def play(env: SearchQAEnv, *turns: str) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
    env.reset(seed=0, options={"index": 0})
    return [env.step(turn) for turn in turns]


# -- the grammar -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ("<python>print(1)</python>", "python", "print(1)"),
        ("<think>t</think><look_up> Hamlet </look_up>", "look_up", "Hamlet"),
        ("<python>\n    if x:\n        y()\n    z()\n</python>", "python", "if x:\n    y()\nz()"),
        ("<python>a = 1\nb = 2</python><answer>3</answer>", "python", "a = 1\nb = 2"),
        ("<search>q</search><python>x</python>", "search", "q"),
        ("<think><python>draft</python></think><answer>a</answer>", "answer", "a"),
        ("<python> \n </python>", "invalid", "empty_call"),
        ("<python>x", "invalid", "unclosed_python"),
        ("x</look_up>", "invalid", "unopened_look_up"),
        ("<python>a <search> b</python>", "invalid", "nested_tags"),
        ("<Python>x</Python>", "invalid", "misspelt_tag"),
        ("<echo>x</echo>", "invalid", "no_action"),
    ],
)
def test_calls_of_tools_are_read_as_searches_are(text: str, kind: str, argument: str) -> None:
    assert GRAMMAR.parse(text).action == Action(kind, argument)
    assert WorldGrammar().with_tools(SPECS).parse(text).action == Action(kind, argument)


def test_the_prompt_and_the_corrections_name_the_tools() -> None:
    prompt = GRAMMAR.prompt("Who wrote Hamlet?")
    assert "<python> ... </python>: runs Python code" in prompt
    assert "<look_up> ... </look_up>: looks a word up" in prompt
    assert prompt.endswith("Question: Who wrote Hamlet?")
    assert "<python>, <look_up>" in GRAMMAR.correction("no_action")
    assert GRAMMAR.stop == ("</search>", "</answer>", "</python>", "</look_up>")


def test_tools_change_the_fingerprint_and_nothing_without_them() -> None:
    plain = TagGrammar()
    others = [plain.with_tools(SPECS[:1]), GRAMMAR, plain.with_tools([ToolSpec("python", "something else")])]
    assert len({plain.fingerprint, *(g.fingerprint for g in others)}) == 4
    assert plain.with_tools([]) == plain
    assert "tool" not in plain.prompt("?") + plain.correction("no_action")


@given(TEXTS)
def test_reading_is_total_and_results_hold_no_tags(text: str) -> None:
    parsed = GRAMMAR.parse(text)
    assert parsed.action.kind in ("search", "answer", "python", "look_up", "invalid")
    assert parsed.action.argument.strip() != ""
    for grammar in (GRAMMAR, WorldGrammar().with_tools(SPECS)):
        shown = grammar.tool_result("python", text)
        assert not re.search(r"<\s*/?\s*(?:python|look_up|search|information|answer)\s*>", shown.body, re.IGNORECASE)
        assert grammar.parse(shown.body).action.kind == "invalid"
        assert shown.body.strip()


@given(TEXTS.filter(lambda text: not re.search("python|look_up", text, re.IGNORECASE)))
def test_a_turn_without_tool_tags_is_read_as_ever(text: str) -> None:
    assert GRAMMAR.parse(text) == TagGrammar().parse(text)
    assert GRAMMAR.validity_of_text(text) == TagGrammar().validity_of_text(text)


def test_a_call_takes_the_place_of_a_search_in_a_valid_episode() -> None:
    texts = ("<think>t</think><python>x</python>", "<think>t</think><answer>a</answer>")
    turns = [
        TurnRecord(text, GRAMMAR.parse(text).action, kind=kind)  # type: ignore[arg-type]
        for text, kind in zip(texts, ("results", "none"), strict=True)
    ]
    assert GRAMMAR.validity(turns).valid
    assert GRAMMAR.validity(turns[:1]).reason == "incomplete:information"
    assert TagGrammar().validity(turns).reason == "unexpected_text:after_think"
    joined = f"{texts[0]}<information>1</information>{texts[1]}"
    assert GRAMMAR.validity_of_text(joined).valid
    assert GRAMMAR.validity_of_text(texts[0] + texts[1]).reason == "unexpected_tag:after_python"


class Deaf(TagGrammar):
    """Inherits everything about tools and reads searches only."""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(Action("search", "x"))


class Foreign:
    """A grammar that never heard of tools."""

    fingerprint = "foreign"


def test_a_grammar_that_cannot_read_tools_is_refused_with_the_reason(make: Callable[..., SearchQAEnv]) -> None:
    assert isinstance(GRAMMAR, ToolGrammar)
    with pytest.raises(ConfigError, match=r"Deaf cannot read the tool echo: expected .*echo.* found .*search"):
        make(grammar=Deaf())
    foreign: Any = Foreign()
    with pytest.raises(ConfigError, match=r"Foreign cannot read the tools python, look_up: .*with_tools"):
        reading_tools(foreign, SPECS)
    assert reading_tools(foreign, []) is foreign


# -- the episode -------------------------------------------------------------------------------------------------------


def test_a_result_is_shown_counted_and_judged(make: Callable[..., SearchQAEnv]) -> None:
    seen: list[Outcome] = []

    def rule(outcome: Outcome) -> float:
        seen.append(outcome)
        return 1.0

    tool = Echo()
    env = make(tool, reward=rule, max_turns=6)
    prompt, _ = env.reset(seed=0)
    assert "<echo> ... </echo>: repeats what it is given" in prompt
    searched, called, last = play(
        env, "<think>t</think><search>Hamlet</search>", CALL.format(" b "), "<think>t</think><answer>x</answer>"
    )
    assert [step[4]["tool_calls"] for step in (searched, called, last)] == [
        {"search": 1, "echo": 0},
        {"search": 1, "echo": 1},
        {"search": 1, "echo": 1},
    ]
    assert called[0] == "\n\n<information>b</information>\n\n"
    assert (called[4]["action"], called[4]["searches"], called[4]["observation_truncated"]) == ("echo", 1, False)
    assert "retrieved" not in called[4]
    assert tool.batches == [["b"]]
    (outcome,) = seen
    assert outcome.format_valid
    assert outcome.tools_used == {"search", "echo"}
    assert outcome.observations == (searched[0], called[0])


def test_tags_in_a_result_are_neutralised(make: Callable[..., SearchQAEnv]) -> None:
    (step,) = play(make(Echo(description="x")), "<echo>&lt; <|im_end|> < Search ></echo>")
    assert step[0] == "\n\n<information>&lt; [|im_end|> [ Search ]</information>\n\n"


def test_a_long_result_is_cut_inside_its_block(make: Callable[..., SearchQAEnv]) -> None:
    class Bytes:
        def encode(self, text: str, /) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Sequence[int], /) -> str:
            return bytes(ids).decode(errors="ignore")

    room = len((TagGrammar().with_tools(SPECS).correction("no_action") + GRAMMAR.last_turn_notice()).encode()) + 20
    env = make(max_observation_tokens=room, tokenizer=Bytes())
    (step,) = play(env, CALL.format("长" * 1000))
    assert step[4]["observation_truncated"] is True
    assert step[0].startswith("\n\n<information>长长")
    assert step[0].endswith("</information>\n\n")
    assert len(step[0].encode()) <= room


def test_an_empty_result_is_said(make: Callable[..., SearchQAEnv]) -> None:
    class Silent(Echo):
        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
            return [ToolResult("\n") for _ in calls]

    (step,) = play(make(Silent()), CALL.format("x"))
    assert "no output" in step[0]


def test_only_the_last_turn_is_without_calls(make: Callable[..., SearchQAEnv]) -> None:
    env = make(max_turns=3, max_searches=1)
    first, second, last = play(env, "<search>Hamlet</search>", "<search>Hamlet</search>", CALL.format("late"))
    notice = env.core.grammar.last_turn_notice()
    assert "No calls are left" in notice
    assert notice not in first[0]
    assert second[4]["invalid_reason"] == "no_searches_left"
    assert second[0].endswith(notice)
    assert (last[0], last[3], last[4]["stop_reason"]) == ("", True, "turns")
    assert not make(max_searches=0).reset(seed=0)[0].endswith(notice.strip())
    assert make(max_turns=1).reset(seed=0)[0].endswith(notice.strip())


def test_memory_belongs_to_the_state(make: Callable[..., SearchQAEnv]) -> None:
    env = make(Echo("in_state", remembers=True), max_turns=6)
    play(env, CALL.format("a"))
    twin = env.fork()
    assert "a b" in env.step(CALL.format("b"))[0]
    assert "a c" in twin.step(CALL.format("c"))[0]
    again = make(Echo("in_state", remembers=True), max_turns=6)
    again.restore(again.decode_snapshot(env.encode_snapshot(env.snapshot())))
    assert "a b d" in again.step(CALL.format("d"))[0]
    assert again.step("<answer>x</answer>")[4]["tool_calls"] == {"search": 0, "echo": 3}


@pytest.mark.parametrize("tool", [Echo(), Echo("in_state", remembers=True)])
def test_the_laws_of_forks_hold_with_tools(make: Callable[..., SearchQAEnv], tool: Echo) -> None:
    laws = check_fork(make(tool, max_turns=128), process=False)
    assert {"isolation", "restore", "json", "pickle"} <= set(laws)


def test_failures_and_wrong_results_are_never_observations(make: Callable[..., SearchQAEnv]) -> None:
    env = make(Echo(down=True))
    with pytest.raises(ToolError, match="the echo is down"):
        play(env, CALL.format("x"))

    class Number(Echo):
        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
            return [ToolResult(42) for _ in calls]

    class Raw(Echo):
        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
            return ["text" for _ in calls]  # type: ignore[misc]

    with pytest.raises(ToolError, match=r"'echo' must return texts, found 42"):
        play(make(Number()), CALL.format("x"))
    with pytest.raises(ToolError, match=r"'echo' must answer with ToolResult"):
        play(make(Raw()), CALL.format("x"))


def test_tools_are_part_of_the_fingerprint(make: Callable[..., SearchQAEnv]) -> None:
    class Versioned(Echo):
        fingerprint = "echo-2"

    tools = [Echo(), Echo("in_state"), Echo(description="another"), Versioned()]
    assert len({make(tool).core.fingerprint for tool in tools}) == 4
    assert make().core.fingerprint == make().core.fingerprint


# -- what is no tool ---------------------------------------------------------------------------------------------------


class NoRun:
    effects = "none"
    description = "x"


class NeedsMore(Echo):
    def run(self, calls: Sequence[ToolCall], more: int) -> list[ToolResult | ToolFailure]:  # type: ignore[override]
        return []


@pytest.mark.parametrize(
    ("name", "tool", "words"),
    [
        ("Echo", Echo(), "small letters"),
        ("search", Echo(), "other than think, search"),
        ("a b", Echo(), "small letters"),
        ("echo", Echo, "the class Echo; give an instance"),
        ("echo", NoRun(), "without run"),
        ("echo", None, "found None without run, effects, description"),
        ("echo", Echo("sometimes"), "effects to be one of 'none', 'in_state', 'external', found 'sometimes'"),  # type: ignore[arg-type]
        ("echo", Echo(description=""), "one line of text as description"),
        ("echo", Echo(description="a\nb"), "one line of text as description"),
        ("echo", NeedsMore(), "one batch of calls"),
    ],
)
def test_what_is_no_tool_is_refused(name: str, tool: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        tool_spec(name, tool)
    with pytest.raises(ConfigError, match=re.escape(f"tools.{name}")):
        load_tools({name: tool})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no_such_module:Tool", "tools.echo=no_such_module:Tool: cannot import module 'no_such_module'"),
        ("turntree.envs.tools:SerchTool", "did you mean 'SearchTool'"),
        ("turntree.envs.tools:SearchTool", "could not be called"),
        ({"path": "turntree.envs.tools:CallCounter"}, "without run, effects, description"),
        ({"path": "turntree.envs.tools:CallCounter", "args": {"speed": 1}}, "unexpected keyword argument 'speed'"),
        ({"paht": "x:y"}, "expected an import path, or path and args"),
        ({"path": "a:b", "args": 3}, "expected an import path, or path and args"),
        ("sometext", "import path of the form package.module:name"),
    ],
)
def test_import_paths_of_tools_are_named_when_wrong(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_tools({"echo": given})


def test_a_tool_is_given_by_object_path_or_path_with_arguments() -> None:
    tool, here = Echo(), f"{__name__}:Echo"
    assert load_tools({"echo": tool}) == {"echo": tool}
    made = load_tools({"a": here, "b": {"path": here, "args": {"effects": "external"}}})
    assert (made["a"].effects, made["b"].effects) == ("none", "external")


def test_check_tool_names_the_law_that_is_broken() -> None:
    assert check_tool(Echo(), "a", "b") == ["a", "b"]
    assert check_tool(Echo("in_state", remembers=True), "a") == ["a"]

    class Moody(Echo):
        def _one(self, call: ToolCall) -> ToolResult:
            return ToolResult(str(len(self.batches)))

    class Live(Echo):
        def _one(self, call: ToolCall) -> ToolResult:
            return ToolResult("x", memory=print)

    assert check_tool(Moody("external"), "a") == ["1"]
    for tool, words in (
        (Moody(), "other results the second time"),
        (Echo(remembers=True), "effects='in_state'"),
        (Live("in_state"), "JSON-able"),
        (Echo(down=True), "expected a text"),
    ):
        with pytest.raises(ToolError, match=words):
            check_tool(tool, "a")
