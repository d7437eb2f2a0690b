"""How a world is written down: names, passages and questions, in a closed short style and in plain prose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from turntree.envs.worlds.facts import Entity, Facts
from turntree.envs.worlds.names import LONG, SHORT, NameInventory
from turntree.envs.worlds.schema import SHARES, YEARS, Relation, relation
from turntree.envs.worlds.speech import ENGLISH, Speech
from turntree.envs.worlds.stream import Stream

__all__ = ["STYLES", "Frames", "Style", "StyleName", "Telling", "Templates"]

StyleName = Literal["short", "prose", "dated"]
Templates = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Frames:
    """Question templates of one split. ``{np}`` is what is asked for, ``{r}`` a relation, ``{a}`` and ``{b}`` sides.

    A style that tells no dates has no ``comparison`` and no ``code`` (by operation; ``{a}`` and ``{b}`` are dates, of
    ``age`` ``{a}`` is a person).
    """

    who: tuple[str, ...]
    what: tuple[str, ...]
    yes_no: tuple[str, ...]
    comparison: tuple[str, ...] = ()
    code: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Telling:
    """A text about an entity and the words of the relations that it states."""

    text: str
    stated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Style:
    """One way to write.

    ``names`` and ``aliases`` are templates by entity type over the name's words ``{f}`` and ``{s}``, and these in Latin
    letters, ``{F}`` and ``{S}``. ``shared_names`` is the share of entities that take another entity's two words under
    another type: near-duplicate titles. ``speech`` has the words of the language. ``opening`` begins the one passage
    about an entity; a style without it has a passage for every fact and decoy.
    ``year`` tells an entity's date; a style without it has nothing to compare. ``prose`` varies sentences, gives
    aliases to some entities only, and words test questions in held-out paraphrases.
    """

    inventory: NameInventory
    names: dict[str, str]
    aliases: dict[str, str]
    shared_names: float
    fact: str
    former: str
    mention: str
    frames: dict[Templates, Frames]
    prose: bool
    opening: str = ""
    year: str = ""
    speech: Speech = ENGLISH

    def name(self, kind: str, words: tuple[str, str], *, alias: bool = False) -> str:
        """The name of an entity of this kind, or its alias."""
        first, second = words
        latin = {"F": self.inventory.latin(first), "S": self.inventory.latin(second)}
        return (self.aliases if alias else self.names)[kind].format(f=first, s=second, **latin)

    def passages(self, entity: Entity, facts: Facts, stream: Stream) -> list[Telling]:
        """The texts about one entity, its facts and decoys in random order.

        The short style has one text for each: a decoder trained from scratch learns to read a single fact long before
        it learns to pick one of many.
        """
        told = self._tellings(entity, facts, stream)
        stream.shuffle(told)
        if not self.opening:
            return told
        speech = self.speech
        also = speech.also.format(a=entity.aliases[0]) if entity.aliases else ""
        opening = self.opening.format(s=entity.name, also=also, k=speech.one[entity.kind])
        text = speech.gap.join([opening, *(t.text for t in told)])
        return [Telling(text, tuple(word for t in told for word in t.stated))]

    def _tellings(self, entity: Entity, facts: Facts, stream: Stream) -> list[Telling]:
        """One sentence a fact or decoy; decoys state nothing."""
        entities, speech = facts.entities, self.speech
        objects = facts.objects[entity.index].items()
        told = [Telling(self._fact(entity, relation(w), entities[i].name, stream), (w,)) for w, i in objects]
        if former := facts.former[entity.index]:
            word, o = speech.relations[former[0]], entities[former[1]].name
            told.append(Telling(self.former.format(s=entity.name, r=word, o=o)))
        for i in facts.mentions[entity.index]:
            told.append(Telling(self.mention.format(s=entity.name, o=entities[i].name)))
        if self.year:
            event = YEARS[entity.kind]
            told.append(Telling(speech.dated(self.year, entity.name, speech.years[entity.kind], entity.year), (event,)))
        return told

    def _fact(self, entity: Entity, stated: Relation, name: str, stream: Stream) -> str:
        varied = self.prose and stream.chance(0.5)
        template = self.speech.sentences[stated.word] if varied else self.fact
        return template.format(s=entity.name, r=self.speech.relations[stated.word], o=name)

    def noun_phrase(self, word: str, inner: str, *, templates: Templates) -> str:
        """What is asked for: ``the mayor of X``; test questions in prose use the held-out paraphrase."""
        if self.prose and templates == "test":
            return self.speech.paraphrases[word].format(x=inner)
        return self.speech.of.format(r=self.speech.relations[word], x=inner)


_SHORT_FRAMES: dict[Templates, Frames] = {
    "train": Frames(
        who=(
            "Who is {np} ?",
            "What is the name of {np} ?",
            "Tell me who is {np} .",
            "Can you tell me the name of {np} ?",
        ),
        what=("What is {np} ?", "Can you find {np} ?", "Tell me what is {np} .", "I want to know {np} ."),
        yes_no=("Do {a} and {b} have the same {r} ?", "Is the {r} of {a} also the {r} of {b} ?"),
    ),
    "test": Frames(
        who=("Tell me {np} .", "Can you tell me who is {np} ?"),
        what=("Tell me {np} .", "I want to know what is {np} ."),
        yes_no=("Is the {r} of {a} and {b} the same ?",),
    ),
}

_PROSE_FRAMES: dict[Templates, Frames] = {
    "train": Frames(
        who=("Who is {np}?", "What is the name of {np}?", "Find out who {np} is."),
        what=("What is {np}?", "What is the name of {np}?", "Find out what {np} is called."),
        yes_no=("Do {a} and {b} have the same {r}?", "Is the {r} of {a} also the {r} of {b}?"),
        comparison=("Which has the earlier {r}, {a} or {b}?", "Of {a} and {b}, which has the earlier {r}?"),
    ),
    "test": Frames(
        who=("Please identify {np}.", "Could you say who {np} might be?"),
        what=("Please identify {np}.", "Which name does one give to {np}?"),
        yes_no=("Is it true that {a} shares its {r} with {b}?", "Does one {r} belong to both {a} and {b}?"),
        comparison=("Compare {a} with {b}: whose {r} comes first?",),
    ),
}

_SHORT_CODE: dict[Templates, dict[str, tuple[str, ...]]] = {
    "train": {
        "difference": ("How many years are between {a} and {b} ?", "Tell me how many years are between {a} and {b} ."),
        "sum": ("What is the sum of {a} and {b} ?", "Tell me the sum of {a} and {b} ."),
        "age": ("How old is {a} in {b} ?", "Tell me how old is {a} in {b} ."),
    },
    "test": {
        "difference": ("Can you tell me how many years are between {a} and {b} ?",),
        "sum": ("I want to know the sum of {a} and {b} .",),
        "age": ("I want to know how old is {a} in {b} .",),
    },
}

_PROSE_CODE: dict[Templates, dict[str, tuple[str, ...]]] = {
    "train": {
        "difference": ("How many years lie between {a} and {b}?", "By how many years do {a} and {b} differ?"),
        "sum": ("What is the sum of {a} and {b}?", "What do {a} and {b} add up to?"),
        "age": ("How old was {a} in {b}?", "What was the age of {a} in {b}?"),
    },
    "test": {
        "difference": ("What is the distance in years from {a} to {b}?",),
        "sum": ("Add {a} to {b}: which number results?",),
        "age": ("How many years had {a} lived by {b}?",),
    },
}

STYLES: dict[StyleName, Style] = {
    "short": Style(
        inventory=SHORT,
        names=dict.fromkeys(SHARES, "{f} {s}"),
        aliases={kind: f"{kind} {{f}} {{s}}" for kind in SHARES},
        shared_names=0.0,
        fact="The {r} of {s} is {o} .",
        former="The former {r} of {s} is {o} .",
        mention="{s} is often seen with {o} .",
        frames=_SHORT_FRAMES,
        prose=False,
    ),
    "prose": Style(
        inventory=LONG,
        names={
            "person": "{f} {s}",
            "city": "{f} {s} City",
            "company": "{f} {s} Industries",
            "film": "The {f} {s} Affair",
            "book": "A Letter to {f} {s}",
            "school": "{f} {s} Academy",
            "team": "{f} {s} Rovers",
            "country": "{f} {s} Republic",
        },
        aliases={
            "person": "Sir {f} {s}",
            "city": "City of {f} {s}",
            "company": "{f} {s} Group",
            "film": "The Affair of {f} {s}",
            "book": "To {f} {s} with Love",
            "school": "{f} {s} School",
            "team": "{f} {s} Club",
            "country": "Republic of {f} {s}",
        },
        shared_names=0.05,
        opening="{s}{also} is a {k}.",
        fact="The {r} of {s} is {o}.",
        former="Its former {r} was {o}.",
        mention="It is often named together with {o}.",
        year="Its {r} is {o}.",
        frames={split: replace(frames, code=_PROSE_CODE[split]) for split, frames in _PROSE_FRAMES.items()},
        prose=True,
    ),
}
# The short style with dates, each in a passage of its own.
STYLES["dated"] = replace(
    STYLES["short"],
    year="The {r} of {s} is {o} .",
    frames={split: replace(frames, code=_SHORT_CODE[split]) for split, frames in _SHORT_FRAMES.items()},
)
