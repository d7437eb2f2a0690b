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
    Observation,
    ParsedTurn,
    Think,
    TurnRecord,
    Validity,
    passage_lines,
)
from turntree.envs.grammar.words import SHARED, TAGS, Language, fill
from turntree.envs.loading import reject_unknown
from turntree.envs.prompt import require_question
from turntree.envs.schemas import parameters, text_parameter
from turntree.envs.tags import Tags, advance, compile_tags, is_other_dialect, neutralise, read
from turntree.envs.task import thaw
from turntree.search_backend.passage import Passage

__all__ = ["TagGrammar", "close_question", "given"]


@dataclass(frozen=True)
class TagGrammar:
    """Turns with tags; see the module's table.

    ``think``: whether an action needs a closed thought before it. ``tools``: tools besides the search, set by
    :meth:`with_tools`; each is called by its own tag, and its result is shown as that of a search is. ``language``: of
    the prompt and of all else that the grammar says.
    """

    think: Think = "optional"
    tools: tuple[ToolSpec, ...] = ()
    language: Language = "en"

    #: The tag around what the environment answers.
    shown_tag: ClassVar[str] = "information"

    def __post_init__(self) -> None:
        reject_unknown([self.think], get_args(Think), what="think setting")
        reject_unknown([self.language], get_args(Language), what="language")

    @property
    def fingerprint(self) -> str:
        """Changes with ``think`` and with every text that the grammar writes."""
        written = [self._prompt("?"), self.results([]).text, self.results([Passage("", "t", "x")]).text]
        reasons = (self._correction(reason) for reason in ("", *TAGS[self.language].corrections))
        texts = [self.think, *written, self.last_turn_notice(), *reasons]
        return "tags-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools besides the search."""
        return tuple([tool.name for tool in self.tools]) if self.tools else ()

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
        return self._prompt(close_question(question))

    def _prompt(self, question: str) -> str:
        said = TAGS[self.language]
        lines = "".join(f"\n<{t.name}> {given(t, self.language)} </{t.name}>: {t.description}" for t in self.tools)
        tools = fill(said.tools, lines=lines) if lines else ""
        return fill(said.prompt, tools=tools, question=fill(SHARED[self.language].question, question=question))

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
        return self.shown(passage_lines(passages, self._clean, language=self.language))

    def tool_result(self, name: str, text: str) -> Observation:
        """The text between the tags of a search's results, tags inside it neutralised."""
        del name
        return self.shown(self._clean(text) if text.strip() else SHARED[self.language].no_output)

    def shown(self, body: str) -> Observation:
        """What came back for a call, between the tags that say so."""
        return Observation(f"\n\n<{self.shown_tag}>", body, f"</{self.shown_tag}>\n\n")

    def correction(self, reason: str) -> str:
        """A sentence for the reason code, the general one for codes without an own sentence."""
        return f"\n\n{self._correction(reason)}\n\n"

    def sentence(self, reason: str) -> str:
        """What a correction says of the reason code."""
        return TAGS[self.language].corrections.get(reason, TAGS[self.language].general)

    def _correction(self, reason: str) -> str:
        sentence = self.sentence(reason)
        if not self.tools:
            return sentence
        said = TAGS[self.language]
        names = said.between.join(f"<{name}>" for name in self.tool_names)
        return sentence + fill(said.other_tools, names=names)

    def last_turn_notice(self) -> str:
        return f"{TAGS[self.language].notice[bool(self.tools)]}\n\n"

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


def given(tool: ToolSpec, language: Language) -> str:
    """What stands between a tool's tags, for a prompt."""
    if text_parameter(tool) is not None:
        return "..."
    return fill(SHARED[language].schema, schema=json.dumps(thaw(parameters(tool)), ensure_ascii=False))


_SENTENCE_ENDS = frozenset("?？!！.。．｡…؟")


def close_question(question: str) -> str:
    """The question with a question mark of its script at its end."""
    stripped = require_question(question)
    trailing = itertools.takewhile(lambda character: not character.isalnum(), reversed(stripped))
    if _SENTENCE_ENDS & set(trailing):
        return stripped
    return stripped + ("？" if _is_wide(stripped[-1]) else "?")


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in ("W", "F")
