"""What a finished trajectory called, read from the ``info`` of its turns."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turntree.agents.scorer import Finished, FinishedTurn

__all__ = ["Call", "CallTurn", "call_key", "call_turns", "gold_steps", "is_legal"]

_CODE = frozenset({"python"})
"""Tools whose argument is code, of one line too: there case, quotes and blanks mean something."""
_NO_CALL = frozenset({"", "none", "answer", "invalid"})


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was executed: the tool's name, and its argument as the model wrote it."""

    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class CallTurn:
    """The calls of one turn, what the model was shown for them, and the ids of the passages among it."""

    calls: tuple[Call, ...]
    result: str
    retrieved: tuple[str, ...] = ()


def call_turns(finished: Finished) -> tuple[CallTurn, ...]:
    """The turns that executed a call, in order.

    ``info["calls"]`` (``tool``, ``argument``) says what was called, or ``info["argument"]`` with the turn's ``action``
    as tool. An environment that writes neither (its own ``calls`` may well be a count, or a list of something else) has
    one call a turn: its ``action``, with the turn's whole text as argument; a turn that was shown nothing called
    nothing.
    """
    turns = (CallTurn(_calls(turn), turn.observation, _retrieved(turn)) for turn in finished.turns)
    return tuple(turn for turn in turns if turn.calls)


def _calls(turn: FinishedTurn) -> tuple[Call, ...]:
    listed = turn.info.get("calls")
    if isinstance(listed, (list, tuple)) and all(
        isinstance(c, Mapping) and {"tool", "argument"} <= {*c} for c in listed
    ):
        return tuple(Call(str(call["tool"]), str(call["argument"])) for call in listed)
    if "argument" in turn.info:
        return (Call(turn.action, str(turn.info["argument"])),)
    called = turn.action not in _NO_CALL and bool(turn.observation.strip())
    return (Call(turn.action, turn.text),) if called else ()


def _retrieved(turn: FinishedTurn) -> tuple[str, ...]:
    shown = turn.info.get("retrieved")
    passages = shown if isinstance(shown, (list, tuple)) else ()  # of another environment it may be a count
    return tuple(str(passage["id"]) for passage in passages if isinstance(passage, Mapping) and "id" in passage)


def call_key(call: Call) -> tuple[str, str]:
    """What two identical calls have in common.

    JSON objects are compared without the order of their keys; other arguments after NFKC and case folding, without
    white space and punctuation at their ends, runs of white space taken as one. Code (all that ``python`` is given, and
    any argument of several lines) keeps its case and its lines.
    """
    text = call.argument.strip()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # a model may well write a thousand brackets
        document = None
    if isinstance(document, Mapping):
        return call.tool, json.dumps(document, sort_keys=True, ensure_ascii=False)
    if call.tool in _CODE or "\n" in text:
        return call.tool, "\n".join(line.rstrip() for line in text.splitlines())
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return call.tool, _bare(folded) or folded


def _bare(text: str) -> str:
    start, end = 0, len(text)
    while start < end and not _is_content(text[start]):
        start += 1
    while end > start and not _is_content(text[end - 1]):
        end -= 1
    return text[start:end]


def _is_content(character: str) -> bool:
    """Not white space and not punctuation that ends or quotes a sentence; ``C++`` and ``-5`` keep their signs."""
    return not character.isspace() and character not in "?!.,;:\"'`“”‘’。、！？，；：…《》「」『』"


def is_legal(finished: Finished, *, excused: Sequence[str] = ()) -> bool:
    """Whether the environment found the format valid; true where it does not judge it.

    ``excused``: reason codes of corrections that do not make an episode illegal.
    """
    if finished.info.get("format_valid", True):
        return True
    kind, _, reason = str(finished.info.get("format_reason", "")).partition(":")
    return kind == "corrected" and reason in excused


def gold_steps(finished: Finished) -> tuple[Mapping[str, object], ...]:
    """The gold steps of the question, empty where it has none, or something that is no list of steps."""
    metadata = getattr(finished.task, "metadata", None) or {}
    steps = metadata.get("steps") or ()
    listed = isinstance(steps, (list, tuple)) and all(isinstance(step, Mapping) for step in steps)
    return tuple(steps) if listed else ()
