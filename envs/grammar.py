"""The turn grammar: how a question is asked, a turn is read, an observation is written and an episode is judged.

:class:`TagGrammar` follows the convention of Search-R1 and Tree-GRPO: ``<think>``, ``<search>``, ``<information>``,
``<answer>``. Tags are exact: lower case, no spaces, no attributes. How a turn is read:

| turn | reading |
|---|---|
| ``<search>q</search>`` or ``<answer>a</answer>`` | that action, its text stripped |
| several closed actions | the first one; what follows is never executed (note ``overrun``) |
| ``<answer>x <answer>y</answer></answer>`` (nested) | the innermost: ``y`` |
| an action inside ``<think>...</think>`` | a thought, skipped |
| text before a ``</think>`` that was never opened | a thought, skipped (some chat templates open it in the prompt) |
| an action inside a ``<think>`` that is never closed | it counts; with ``think="required"``: ``inside_think`` |
| no closed thought before the action | fine; with ``think="required"``: ``missing_think`` |
| ``<search> </search>``, ``<answer></answer>`` | ``empty_query``, ``empty_answer`` |
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
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from turntree.envs.core import Action
from turntree.envs.loading import reject_unknown
from turntree.errors import DataError
from turntree.search_backend.passage import Passage

__all__ = [
    "GRAMMARS",
    "Grammar",
    "Observation",
    "ParsedTurn",
    "TagGrammar",
    "Think",
    "TurnRecord",
    "Validity",
    "complete_turn",
    "is_other_dialect",
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


_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
# Written so that long runs of white space cannot be split in two ways: a turn is untrusted text of any length.
_ANY_SPELLING = re.compile(r"<\s*(?:/\s*)?(?:think|search|information|answer)\s*(?:/\s*)?>", re.IGNORECASE)
_CONTROL_TOKEN = re.compile(r"<(?=[|｜][^<>\s]{1,64}[|｜]>)")
_OTHER_DIALECT = re.compile(
    r"<tool_call>|<function_call>|<function=|<invoke\b|<\|?(?:tool_call|python_tag|action_start)|<｜tool|\[TOOL_CALLS\]"
    r"|^[ \t]*Action\s*(?:\d+\s*)?:\s*\w+\s*[\[(]|\"(?:arguments|parameters)\"\s*:\s*[{\"]"
    r"|<code>|<python>|```(?:python|json|tool)",
    re.IGNORECASE | re.MULTILINE,
)

# The automaton of Tree-GRPO (qa_em_format.is_valid_sequence): think -> (search -> information -> think)* -> answer,
# only white space between tags.
_MOVES = {
    ("start", "<think>"): "in_think",
    ("information", "<think>"): "in_think",
    ("in_think", "</think>"): "after_think",
    ("after_think", "<search>"): "in_search",
    ("in_search", "</search>"): "after_search",
    ("after_search", "<information>"): "in_information",
    ("in_information", "</information>"): "information",
    ("after_think", "<answer>"): "in_answer",
    ("in_answer", "</answer>"): "end",
}
_INSIDE = frozenset({"in_think", "in_search", "in_information", "in_answer"})

_CORRECTIONS = {
    "empty_query": "The search query was empty. Write what to look for between <search> and </search>.",
    "empty_answer": "The answer was empty. Write the final answer between <answer> and </answer>.",
    "inside_think": "Close the thought with </think> before you search or answer.",
    "missing_think": "Think between <think> and </think> before you search or answer.",
    "no_searches_left": "That search was not run.",
    "cut_at_length": "The last turn was too long and was cut off, so nothing of it was executed. Be brief.",
    "misspelt_tag": "Tags must be written exactly as <search>, </search>, <answer> and </answer>.",
}
NOTHING_FOUND = "No results were found for this query."
"""The observation of a search without results."""

_DEFAULT_CORRECTION = (
    "The last turn held no action that could be executed. To search, write the query between <search> and </search>; "
    "to finish, write the answer between <answer> and </answer>."
)


@dataclass(frozen=True)
class TagGrammar:
    """Turns with tags; see the module's table. ``think``: whether an action needs a closed thought before it."""

    think: Think = "optional"

    def __post_init__(self) -> None:
        reject_unknown([self.think], get_args(Think), what="think setting")

    @property
    def fingerprint(self) -> str:
        """Changes with ``think`` and with every text that the grammar writes."""
        written = [_prompt_text("?"), self.results([]).text, self.results([Passage("", "t", "x")]).text]
        texts = [self.think, *written, self.last_turn_notice(), _DEFAULT_CORRECTION, *_CORRECTIONS.values()]
        return "tags-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    @property
    def stop(self) -> tuple[str, ...]:
        return ("</search>", "</answer>")

    def prompt(self, question: str) -> str:
        """One user message. A question mark is added only where the question has no closing punctuation."""
        return _prompt_text(_close_question(question))

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn by the module's table; never raises."""
        reading = _read(text)
        action, notes = reading.action, reading.notes
        if action.kind != "invalid" and self.think == "required":
            if "inside_think" in notes:
                action = Action("invalid", "inside_think")
            elif not reading.thought:
                action = Action("invalid", "missing_think")
        other = action.argument == "no_action" and action.kind == "invalid" and is_other_dialect(text)
        return ParsedTurn(action, reading.span, notes, other)

    def write(self, thought: str, action: Action) -> str:
        """One turn; :meth:`parse` reads its search or answer back, if the texts hold no tags."""
        return f"<think> {thought} </think> <{action.kind}> {action.argument} </{action.kind}>"

    def results(self, passages: Sequence[Passage]) -> Observation:
        """``\\n\\n<information>Doc 1(Title: T) text\\n...</information>\\n\\n``, tags inside passages neutralised."""
        docs = [f"Doc {i}(Title: {plain(p.title)}) {plain(p.text)}" for i, p in enumerate(passages, start=1)]
        body = "\n".join(docs) if docs else NOTHING_FOUND
        return Observation("\n\n<information>", body, "</information>\n\n")

    def correction(self, reason: str) -> str:
        """A sentence for the reason code, the general one for codes without an own sentence."""
        return f"\n\n{_CORRECTIONS.get(reason, _DEFAULT_CORRECTION)}\n\n"

    def last_turn_notice(self) -> str:
        return "No searches are left. Give the final answer now between <answer> and </answer>.\n\n"

    def validity(self, turns: Sequence[TurnRecord]) -> Validity:
        """Tree-GRPO's automaton, told apart by who wrote a tag: ``<information>`` counts from the environment only."""
        state = "start"
        for turn in turns:
            state, reason = _advance(state, turn.text, own_turn=True)
            if reason:
                return Validity(False, reason)
            if turn.kind == "correction":
                return Validity(False, f"corrected:{turn.action.argument}")
            if turn.kind == "results":
                if state != "after_search":
                    return Validity(False, f"unexpected_tag:{state}")
                state = "information"
        return _final(state)

    def validity_of_text(self, text: str) -> Validity:
        """The same automaton over one transcript in which turns and observations are already joined."""
        state, reason = _advance("start", text, own_turn=False)
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


