"""Calls as JSON between tags, the convention of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}``.

The search is a tool of one argument, ``query``. Results are shown between ``<tool_response>`` and
``</tool_response>``, one block a call, in call order. How a turn is read:

| turn | reading |
|---|---|
| ``<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>`` | that call |
| several such blocks with only white space between them | all of them, in order |
| text before the first block | fine |
| other text or a ``<think>`` after a block | ends the turn: what follows is never executed (note ``overrun``) |
| no block | the text after the last thought is the answer; with ``answer="tool"``: ``no_action`` |
| blocks inside ``<think>...</think>``, or before a ``</think>`` that was never opened | a thought, skipped |
| a block inside a ``<think>`` that is never closed | it counts; with ``think="required"``: ``inside_think`` |
| no block and a ``<think>`` that is never closed | ``unclosed_think`` |
| no closed thought before | fine; with ``think="required"``: ``missing_think`` |
| what is not JSON in a block | ``bad_json`` |
| JSON without a ``name``, or whose ``arguments`` are no object | ``bad_call`` |
| a name that is no tool's | ``unknown_tool`` |
| arguments that do not fit the tool's schema | ``bad_arguments`` |
| an empty text given to the search, another tool, an answer | ``empty_query``, ``empty_call``, ``empty_answer`` |
| more than ``max_calls`` blocks | ``too_many_calls`` |
| the ``answer`` tool beside other calls | ``answer_not_alone`` |
| a tag between the opening and the closing one | ``nested_tags`` |
| a block that is never closed, or never opened | ``unclosed_call``, ``unopened_call`` |
| ``<tool_response>`` without a call before it | ``fabricated_result`` |
| ``<Tool_Call>``, ``< tool_call >``, ``<tool_call/>`` | ``misspelt_tag`` |
| no call, and ``＜tool_call＞``, ``〈tool_call〉``, ``《tool_call》`` | ``full_width_tag`` |
| a call in another dialect (``<search>q</search>``, JSON without tags) | ``no_action``, flagged ``other_dialect`` |
| thoughts only; no text | ``empty_answer``, or ``action_in_thought`` where they held a call; ``empty_turn`` |

One bad block makes the whole turn invalid, and nothing of it is executed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar.base import Observation, ParsedTurn, Think, TurnRecord, Validity, passage_lines
from turntree.envs.grammar.tag import close_question
from turntree.envs.grammar.words import HERMES, SHARED, HermesWords, Language, fill
from turntree.envs.loading import reject_unknown
from turntree.envs.schemas import (
    decode_arguments,
    encode_arguments,
    function_schema,
    parameters,
    parse_json,
    text_parameter,
    text_schema,
    violation,
)
from turntree.envs.tags import any_spelling, bracket, exactly, is_other_dialect, misspelling
from turntree.errors import ConfigError
from turntree.search_backend.passage import Passage

__all__ = ["HermesGrammar"]

AnswerBy = Literal["text", "tool"]
SchemasIn = Literal["prompt", "template"]

_NAMES = ("think", "tool_call", "tool_response")
_TAGS = exactly(_NAMES)
_SPELT = any_spelling((*_NAMES, "tools"))
_FULL_WIDTH_JSON = re.compile("[：，“”｛｝＂]")
_EMPTY = {"search": "empty_query", "answer": "empty_answer"}
# What a tool that the grammar was not taught is given in writing: one text.
_UNTAUGHT = ToolSpec("", "")


@dataclass(frozen=True)
class HermesGrammar:
    """Calls as JSON; see the module's table.

    ``answer``: a turn without a call is the answer (``"text"``), or a call of the tool ``answer`` is (``"tool"``).
    ``max_calls``: calls of one turn. With 1 a turn stops at ``</tool_call>``, with more where the model ends it.
    ``schemas``: who lists the tools: the ``prompt``, or the chat ``template`` (:class:`turntree.agents.Dialogue` with
    ``tools=grammar.functions()``). ``tools``: those besides the search, set by :meth:`with_tools`. ``language``: of all
    that the grammar says; JSON's own words stay English.
    """

    think: Think = "optional"
    answer: AnswerBy = "text"
    max_calls: int = 8
    schemas: SchemasIn = "prompt"
    tools: tuple[ToolSpec, ...] = ()
    language: Language = "en"

    def __post_init__(self) -> None:
        reject_unknown([self.think], get_args(Think), what="think setting")
        reject_unknown([self.answer], get_args(AnswerBy), what="answer setting")
        reject_unknown([self.schemas], get_args(SchemasIn), what="schemas setting")
        reject_unknown([self.language], get_args(Language), what="language")
        if self.max_calls < 1:
            raise ConfigError(f"max_calls: expected at least 1, found {self.max_calls}")

    @property
    def fingerprint(self) -> str:
        """Changes with every setting, with the tools' schemas, and with every text that the grammar writes."""
        settings = [self.think, self.answer, str(self.max_calls), self.schemas]
        written = [self.prompt("?"), self.results([]).text, self.results([Passage("", "t", "x")]).text]
        tools = json.dumps(self.functions(), sort_keys=True)
        texts = [
            *settings,
            tools,
            *written,
            self.last_turn_notice(),
            *map(self.correction, ("", *self._said.corrections)),
        ]
        return "hermes-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    @property
    def _said(self) -> HermesWords:
        return HERMES[self.language]

    @property
    def stop(self) -> tuple[str, ...]:
        return ("<tool_response>", "</tool_call>") if self.max_calls == 1 else ("<tool_response>",)

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """The same grammar with ``tools`` besides the search."""
        return replace(self, tools=tuple(tools))

    @property
    def _specs(self) -> dict[str, ToolSpec]:
        about, query = self._said.search
        search = ToolSpec("search", about, text_schema("query", query))
        about, text = self._said.answer
        answer = ToolSpec("answer", about, text_schema("answer", text))
        own = (search, *self.tools, *((answer,) if self.answer == "tool" else ()))
        return {spec.name: spec for spec in own}

    def functions(self) -> list[dict[str, Any]]:
        """All tools in the form of OpenAI's ``tools`` list, for a chat template."""
        return [function_schema(spec) for spec in self._specs.values()]

    # -- writing -------------------------------------------------------------------------------------------------

    def prompt(self, question: str) -> str:
        """One user message: the tools (unless a template lists them), how to answer, and the question."""
        said = self._said
        asked = f"{self._how_to_answer()}\n{fill(SHARED[self.language].question, question=close_question(question))}"
        if self.schemas == "template":
            return asked
        listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in self.functions())
        most = fill(said.several_calls, n=self.max_calls) if self.max_calls > 1 else said.one_call
        return fill(said.prompt, listed=listed, most=most, asked=asked)

    def _how_to_answer(self) -> str:
        thinking = self._said.thinking if self.think == "required" else ""
        return fill(self._said.task, thinking=thinking, way=self._said.way[self.answer])

    def write(self, thought: str, action: Action, *more: Action) -> str:
        """One turn; :meth:`parse` reads its actions back, if the thought holds no tags."""
        head = f"<think>\n{thought}\n</think>\n\n"
        if action.kind == "answer" and self.answer == "text":
            return head + action.argument
        return head + "\n".join(self._written(call) for call in (action, *more))

    def _written(self, action: Action) -> str:
        spec = self._specs.get(action.kind, _UNTAUGHT)
        arguments = decode_arguments(spec, action.argument)
        call = json.dumps({"name": action.kind, "arguments": arguments}, ensure_ascii=False)
        if bracket(call, _SPELT) != call:  # a tag inside a string would end the block
            call = call.replace("<", "\\u003c")
        return f"<tool_call>\n{call}\n</tool_call>"

    def results(self, passages: Sequence[Passage]) -> Observation:
        """``Doc 1(Title: T) text`` a line in a block, tags inside passages neutralised."""
        return _block(passage_lines(passages, _clean, language=self.language))

    def tool_result(self, name: str, text: str) -> Observation:
        """The text in a block, tags inside it neutralised."""
        del name
        return _block(_clean(text) if text.strip() else SHARED[self.language].no_output)

    def correction(self, reason: str) -> str:
        """A sentence for the reason code, the general one for codes without an own sentence."""
        said = self._said
        return said.corrections.get(reason) or fill(said.general, finish=said.finish[self.answer])

    def last_turn_notice(self) -> str:
        return f"\n{self._said.notice[self.answer]}"

    # -- reading -------------------------------------------------------------------------------------------------

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn by the module's table; never raises."""
        scan = _scan(text)
        if scan.reason:
            return _invalid(scan.reason, scan)
        if self.think == "required" and (not scan.thought or (scan.inside_think and scan.blocks)):
            return _invalid("inside_think" if scan.inside_think else "missing_think", scan)
        if not scan.blocks:
            return self._without_call(text, scan)
        if len(scan.blocks) > self.max_calls:
            return _invalid("too_many_calls", scan, fill(self._said.most, n=self.max_calls))
        actions: list[Action] = []
        for start, end in scan.blocks:
            action, hint = self._read_call(text[start:end])
            if action.kind == "invalid":
                return _invalid(action.argument, scan, hint)
            actions.append(action)
        if len(actions) > 1 and any(action.kind == "answer" for action in actions):
            return _invalid("answer_not_alone", scan)
        return ParsedTurn(actions[0], scan.span, scan.notes, more=tuple(actions[1:]))

    def _without_call(self, text: str, scan: _Scan) -> ParsedTurn:
        """The answer, where the text is one."""
        content = text[scan.content :].strip()
        if not text.strip():
            return _invalid("empty_turn", scan)
        exact = {tag.start() for tag in _TAGS.finditer(text)}
        if wrong := misspelling(text, exact, _SPELT, ("tool_call",)):
            return _invalid(wrong, scan)
        if is_other_dialect(content, "hermes"):
            return ParsedTurn(Action("invalid", "no_action"), other_dialect=True)
        if scan.inside_think:
            return _invalid("unclosed_think", scan)
        if not content:
            return _invalid("action_in_thought" if scan.call_in_thought else "empty_answer", scan)
        if self.answer == "tool":
            return _invalid("no_action", scan)
        return ParsedTurn(
            Action("answer", content), (len(text) - len(text[scan.content :].lstrip()), len(text.rstrip()))
        )

    def _read_call(self, block: str) -> tuple[Action, str]:
        """The call in a block; an ``invalid`` action with a hint otherwise."""
        try:
            call = parse_json(block)
        except ValueError as error:
            hint = self._said.full_width_json if _FULL_WIDTH_JSON.search(block) else f"{error}."
            return Action("invalid", "bad_json"), hint
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Action("invalid", "bad_call"), ""
        spec = self._specs.get(name)
        if spec is None:
            return Action("invalid", "unknown_tool"), fill(self._said.known, names=", ".join(self._specs))
        if wrong := violation(parameters(spec), arguments):
            return Action("invalid", "bad_arguments"), f"{name}: {wrong}."
        argument = encode_arguments(spec, arguments)
        if text_parameter(spec) is not None and not argument.strip():
            return Action("invalid", _EMPTY.get(name, "empty_call")), ""
        return Action(name, argument.strip() if name in _EMPTY else argument), ""

    def validity(self, turns: Sequence[TurnRecord]) -> Validity:
        """Calls that were all answered, then an answer, nothing after a call, no result of the model's own."""
        for turn in turns:
            notes = self.parse(turn.text).notes
            if any(tag[2] == "tool_response" for tag in _TAGS.finditer(turn.text)):
                return Validity(False, "fabricated_result")
            if turn.kind == "correction":
                return Validity(False, f"corrected:{turn.action.argument}")
            if notes:
                return Validity(False, {"overrun": "unexpected_text"}.get(notes[0], notes[0]))
            if turn.kind != "results":
                return Validity(True) if turn.action.kind == "answer" else Validity(False, "incomplete:call")
        return Validity(False, "incomplete:results" if turns else "incomplete:start")


