"""The convention of AT2PO and ATPO: ``<think>``, ``<search>``, ``<python>``, ``<result>``, ``<answer>`` with a box.

Turns are read as :mod:`turntree.envs.grammar` says, with these differences:

| turn | reading |
|---|---|
| ``<answer> ... \\boxed{a} ... </answer>`` | the answer ``a``: the last box whose braces balance |
| ``<answer>`` without such a box | ``no_boxed`` |
| ``\\boxed{ }`` | ``empty_answer`` |

``<python>`` is a call where the environment has a tool of that name. Results stand between ``<result>`` and
``</result>``. An episode is valid by the rules of AT2PO's reward (``deep_research_em``), told apart by who wrote a tag:

| reason | what is wrong in the model's turns |
|---|---|
| ``no_think``, ``unbalanced_think`` | no thought, or not as many ``</think>`` as ``<think>`` |
| ``no_answer``, ``several_answers`` | not exactly one ``<answer>`` and one ``</answer>`` |
| ``call_without_result`` | a turn with ``<search>`` (or the tag of a tool) that was given no result |
| ``fabricated_result`` | a ``<result>`` of the model's own |
| ``no_boxed`` | no box in the answer |
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from turntree.envs.core import Action
from turntree.envs.grammar.base import ParsedTurn, TurnRecord, Validity
from turntree.envs.grammar.tag import TagGrammar, close_question, given
from turntree.envs.grammar.words import ATPO, SHARED, fill
from turntree.search_backend.passage import Passage

__all__ = ["AtpoGrammar", "boxed"]

_BOX = "\\boxed{"
_BRACES = re.compile(r"(?:\\boxed)?\{|\}")
_ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)


@dataclass(frozen=True)
class AtpoGrammar(TagGrammar):
    """Turns of AT2PO; see the module's tables. the fields are those of :class:`TagGrammar`."""

    shown_tag: ClassVar[str] = "result"

    @property
    def fingerprint(self) -> str:
        """Changes with ``think`` and with every text that the grammar writes."""
        texts = [
            super().fingerprint,
            self.prompt("?"),
            self.results([Passage("", "t", "x")]).text,
            *ATPO[self.language].corrections.values(),
        ]
        return "atpo-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    def prompt(self, question: str) -> str:
        """One user message, the question at its end."""
        said, shared = ATPO[self.language], SHARED[self.language]
        lines = "".join(
            fill(said.tool, name=t.name, given=given(t, self.language), about=t.description) for t in self.tools
        )
        tools = fill(said.tools, lines=lines) if lines else ""
        return fill(said.prompt, tools=tools, question=fill(shared.question, question=close_question(question)))

    def parse(self, text: str) -> ParsedTurn:
        """Read one turn by the module's table; never raises."""
        parsed = super().parse(text)
        if parsed.action.kind != "answer":
            return parsed
        answer = boxed(parsed.action.argument)
        if answer is None:
            return replace(parsed, action=Action("invalid", "no_boxed"))
        kept = Action("answer", answer.strip()) if answer.strip() else Action("invalid", "empty_answer")
        return replace(parsed, action=kept)

    def write(self, thought: str, action: Action) -> str:
        """One turn; :meth:`parse` reads its action back, if the texts hold no tags and an answer's braces balance."""
        if action.kind == "answer":
            action = Action("answer", f"{_BOX}{action.argument}}}")
        return super().write(thought, action)

    def sentence(self, reason: str) -> str:
        return ATPO[self.language].corrections.get(reason) or super().sentence(reason)

    def last_turn_notice(self) -> str:
        return f"{ATPO[self.language].notice}\n\n"

    def validity(self, turns: Sequence[TurnRecord]) -> Validity:
        """AT2PO's rules over the model's turns; see the module's table. The answer's box is looked for last."""
        text = "".join(turn.text for turn in turns)
        reason = _thoughts(text) or _answers(text)
        if not reason and re.search(r"</?result>", text):
            reason = "fabricated_result"
        calls = tuple(f"<{name}>" for name in ("search", *self.tool_names))
        if not reason and any(turn.kind != "results" and any(call in turn.text for call in calls) for turn in turns):
            reason = "call_without_result"
        if not reason and not _is_boxed(text):
            reason = "no_boxed"
        return Validity(reason == "", reason)


def boxed(text: str) -> str | None:
    """What the last ``\\boxed{...}`` of balanced braces holds; None when there is none. In one pass."""
    opened: list[tuple[int, bool]] = []
    boxes: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text):
        if match[0] != "}":
            opened.append((match.end(), match[0] == _BOX))
        elif opened:
            start, is_box = opened.pop()
            if is_box:
                boxes.append((start, match.start()))
    return text[slice(*max(boxes))] if boxes else None


def _thoughts(text: str) -> str:
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened != closed:
        return "unbalanced_think"
    return "" if opened else "no_think"


def _is_boxed(text: str) -> bool:
    """Whether the one answer of ``text`` holds a box; of many tags the search would take quadratic time."""
    found = _ANSWER.search(text)
    return found is not None and boxed(found[1]) is not None


def _answers(text: str) -> str:
    opened, closed = text.count("<answer>"), text.count("</answer>")
    if (opened, closed) == (1, 1):
        return ""
    return "several_answers" if max(opened, closed) > 1 else "no_answer"