def is_other_dialect(text: str) -> bool:
    """Whether a turn looks like a call in another convention (Hermes, ReAct, JSON functions, code blocks)."""
    return _OTHER_DIALECT.search(text) is not None


# -- reading a turn ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reading:
    action: Action
    span: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    thought: bool = False


def _read(text: str) -> _Reading:
    """One pass over the tags; ``opened`` remembers the innermost open tag of each action."""
    tags = list(_TAG.finditer(text))
    thoughts = [tag for tag in tags if tag[2] == "think"]
    last_close = max((tag.start() for tag in thoughts if tag[1]), default=-1)
    thinking = bool(thoughts) and bool(thoughts[0][1])
    thought = False
    opened: dict[str, re.Match[str]] = {}
    broken = in_thought = ""
    for index, tag in enumerate(tags):
        name = tag[2]
        if name == "think":
            thinking, thought = not tag[1], thought or bool(tag[1])
        elif thinking and tag.start() < last_close:
            in_thought = "action_in_thought" if tag[1] and name != "information" else in_thought
        elif name in ("search", "answer") and not tag[1]:
            opened[name] = tag
        elif name in opened and tags[index - 1] is opened[name]:
            return _closed(text, opened[name], tag, inside_think=thinking, thought=thought)
        elif name in ("search", "answer"):
            broken = "nested_tags" if name in opened else f"unopened_{name}"
            opened.pop(name, None)
    newest = max(opened.values(), key=lambda tag: tag.start(), default=None)
    unclosed = f"unclosed_{newest[2]}" if newest is not None else ""
    return _Reading(Action("invalid", broken or unclosed or in_thought or _no_action(text, tags)), thought=thought)


