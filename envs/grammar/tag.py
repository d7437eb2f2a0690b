"""Turns with tags, the convention of Search-R1 and Tree-GRPO; the package's table says how they are read."""

from __future__ import annotations

import hashlib
import itertools
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, get_args

from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar.base import (
    NO_OUTPUT,
    Observation,
    ParsedTurn,
    Think,
    TurnRecord,
    Validity,
    passage_lines,
)
from turntree.envs.loading import reject_unknown
from turntree.envs.prompt import require_question
from turntree.envs.schemas import parameters, text_parameter
from turntree.envs.tags import Tags, advance, compile_tags, is_other_dialect, neutralise, read
from turntree.envs.task import thaw
from turntree.search_backend.passage import Passage

__all__ = ["TagGrammar", "close_question", "given"]

_CORRECTIONS = {
    "empty_query": "The search query was empty. Write what to look for between <search> and </search>.",
    "empty_call": "The call was empty. Write what the tool is given between its tags.",
    "empty_answer": "The answer was empty. Write the final answer between <answer> and </answer>.",
    "inside_think": "Close the thought with </think> before you search or answer.",
    "missing_think": "Think between <think> and </think> before you search or answer.",
    "no_searches_left": "That search was not run.",
    "cut_at_length": "The last turn was too long and was cut off, so nothing of it was executed. Be brief.",
    "misspelt_tag": "Tags must be written exactly as <search>, </search>, <answer> and </answer>.",
}
_DEFAULT_CORRECTION = (
    "The last turn held no action that could be executed. To search, write the query between <search> and </search>; "
    "to finish, write the answer between <answer> and </answer>."
)


@dataclass(frozen=True)
class TagGrammar:
    """Turns with tags; see the module's table.

    ``think``: whether an action needs a closed thought before it. ``tools``: tools besides the search, set by
    :meth:`with_tools`; each is called by its own tag, and its result is shown as that of a search is.
    """

    think: Think = "optional"
    tools: tuple[ToolSpec, ...] = ()

    #: The tag around what the environment answers.
    shown_tag: ClassVar[str] = "information"

    def __post_init__(self) -> None:
        reject_unknown([self.think], get_args(Think), what="think setting")

    @property
    def fingerprint(self) -> str:
        """Changes with ``think`` and with every text that the grammar writes."""
        written = [_prompt_text("?", self.tools), self.results([]).text, self.results([Passage("", "t", "x")]).text]
        reasons = (self._correction(reason) for reason in ("", *_CORRECTIONS))
        texts = [self.think, *written, self.last_turn_notice(), *reasons]
        return "tags-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools besides the search."""
        return tuple(tool.name for tool in self.tools)

    @property
    def _tags(self) -> Tags:
        return compile_tags(self.tool_names, self.shown_tag)

    def _clean(self, text: str) -> str:
        return neutralise(text, self.tool_names, self.shown_tag)

    @property
    def stop(self) -> tuple[str, ...]:
        return ("</search>", "</answer>", *(f"</{name}>" for name in self.tool_names))

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """The same grammar with ``tools``; the prompt names each with its description."""
        return replace(self, tools=tuple(tools))

    def prompt(self, question: str) -> str:
        """One user message. A question mark is added only where the question has no closing punctuation."""
        return _prompt_text(close_question(question), self.tools)

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn by the module's table; never raises."""
        reading = read(text, self._tags)
        action, notes = reading.action, reading.notes
        if action.kind != "invalid" and self.think == "required":
            if "inside_think" in notes:
                action = Action("invalid", "inside_think")
            elif not reading.thought:
                action = Action("invalid", "missing_think")
        other = action.argument == "no_action" and action.kind == "invalid" and is_other_dialect(text)
        return ParsedTurn(action, reading.span, notes, other)

    def write(self, thought: str, action: Action) -> str:
        """One turn; :meth:`parse` reads its action back, if the texts hold no tags."""
        return f"<think> {thought} </think> <{action.kind}> {action.argument} </{action.kind}>"

    def results(self, passages: Sequence[Passage]) -> Observation:
        """``\\n\\n<information>Doc 1(Title: T) text\\n...</information>\\n\\n``, tags inside passages neutralised."""
        return self.shown(passage_lines(passages, self._clean))

    def tool_result(self, name: str, text: str) -> Observation:
        """The text between the tags of a search's results, tags inside it neutralised."""
        del name
        return self.shown(self._clean(text) if text.strip() else NO_OUTPUT)

    def shown(self, body: str) -> Observation:
        """What came back for a call, between the tags that say so."""
        return Observation(f"\n\n<{self.shown_tag}>", body, f"</{self.shown_tag}>\n\n")

    def correction(self, reason: str) -> str:
        """A sentence for the reason code, the general one for codes without an own sentence."""
        return f"\n\n{self._correction(reason)}\n\n"

    def sentence(self, reason: str) -> str:
        """What a correction says of the reason code."""
        return _CORRECTIONS.get(reason, _DEFAULT_CORRECTION)

    def _correction(self, reason: str) -> str:
        sentence = self.sentence(reason)
        if not self.tools:
            return sentence
        names = ", ".join(f"<{name}>" for name in self.tool_names)
        return f"{sentence} Other tools are called between their own tags: {names}."

    def last_turn_notice(self) -> str:
        left = "No calls" if self.tools else "No searches"
        return f"{left} are left. Give the final answer now between <answer> and </answer>.\n\n"

    def validity(self, turns: Sequence[TurnRecord]) -> Validity:
        """Tree-GRPO's automaton, told apart by who wrote a tag: ``<information>`` counts from the environment only."""
        state, tags, shown = "start", self._tags, self.shown_tag
        for turn in turns:
            state, reason = advance(state, turn.text, tags, own_turn=True)
            if reason:
                return Validity(False, reason)
            if turn.kind == "correction":
                return Validity(False, f"corrected:{turn.action.argument}")
            if turn.kind == "results":
                if (state, f"<{shown}>") not in tags.moves:
                    return Validity(False, f"unexpected_tag:{state}")
                state = shown
        return _final(state)

    def validity_of_text(self, text: str) -> Validity:
        """The same automaton over one transcript in which turns and observations are already joined."""
        state, reason = advance("start", text, self._tags, own_turn=False)
        return Validity(False, reason) if reason else _final(state)


