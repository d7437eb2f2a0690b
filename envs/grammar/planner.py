"""Turns of a planner, which calls tools until it stops and never answers: any other grammar with another ending.

| grammar inside | the planner stops with | an answer of its own |
|---|---|---|
| tags (``tags``, ``atpo``, own ones that learn tools) | ``<finish></finish>`` | ``own_answer``, a correction |
| ``hermes`` | a turn without a call; what it says is dropped | there is none |

Everything else is read, shown and judged as the grammar inside does it. What stands between the tags of ``<finish>`` is
dropped. An episode is valid where it would be with a proper answer in the place of the ending.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, cast, get_args

from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar.atpo import AtpoGrammar
from turntree.envs.grammar.base import Grammar, Observation, ParsedTurn, ToolGrammar, TurnRecord, Validity
from turntree.envs.grammar.hermes import HermesGrammar
from turntree.envs.grammar.tag import TagGrammar, close_question, given
from turntree.envs.grammar.words import Language
from turntree.envs.loading import reject_unknown
from turntree.errors import ConfigError
from turntree.search_backend.passage import Passage

__all__ = ["DONE", "FINISH", "PlannerGrammar"]

FINISH = "finish"
"""The kind of the action that stops a planner, the tag that it is written with, and the episode's stop reason."""

DONE = Action(FINISH, "")
"""The action with which a planner ends: it has called all that it wants."""

_PROMPTS = Path(__file__).resolve().parent.parent / "prompts"
_SPEC = ToolSpec(FINISH, "Ends the work; stays empty. Somebody else writes the answer.")
_SEARCH = {"en": "finds passages for a query", "zh": "按查询查找段落"}
_EMPTY = re.compile(rf"<{FINISH}>\s*</{FINISH}>")
_ANSWERS = re.compile("answer|答", re.IGNORECASE)
# In the place of the ending, for the rules of an episode.
_STAND_IN = Action("answer", "x")
_NO_ANSWER = ("empty_answer", "no_boxed")


@dataclass(frozen=True, slots=True)
class _Words:
    stop: dict[str, str]
    notice: str
    own_answer: str
    no_action: str
    rule: str
    done: str


_WORDS: dict[Language, _Words] = {
    "en": _Words(
        stop={"tags": f"write <{FINISH}></{FINISH}>", "hermes": "reply without a call"},
        notice="No calls are left. Stop now: {stop}.",
        own_answer="Somebody else writes the answer. Call a tool if a fact is missing; to stop, {stop}.",
        no_action="The last turn held no call that could be executed. Call a tool if one is needed; to stop, {stop}.",
        rule="Only gather the facts: somebody else writes the answer, so never write it yourself. To stop, {stop}.",
        done="Done",
    ),
    "zh": _Words(
        stop={"tags": f"写 <{FINISH}></{FINISH}>", "hermes": "不带调用地回复"},
        notice="不能再调用了。现在请停止：{stop}。",
        own_answer="答案由别人来写。如果还缺事实，请调用工具；要停止，请{stop}。",
        no_action="上一轮没有可以执行的调用。如果还缺事实，请调用工具；要停止，请{stop}。",
        rule="只收集事实：答案由别人来写，请不要自己写。要停止，请{stop}。",
        done="完成",
    ),
}


