"""The turn grammar: how a question is asked, a turn is read, an observation is written and an episode is judged.

:class:`TagGrammar` follows the convention of Search-R1 and Tree-GRPO: ``<think>``, ``<search>``, ``<information>``,
``<answer>``. Tags are exact: lower case, no spaces, no attributes. With tools their tags are calls as ``<search>`` is
one (``<lookup>...</lookup>``), and the reason codes are named after them. How a turn is read:

| turn | reading |
|---|---|
| ``<search>q</search>`` or ``<answer>a</answer>`` | that action, its text stripped |
| several closed actions | the first one; what follows is never executed (note ``overrun``) |
| ``<answer>x <answer>y</answer></answer>`` (nested) | the innermost: ``y`` |
| an action inside ``<think>...</think>`` | a thought, skipped |
| text before a ``</think>`` that was never opened | a thought, skipped (some chat templates open it in the prompt) |
| an action inside a ``<think>`` that is never closed | it counts; with ``think="required"``: ``inside_think`` |
| no closed thought before the action | fine; with ``think="required"``: ``missing_think`` |
| ``<search> </search>``, ``<answer></answer>`` | ``empty_query``, ``empty_answer``; of another tool ``empty_call`` |
| another tag between the opening and the closing one | ``nested_tags`` |
| ``<search>q`` or ``<answer>a``, never closed | ``unclosed_search``, ``unclosed_answer`` |
| ``q</search>`` or ``a</answer>``, never opened | ``unopened_search``, ``unopened_answer`` |
| closed actions inside finished thoughts only | ``action_in_thought`` |
| ``<Search>``, ``< search >``, ``<search/>`` | ``misspelt_tag`` |
| a call in another dialect (``<tool_call>{...}``) | ``no_action``, flagged ``other_dialect`` |
| other text, no text | ``no_action``, ``empty_turn`` |
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, get_args, runtime_checkable

from turntree.envs.core import Action, ToolSpec
from turntree.envs.loading import reject_unknown
from turntree.envs.prompt import require_question
from turntree.envs.tags import advance, compile_tags, is_other_dialect, neutralise, read
from turntree.errors import ConfigError
from turntree.search_backend.passage import Passage

__all__ = [
    "GRAMMARS",
    "Grammar",
    "Observation",
    "ParsedTurn",
    "TagGrammar",
    "Think",
    "ToolGrammar",
    "TurnRecord",
    "Validity",
    "complete_turn",
    "is_other_dialect",
    "reading_tools",
]

logger = logging.getLogger(__name__)

Think = Literal["optional", "required"]
ObservationKind = Literal["results", "correction", "none"]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a turn asks for.

    ``span``: start and end of the action in the turn's text, tags included, or None. ``notes``: reason codes of what
    was odd but did not matter (``overrun``, ``inside_think``). ``other_dialect``: there is no action, but something
    that looks like a call of another convention; a high rate of it means that prompt and grammar do not fit.
    """

    action: Action
    span: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    other_dialect: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation in three parts, so that a length limit can shorten ``body`` (the documents) only."""

    head: str
    body: str
    tail: str

    @property
    def text(self) -> str:
        return self.head + self.body + self.tail


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One finished turn: the model's text, how it was read, and what the environment answered."""

    text: str
    action: Action
    observation: str = ""
    kind: ObservationKind = "none"


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether an episode has the format, and otherwise the reason code of the first thing that is wrong."""

    valid: bool
    reason: str = ""


@runtime_checkable
class Grammar(Protocol):
    """What an environment needs to know about a way of writing turns. All methods are pure and total."""

    @property
    def fingerprint(self) -> str:
        """A short stable hash of everything that changes how turns are read or observations are written."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; they belong to it."""
        ...

    def prompt(self, question: str) -> str:
        """The user's message that asks ``question``. Raises ``DataError`` when the question is empty."""
        ...

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn. Never raises: what cannot be read is an ``invalid`` action with a reason code."""
        ...

    def results(self, passages: Sequence[Passage]) -> Observation:
        """The observation of a search, an honest one when nothing was found."""
        ...

    def correction(self, reason: str) -> str:
        """The observation of a turn that was not executed."""
        ...

    def last_turn_notice(self) -> str:
        """What is added to an observation when no search is left."""
        ...

    def validity(self, turns: Sequence[TurnRecord]) -> Validity:
        """Judge the format of a whole episode with the same reading of tags as :meth:`parse`."""
        ...


@runtime_checkable
class ToolGrammar(Grammar, Protocol):
    """A grammar that can learn to read calls of tools besides the search; :class:`TagGrammar` and its subclasses can.

    A call is an action whose kind is the tool's name and whose argument is what the tool is given.
    """

    def with_tools(self, tools: Sequence[ToolSpec]) -> Grammar:
        """The same grammar that also asks for, reads and stops at calls of ``tools``."""
        ...

    def write(self, thought: str, action: Action) -> str:
        """One turn that :meth:`parse` reads back."""
        ...

    def tool_result(self, name: str, text: str) -> Observation:
        """The observation of a call, tags inside ``text`` neutralised."""
        ...


def reading_tools(grammar: Grammar, tools: Sequence[ToolSpec]) -> Grammar:
    """``grammar`` with ``tools``, after it read back a call of each. Raises ``ConfigError`` with the reason."""
    if not tools:
        return grammar
    kind = type(grammar).__name__
    if not isinstance(grammar, ToolGrammar):
        lacks = [name for name in ("with_tools", "write", "tool_result") if not hasattr(grammar, name)]
        raise ConfigError(
            f"the grammar {kind} cannot read the tools {', '.join(t.name for t in tools)}: it has no "
            f"{', '.join(lacks)}; write these methods (see turntree.envs.grammar.ToolGrammar) or use no tools"
        )
    taught = grammar.with_tools(tools)
    for tool in tools:
        call = Action(tool.name, "x")
        written = taught.write("I use it.", call) if isinstance(taught, ToolGrammar) else ""
        if (found := taught.parse(written).action) != call:
            raise ConfigError(
                f"the grammar {kind} cannot read the tool {tool.name}: expected {call} from {written!r}, found "
                f"{found}; its parse() must read what its write() writes, or use no tools"
            )
    return taught


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
NOTHING_FOUND = "No results were found for this query."
"""The observation of a search without results."""
NO_OUTPUT = "The call gave no output."
"""The observation of a call of another tool that returned an empty text."""

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
    def stop(self) -> tuple[str, ...]:
        return ("</search>", "</answer>", *(f"</{name}>" for name in self.tool_names))

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """The same grammar with ``tools``; the prompt names each with its description."""
        return replace(self, tools=tuple(tools))

    def prompt(self, question: str) -> str:
        """One user message. A question mark is added only where the question has no closing punctuation."""
        return _prompt_text(_close_question(question), self.tools)

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn by the module's table; never raises."""
        reading = read(text, compile_tags(self.tool_names))
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
        names = self.tool_names
        docs = [
            f"Doc {i}(Title: {neutralise(p.title, names)}) {neutralise(p.text, names)}"
            for i, p in enumerate(passages, 1)
        ]
        return self.shown("\n".join(docs) if docs else NOTHING_FOUND)

    def tool_result(self, name: str, text: str) -> Observation:
        """The text between the tags of a search's results, tags inside it neutralised."""
        del name
        return self.shown(neutralise(text, self.tool_names) if text.strip() else NO_OUTPUT)

    def shown(self, body: str) -> Observation:
        """What came back for a call, between the tags that say so."""
        return Observation("\n\n<information>", body, "</information>\n\n")

    def correction(self, reason: str) -> str:
        """A sentence for the reason code, the general one for codes without an own sentence."""
        return f"\n\n{self._correction(reason)}\n\n"

    def _correction(self, reason: str) -> str:
        sentence = _CORRECTIONS.get(reason, _DEFAULT_CORRECTION)
        if not self.tools:
            return sentence
        names = ", ".join(f"<{name}>" for name in self.tool_names)
        return f"{sentence} Other tools are called between their own tags: {names}."

    def last_turn_notice(self) -> str:
        left = "No calls" if self.tools else "No searches"
        return f"{left} are left. Give the final answer now between <answer> and </answer>.\n\n"

    def validity(self, turns: Sequence[TurnRecord]) -> Validity:
        """Tree-GRPO's automaton, told apart by who wrote a tag: ``<information>`` counts from the environment only."""
        state, tags = "start", compile_tags(self.tool_names)
        for turn in turns:
            state, reason = advance(state, turn.text, tags, own_turn=True)
            if reason:
                return Validity(False, reason)
            if turn.kind == "correction":
                return Validity(False, f"corrected:{turn.action.argument}")
            if turn.kind == "results":
                if (state, "<information>") not in tags.moves:
                    return Validity(False, f"unexpected_tag:{state}")
                state = "information"
        return _final(state)

    def validity_of_text(self, text: str) -> Validity:
        """The same automaton over one transcript in which turns and observations are already joined."""
        state, reason = advance("start", text, compile_tags(self.tool_names), own_turn=False)
        return Validity(False, reason) if reason else _final(state)


