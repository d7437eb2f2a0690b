"""What every way of writing turns must offer, and the values that it deals in."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar.words import NO_OUTPUT, NOTHING_FOUND, SHARED, Language, fill
from turntree.envs.loading import reject_unknown
from turntree.envs.schemas import example_argument
from turntree.errors import ConfigError
from turntree.search_backend.passage import Passage

__all__ = [
    "NOTHING_FOUND",
    "NO_OUTPUT",
    "Grammar",
    "Language",
    "Observation",
    "ParsedTurn",
    "Think",
    "ToolGrammar",
    "TurnRecord",
    "Validity",
    "complete_turn",
    "passage_lines",
    "reading_tools",
    "speaking",
]

logger = logging.getLogger(__name__)

Think = Literal["optional", "required"]
"""Whether a turn may leave out its thought."""
ObservationKind = Literal["results", "correction", "none"]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a turn asks for.

    ``span``: start and end of the action in the turn's text, tags included, or None. ``notes``: reason codes of what
    was odd but did not matter (``overrun``, ``inside_think``). ``other_dialect``: there is no action, but something
    that looks like a call of another convention; a high rate of it means that prompt and grammar do not fit.
    ``more``: further calls of the same turn, in order (:class:`HermesGrammar` only). ``hint``: what exactly was wrong
    with an invalid turn, one line for the agent, tags neutralised.
    """

    action: Action
    span: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    other_dialect: bool = False
    more: tuple[Action, ...] = ()
    hint: str = ""

    @property
    def actions(self) -> tuple[Action, ...]:
        """Everything that the turn asks for, in order."""
        return (self.action, *self.more)


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
    """A grammar that can learn to read calls of tools besides the search, as all of this package can.

    A call is an action whose kind is the tool's name and whose argument is the text that the tool is given: its one
    string, or a JSON object of arguments (see :mod:`turntree.envs.schemas`).
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
        argument = example_argument(tool)
        if argument is None:  # a schema that no example could be made for: nothing to try
            continue
        call = Action(tool.name, argument)
        written = taught.write("I use it.", call) if isinstance(taught, ToolGrammar) else ""
        if (found := taught.parse(written).action) != call:
            raise ConfigError(
                f"the grammar {kind} cannot read the tool {tool.name}: expected {call} from {written!r}, found "
                f"{found}; its parse() must read what its write() writes, or use no tools"
            )
    return taught


def speaking(grammar: Grammar, language: Language) -> Grammar:
    """``grammar`` with its texts in a language, one of ``en`` (a grammar's own), ``zh``.

    Raises ``ConfigError`` for a grammar that has no texts in it.
    """
    reject_unknown([language], get_args(Language), what="language")
    if language == "en":
        return grammar
    value: Any = grammar  # is_dataclass asks the type: a grammar that passes names on to another one is none itself
    if not dataclasses.is_dataclass(value) or "language" not in {f.name for f in dataclasses.fields(value)}:
        raise ConfigError(
            f"the grammar {type(grammar).__name__} has no texts in the language {language}: it is no dataclass with a "
            "field language; leave the language out, and give a prompt of your own"
        )
    spoken: Any = dataclasses.replace(cast("Any", value), language=language)
    return cast("Grammar", spoken)


def passage_lines(passages: Sequence[Passage], clean: Callable[[str], str], *, language: Language) -> str:
    """``Doc 1(Title: T) text`` a passage, each part passed through ``clean``; an honest line when there is none."""
    said = SHARED[language]
    lines = [fill(said.document, i=i, title=clean(p.title), text=clean(p.text)) for i, p in enumerate(passages, 1)]
    return "\n".join(lines) if lines else said.nothing_found


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
