"""The tag grammar with few words, for models too small to read instructions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from turntree.envs.grammar import Observation, TagGrammar
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
        return "world-" + hashlib.sha256(f"{self.think}\0{_NOTICE}\0{_CORRECTION}".encode()).hexdigest()[:12]

    def prompt(self, question: str) -> str:
        """The question. Raises ``DataError`` when it is empty."""
        super().prompt(question)
        return question

    def results(self, passages: Sequence[Passage]) -> Observation:
        """``<information>`` text of the passages ``</information>``, tags inside passages neutralised."""
        documents = super().results([Passage(p.id, "", p.text) for p in passages]).body
        for number in range(1, len(passages) + 1):
            documents = documents.replace(f"Doc {number}(Title: ) ", "", 1)
        return Observation("<information> ", documents, "</information>")

    def correction(self, reason: str) -> str:
        """One sentence for every reason."""
        del reason
        return _CORRECTION

    def last_turn_notice(self) -> str:
        return _NOTICE

    def words(self) -> tuple[str, ...]:
        """Words that the grammar itself writes, for a tokenizer's vocabulary."""
        nothing_found = self.results(()).body
        return tuple(sorted({*_NOTICE.split(), "That", "was", "action", *nothing_found.rstrip(".").split()}))
