"""The tag grammar with few words, for models too small to read instructions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from turntree.envs.grammar import NOTHING_FOUND, Observation, TagGrammar
from turntree.envs.tags import neutralise
from turntree.search_backend.passage import Passage

__all__ = ["WorldGrammar"]

_NOTICE = " No search is left ."
_CORRECTION = "<information> That was no action .</information>"


@dataclass(frozen=True)
class WorldGrammar(TagGrammar):
    """Reads turns exactly as :class:`TagGrammar` does; the prompt is the question alone and observations are terse.

    A decoder trained from scratch learns the format from its cold start, so instructions would only cost tokens.
    """

    @property
    def fingerprint(self) -> str:
        """Changes with ``think`` and with every text that the grammar writes."""
        found = [self.results(passages).text for passages in ([], [Passage("", "t", "x"), Passage("", "t", "y")])]
        texts = [self.think, self.prompt("?"), *found, _NOTICE, _CORRECTION, *self.tool_names]
        return "world-" + hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]

    def prompt(self, question: str) -> str:
        """The question, unchanged. Raises ``DataError`` when it is empty."""
        super().prompt(question)
        return question

    def results(self, passages: Sequence[Passage]) -> Observation:
        """``<information> text\\n...</information>``: no titles or numbers, tags inside passages neutralised."""
        return self.shown(
            "\n".join(neutralise(p.text, self.tool_names) for p in passages) if passages else NOTHING_FOUND
        )

    def shown(self, body: str) -> Observation:
        """What came back for a call, on one line with its tags."""
        return Observation("<information> ", body, "</information>")

    def correction(self, reason: str) -> str:
        """One sentence for every reason."""
        del reason
        return _CORRECTION

    def last_turn_notice(self) -> str:
        return _NOTICE

    def words(self) -> tuple[str, ...]:
        """Words and signs that the grammar itself writes, tags aside, for a tokenizer's vocabulary."""
        written = re.sub("<.*?>", " ", " ".join((_NOTICE, _CORRECTION, NOTHING_FOUND)))
        return tuple(sorted(set(re.findall(r"\w+|[^\w\s]", written))))
