"""Tags in turns: read as an action, fed to the automaton of a valid episode, neutralised in what is data.

The table of :mod:`turntree.envs.grammar` says how a turn is read; this is the reading itself, for any set of tools.
"""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turntree.envs.core import Action

__all__ = [
    "Reading",
    "Tags",
    "advance",
    "any_spelling",
    "bracket",
    "compile_tags",
    "exactly",
    "is_other_dialect",
    "misspelling",
    "neutralise",
    "read",
]

_CONTROL_TOKEN = re.compile(r"<(?=[|｜][^>\s]{1,64}[|｜]>)")
# Ways of calling tools that neither tags nor Hermes use, then what only one of the two would call foreign.
_FOREIGN = (
    r"<function_call>|<function=|<invoke\b|<\|?(?:python_tag|action_start)|<\|tool_call|<｜tool|\[TOOL_CALLS\]"
    r"|^[ \t]*(?:Action|行动|动作)\s*(?:\d+\s*)?[:：]\s*\w+\s*[\[(（【]"
    r"|\"(?:arguments|parameters)\"\s*:\s*[{\"]|<code>|<python>|```tool"
)
_OTHER_DIALECT = {
    "tags": re.compile(rf"{_FOREIGN}|<tool_call|```(?:python|json)", re.IGNORECASE | re.MULTILINE),
    "hermes": re.compile(rf"{_FOREIGN}|</?(?:search|information|answer)>", re.IGNORECASE | re.MULTILINE),
}
_EMPTY = {"search": "empty_query", "answer": "empty_answer"}


@dataclass(frozen=True)
class Tags:
    """The tags of a grammar, compiled: what calls for an action, and the automaton of a valid episode.

    ``shown`` is the tag around what the environment answers.
    """

    actions: frozenset[str]
    exact: re.Pattern[str]
    any_spelling: re.Pattern[str]
    moves: Mapping[tuple[str, str], str]
    inside: frozenset[str]
    shown: str = "information"


@functools.cache
def compile_tags(tools: tuple[str, ...] = (), shown: str = "information") -> Tags:
    """The automaton is Tree-GRPO's (qa_em_format.is_valid_sequence), every tool in the place of the search.

    think -> (search -> information -> think)* -> answer, only white space between tags.
    """
    calls = ("search", *tools)
    moves = {
        ("start", "<think>"): "in_think",
        (shown, "<think>"): "in_think",
        ("in_think", "</think>"): "after_think",
        (f"in_{shown}", f"</{shown}>"): shown,
        ("after_think", "<answer>"): "in_answer",
        ("in_answer", "</answer>"): "end",
    }
    for call in calls:
        moves["after_think", f"<{call}>"] = f"in_{call}"
        moves[f"in_{call}", f"</{call}>"] = f"after_{call}"
        moves[f"after_{call}", f"<{shown}>"] = f"in_{shown}"
    names = ("think", shown, "answer", *calls)
    return Tags(
        actions=frozenset({"answer", *calls}),
        exact=exactly(names),
        any_spelling=any_spelling(names),
        moves=moves,
        inside=frozenset(f"in_{name}" for name in names),
        shown=shown,
    )


def exactly(names: Sequence[str]) -> re.Pattern[str]:
    """Tags as they must be written: group 1 the slash of a closing one, group 2 the name."""
    return re.compile(rf"<(/?)({'|'.join(names)})>")


def any_spelling(names: Sequence[str]) -> re.Pattern[str]:
    """Tags however they are spelt, full-width signs and letters included.

    Written so that long runs of white space cannot be split in two ways: a turn is untrusted text of any length.
    """
    spelt = "|".join("".join(_width(sign) for sign in name) for name in names)
    return re.compile(rf"[<＜﹤]\s*(?:[/／]\s*)?(?:{spelt})\s*(?:[/／]\s*)?[>＞﹥]", re.IGNORECASE)


def _width(sign: str) -> str:
    """A printable ASCII sign and its full-width form, as a class."""
    return f"[{re.escape(sign)}{chr(ord(sign) + 0xFEE0)}]"


def misspelling(text: str, exact: Container[int], spelt: re.Pattern[str], names: Sequence[str]) -> str:
    """The reason code for tags that are not written as they must be; empty where there is none.

    ``exact``: where tags that are right begin. Tags of ``names`` in the brackets of Chinese titles are looked for too,
    which is not done in data: a title there may be any word.
    """
    wrong = next((match[0] for match in spelt.finditer(text) if match.start() not in exact), "")
    if wrong.isascii() and wrong:
        return "misspelt_tag"
    # No run of white space can be split in two ways here either: see any_spelling.
    titled = rf"[〈《]\s*(?:[/／]\s*)?(?:{'|'.join(names)})\s*[〉》]"
    return "full_width_tag" if wrong or re.search(titled, text, re.IGNORECASE) else ""