def _closed(
    text: str, opening: re.Match[str], closing: re.Match[str], *, inside_think: bool, thought: bool
) -> _Reading:
    kind = opening[2]
    argument = text[opening.end() : closing.start()].strip()
    action = Action(kind, argument)
    if not argument:
        action = Action("invalid", "empty_query" if kind == "search" else "empty_answer")
    notes = [
        code for code, holds in (("inside_think", inside_think), ("overrun", text[closing.end() :].strip())) if holds
    ]
    return _Reading(action, (opening.start(), closing.end()), tuple(notes), thought)


def _no_action(text: str, tags: Sequence[re.Match[str]]) -> str:
    if not text.strip():
        return "empty_turn"
    exact = {tag.start() for tag in tags}
    if any(match.start() not in exact for match in _ANY_SPELLING.finditer(text)):
        return "misspelt_tag"
    return "no_action"


# -- judging an episode --------------------------------------------------------------------------------------


def _advance(state: str, text: str, *, own_turn: bool) -> tuple[str, str]:
    """Feed text to the automaton: the new state, and the reason code when it was refused."""
    position = 0
    for tag in _TAG.finditer(text):
        if state not in _INSIDE and text[position : tag.start()].strip():
            return state, f"unexpected_text:{state}"
        if own_turn and tag[2] == "information":
            return state, "fabricated_information"
        if (state, tag[0]) not in _MOVES:
            return state, f"unexpected_tag:{state}"
        state = _MOVES[state, tag[0]]
        position = tag.end()
    if state not in _INSIDE and text[position:].strip():
        return state, f"unexpected_text:{state}"
    return state, ""


def _final(state: str) -> Validity:
    return Validity(True) if state == "end" else Validity(False, f"incomplete:{state}")


# -- writing -------------------------------------------------------------------------------------------------


def _prompt_text(question: str) -> str:
    return (
        "Find the answer to the question below. Whenever you have read something new, first think between <think> and "
        "</think>. If a fact is missing, look it up: write one query between <search> and </search>, and the passages "
        "that were found will be shown to you between <information> and </information>. You may search again as "
        "often as it helps. Once you know the answer, write it between <answer> and </answer>, as short as possible "
        f"and without an explanation.\nQuestion: {question}"
    )


_SENTENCE_ENDS = frozenset("?？!！.。．｡…؟")


def _close_question(question: str) -> str:
    stripped = question.strip()
    if not stripped:
        raise DataError("expected a question, found an empty one; remove the row or repair its 'question' field")
    trailing = itertools.takewhile(lambda character: not character.isalnum(), reversed(stripped))
    if _SENTENCE_ENDS & set(trailing):
        return stripped
    return stripped + ("？" if _is_wide(stripped[-1]) else "?")


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in ("W", "F")


def plain(text: str) -> str:
    """Retrieved text is data: tags of the grammar and chat control tokens inside it lose their angle brackets."""
    bracketed = _ANY_SPELLING.sub(lambda match: f"[{match[0][1:-1]}]", text)
    return _CONTROL_TOKEN.sub("[", bracketed)