@dataclass(frozen=True)
class PlannerGrammar:
    """``inner`` with the ending of a planner; see the module's table.

    ``language``: of the packaged prompt (for ``tags``, ``atpo`` and ``hermes``) and of what the planner is told instead
    of a sentence that asks for an answer; the grammars of this package say all else in it too. Other grammars keep
    their own prompt: one that holds more than the question is followed by the rule to gather facts only. ``tools``:
    those besides the search, set by :meth:`with_tools`.

    Raises ``ConfigError`` for a grammar that cannot learn to read the tag, and for a tool of its name.
    """

    inner: Grammar
    language: Language = "en"
    tools: tuple[ToolSpec, ...] = ()

    def __post_init__(self) -> None:
        reject_unknown([self.language], get_args(Language), what="language of the planner")
        kind = type(self.inner).__name__
        if not isinstance(self.inner, ToolGrammar):
            raise ConfigError(f"the grammar {kind} cannot learn a planner's ending: it has no with_tools and write")
        if isinstance(self.inner, HermesGrammar):
            object.__setattr__(self, "inner", replace(self.inner, language=self.language, answer="text"))
        elif isinstance(self.inner, TagGrammar):
            object.__setattr__(self, "inner", replace(self.inner, language=self.language))
        if any(tool.name == FINISH for tool in self.tools):
            raise ConfigError(f"a tool is called {FINISH!r}, which is how a planner stops; give it another name")
        written = self.write("Nothing is missing.", DONE)
        if (found := self.parse(written).action) != DONE:
            raise ConfigError(
                f"the grammar {kind} cannot read a planner's ending: expected {DONE} from {written!r}, found {found}; "
                "its parse() must read the calls of tools"
            )

    @property
    def _silent(self) -> bool:
        """Whether the planner stops with a turn without a call."""
        return isinstance(self.inner, HermesGrammar)

    @functools.cached_property
    def _taught(self) -> ToolGrammar:
        inner = cast("ToolGrammar", self.inner)
        tools = self.tools if self._silent else (*self.tools, _SPEC)
        return cast("ToolGrammar", inner.with_tools(tools)) if tools else inner

    @functools.cached_property
    def _answer(self) -> str:
        """How the grammar inside writes an answer, without the thought; empty where it does not say."""
        written = self._taught.write("t", _STAND_IN)
        span = self._taught.parse(written).span
        return written[slice(*span)] if span is not None else ""

    @property
    def _words(self) -> _Words:
        return _WORDS[self.language]

    def _say(self, sentence: str) -> str:
        return sentence.replace("{stop}", self._words.stop["hermes" if self._silent else "tags"])

    @property
    def fingerprint(self) -> str:
        """Changes with the grammar inside, the language, and every text that is written in its place."""
        texts = [self._taught.fingerprint, self.language, self._template, *map(self._say, _sentences(self._words))]
        return "planner-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(self._taught.stop)

    @property
    def max_calls(self) -> int:
        """Calls of one turn."""
        return int(getattr(self.inner, "max_calls", 1))

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """The same grammar with ``tools`` besides the search."""
        return replace(self, tools=tuple(tools))

    # -- writing -------------------------------------------------------------------------------------------------

    @property
    def _template(self) -> str:
        """The packaged prompt; empty for grammars that have one of their own."""
        family = "hermes" if self._silent else "tags" if type(self.inner) in (TagGrammar, AtpoGrammar) else ""
        return _read(f"planner_{family}_{self.language}.txt") if family else ""

    def prompt(self, question: str) -> str:
        """One user message. Raises ``DataError`` for an empty question."""
        if not self._template:
            own = self._taught.prompt(question)
            return own if own.strip() == question.strip() else f"{own}\n\n{self._say(self._words.rule)}"
        before, _, after = self._template.partition("{question}")
        before = before.replace("{shown}", self._shown).replace("{tools}", self._tool_lines())
        return before + close_question(question) + after

    @property
    def _shown(self) -> str:
        return str(getattr(self.inner, "shown_tag", ""))

    def _tool_lines(self) -> str:
        if isinstance(self._taught, HermesGrammar):
            return "\n".join(json.dumps(function, ensure_ascii=False) for function in self._taught.functions())
        own = (f"<{t.name}> {given(t, self.language)} </{t.name}>: {t.description}" for t in self.tools)
        return "\n".join((f"<search> ... </search>: {_SEARCH[self.language]}", *own))

    def write(self, thought: str, action: Action) -> str:
        """One turn that :meth:`parse` reads back; an answer is written as the ending."""
        if action.kind not in (FINISH, "answer"):
            return self._taught.write(thought, action)
        if self._silent:
            return self._taught.write(thought, Action("answer", self._words.done))
        return _EMPTY.sub(f"<{FINISH}></{FINISH}>", self._taught.write(thought, DONE))

    def results(self, passages: Sequence[Passage]) -> Observation:
        """As the grammar inside; the planner's tag inside passages is neutralised too."""
        return self._taught.results(passages)

    def tool_result(self, name: str, text: str) -> Observation:
        """As the grammar inside."""
        return self._taught.tool_result(name, text)

    def correction(self, reason: str) -> str:
        """What the grammar inside says, unless that asks for an answer."""
        if reason == "own_answer":
            return self._framed(self._words.own_answer)
        said = self._taught.correction(reason)
        return self._framed(self._words.no_action) if _ANSWERS.search(said) else said

    def last_turn_notice(self) -> str:
        said = self._taught.last_turn_notice()
        if not _ANSWERS.search(said):
            return said
        notice = self._say(self._words.notice)
        return f"\n{notice}" if self._silent else f"{notice}\n\n"

    def _framed(self, sentence: str) -> str:
        said = self._say(sentence)
        return said if self._silent else f"\n\n{said}\n\n"

    # -- reading -------------------------------------------------------------------------------------------------

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn by the module's table; never raises."""
        parsed = self._taught.parse(text)
        if parsed.action == Action("invalid", "empty_call") and parsed.span is not None:
            start, end = parsed.span
            if _EMPTY.fullmatch(text, start, end):  # read it again as a call that holds something, with all other rules
                filled = f"{text[:start]}<{FINISH}>.</{FINISH}>{text[end:]}"
                parsed = replace(self._taught.parse(filled), span=parsed.span)
        kind, argument = parsed.action.kind, parsed.action.argument
        answered = kind == "answer" or (kind == "invalid" and argument in _NO_ANSWER)
        if kind == FINISH or (answered and self._silent):
            return replace(parsed, action=DONE)
        return replace(parsed, action=Action("invalid", "own_answer")) if answered else parsed

    def validity(self, turns: Sequence[TurnRecord]) -> Validity:
        """The format by the rules inside, with an answer in the place of the ending."""
        if turns and turns[-1].action.kind == FINISH:
            turns = (*turns[:-1], self._as_answer(turns[-1]))
        return self._taught.validity(turns)

    def _as_answer(self, turn: TurnRecord) -> TurnRecord:
        answered = replace(turn, action=_STAND_IN)
        span = self._taught.parse(turn.text).span
        if self._silent or span is None:
            return answered
        return replace(answered, text=turn.text[: span[0]] + self._answer + turn.text[span[1] :])


def _sentences(words: _Words) -> tuple[str, ...]:
    return words.notice, words.own_answer, words.no_action, words.rule, words.done


@functools.cache
def _read(name: str) -> str:
    return (_PROMPTS / name).read_text(encoding="utf-8").strip()