@dataclass(frozen=True, slots=True)
class Reading:
    """The action that a turn asks for, where it stands, what was odd, and whether a closed thought came before it."""

    action: Action
    span: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    thought: bool = False


def read(text: str, known: Tags) -> Reading:
    """One pass over the tags; ``opened`` remembers the innermost open tag of each action."""
    tags = list(known.exact.finditer(text))
    thoughts = [tag for tag in tags if tag[2] == "think"]
    last_close = text.rfind("</think>")
    thinking = bool(thoughts) and bool(thoughts[0][1])
    thought = False
    opened: dict[str, re.Match[str]] = {}
    broken = in_thought = ""
    for index, tag in enumerate(tags):
        name = tag[2]
        if name == "think":
            thinking, thought = not tag[1], thought or bool(tag[1])
        elif thinking and tag.start() < last_close:
            in_thought = "action_in_thought" if tag[1] and name != known.shown else in_thought
        elif name in known.actions and not tag[1]:
            opened[name] = tag
        elif name in opened and tags[index - 1] is opened[name]:
            return _closed(text, opened[name], tag, inside_think=thinking, thought=thought)
        elif name in known.actions:
            broken = "nested_tags" if name in opened else f"unopened_{name}"
            opened.pop(name, None)
    newest = max(opened.values(), key=lambda tag: tag.start(), default=None)
    unclosed = f"unclosed_{newest[2]}" if newest is not None else ""
    unread = _unread(text, tags, known)
    full_width = unread if unread == "full_width_tag" else ""
    reason = full_width or broken or unclosed or in_thought or unread
    return Reading(Action("invalid", reason), thought=thought)


def _closed(text: str, opening: re.Match[str], closing: re.Match[str], *, inside_think: bool, thought: bool) -> Reading:
    kind = sys.intern(opening[2])  # one text for all turns of all episodes
    argument = text[opening.end() : closing.start()]
    if kind not in _EMPTY:  # what a tool is given may be code, whose first line is indented as the others are
        argument = textwrap.dedent(argument)
    argument = argument.strip()
    action = Action(kind, argument) if argument else Action("invalid", _EMPTY.get(kind, "empty_call"))
    notes: tuple[str, ...] = ("inside_think",) if inside_think else ()
    if text[closing.end() :].strip():
        notes += ("overrun",)
    return Reading(action, (opening.start(), closing.end()), notes, thought)


def _unread(text: str, tags: Sequence[re.Match[str]], known: Tags) -> str:
    if not text.strip():
        return "empty_turn"
    exact = {tag.start() for tag in tags}
    return misspelling(text, exact, known.any_spelling, tuple(known.actions)) or "no_action"


def advance(state: str, text: str, known: Tags, *, own_turn: bool) -> tuple[str, str]:
    """Feed text to the automaton: the new state, and the reason code when it was refused."""
    position = 0
    for tag in known.exact.finditer(text):
        if state not in known.inside and text[position : tag.start()].strip():
            return state, f"unexpected_text:{state}"
        if own_turn and tag[2] == known.shown:
            return state, f"fabricated_{known.shown}"
        if (state, tag[0]) not in known.moves:
            return state, f"unexpected_tag:{state}"
        state = known.moves[state, tag[0]]
        position = tag.end()
    if state not in known.inside and text[position:].strip():
        return state, f"unexpected_text:{state}"
    return state, ""


def is_other_dialect(text: str, own: Literal["tags", "hermes"] = "tags") -> bool:
    """Whether a turn looks like a call in another convention than ``own`` (ReAct, JSON functions, code blocks, ...)."""
    return _OTHER_DIALECT[own].search(text) is not None


def neutralise(text: str, tools: tuple[str, ...] = (), shown: str = "information") -> str:
    """Retrieved text is data: tags of the grammar and chat control tokens inside it lose their angle brackets."""
    return bracket(text, compile_tags(tools, shown).any_spelling)


def bracket(text: str, tags: re.Pattern[str]) -> str:
    """``text`` with ``tags`` and chat control tokens in square brackets."""
    bracketed = tags.sub(lambda match: f"[{match[0][1:-1]}]", text)
    return _CONTROL_TOKEN.sub("[", bracketed)
