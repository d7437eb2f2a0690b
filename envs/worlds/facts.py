"""The facts of a world: entities, typed relations between them, dates, and decoys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from turntree.envs.worlds.schema import SHARES, Relation, relations_of
from turntree.envs.worlds.stream import Stream

__all__ = ["Entity", "Facts", "Past", "Telltale", "apportion", "make_facts"]


@dataclass(frozen=True, slots=True)
class Entity:
    """A thing with a unique name made from the ``words``.

    ``aliases`` are other acceptable forms of the name; ``year`` dates it.
    """

    index: int
    kind: str
    words: tuple[str, str]
    name: str
    aliases: tuple[str, ...]
    year: int

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Telltale(NamedTuple):
    """What one passage tells: the relation ``word`` of ``subject``, or the value that it once had."""

    subject: int
    word: str
    old: bool = False


class Past(NamedTuple):
    """The value that a relation had from the year ``since`` on, until it ``changed``."""

    word: str
    object: int
    since: int
    changed: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is true in a world.

    ``objects[subject][word]`` is the object's index. ``former[subject]`` is a decoy (word, object): who used to fill a
    relation. ``mentions[subject]`` are entities that it is named together with, without any relation.

    ``inverse`` are (subject, word) that are told in passages about the object. ``lost[subject]`` is a (word, object)
    that is no fact: only that it once was one is told. ``past[subject]`` is the outdated value of one of its relations.
    ``asides`` are (subject, word) whose subject passages about the object name too, without the relation.
    """

    entities: tuple[Entity, ...]
    objects: tuple[dict[str, int], ...]
    former: tuple[tuple[str, int] | None, ...]
    mentions: tuple[tuple[int, ...], ...]
    inverse: frozenset[tuple[int, str]] = frozenset()
    lost: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    past: Mapping[int, Past] = field(default_factory=dict)
    asides: frozenset[tuple[int, str]] = frozenset()
    _names: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _pointing: dict[int, tuple[tuple[int, str], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names: dict[str, tuple[int, ...]] = {}
        for entity in self.entities:
            for answer in entity.answers:
                names[answer.casefold()] = (*names.get(answer.casefold(), ()), entity.index)
        pointing: dict[int, tuple[tuple[int, str], ...]] = {}
        for subject, objects in enumerate(self.objects):
            for word, end in objects.items():
                pointing[end] = (*pointing.get(end, ()), (subject, word))
        object.__setattr__(self, "_names", names)
        object.__setattr__(self, "_pointing", pointing)

    def named(self, name: str) -> tuple[int, ...]:
        """All entities that go by a name or alias, in any case."""
        return self._names.get(name.casefold(), ())

    def pointing_at(self, end: int) -> tuple[tuple[int, str], ...]:
        """All (subject, word) of which ``end`` is the object."""
        return self._pointing.get(end, ())

    def subjects(self, word: str, end: int) -> set[int]:
        """All entities whose ``word`` is ``end``."""
        return {subject for subject, w in self.pointing_at(end) if w == word}

    def is_past(self, subject: int, word: str, year: int) -> bool:
        """Whether a relation had another value in this year (0: now)."""
        past = self.past.get(subject)
        return past is not None and past.word == word and 0 < year < past.changed

    def object_in(self, subject: int, word: str, year: int = 0) -> int:
        """The object of a relation in a year, 0 for now. Raises ``KeyError`` where there is none."""
        return self.past[subject].object if self.is_past(subject, word, year) else self.objects[subject][word]

    def told_about(self, end: int) -> tuple[tuple[int, str], ...]:
        """The (subject, word) that passages about their object ``end`` tell."""
        return tuple(fact for fact in self.pointing_at(end) if fact in self.inverse)

    def beside(self, end: int) -> tuple[int, ...]:
        """The subjects that passages about their object ``end`` name in passing."""
        return tuple(dict.fromkeys(fact[0] for fact in self.pointing_at(end) if fact in self.asides))

    def named_in(self, subject: int) -> set[int]:
        """Other entities that the passages about ``subject`` name."""
        decoys = [self.former[subject], self.lost.get(subject)]
        named = {*self.objects[subject].values(), *self.mentions[subject], *(d[1] for d in decoys if d)}
        if self.inverse or self.asides:
            named |= {s for s, _ in self.told_about(subject)} | set(self.beside(subject))
        return named | {self.past[subject].object} if subject in self.past else named


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to integer weights; largest remainders first, so that the parts add up."""
    whole = sum(weights)
    parts = [total * w // whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def make_facts(entities: Sequence[Entity], *, stream: Stream) -> Facts:
    """Draw relations and decoys; what is told about a subject never names an entity twice."""
    by_kind = {kind: [e.index for e in entities if e.kind == kind] for kind in SHARES}
    namesakes: dict[str, list[int]] = {}
    for entity in entities:
        namesakes.setdefault(entity.words[1], []).append(entity.index)
    drawn = [_draw(entity, entities, by_kind, namesakes[entity.words[1]], stream) for entity in entities]
    return Facts(
        entities=tuple(entities),
        objects=tuple(objects for objects, _, _ in drawn),
        former=tuple(former for _, former, _ in drawn),
        mentions=tuple(mentions for _, _, mentions in drawn),
    )


def _draw(
    entity: Entity, entities: Sequence[Entity], by_kind: dict[str, list[int]], namesakes: list[int], stream: Stream
) -> tuple[dict[str, int], tuple[str, int] | None, tuple[int, ...]]:
    used = [entity]

    def fresh(pool: Sequence[int]) -> int:
        used.append(_fresh([entities[i] for i in pool], used, stream))
        return used[-1].index

    stated = stream.sample(relations_of(entity.kind), 3)
    objects = {r.word: fresh(by_kind[r.object]) for r in stated}
    if stream.chance(0.55):
        relation: Relation = stream.pick(stated)
        return objects, (relation.word, fresh(by_kind[relation.object])), ()
    # A namesake is the harder decoy: its passage and this one share a word of their titles.
    others = [i for i in namesakes if entities[i] not in used] if stream.chance(0.5) else []
    return objects, None, (stream.pick(others) if others else fresh(by_kind[entity.kind]),)


def _fresh(pool: Sequence[Entity], used: Sequence[Entity], stream: Stream) -> Entity:
    """One of ``pool`` that is not in ``used`` and, if a few tries find one, shares no word of a name with them.

    Otherwise a passage about X Z that names X Y could outrank the passage about X Y.
    """
    taken = {word for entity in used for word in entity.words}
    for _ in range(20):
        entity = stream.pick(pool)
        if taken.isdisjoint(entity.words):
            return entity
    return stream.pick([entity for entity in pool if entity not in used])
