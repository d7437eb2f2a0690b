"""How a world is written down: names, passages and questions, in a closed short style and in plain prose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from turntree.envs.worlds.facts import Entity, Facts, Telltale
from turntree.envs.worlds.names import LONG, SHORT, NameInventory
from turntree.envs.worlds.schema import SHARES, YEARS, Relation, relation, vague_group
from turntree.envs.worlds.speech import ENGLISH, Speech
from turntree.envs.worlds.stream import Stream

__all__ = ["STYLES", "Frames", "Style", "StyleName", "Telling", "Templates"]

StyleName = Literal["short", "prose", "dated", "articles", "vague"]
"""Names of the styles of passages."""
Templates = Literal["train", "test"]
"""Wordings: those of training, and those held out."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Question templates of one split. ``{np}`` is what is asked for, ``{r}`` a relation, ``{a}`` and ``{b}`` sides.

    A style that tells no dates has no ``comparison`` and no ``code`` (by operation; ``{a}`` and ``{b}`` are dates, of
    ``age`` ``{a}`` is a person). ``both`` is a noun phrase: the ``{k}`` whose ``{r}`` is ``{a}`` and
    whose ``{q}`` is ``{b}``. ``count`` asks how many have ``{a}`` as their ``{r}``, ``current`` and ``as_of`` for the
    present value and that of the year ``{y}``.
    """

    who: tuple[str, ...]
    what: tuple[str, ...]
    yes_no: tuple[str, ...]
    comparison: tuple[str, ...] = ()
    code: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    both: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    as_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Telling:
    """A text about an entity and the facts that it states."""

    text: str
    stated: tuple[Telltale, ...] = ()


@dataclass(frozen=True, slots=True)
class Style:
    """One way to write.

    ``names`` and ``aliases`` are templates by entity type over the name's words ``{f}`` and ``{s}``, and these in Latin
    letters, ``{F}`` and ``{S}``. ``shared_names`` is the share of entities that take another entity's two words under
    another type: near-duplicate titles. ``speech`` has the words of the language. ``opening`` begins the one passage
    about an entity; a style without it has a passage for every fact and decoy.
    ``year`` tells an entity's date; a style without it has nothing to compare. ``prose`` varies sentences, gives
    aliases to some entities only, and words test questions in held-out paraphrases.

    ``inverse`` states a fact from the object's side, ``as_of`` what holds since the year ``{y}``, in an own passage.
    ``loose`` is the share of facts that are told without the relation's own word. ``sections`` is the most sentences of
    a passage (0: all of an entity in one), to each of which ``aside`` adds who else names the entity, ``{x}``.
    ``vague`` questions name relations by :data:`VAGUE` only; ``nothing`` then tells which relations are not known.
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
    inverse: str = ""
    as_of: str = ""
    loose: float = 0.0
    sections: int = 0
    aside: str = ""
    vague: bool = False
    nothing: str = ""

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
        if self.opening:
            speech = self.speech
            also = speech.also.format(a=entity.aliases[0]) if entity.aliases else ""
            told = [Telling(self.opening.format(s=entity.name, also=also, k=speech.one[entity.kind])), *told]
            size = self.sections or len(told)
            aside = self._aside(entity, facts)
            told = [self._joined([*told[i : i + size], *aside]) for i in range(0, len(told), size)]
        return [*told, *self._dated(entity, facts)]

    def _aside(self, entity: Entity, facts: Facts) -> list[Telling]:
        names = [facts.entities[i].name for i in facts.beside(entity.index)]
        return [Telling(self.aside.format(x=self.speech.both.join(names)))] if names else []

    def _joined(self, told: list[Telling]) -> Telling:
        return Telling(self.speech.gap.join(t.text for t in told), tuple(fact for t in told for fact in t.stated))

    def _tellings(self, entity: Entity, facts: Facts, stream: Stream) -> list[Telling]:
        """One sentence a fact or decoy; decoys state nothing, but what is lost is to be looked for where it was."""
        entities, speech, index = facts.entities, self.speech, entity.index
        past = facts.past.get(index)
        told = [
            Telling(self._fact(entity, relation(w), entities[i].name, stream), (Telltale(index, w),))
            for w, i in facts.objects[index].items()
            if (index, w) not in facts.inverse and not (past and past.word == w)
        ]
        for subject, w in facts.told_about(index):
            text = self.inverse.format(s=entities[subject].name, r=speech.relations[w], o=entity.name)
            told.append(Telling(text, (Telltale(subject, w),)))
        if former := facts.former[index]:
            told.append(Telling(self._former(entity, *former, facts)))
        if lost := facts.lost.get(index):
            told.append(Telling(self._former(entity, *lost, facts), (Telltale(index, lost[0]),)))
        for i in facts.mentions[index]:
            told.append(Telling(self.mention.format(s=entity.name, o=entities[i].name)))
        if self.year:
            event = YEARS[entity.kind]
            text = speech.dated(self.year, entity.name, speech.years[entity.kind], entity.year)
            told.append(Telling(text, (Telltale(index, event),)))
        return told

    def _former(self, entity: Entity, word: str, end: int, facts: Facts) -> str:
        return self.former.format(s=entity.name, r=self.speech.relations[word], o=facts.entities[end].name)

    def _dated(self, entity: Entity, facts: Facts) -> list[Telling]:
        """The outdated and the present value of a relation, which only their dates tell apart."""
        past = facts.past.get(entity.index)
        if past is None:
            return []
        word, ends = past.word, facts.entities
        told = [(past.since, past.object, True), (past.changed, facts.objects[entity.index][word], False)]
        names = {"s": entity.name, "r": self.speech.relations[word]}
        return [
            Telling(self.as_of.format(y=year, o=ends[end].name, **names), (Telltale(entity.index, word, old=old),))
            for year, end, old in told
        ]

    def _fact(self, entity: Entity, stated: Relation, name: str, stream: Stream) -> str:
        if self.loose and stream.chance(self.loose):
            text = self.speech.loosely.format(p=self.speech.paraphrases[stated.word].format(x=entity.name), o=name)
            return text[0].upper() + text[1:]
        varied = self.prose and stream.chance(0.5)
        template = self.speech.sentences[stated.word] if varied else self.fact
        return template.format(s=entity.name, r=self.speech.relations[stated.word], o=name)

    def noun_phrase(self, word: str, inner: str, *, templates: Templates) -> str:
        """What is asked for: ``the mayor of X``; test questions in prose use the held-out paraphrase."""
        if self.vague:
            return self.speech.of.format(r=self.speech.vague[vague_group(word)], x=inner)
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
        both=("the {k} whose {r} is {a} and whose {q} is {b}", "the {k} with the {r} {a} and the {q} {b}"),
        count=("How many have {a} as their {r}?", "Of how many is {a} the {r}?"),
        current=("As things stand today, name {np}.", "What is the present name of {np}?"),
        as_of=("As of {y}, name {np}.", "What was the name of {np} in {y}?"),
    ),
    "test": Frames(
        who=("Please identify {np}.", "Could you say who {np} might be?"),
        what=("Please identify {np}.", "Which name does one give to {np}?"),
        yes_no=("Is it true that {a} shares its {r} with {b}?", "Does one {r} belong to both {a} and {b}?"),
        comparison=("Compare {a} with {b}: whose {r} comes first?",),
        both=("that {k} which has both {a} as its {r} and {b} as its {q}",),
        count=("Count those whose {r} turns out to be {a}.",),
        current=("Going by the newest record, state {np}.",),
        as_of=("Going by the records for {y}, state {np}.",),
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
        inverse="{o} is the {r} of {s}.",
        as_of="As of {y}, the {r} of {s} is {o}.",
        frames={split: replace(frames, code=_PROSE_CODE[split]) for split, frames in _PROSE_FRAMES.items()},
        prose=True,
    ),
}
"""Styles of English passages."""
# The short style with dates, each in a passage of its own.
STYLES["dated"] = replace(
    STYLES["short"],
    year="The {r} of {s} is {o} .",
    frames={split: replace(frames, code=_SHORT_CODE[split]) for split, frames in _SHORT_FRAMES.items()},
)
# Prose as an encyclopedia has it: several passages a title, facts in words that questions and searches do not share.
STYLES["articles"] = replace(STYLES["prose"], loose=0.45, sections=3, aside="It comes up in accounts of {x}.")
# The short style with names of several senses, and questions that leave open which relation is meant.
STYLES["vague"] = replace(STYLES["short"], shared_names=0.6, vague=True, nothing="Nothing is known of the {r} of {s} .")
