"""The words of a language that worlds are written in; sentences and questions are the styles' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from turntree.envs.worlds.schema import RELATIONS, SHARES, VAGUE, YEARS

__all__ = ["ENGLISH", "Language", "Speech"]

Language = Literal["en", "zh"]
"""Languages of worlds."""


@dataclass(frozen=True, slots=True)
class Speech:
    """Words and the ways to join them.

    Tables go by the words of :mod:`turntree.envs.worlds.schema`: ``kinds`` names an entity type, ``one`` says "a city",
    ``relations`` and ``years`` name what is known of an entity; ``sentences`` states a relation in prose, and
    ``paraphrases`` asks for it in test questions. Templates: ``of`` joins a relation ``{r}`` and its subject ``{x}`` in
    questions, ``query`` in searches; ``named`` puts the type before a name; ``also`` gives an alias; ``gap`` stands
    between sentences, ``both`` between names, and ``loosely`` states that a paraphrase ``{p}`` is ``{o}``.
    ``yes``, ``no`` and ``unknown`` (the refusal) are the accepted answers, ``units`` what may follow a computed number
    ``{n}``, ``counts`` other ways to write a small number. ``vague`` has the words that stand for several relations.
    """

    language: Language
    kinds: Mapping[str, str]
    one: Mapping[str, str]
    relations: Mapping[str, str]
    years: Mapping[str, str]
    sentences: Mapping[str, str]
    paraphrases: Mapping[str, str]
    of: str
    query: str
    named: str
    also: str
    gap: str
    yes: tuple[str, ...]
    no: tuple[str, ...]
    lecture_title: str
    lecture: str
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numerals: str = "0123456789"
    both: str = " and "
    loosely: str = "{p} is {o}."
    unknown: tuple[str, ...] = (
        "unknown",
        "not known",
        "unanswerable",
        "it is unknown",
        "I do not know",
        "I don't know",
    )
    counts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    vague: Mapping[str, str] = field(default_factory=dict)

    def spoken(self, word: str) -> str:
        """A relation, or the date of an entity type, of the schema in this language."""
        return self.relations[word] if word in self.relations else self.years[_KINDS_BY_YEAR[word]]

    def dated(self, template: str, subject: str, event: str, year: int) -> str:
        """A date ``{o}`` told by a template; ``{c}`` are its digits in the language's own numerals."""
        written = "".join(self.numerals[int(digit)] for digit in str(year))
        return template.format(s=subject, r=event, o=year, c=written)


_KINDS_BY_YEAR = {event: kind for kind, event in YEARS.items()}

ENGLISH = Speech(
    language="en",
    kinds={kind: kind for kind in SHARES},
    one={kind: kind for kind in SHARES},
    relations={r.word: r.word for r in RELATIONS},
    years=YEARS,
    sentences={r.word: r.sentence for r in RELATIONS},
    paraphrases={r.word: r.paraphrase for r in RELATIONS},
    of="the {r} of {x}",
    query="{x} {r}",
    named="the {k} {x}",
    also=", also known as {a},",
    gap=" ",
    yes=("yes",),
    no=("no",),
    lecture_title="{s} Lecture",
    lecture="The {t} is an annual event in memory of {s}. Recent talks were about {a} and {b}.",
    counts={1: ("one",), 2: ("two",), 3: ("three",)},
    vague={group: group for group in VAGUE},
)
"""How a world speaks English."""
