"""How the turns of a task of your own are read: by the author's action tags, or whole as plain text.

:class:`ActionTags` reads a turn as :class:`turntree.envs.grammar.TagGrammar` does (see the table there), with the
author's tags in the place of ``<search>`` and ``<answer>``. :class:`PlainText` takes every turn as one action, ``say``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args, runtime_checkable

from turntree.envs.core import Action
from turntree.envs.grammar import NO_OUTPUT, Observation, ParsedTurn, Think
from turntree.envs.loading import reject_unknown
from turntree.envs.tags import Tags, is_other_dialect, neutralise, read
from turntree.envs.task import FrozenDict
from turntree.errors import ConfigError

__all__ = ["ActionGrammar", "ActionTags", "PlainText"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = ("think", "information", "invalid", "none")
_CORRECTIONS = {
    "cut_at_length": "The last turn was too long and was cut off, so nothing of it was executed. Be brief.",
    "empty_call": "The action was empty. Write what it is given between its tags.",
    "inside_think": "Close the thought with </think> before you act.",
    "missing_think": "Think between <think> and </think> before you act.",
}
_LAST = "This is the last turn."


@runtime_checkable
class ActionGrammar(Protocol):
    """What a task needs to know about a way of writing turns. All methods are pure and total."""

    @property
    def fingerprint(self) -> str:
        """Changes with everything that changes how turns are read or observations are written."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; they belong to it."""
        ...

    def with_actions(self, actions: Mapping[str, str]) -> ActionGrammar:
        """The same grammar that also reads ``actions``, name to description: those of a task's tools."""
        ...

    def instructions(self) -> str:
        """What the prompt says about how to act; empty for nothing."""
        ...

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn. Never raises: what cannot be read is an ``invalid`` action with a reason code."""
        ...

    def write(self, thought: str, action: Action) -> str:
        """One turn that :meth:`parse` reads back."""
        ...

    def observation(self, text: str) -> Observation:
        """What came back for an action; the text is data."""
        ...

    def correction(self, reason: str) -> str:
        """The observation of a turn that was not executed."""
        ...

    def last_turn_notice(self) -> str:
        """What is added to the observation before the last turn."""
        ...


@dataclass(frozen=True)
class ActionTags:
    """Turns that hold one action between its tags, after an optional thought: ``<go> north </go>``.

    ``actions``: name to one line that says what the action does and what is written between its tags. ``bare``: those
    that need nothing there (``<look></look>``). ``think``: whether an action needs a closed thought before it.
    """

    actions: Mapping[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    think: Think = "optional"

    def __post_init__(self) -> None:
        for name in self.actions:
            if not _NAME.fullmatch(name) or name in _TAKEN:
                raise ConfigError(
                    f"expected an action's name of small letters, digits and underscores other than "
                    f"{', '.join(_TAKEN)}, found {name!r}"
                )
        reject_unknown(self.bare, self.actions, what="bare action")
        reject_unknown([self.think], get_args(Think), what="think setting")
        object.__setattr__(self, "actions", FrozenDict(self.actions))

    @property
    def fingerprint(self) -> str:
        parts = [*self.actions.items()], self.bare, self.think, self.instructions(), _CORRECTIONS, _LAST
        return "actions-" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{name}>" for name in self.actions)

    def with_actions(self, actions: Mapping[str, str]) -> ActionTags:
        """The same grammar with more actions. Raises ``ConfigError`` for a name that is there already."""
        twice = sorted(set(actions) & set(self.actions))
        if twice:
            raise ConfigError(f"{', '.join(twice)}: both an action of the grammar and a tool; name them apart")
        return replace(self, actions={**self.actions, **actions})

    def instructions(self) -> str:
        """The list of actions, and how a thought and what comes back are marked."""
        lines = "".join(
            f"\n<{name}></{name}>: {text}" if name in self.bare else f"\n<{name}> ... </{name}>: {text}"
            for name, text in self.actions.items()
        )
        return (
            "You may think first, between <think> and </think>. Then act once; what comes back is shown to you between "
            f"<information> and </information>. The actions:{lines}"
        )

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn; never raises."""
        reading = read(text, _compiled(tuple(self.actions)))
        action = reading.action
        if action.kind == "invalid" and reading.span is not None:  # closed tags with nothing between them
            name = text[reading.span[0] + 1 : text.index(">", reading.span[0])]
            action = Action(name, "") if name in self.bare else Action("invalid", "empty_call")
        if action.kind != "invalid" and self.think == "required":
            if "inside_think" in reading.notes:
                action = Action("invalid", "inside_think")
            elif not reading.thought:
                action = Action("invalid", "missing_think")
        other = action == Action("invalid", "no_action") and is_other_dialect(text)
        return ParsedTurn(action, reading.span, reading.notes, other)

    def write(self, thought: str, action: Action) -> str:
        """One turn; :meth:`parse` reads its action back, if the texts hold no tags. An empty thought is left out."""
        inside = f" {action.argument} " if action.argument else ""
        thinking = f"<think> {thought} </think> " if thought else ""
        return f"{thinking}<{action.kind}>{inside}</{action.kind}>"

    def observation(self, text: str) -> Observation:
        """The text between ``<information>`` tags; tags of the grammar inside it are neutralised."""
        body = neutralise(text, tuple(self.actions)) if text.strip() else NO_OUTPUT
        return Observation("\n\n<information>", body, "</information>\n\n")

    def correction(self, reason: str) -> str:
        """A sentence for the reason code, the general one with the names of the actions for all others."""
        names = ", ".join(f"<{name}>" for name in self.actions)
        general = f"The last turn held no action that could be executed. Write one between its tags: {names}."
        return f"\n\n{_CORRECTIONS.get(reason, general)}\n\n"

    def last_turn_notice(self) -> str:
        return f"{_LAST}\n\n"


