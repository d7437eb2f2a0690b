"""What questions mean: logical forms over the facts of a world, their gold steps and their only answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turntree.envs.worlds.facts import Entity, Facts, Telltale
from turntree.envs.worlds.schema import YEARS
from turntree.envs.worlds.speech import ENGLISH, Speech
from turntree.errors import DataError

__all__ = ["Chain", "Computation", "Form", "Kind", "Lookup", "computation_of", "end_of", "evaluate", "steps_of", "walk"]

Kind = Literal["chain", "comparison", "yes_no", "code", "intersection", "count", "unanswerable", "stale"]
"""Kinds of questions."""
Operation = Literal["", "difference", "sum", "age"]


@dataclass(frozen=True, slots=True)
class Chain:
    """Follow ``words`` from ``start``: ``Chain(3, ("mayor", "mentor"))`` is the mentor of the mayor of entity 3."""

    start: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """What a question means.

    - ``chain``: one chain, its end is the answer.
    - ``yes_no``: do two chains end at the same entity?
    - ``comparison``: which of the ends of two chains (of no words: the starts themselves) has the earlier ``YEARS``
      date?
    - ``code``: a number that is computed from these dates, by ``operation``: how many years lie between them, their
      sum, or how old a person (the first end) was at the date of something (the second end).
    - ``intersection``: three chains from one start, two of one word each. The question names the ends of these two; the
      start is the only entity that fits both, and the answer is the end of the third (of no words: the start itself).
    - ``count``: how many entities have the end of the first chain as their ``word``? The other chains are these
      entities, each with that one word.
    - ``unanswerable``: a chain whose last word no passage tells of the entity before it.
    - ``stale``: a chain whose last relation has an outdated value too. ``year`` asks for the value of that year, 0 for
      the present one.
    """

    kind: Kind
    chains: tuple[Chain, ...]
    operation: Operation = ""
    year: int = 0


@dataclass(frozen=True, slots=True)
class Lookup:
    """One gold step: a search for ``word`` and the name of ``subject``, and the ``answer`` that its passages give.

    ``sources`` are the facts whose passages have to be found, ``parts`` the names in the answer where it has several.
    ``missing``: the passage is there, but does not tell.
    """

    subject: int
    word: str
    answer: str
    sources: tuple[Telltale, ...]
    parts: tuple[str, ...] = ()
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Computation:
    """The last gold step of a code question: an expression and its value, as texts."""

    code: str
    answer: str


def walk(chain: Chain, facts: Facts) -> list[int]:
    """The entities along a chain, its start first."""
    path = [chain.start]
    for name in chain.words:
        path.append(facts.objects[path[-1]][name])
    return path


def end_of(form: Form, facts: Facts) -> int:
    """Where the first chain ends; of a ``stale`` form in its year. An ``unanswerable`` one ends nowhere: KeyError."""
    chain = form.chains[0]
    if form.kind == "stale":
        before = walk(Chain(chain.start, chain.words[:-1]), facts)[-1]
        return facts.object_in(before, chain.words[-1], form.year)
    return walk(chain, facts)[-1]


def steps_of(form: Form, facts: Facts, *, speech: Speech = ENGLISH) -> list[Lookup]:
    """The gold steps in order."""
    first = form.chains[0]
    if form.kind == "intersection":
        return _intersection_steps(form, facts)
    if form.kind == "count":
        members = [(chain.start, form.chains[1].words[0]) for chain in form.chains[1:]]
        end, names = walk(first, facts)[-1], tuple(facts.entities[i].name for i, _ in members)
        sources = tuple(Telltale(i, word) for i, word in members)
        return [*_follow(first, facts), Lookup(end, members[0][1], speech.both.join(names), sources, parts=names)]
    if form.kind in ("unanswerable", "stale"):
        known = Chain(first.start, first.words[:-1])
        return [*_follow(known, facts), _last_step(form, walk(known, facts)[-1], facts, speech)]
    steps: list[Lookup] = []
    for chain in form.chains:
        steps += _follow(chain, facts)
        if form.kind in ("comparison", "code"):
            dated = facts.entities[walk(chain, facts)[-1]]
            steps.append(_lookup(dated.index, YEARS[dated.kind], str(dated.year)))
    return steps


def _lookup(subject: int, word: str, answer: str) -> Lookup:
    return Lookup(subject, word, answer, (Telltale(subject, word),))


def _follow(chain: Chain, facts: Facts) -> list[Lookup]:
    path = walk(chain, facts)
    return [_lookup(s, word, facts.entities[o].name) for s, word, o in zip(path, chain.words, path[1:])]


def _last_step(form: Form, subject: int, facts: Facts, speech: Speech) -> Lookup:
    word = form.chains[0].words[-1]
    if form.kind == "unanswerable":
        return Lookup(subject, word, speech.unknown[0], (Telltale(subject, word),), missing=True)
    old = facts.is_past(subject, word, form.year)
    answer = facts.entities[facts.object_in(subject, word, form.year)].name
    return Lookup(subject, word, answer, (Telltale(subject, word, old=old),))


def _intersection_steps(form: Form, facts: Facts) -> list[Lookup]:
    """From the first end back to the start, then as the chains go."""
    first, second, rest = form.chains
    (word,) = first.words
    name = facts.entities[first.start].name
    back = Lookup(walk(first, facts)[-1], word, name, (Telltale(first.start, word),))
    return [back, *_follow(second, facts), *_follow(rest, facts)]


def computation_of(form: Form, facts: Facts) -> Computation | None:
    """What is computed from the dates that the lookups gave; None for all but code questions."""
    if form.kind != "code":
        return None
    first, second = (facts.entities[walk(chain, facts)[-1]].year for chain in form.chains)
    later, earlier = max(first, second), min(first, second)
    code = f"{first} + {second}" if form.operation == "sum" else f"{later} - {earlier}"
    return Computation(code, str(_computed(form.operation, first, second)))


def _computed(operation: Operation, first: int, second: int) -> int:
    return first + second if operation == "sum" else abs(first - second)


def evaluate(form: Form, facts: Facts, *, speech: Speech = ENGLISH) -> tuple[str, ...]:
    """The acceptable answers, found by looking at every fact of the world; raises unless exactly one thing fits."""
    if form.kind == "intersection":
        return _only(_fitting_both(form, facts), form, facts).answers
    ends = [_scan(chain, facts, form.year) for chain in form.chains]
    if form.kind == "unanswerable":
        chain = form.chains[0]
        _only(_scan(Chain(chain.start, chain.words[:-1]), facts), form, facts)
        if ends[0]:
            raise DataError(f"expected no answer to {form}, found {ends}")
        return speech.unknown
    if form.kind == "count":
        return _counted(form, facts, speech)
    if any(len(end) != 1 for end in ends):
        raise DataError(f"expected one answer to each part of {form}, found {ends}")
    first, *rest = [facts.entities[next(iter(end))] for end in ends]
    if form.kind in ("chain", "stale"):
        return first.answers
    if form.kind == "yes_no":
        return speech.yes if first == rest[0] else speech.no
    if form.kind == "code":
        number = str(_computed(form.operation, first.year, rest[0].year))
        return (number, *(unit.format(n=number) for unit in speech.units.get(form.operation, ())))
    if first.year == rest[0].year:
        raise DataError(f"expected different years, found {first.year} twice in {form}")
    return min(first, rest[0], key=lambda e: e.year).answers


def _only(found: set[int], form: Form, facts: Facts) -> Entity:
    if len(found) != 1:
        raise DataError(f"expected one answer to {form}, found {sorted(found)}")
    return facts.entities[next(iter(found))]


def _fitting_both(form: Form, facts: Facts) -> set[int]:
    """Where the third chain ends from all entities that the first two describe."""
    first, second, rest = form.chains
    a, b = (walk(chain, facts)[-1] for chain in (first, second))
    both = facts.subjects(first.words[0], a) & facts.subjects(second.words[0], b)
    return _onwards(both, rest.words, facts)


def _counted(form: Form, facts: Facts, speech: Speech) -> tuple[str, ...]:
    end = _only(_scan(form.chains[0], facts), form, facts)
    found = facts.subjects(form.chains[1].words[0], end.index)
    if found != {chain.start for chain in form.chains[1:]}:
        raise DataError(f"expected the members of {form}, found {sorted(found)}")
    return (str(len(found)), *speech.counts.get(len(found), ()))


def _scan(chain: Chain, facts: Facts, year: int = 0) -> set[int]:
    """Every entity at which a chain can end, without trusting that names or relations are unique."""
    *before, last = chain.words or ("",)
    ends = _onwards(set(facts.named(facts.entities[chain.start].name)), tuple(before), facts)
    if not last:
        return ends
    return {facts.object_in(i, last, year) for i in ends if last in facts.objects[i]}


def _onwards(ends: set[int], words: tuple[str, ...], facts: Facts) -> set[int]:
    for name in words:
        ends = {facts.objects[i][name] for i in ends if name in facts.objects[i]}
    return ends
