"""The laws of a grammar, for every grammar of the library, and the tables of those that are not plain tags."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs import Action, SearchQAEnv, TagGrammar, ToolCall, ToolResult, TurnRecord
from turntree.envs.core import ToolSpec
from turntree.envs.grammar import GRAMMARS, AtpoGrammar, HermesGrammar, ToolGrammar, reading_tools
from turntree.envs.grammar.atpo import boxed
from turntree.envs.schemas import encode_arguments
from turntree.envs.task import FrozenDict
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import ConfigError, DataError
from turntree.search_backend import Passage

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
MAKERS: dict[str, Callable[..., Any]] = {
    "tags": TagGrammar,
    "world": WorldGrammar,
    "atpo": AtpoGrammar,
    "hermes": HermesGrammar,
    "hermes_answer_tool": lambda **options: HermesGrammar(answer="tool", **options),
    "hermes_one_call": lambda **options: HermesGrammar(max_calls=1, **options),
}
PIECES = [
    "<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>",
    "<result>", "</result>", "\\boxed{", "}", "{", "<python>", "</python>", "<tool_call>", "</tool_call>",
    '{"name": "search", "arguments": {"query": "q"}}', '{"name": "python", "arguments": {"input": "x"}}', "[" * 50,
    "<tool_response>", "</tool_response>", "<Tool_Call>", "< answer >", "Paris", " ", "\n", "中文👍", "<|im_end|>", "<",
    '"\\ud800"', "NaN", "1" * 50,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=20).map("".join)
TAGLESS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(lambda text: re.sub(r"[<>{}]", "", text))


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MAKERS[request.param]


def every(test: Callable[[Any], None]) -> None:
    """Run ``test`` on each grammar, lenient and strict, without and with tools."""
    for maker in MAKERS.values():
        for think in ("optional", "required"):
            for tools in ((), SPECS):
                test(maker(think=think).with_tools(tools))


@settings(max_examples=30, deadline=None)
@given(TEXTS)
def test_reading_and_judging_are_total(text: str) -> None:
    def law(grammar: Any) -> None:
        parsed = grammar.parse(text)
        for action in parsed.actions:
            assert action.kind in ("search", "answer", "invalid", *(tool.name for tool in grammar.tools))
            assert action.argument.strip() != ""
        assert grammar.correction(parsed.action.argument).strip()
        assert not (parsed.other_dialect and parsed.action.kind != "invalid")
        assert not (parsed.more and parsed.action.kind == "invalid")
        for kind in ("results", "correction", "none"):
            validity = grammar.validity([TurnRecord(text, parsed.action, kind=kind)])
            assert validity.valid == (validity.reason == "")

    every(law)


@settings(max_examples=30, deadline=None)
@given(TAGLESS, st.sampled_from(["search", "answer", "python"]), TAGLESS.map(str.strip).filter(bool))
def test_written_turns_are_read_back(thought: str, kind: str, argument: str) -> None:
    def law(grammar: Any) -> None:
        if kind == "python" and not grammar.tools:
            return
        parsed = grammar.parse(grammar.write(thought, Action(kind, argument)))
        if not parsed.other_dialect:  # an answer of plain text may look like a call of somebody else's
            assert parsed.actions == (Action(kind, argument),)
            assert parsed.notes == ()

    every(law)


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.integers(1, 9))
def test_json_arguments_are_read_back_in_every_grammar(city: str, days: int) -> None:
    def law(grammar: Any) -> None:
        if not grammar.tools:
            return
        argument = encode_arguments(WEATHER, {"city": city, "days": days})
        hermes = isinstance(grammar, HermesGrammar)
        if hermes or not re.search("[<>]", argument):  # JSON hides tags from Hermes alone
            assert grammar.parse(grammar.write("t", Action("weather", argument))).action == Action("weather", argument)

    every(law)


@settings(max_examples=30, deadline=None)
@given(TEXTS, TEXTS)
def test_observations_hold_no_tags_and_no_control_tokens(title: str, text: str) -> None:
    def law(grammar: Any) -> None:
        shown = [grammar.results([Passage("1", title, text)]), grammar.tool_result("python", text)]
        own = ("tool_call", "tool_response", "think") if isinstance(grammar, HermesGrammar) else (
            "think", "search", "answer", getattr(grammar, "shown_tag", "result"), *grammar.tool_names
        )  # fmt: skip
        for observation in shown:
            assert not re.search(rf"<\s*/?\s*(?:{'|'.join(own)})\s*/?\s*>|<\|im_end", observation.body, re.IGNORECASE)
            assert observation.body.strip() or not text.strip()
            assert grammar.parse(f"{observation.body} <tool_call>").action.kind == "invalid"

    every(law)


@settings(max_examples=30, deadline=None)
@given(before=TEXTS, after=TEXTS)
def test_what_follows_the_actions_is_never_executed(before: str, after: str) -> None:
    def law(grammar: Any) -> None:
        first = grammar.parse(before)
        if first.span is None or "think>" in after or "</think>" in before[first.span[1] :] or _answers(grammar, first):
            return
        assert grammar.parse(f"{before} . {after}").actions == first.actions

    every(law)


def _answers(grammar: Any, parsed: Any) -> bool:
    """An answer that is the rest of the turn."""
    return isinstance(grammar, HermesGrammar) and grammar.answer == "text" and parsed.action.kind == "answer"


@pytest.mark.parametrize("piece", ["<", "< ", "\n", "<think>", "</think>", "<tool_call>", "\\boxed{", "{", "}", "["])
def test_reading_takes_linear_time(make: Callable[..., Any], piece: str) -> None:
    grammar = make().with_tools(SPECS)
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    for turn in (text, f"<tool_call>{text}</tool_call>", f"<answer>{text}</answer>"):
        grammar.parse(turn)
        grammar.validity([TurnRecord(turn, Action("answer", "x"))])
    grammar.tool_result("python", text)
    assert time.process_time() - start < 10


def test_a_fingerprint_changes_with_everything_that_is_written(make: Callable[..., Any]) -> None:
    plain = make()
    others = [make(think="required"), plain.with_tools(SPECS), plain.with_tools(SPECS[:1])]
    if make is not WorldGrammar:
        others.append(plain.with_tools([SPECS[0], ToolSpec("weather", WEATHER.description)]))
    prints = [g.fingerprint for g in (plain, *others)]
    assert len(set(prints)) == len(prints)
    assert make().fingerprint == plain.fingerprint
    assert plain.with_tools([]) == plain


def test_the_grammars_differ_from_each_other() -> None:
    assert len({maker().fingerprint for maker in MAKERS.values()}) == len(MAKERS)


def test_tools_are_taught_and_checked(make: Callable[..., Any]) -> None:
    taught = reading_tools(make(), SPECS)
    assert isinstance(taught, ToolGrammar)
    if make is not WorldGrammar:
        prompt = taught.prompt("Who?")
        assert all(word in prompt for word in ("python", "Runs code.", "weather", '"city"'))
    with pytest.raises(DataError, match="empty"):
        taught.prompt(" ")


# -- ATPO --------------------------------------------------------------------------------------------------------------

ATPO = AtpoGrammar().with_tools(SPECS[:1])


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ("<think>t</think><answer>It is \\boxed{Paris}.</answer>", "answer", "Paris"),
        ("<answer>\\boxed{a} or \\boxed{ b }</answer>", "answer", "b"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "answer", "\\frac{1}{2}"),
        ("<answer>\\boxed{a} \\boxed{b</answer>", "answer", "a"),
        ("<answer>\\boxed{\\boxed{a}}</answer>", "answer", "a"),
        ("<answer>Paris</answer>", "invalid", "no_boxed"),
        ("<answer>\\boxed{a</answer>", "invalid", "no_boxed"),
        ("<answer>\\boxed{ }</answer>", "invalid", "empty_answer"),
        ("<answer> </answer>", "invalid", "empty_answer"),
        ("\\boxed{Paris}", "invalid", "no_action"),
        ("<python>print(1)</python>", "python", "print(1)"),
        ("<search>q</search><result>fake</result>", "search", "q"),
        ("<result>x</result>", "invalid", "no_action"),
        ("<Result>x</Result>", "invalid", "misspelt_tag"),
    ],
)
def test_atpo_table(text: str, kind: str, argument: str) -> None:
    assert ATPO.parse(text).action == Action(kind, argument)


def test_atpo_shows_results_between_its_tags() -> None:
    text = ATPO.results([Passage("1", "T", "a </result> <search> <information>")]).text
    assert text == "\n\n<result>Doc 1(Title: T) a [/result] [search] <information></result>\n\n"
    assert ATPO.stop == ("</search>", "</answer>", "</python>")


def episode(grammar: Any, *turns: tuple[str, str]) -> list[TurnRecord]:
    return [TurnRecord(text, grammar.parse(text).action, kind=kind) for text, kind in turns]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("<think>t</think><search>q</search>", "results"), ("<answer>\\boxed{a}</answer>", "none")], ""),
        ([("<think>t</think> so <answer>\\boxed{a}</answer>", "none")], ""),
        ([("<answer>\\boxed{a}</answer>", "none")], "no_think"),
        ([("<think>t<answer>\\boxed{a}</answer>", "none")], "unbalanced_think"),
        ([("t</think><answer>\\boxed{a}</answer>", "none")], "unbalanced_think"),
        ([("<think>t</think><search>q</search>", "results")], "no_answer"),
        ([("<think><answer></think><answer>\\boxed{a}</answer>", "none")], "several_answers"),
        ([("<think>t</think><answer>a</answer>", "correction")], "no_boxed"),
        ([("<think>t</think><search> </search>", "correction"), ("<answer>\\boxed{a}</answer>", "none")],
         "call_without_result"),
        ([("<think>t</think><python>x</python>", "results"), ("<answer>\\boxed{a}</answer>", "none")], ""),
        ([("<think>t</think><result>r</result><answer>\\boxed{a}</answer>", "none")], "fabricated_result"),
        ([], "no_think"),
    ],
)  # fmt: skip
def test_atpo_episodes_are_judged_by_its_rules(turns: list[tuple[str, str]], reason: str) -> None:
    validity = ATPO.validity(episode(ATPO, *turns))
    assert (validity.valid, validity.reason) == (reason == "", reason)


@given(TEXTS)
def test_the_last_balanced_box_is_found_as_a_plain_search_finds_it(text: str) -> None:
    def plain() -> str | None:
        for start in [m.end() for m in re.finditer(r"\\boxed\{", text)][::-1]:
            depth = 1
            for i, character in enumerate(text[start:]):
                depth += {"{": 1, "}": -1}.get(character, 0)
                if depth == 0:
                    return text[start : start + i]
        return None

    assert boxed(text) == plain()


# -- Hermes ------------------------------------------------------------------------------------------------------------

HERMES = HermesGrammar().with_tools(SPECS)


def call(name: Any, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


Q, P = call("search", query="q"), call("python", input="x")


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        (Q, "search", "q"),
        ("<think>t</think>I look. " + Q, "search", "q"),
        (f"<think>{P}</think>{Q}", "search", "q"),
        (f"{P}</think>{Q}", "search", "q"),
        (f"<think>open {Q}", "search", "q"),
        (call("weather", city="Rome", days=2), "weather", '{"city": "Rome", "days": 2}'),
        ("Paris", "answer", "Paris"),
        ("<think>t</think>\n\n 巴黎 👍 ", "answer", "巴黎 👍"),
        ("a < b", "answer", "a < b"),
        (f"<think>{P}</think>Paris", "answer", "Paris"),
        ("<tool_call>{name: search}</tool_call>", "invalid", "bad_json"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "invalid", "bad_json"),
        ('<tool_call>{"name": "python", "arguments": {"input": NaN}}</tool_call>', "invalid", "bad_json"),
        ("<tool_call>[1]</tool_call>", "invalid", "bad_call"),
        ('<tool_call>{"arguments": {}}</tool_call>', "invalid", "bad_call"),
        ('<tool_call>{"name": "search", "arguments": "q"}</tool_call>', "invalid", "bad_call"),
        (call("lookup", query="q"), "invalid", "unknown_tool"),
        (call("answer", answer="q"), "invalid", "unknown_tool"),
        (call("search", query=3), "invalid", "bad_arguments"),
        (call("search"), "invalid", "bad_arguments"),
        (call("search", query="q", k=3), "invalid", "bad_arguments"),
        (call("weather", city="Rome", days=0), "invalid", "bad_arguments"),
        (call("search", query=" "), "invalid", "empty_query"),
        (call("python", input="\n"), "invalid", "empty_call"),
        (Q * 9, "invalid", "too_many_calls"),
        (Q + call("lookup"), "invalid", "unknown_tool"),
        (f"<tool_call>{Q}</tool_call>", "invalid", "nested_tags"),
        ('<tool_call>{"name": "search"}', "invalid", "unclosed_call"),
        (f"{Q}<tool_call>", "invalid", "unclosed_call"),
        ('{"name": "search", "arguments": {}}</tool_call>', "invalid", "unopened_call"),
        ("<tool_response>fake</tool_response>", "invalid", "fabricated_result"),
        ("<Tool_Call>{}</Tool_Call>", "invalid", "misspelt_tag"),
        ("<tool_call/>", "invalid", "misspelt_tag"),
        ("<think>Paris", "invalid", "unclosed_think"),
        ("<think>Paris</think>", "invalid", "empty_answer"),
        (f"<think>{Q}</think>", "invalid", "action_in_thought"),
        ("<search>q</search>", "invalid", "no_action"),
        ('{"name": "search", "arguments": {"query": "q"}}', "invalid", "no_action"),
        ("Action: Search[Hamlet]", "invalid", "no_action"),
        ("", "invalid", "empty_turn"),
    ],
)  # fmt: skip
def test_hermes_table(text: str, kind: str, argument: str) -> None:
    assert HERMES.parse(text).action == Action(kind, argument)


@pytest.mark.parametrize(
    ("text", "kinds", "notes"),
    [
        (f"{Q}\n{P}", ["search", "python"], ()),
        (f"{Q}\n{P} done", ["search", "python"], ("overrun",)),
        (f"{Q} then {P}", ["search"], ("overrun",)),
        (f"{Q}<tool_response>fake</tool_response>{P}", ["search"], ("overrun",)),
        (f"{Q}<think>x</think>{P}", ["search"], ("overrun",)),
        (f"<think>{Q}", ["search"], ("inside_think",)),
    ],
)
def test_hermes_reads_several_calls_until_other_text(text: str, kinds: list[str], notes: tuple[str, ...]) -> None:
    parsed = HERMES.parse(text)
    assert [action.kind for action in parsed.actions] == kinds
    assert parsed.notes == notes


def test_hermes_can_require_thoughts_and_answer_by_a_tool() -> None:
    strict = HermesGrammar(think="required")
    assert strict.parse(Q).action == Action("invalid", "missing_think")
    assert strict.parse("Paris").action == Action("invalid", "missing_think")
    assert strict.parse(f"<think>t {Q}").action == Action("invalid", "inside_think")
    assert strict.parse(f"<think>t</think>{Q}").action == Action("search", "q")
    tool = HermesGrammar(answer="tool")
    assert tool.parse(call("answer", answer=" Paris ")).action == Action("answer", "Paris")
    assert tool.parse(call("answer", answer="")).action == Action("invalid", "empty_answer")
    assert tool.parse(Q + call("answer", answer="Paris")).action == Action("invalid", "answer_not_alone")
    assert tool.parse("Paris").action == Action("invalid", "no_action")
    assert (HERMES.stop, HermesGrammar(max_calls=1).stop) == (("<tool_response>",), ("<tool_response>", "</tool_call>"))


def test_hermes_says_what_was_wrong_and_neutralises_it() -> None:
    assert "Known: search, python, weather" in HERMES.parse(call("lookup")).hint
    hint = HERMES.parse(call("weather", city="Rome", days="< /Tool_Response ><|im_end|>")).hint
    assert hint.startswith("weather: days: ")
    assert "integer" in hint
    assert "< /Tool_Response >" not in hint
    assert "<|im_end|>" not in hint


def test_tags_in_arguments_survive_as_data() -> None:
    code = "print('</tool_call><think>')"
    written = HERMES.write("t", Action("python", code), Action("search", "<tool_call>"))
    assert [a.argument for a in HERMES.parse(written).actions] == [code, "<tool_call>"]


def test_the_tools_are_listed_in_the_prompt_or_left_to_the_template() -> None:
    block = HERMES.prompt("Who?").split("<tools>\n")[1].split("\n</tools>")[0]
    assert [json.loads(line) for line in block.splitlines()] == HERMES.functions()
    assert [f["function"]["name"] for f in HERMES.functions()] == ["search", "python", "weather"]
    assert "<tools>" not in HermesGrammar(schemas="template").prompt("Who?")


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([(Q + P, "results"), ("Paris", "none")], ""),
        ([("Paris", "none")], ""),
        ([(Q, "results")], "incomplete:results"),
        ([(Q, "none")], "incomplete:call"),
        ([], "incomplete:start"),
        ([(call("lookup"), "correction"), ("Paris", "none")], "corrected:unknown_tool"),
        ([(Q + " and", "results"), ("Paris", "none")], "unexpected_text"),
        ([(Q + "<tool_response>", "results"), ("Paris", "none")], "fabricated_result"),
        ([("<think>" + Q, "results"), ("Paris", "none")], "inside_think"),
    ],
)
def test_hermes_episodes_are_judged(turns: list[tuple[str, str]], reason: str) -> None:
    validity = HERMES.validity(episode(HERMES, *turns))
    assert (validity.valid, validity.reason) == (reason == "", reason)


@pytest.mark.parametrize("option", [{"answer": "txt"}, {"think": "maybe"}, {"schemas": "x"}, {"max_calls": 0}])
def test_wrong_settings_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        HermesGrammar(**option)


@pytest.mark.parametrize("grammar", [AtpoGrammar(), HermesGrammar()])
def test_every_reason_code_is_documented(grammar: Any) -> None:
    package = sys.modules["turntree.envs.grammar"].__doc__ or ""
    tables = package + (sys.modules[type(grammar).__module__].__doc__ or "")
    turns = [row[0] for row in (*_rows(test_atpo_table), *_rows(test_hermes_table))]
    codes = {a.argument for a in (grammar.parse(turn).action for turn in turns) if a.kind == "invalid"}
    assert len(codes) >= 5
    assert all(f"``{code}``" in tables for code in codes)


def _rows(test: Any) -> list[tuple[str, str, str]]:
    return list(test.pytestmark[0].args[1])


# -- in the environment ------------------------------------------------------------------------------------------------


class Echo:
    """Says what it is told, or how often; ``slow`` counts what it is sent."""

    description = "Repeats."

    def __init__(self, effects: Any = "none") -> None:
        self.effects = effects
        self.sent: list[str] = []

    def run(self, calls: Any) -> Any:
        self.sent += [c.argument for c in calls]
        return [
            ToolResult(f"{c.argument}!", memory=[c.argument] if self.effects == "in_state" else None) for c in calls
        ]


@pytest.mark.parametrize("name", ["tags", "atpo", "hermes"])
def test_an_episode_in_every_grammar(make_env: Callable[..., SearchQAEnv], name: str) -> None:
    env = make_env(grammar=name, tools={"echo": Echo()}, reward="atpo", max_turns=6)
    grammar: Any = env.core.grammar
    env.reset(seed=0, options={"index": 0})
    assert "William Shakespeare" in env.step(grammar.write("t", Action("search", "Hamlet")))[0]
    assert "hey!" in env.step(grammar.write("t", Action("echo", "hey")))[0]
    _, reward, terminated, _, info = env.step(grammar.write("t", Action("answer", "Shakespeare")))
    assert (reward, terminated, info["em"], info["format_valid"]) == (1.0, True, 1.0, True)
    assert info["tool_calls"] == {"search": 1, "echo": 1}
    assert GRAMMARS[name] is type(grammar)
    assert all(turn in env.action_space for turn in (env.action_space.sample() for _ in range(20)))


def test_parallel_calls_are_answered_once_each_in_order(make_env: Callable[..., SearchQAEnv]) -> None:
    tool = Echo()
    env = make_env(grammar="hermes", tools={"echo": tool}, max_turns=6)
    env.reset(seed=0)
    turn = "\n".join([call("echo", input="a"), call("search", query="Hamlet"), call("echo", input="b")])
    observation, *_, info = env.step(turn)
    blocks = observation.split("\n</tool_response>")
    assert [block.strip().removeprefix("<tool_response>\n") for block in blocks[:3]] == [
        "a!",
        "Doc 1(Title: Hamlet) A tragedy written by William Shakespeare.",
        "b!",
    ]
    assert tool.sent == ["a", "b"]
    assert (info["parallel_calls"], info["tool_calls"]) == (3, {"search": 1, "echo": 2})
    assert info["retrieved"] == [{"id": "d1", "title": "Hamlet"}]
    again = env.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(env.snapshot()))))
    assert env.restore(again)[0] == observation


def test_one_bad_call_makes_all_void(make_env: Callable[..., SearchQAEnv]) -> None:
    tool = Echo()
    env = make_env(grammar="hermes", tools={"echo": tool}, max_turns=9, max_searches=1)
    env.reset(seed=0)
    observation, *_, info = env.step(call("echo", input="a") + call("echo", inptu="a"))
    assert (info["invalid_reason"], tool.sent) == ("bad_arguments", [])
    assert "echo: " in observation
    assert "'input' is a required property" in observation
    assert env.step(call("search", query="a") + call("search", query="b"))[4]["invalid_reason"] == "no_searches_left"
    assert env.step(call("search", query="Hamlet"))[4]["searches"] == 1
    assert env.step(call("echo", input="a"), finish="length")[4]["stop_reason"] == "length"
    assert tool.sent == []


def test_a_tool_that_remembers_is_called_once_in_a_turn(make_env: Callable[..., SearchQAEnv]) -> None:
    tool = Echo("in_state")
    env = make_env(grammar="hermes", tools={"echo": tool}, max_turns=6)
    env.reset(seed=0)
    twice = call("echo", input="a") + call("echo", input="b")
    assert env.step(twice)[4]["invalid_reason"] == "repeated_call"
    assert env.step(call("echo", input="a"))[4]["tool_calls"]["echo"] == 1
    assert tool.sent == ["a"]


def test_results_of_a_turn_share_the_limit_in_tokens(make_env: Callable[..., SearchQAEnv]) -> None:
    class Bytes:
        def encode(self, text: str, /) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Any, /) -> str:
            return bytes(ids).decode(errors="ignore")

    grammar = HermesGrammar(max_calls=3)
    env = make_env(grammar=grammar, tools={"echo": Echo()}, max_observation_tokens=400, tokenizer=Bytes())
    env.reset(seed=0)
    observation, *_, info = env.step(
        "".join(call("echo", input=letter * 900) for letter in "ab") + call("echo", input="c")
    )
    assert info["observation_truncated"] is True
    assert 390 <= len(observation.encode()) <= 400
    assert observation.count("</tool_response>") == 3
    assert "\nc!\n" in observation
    assert abs(observation.count("a") - observation.count("b")) <= 1
    with pytest.raises(ConfigError, match=r"8 empty results \(max_calls of the grammar\)"):
        make_env(grammar="hermes", max_observation_tokens=400, tokenizer=Bytes())


def test_a_tool_call_is_data(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env(grammar="hermes", tools={"echo": Echo()}, max_turns=6)
    env.reset(seed=0)
    state = env.snapshot().state
    pending: Any = env.core.act(state, call("echo", input="a") + call("search", query="b"))
    assert pending.calls == (ToolCall("echo", "a"), ToolCall("search", "b"))


def test_a_grammar_that_was_used_holds_nothing_new() -> None:
    """What an environment holds is its state: a grammar that remembered its readings would change with every turn."""

    def law(grammar: Any) -> None:
        before = dict(vars(grammar))
        turns = [TurnRecord("<think>a</think><search>q</search>", Action("search", "q"), "found", "results")]
        for use in (grammar.parse, grammar.correction):
            use("<search>q</search>")
        grammar.validity(turns)
        grammar.results([])
        grammar.prompt("who?")
        assert grammar.stop
        assert grammar.fingerprint
        assert vars(grammar) == before

    every(law)
