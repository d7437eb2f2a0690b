"""The facts of a world: entities, typed relations between them, dates, and decoys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turntree.envs.worlds.schema import SHARES, Relation, relations_of
from turntree.envs.worlds.stream import Stream

__all__ = ["Entity", "Facts", "apportion", "make_facts"]


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


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is true in a world.

    ``objects[subject][word]`` is the object's index. ``former[subject]`` is a decoy (word, object): who used to fill a
    relation. ``mentions[subject]`` are entities that its passage names without any relation.
    """

    entities: tuple[Entity, ...]
    objects: tuple[dict[str, int], ...]
    former: tuple[tuple[str, int] | None, ...]
    mentions: tuple[tuple[int, ...], ...]
    _names: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names: dict[str, tuple[int, ...]] = {}
        for entity in self.entities:
            for answer in entity.answers:
                names[answer.casefold()] = (*names.get(answer.casefold(), ()), entity.index)
        object.__setattr__(self, "_names", names)

    def named(self, name: str) -> tuple[int, ...]:
        """All entities that go by a name or alias, in any case."""
        return self._names.get(name.casefold(), ())

    def named_in(self, subject: int) -> set[int]:
        """Entities that the passage of ``subject`` names."""
        former = self.former[subject]
        return {*self.objects[subject].values(), *self.mentions[subject], *([former[1]] if former else [])}


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to integer weights; largest remainders first, so that the parts add up."""
    whole = sum(weights)
    parts = [total * w // whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def make_facts(entities: Sequence[Entity], *, stream: Stream) -> Facts:
    """Draw relations and decoys; an entity never stands twice in one passage."""
    by_kind = {kind: [e.index for e in entities if e.kind == kind] for kind in SHARES}
    namesakes: dict[str, list[int]] = {}
    for entity in entities:
        namesakes.setdefault(entity.words[1], []).append(entity.index)
    drawn = [_draw(entity, by_kind, namesakes[entity.words[1]], stream) for entity in entities]
    return Facts(
        entities=tuple(entities),
        objects=tuple(objects for objects, _, _ in drawn),
        former=tuple(former for _, former, _ in drawn),
        mentions=tuple(mentions for _, _, mentions in drawn),
    )


def _draw(
    entity: Entity, by_kind: dict[str, list[int]], namesakes: list[int], stream: Stream
) -> tuple[dict[str, int], tuple[str, int] | None, tuple[int, ...]]:
    used = {entity.index}
    stated = stream.sample(relations_of(entity.kind), 3)
    objects = {r.word: _fresh(by_kind[r.object], used, stream) for r in stated}
    if stream.chance(55):
        relation: Relation = stream.pick(stated)
        return objects, (relation.word, _fresh(by_kind[relation.object], used, stream)), ()
    # A namesake, where there is one, makes the harder decoy.
    others = [i for i in namesakes if i not in used] or by_kind[entity.kind]
    return objects, None, (_fresh(others, used, stream),)


def _fresh(pool: Sequence[int], used: set[int], stream: Stream) -> int:
    """One of ``pool`` that is not in ``used``, which it joins."""
    while (index := stream.pick(pool)) in used:
        pass
    used.add(index)
    return index
