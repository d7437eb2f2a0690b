"""The tag grammar with few words, for models too small to read instructions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from turntree.envs.core import Action
from turntree.envs.grammar import Language, Observation, TagGrammar
from turntree.envs.grammar.words import SHARED
from turntree.envs.tags import neutralise
from turntree.search_backend.passage import Passage

__all__ = ["WorldGrammar"]

_NOTICES: dict[Language, str] = {"en": " No search is left .", "zh": "不能再查找。"}
_CORRECTIONS: dict[Language, str] = {
    "en": "<information> That was no action .</information>",
    "zh": "<information>没有可以执行的动作。</information>",
}
_HEADS: dict[Language, str] = {"en": "<information> ", "zh": "<information>"}


@dataclass(frozen=True)
class WorldGrammar(TagGrammar):
    """Reads turns exactly as :class:`TagGrammar` does; the prompt is the question alone and observations are terse.

    A decoder trained from scratch learns the format from its cold start, so instructions would only cost tokens.
    """

    @property
    def fingerprint(self) -> str:
        """Changes with ``think`` and with every text that the grammar writes."""
        found = [self.results(passages).text for passages in ([], [Passage("", "t", "x"), Passage("", "t", "y")])]
        texts = [self.think, self.prompt("?"), *found, self.last_turn_notice(), self.correction(""), *self.tool_names]
        return "world-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    def prompt(self, question: str) -> str:
        """The question, unchanged. Raises ``DataError`` when it is empty."""
        super().prompt(question)
        return question

    def results(self, passages: Sequence[Passage]) -> Observation:
        """``<information> text\\n...</information>``: no titles or numbers, tags inside passages neutralised."""
        return self.shown(
            "\n".join(neutralise(p.text, self.tool_names) for p in passages)
            if passages
            else SHARED[self.language].nothing_found
        )

    def write(self, thought: str, action: Action) -> str:
        """As :class:`TagGrammar`; Chinese without blanks, so that a name is the same tokens wherever it stands."""
        if self.language == "zh":
            return f"<think>{thought}</think><{action.kind}>{action.argument}</{action.kind}>"
        return super().write(thought, action)

    def shown(self, body: str) -> Observation:
        """What came back for a call, on one line with its tags."""
        return Observation(_HEADS[self.language], body, "</information>")

    def correction(self, reason: str) -> str:
        """One sentence for every reason."""
        del reason
        return _CORRECTIONS[self.language]

    def last_turn_notice(self) -> str:
        return _NOTICES[self.language]

    def words(self) -> tuple[str, ...]:
        """Words and signs that the grammar itself writes, tags aside, for a tokenizer's vocabulary."""
        nothing = SHARED[self.language].nothing_found
        written = re.sub("<.*?>", " ", " ".join((self.last_turn_notice(), self.correction(""), nothing)))
        # Chinese has no blanks: its characters are words, and the few that are common ones get a token of their own.
        return tuple(sorted(set(re.findall(r"[\u4e00-\u9fff]|[a-zA-Z]+|[^\w\s]", written))))