@dataclass(frozen=True)
class PlainText:
    """Every turn is one action, ``say``, whose argument is the whole turn without white space around it.

    ``stop``: strings that end a turn besides the end of the text, such as a line end. Tools cannot be called.
    """

    stop: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        return f"plain-{json.dumps(self.stop)}"

    def with_actions(self, actions: Mapping[str, str]) -> PlainText:
        """The same grammar. Raises ``ConfigError`` if there are any ``actions``: nothing could call them."""
        if actions:
            raise ConfigError(f"plain text cannot call the tools {', '.join(actions)}; use ActionTags as grammar")
        return self

    def instructions(self) -> str:
        return ""

    def parse(self, text: str) -> ParsedTurn:
        """The turn as one action; ``empty_turn`` for white space alone."""
        said = text.strip()
        return ParsedTurn(Action("say", said) if said else Action("invalid", "empty_turn"))

    def write(self, thought: str, action: Action) -> str:
        """The argument of the action; thoughts have no place in plain text."""
        del thought
        return action.argument

    def observation(self, text: str) -> Observation:
        """The text as a paragraph of its own; control tokens of chat templates inside it are neutralised."""
        return Observation("\n\n", neutralise(text), "\n\n")

    def correction(self, reason: str) -> str:
        sentence = _CORRECTIONS["cut_at_length"] if reason == "cut_at_length" else "The last turn was empty. Say more."
        return f"\n\n{sentence}\n\n"

    def last_turn_notice(self) -> str:
        return f"{_LAST}\n\n"


@functools.cache
def _compiled(actions: tuple[str, ...]) -> Tags:
    """The tags as :func:`turntree.envs.tags.read` wants them; there is no automaton of a valid episode."""
    either = "|".join(("think", "information", *actions))
    return Tags(
        actions=frozenset(actions),
        exact=re.compile(rf"<(/?)({either})>"),
        any_spelling=re.compile(rf"<\s*(?:/\s*)?(?:{either})\s*(?:/\s*)?>", re.IGNORECASE),
        moves={},
        inside=frozenset(),
    )