def _final(state: str) -> Validity:
    return Validity(True) if state == "end" else Validity(False, f"incomplete:{state}")


# -- writing -------------------------------------------------------------------------------------------------


def _prompt_text(question: str, tools: Sequence[ToolSpec] = ()) -> str:
    return (
        "Find the answer to the question below. Whenever you have read something new, first think between <think> and "
        "</think>. If a fact is missing, look it up: write one query between <search> and </search>, and the passages "
        "that were found will be shown to you between <information> and </information>. You may search again as "
        f"often as it helps. {_tools_text(tools)}Once you know the answer, write it between <answer> and </answer>, as "
        f"short as possible and without an explanation.\nQuestion: {question}"
    )


def _tools_text(tools: Sequence[ToolSpec]) -> str:
    if not tools:
        return ""
    lines = "".join(f"\n<{t.name}> {given(t)} </{t.name}>: {t.description}" for t in tools)
    return (
        "There are other tools too. Write one call between a tool's tags, and what it returned will be shown to you "
        f"between <information> and </information>:{lines}\n"
    )


def given(tool: ToolSpec) -> str:
    """What stands between a tool's tags, for a prompt."""
    if text_parameter(tool) is not None:
        return "..."
    return f"arguments as JSON of the schema {json.dumps(thaw(parameters(tool)), ensure_ascii=False)}"


_SENTENCE_ENDS = frozenset("?？!！.。．｡…؟")


def close_question(question: str) -> str:
    stripped = require_question(question)
    trailing = itertools.takewhile(lambda character: not character.isalnum(), reversed(stripped))
    if _SENTENCE_ENDS & set(trailing):
        return stripped
    return stripped + ("？" if _is_wide(stripped[-1]) else "?")


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in ("W", "F")
