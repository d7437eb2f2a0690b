"""What makes a world's facts harder to find: told from the other side, withheld, or outdated."""

from __future__ import annotations

from dataclasses import replace

from turntree.envs.worlds.facts import Facts, Past
from turntree.envs.worlds.schema import relation
from turntree.envs.worlds.stream import Stream

__all__ = ["vary"]

# The earliest year of an outdated value, and for how long it and the present one are known to hold.
_FIRST_YEAR, _YEARS, _LEAST, _SPAN = 1900, 60, 5, 25


def vary(facts: Facts, *, inverse: int, withheld: int, stale: int, asides: int, stream: Stream) -> Facts:
    """The same world with some facts changed; all four are percentages.

    ``stale``: entities of which one relation has an outdated value beside the present one. ``withheld``: entities that
    lose one relation, of which only remains that it once was. ``inverse``: of the facts that are left, those that stand
    with their object instead of their subject. ``asides``: of the facts, those whose object's passages name the subject
    in passing.
    """
    if stale:
        facts = replace(facts, past=_pasts(facts, stale, stream))
    if withheld:
        facts = _withhold(facts, withheld, stream)
    if inverse:
        told = [(subject, word) for subject, objects in enumerate(facts.objects) for word in objects]
        dated = {(subject, past.word) for subject, past in facts.past.items()}
        chosen = stream.sample(told, len(told) * inverse // 100)
        facts = replace(facts, inverse=frozenset(chosen) - dated)
    if asides:
        told = [(subject, word) for subject, objects in enumerate(facts.objects) for word in objects]
        facts = replace(facts, asides=frozenset(stream.sample(told, len(told) * asides // 100)))
    return facts


def _pasts(facts: Facts, percent: int, stream: Stream) -> dict[int, Past]:
    chosen = sorted(stream.sample(range(len(facts.entities)), len(facts.entities) * percent // 100))
    pasts: dict[int, Past] = {}
    for subject in chosen:
        word = stream.pick(list(facts.objects[subject]))
        kind = relation(word).object
        taken = {subject, *facts.named_in(subject)}
        free = [e.index for e in facts.entities if e.kind == kind and e.index not in taken]
        since = _FIRST_YEAR + stream.below(_YEARS)
        pasts[subject] = Past(word, stream.pick(free), since, since + _LEAST + stream.below(_SPAN))
    return pasts


def _withhold(facts: Facts, percent: int, stream: Stream) -> Facts:
    objects = [dict(told) for told in facts.objects]
    lost: dict[int, tuple[str, int]] = {}
    for subject in sorted(stream.sample(range(len(objects)), len(objects) * percent // 100)):
        former, past = facts.former[subject], facts.past.get(subject)
        busy = {former[0] if former else "", past.word if past else ""}
        word = stream.pick([w for w in objects[subject] if w not in busy])
        lost[subject] = (word, objects[subject].pop(word))
    return replace(facts, objects=tuple(objects), lost=lost)