GRAMMARS = {"tags": TagGrammar}
"""Grammars by name; others are given by import path."""


def complete_turn(text: str, stop_string: str | None) -> str:
    """The turn with its closing tag, for engines that cut the matched stop string off.

    ``stop_string`` is what the engine says it stopped at (None: nothing). A text that lacks it gets it back, and a
    warning is logged once for each stop string: token ids of such an engine lack the tag too.
    """
    if stop_string is None or stop_string in text:
        return text
    _warn_restored(stop_string)
    return text + stop_string


@functools.cache
def _warn_restored(stop_string: str) -> None:
    logger.warning(
        "the engine removed the stop string %r from a turn; it was put back for parsing. Set the engine to include "
        "stop strings, so that the trained tokens hold the closing tag",
        stop_string,
    )


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
    lines = "".join(f"\n<{t.name}> ... </{t.name}>: {t.description}" for t in tools)
    return (
        "There are other tools too. Write one call between a tool's tags, and what it returned will be shown to you "
        f"between <information> and </information>:{lines}\n"
    )


_SENTENCE_ENDS = frozenset("?？!！.。．｡…؟")


def _close_question(question: str) -> str:
    stripped = require_question(question)
    trailing = itertools.takewhile(lambda character: not character.isalnum(), reversed(stripped))
    if _SENTENCE_ENDS & set(trailing):
        return stripped
    return stripped + ("？" if _is_wide(stripped[-1]) else "?")


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in ("W", "F")