def _clean(text: str) -> str:
    return bracket(text, _SPELT)


def _block(body: str) -> Observation:
    return Observation("<tool_response>\n", body, "\n</tool_response>")


def _invalid(reason: str, scan: _Scan, hint: str = "") -> ParsedTurn:
    return ParsedTurn(Action("invalid", reason), notes=scan.notes, hint=_clean(hint))


@dataclass(slots=True)
class _Scan:
    """The tags of a turn in one pass.

    ``blocks``: start and end of the text of each call; ``span``: of all of them with their tags; ``content``: where the
    text after the last thought begins; ``thought``: a closed one stands before the first block; ``inside_think``: an
    open one does.
    """

    blocks: list[tuple[int, int]] = field(default_factory=list)
    span: tuple[int, int] | None = None
    content: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()
    thought: bool = False
    inside_think: bool = False
    call_in_thought: bool = False


def _scan(text: str) -> _Scan:
    tags = list(_TAGS.finditer(text))
    thoughts = [tag for tag in tags if tag[2] == "think"]
    last_close = text.rfind("</think>")
    scan = _Scan(inside_think=bool(thoughts) and bool(thoughts[0][1]))
    opened: re.Match[str] | None = None
    for tag in tags:
        if opened is not None:
            if tag[0] != "</tool_call>":
                scan.reason = "nested_tags"
                break
            scan.blocks.append((opened.end(), tag.start()))
            scan.span = (scan.span[0] if scan.span else opened.start(), tag.end())
            opened = None
        elif scan.span is not None and (tag[0] != "<tool_call>" or text[scan.span[1] : tag.start()].strip()):
            break  # whatever is not a further call ends the turn
        elif tag[2] == "think":
            scan.inside_think, scan.thought = not tag[1], scan.thought or bool(tag[1])
            scan.content = tag.end() if tag[1] else scan.content
        elif scan.inside_think and tag.start() < last_close:
            scan.call_in_thought = scan.call_in_thought or tag[2] == "tool_call"
        elif tag[0] == "<tool_call>":
            opened = tag
        else:
            scan.reason = "unopened_call" if tag[2] == "tool_call" else "fabricated_result"
            break
    if opened is not None and not scan.reason:
        scan.reason = "unclosed_call"
    if scan.span is not None and not scan.reason:
        odd = {"inside_think": scan.inside_think, "overrun": bool(text[scan.span[1] :].strip())}
        scan.notes = tuple(note for note, holds in odd.items() if holds)
    return scan
