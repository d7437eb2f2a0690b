"""What a world is about: entity types, typed relations, and the words for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RELATIONS", "SHARES", "VAGUE", "YEARS", "Relation", "relation", "relations_of", "vague_group"]


@dataclass(frozen=True, slots=True)
class Relation:
    """A functional relation: each subject has at most one object.

    ``word`` names it in passages and queries. ``sentence`` is a second way to state it in prose; ``paraphrase`` is the
    noun phrase that only test questions use.
    """

    subject: str
    word: str
    object: str
    sentence: str
    paraphrase: str


# Percent of the entities of a world that are of each type.
SHARES = {
    "person": 30,
    "city": 15,
    "company": 12,
    "film": 12,
    "book": 10,
    "school": 8,
    "team": 7,
    "country": 6,
}

# The dated event of each type, which comparison questions compare.
YEARS = {
    "person": "birth year",
    "city": "settlement year",
    "company": "founding year",
    "film": "release year",
    "book": "publication year",
    "school": "opening year",
    "team": "formation year",
    "country": "independence year",
}

RELATIONS = tuple(
    Relation(*row)
    for row in (
        ("person", "mentor", "person", "{s} was taught by the mentor {o}.", "the person who mentored {x}"),
        ("person", "hometown", "city", "{s} grew up in the hometown of {o}.", "the city where {x} grew up"),
        ("person", "employer", "company", "{s} works for the employer {o}.", "the company that employs {x}"),
        ("person", "college", "school", "{s} went to college at {o}.", "the school that {x} attended"),
        ("city", "mayor", "person", "{s} elected {o} as its mayor.", "the person elected to lead {x}"),
        ("city", "nation", "country", "{s} lies in the nation of {o}.", "the country in which {x} lies"),
        ("city", "twin", "city", "{s} has a twin in {o}.", "the city that {x} is twinned with"),
        ("country", "ruler", "person", "{s} is governed by the ruler {o}.", "the person who rules {x}"),
        ("country", "capital", "city", "{s} is governed from its capital {o}.", "the seat of government of {x}"),
        ("country", "ally", "country", "{s} has an ally in {o}.", "the country allied with {x}"),
        ("company", "founder", "person", "{s} was started by its founder {o}.", "the person who founded {x}"),
        ("company", "base", "city", "{s} keeps its base in {o}.", "the city where {x} is based"),
        ("company", "owner", "company", "{s} belongs to its owner {o}.", "the company that owns {x}"),
        ("film", "director", "person", "{s} was shot by the director {o}.", "the person who directed {x}"),
        ("film", "star", "person", "{s} features {o} as its star.", "the actor leading the cast of {x}"),
        ("film", "studio", "company", "{s} came out of the studio {o}.", "the company that produced {x}"),
        ("book", "author", "person", "{s} was written by the author {o}.", "the person who wrote {x}"),
        ("book", "publisher", "company", "{s} was printed by the publisher {o}.", "the company that published {x}"),
        ("book", "setting", "city", "{s} takes {o} as its setting.", "the city in which {x} takes place"),
        ("school", "principal", "person", "{s} is led by its principal {o}.", "the person who heads {x}"),
        ("school", "site", "city", "{s} has its site in {o}.", "the city that hosts {x}"),
        ("school", "rival", "school", "{s} has a rival in {o}.", "the school competing with {x}"),
        ("team", "coach", "person", "{s} trains under its coach {o}.", "the person who coaches {x}"),
        ("team", "home", "city", "{s} has its home in {o}.", "the city where {x} plays"),
        ("team", "sponsor", "company", "{s} is paid by its sponsor {o}.", "the company that sponsors {x}"),
    )
)
"""Every relation that a world may hold."""


# Words that stand for one relation of each type of entity. Which one is meant takes to know what the entity is.
VAGUE = {
    "leader": ("mentor", "mayor", "ruler", "founder", "director", "author", "principal", "coach"),
    "seat": ("hometown", "nation", "capital", "base", "studio", "setting", "site", "home"),
    "partner": ("employer", "twin", "ally", "owner", "star", "publisher", "rival", "sponsor"),
}


def vague_group(word: str) -> str:
    """The vague word for a relation; raises ``KeyError`` where there is none."""
    return _GROUPS[word]


def relations_of(kind: str) -> tuple[Relation, ...]:
    """The relations whose subject is of this type."""
    return _BY_SUBJECT[kind]


def relation(word: str) -> Relation:
    """The relation of this name; names are unique, so a word also tells the type of its subject."""
    return _BY_WORD[word]


_BY_WORD = {r.word: r for r in RELATIONS}
_BY_SUBJECT = {kind: tuple(r for r in RELATIONS if r.subject == kind) for kind in SHARES}
_GROUPS = {word: group for group, words in VAGUE.items() for word in words}
