"""Questions of a world: drawn as logical forms, proved to have one answer, then worded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from turntree.envs.worlds.facts import Facts
from turntree.envs.worlds.schema import YEARS
from turntree.envs.worlds.speech import ENGLISH, Speech
from turntree.envs.worlds.stream import Stream
from turntree.envs.worlds.styles import Style, Templates
from turntree.errors import ConfigError, DataError

__all__ = [
    "Chain",
    "Computation",
    "Form",
    "Kind",
    "Lookup",
    "computation_of",
    "draw_forms",
    "evaluate",
    "steps_of",
    "word",
]

Kind = Literal["chain", "comparison", "yes_no", "code"]
Operation = Literal["", "difference", "sum", "age"]

# Draws in a row without a new question after which a world counts as exhausted.
_PATIENCE = 5000


@dataclass(frozen=True, slots=True)
class Chain:
    """Follow ``words`` from ``start``: ``Chain(3, ("mayor", "mentor"))`` is the mentor of the mayor of entity 3."""

    start: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """What a question means.

    ``chain``: one chain, its end is the answer. ``yes_no``: do two chains end at the same entity? ``comparison``: which
    of the ends of two chains (of no words: the starts themselves) has the earlier ``YEARS`` date? ``code``: a number
    that is computed from these dates, by ``operation``: how many years lie between them, their sum, or how old a person
    (the first end) was at the date of something (the second end).
    """

    kind: Kind
    chains: tuple[Chain, ...]
    operation: Operation = ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One gold step: what the passage of ``subject`` says about ``word``."""

    subject: int
    word: str
    answer: str


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


def steps_of(form: Form, facts: Facts) -> list[Lookup]:
    """The gold steps in order."""
    steps: list[Lookup] = []
    for chain in form.chains:
        ends = [facts.entities[i] for i in walk(chain, facts)]
        steps += [Lookup(s.index, w, o.name) for s, w, o in zip(ends, chain.words, ends[1:])]
        if form.kind in ("comparison", "code"):
            steps.append(Lookup(ends[-1].index, YEARS[ends[-1].kind], str(ends[-1].year)))
    return steps


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
    ends = [_scan(chain, facts) for chain in form.chains]
    if any(len(end) != 1 for end in ends):
        raise DataError(f"expected one answer to each part of {form}, found {ends}")
    first, *rest = [facts.entities[next(iter(end))] for end in ends]
    if form.kind == "chain":
        return first.answers
    if form.kind == "yes_no":
        return speech.yes if first == rest[0] else speech.no
    if form.kind == "code":
        number = str(_computed(form.operation, first.year, rest[0].year))
        return (number, *(unit.format(n=number) for unit in speech.units.get(form.operation, ())))
    if first.year == rest[0].year:
        raise DataError(f"expected different years, found {first.year} twice in {form}")
    return min(first, rest[0], key=lambda e: e.year).answers


def _scan(chain: Chain, facts: Facts) -> set[int]:
    """Every entity at which a chain can end, without trusting that names or relations are unique."""
    ends = set(facts.named(facts.entities[chain.start].name))
    for name in chain.words:
        ends = {facts.objects[i][name] for i in ends if name in facts.objects[i]}
    return ends


def draw_forms(kind: Kind, hops: int, n: int, *, facts: Facts, stream: Stream) -> list[Form]:
    """``n`` different forms with ``hops`` gold steps each, without shortcuts; half of the yes/no answers are yes.

    Raises :class:`ConfigError` when the world does not hold as many.
    """
    if kind == "chain":
        return _distinct(lambda: _chain(hops, facts, stream), n, f"chain questions of {hops} hops")
    if hops % 2:
        raise ConfigError(f"expected an even number of hops for {kind} questions (two equal sides), found {hops}")
    if kind == "comparison":
        return _distinct(lambda: _comparison(hops // 2 - 1, facts, stream), n, f"comparison questions of {hops} hops")
    if kind == "code":
        return _distinct(lambda: _code(hops // 2 - 1, facts, stream), n, f"code questions of {hops} hops")
    ends = _ends_by_words(hops // 2, facts)
    agreeing = [starts for groups in ends.values() for starts in groups.values() if len(starts) > 1]
    # Groups of one relation path: chains of the same group agree, those of different groups do not.
    differing = [list(groups.values()) for groups in ends.values() if len(groups) > 1]
    yes = _distinct(lambda: _agree(agreeing, facts, stream), n // 2, f"yes questions of {hops} hops")
    no = _distinct(lambda: _differ(differing, facts, stream), n - n // 2, f"no questions of {hops} hops")
    return yes + no


def _distinct(draw: Callable[[], Form | None], n: int, what: str) -> list[Form]:
    """Draw until ``n`` forms are found; the order of a form's sides does not make it another one."""
    forms: dict[frozenset[Chain], Form] = {}
    misses = 0
    while len(forms) < n and misses < _PATIENCE:
        form = draw()
        known = form is None or frozenset(form.chains) in forms
        misses = misses + 1 if known else 0
        if form is not None and not known:
            forms[frozenset(form.chains)] = form
    if len(forms) < n:
        raise ConfigError(
            f"expected {n} {what}, but this world seems to hold only {len(forms)} different ones; "
            "ask for fewer questions or more entities"
        )
    return list(forms.values())


def _chain(hops: int, facts: Facts, stream: Stream) -> Form | None:
    chain = _random_chain(hops, facts, stream)
    return Form("chain", (chain,)) if _is_sound(chain, facts) else None


def _comparison(hops: int, facts: Facts, stream: Stream) -> Form | None:
    chains = (_random_chain(hops, facts, stream), _random_chain(hops, facts, stream))
    a, b = (facts.entities[walk(c, facts)[-1]] for c in chains)
    comparable = a.kind == b.kind and a.year != b.year and _are_apart(chains, facts, shared=0)
    return Form("comparison", chains) if comparable else None


def _code(hops: int, facts: Facts, stream: Stream) -> Form | None:
    operations: tuple[Operation, ...] = ("difference", "sum", "age")
    operation = stream.pick(operations)
    chains = (_random_chain(hops, facts, stream), _random_chain(hops, facts, stream))
    a, b = (facts.entities[walk(c, facts)[-1]] for c in chains)
    apart = a.year != b.year and _are_apart(chains, facts, shared=0)
    fits = operation != "age" or (a.kind == "person" and b.kind != "person" and a.year < b.year)
    return Form("code", chains, operation) if apart and fits else None


def _agree(groups: Sequence[Sequence[Chain]], facts: Facts, stream: Stream) -> Form | None:
    if not groups:
        return None
    a, b = stream.sample(stream.pick(groups), 2)
    return Form("yes_no", (a, b)) if _are_apart((a, b), facts, shared=1) else None


def _differ(families: Sequence[Sequence[Sequence[Chain]]], facts: Facts, stream: Stream) -> Form | None:
    if not families:
        return None
    left, right = stream.sample(stream.pick(families), 2)
    a, b = stream.pick(left), stream.pick(right)
    return Form("yes_no", (a, b)) if _are_apart((a, b), facts, shared=0) else None


def _random_chain(hops: int, facts: Facts, stream: Stream) -> Chain:
    start = here = stream.below(len(facts.entities))
    words: list[str] = []
    for _ in range(hops):
        words.append(stream.pick(list(facts.objects[here])))
        here = facts.objects[here][words[-1]]
    return Chain(start, tuple(words))


def _ends_by_words(hops: int, facts: Facts) -> dict[tuple[str, ...], dict[int, list[Chain]]]:
    """All chains of ``hops`` words, by words and by end. A relation's word fixes the type of its subject."""
    chains = [Chain(e.index, ()) for e in facts.entities]
    for _ in range(hops):
        chains = [Chain(c.start, (*c.words, w)) for c in chains for w in facts.objects[walk(c, facts)[-1]]]
    out: dict[tuple[str, ...], dict[int, list[Chain]]] = {}
    for chain in chains:
        out.setdefault(chain.words, {}).setdefault(walk(chain, facts)[-1], []).append(chain)
    return out


def _is_sound(chain: Chain, facts: Facts) -> bool:
    """No entity twice, and no passage before the last one names the end: the chain must be followed."""
    path = walk(chain, facts)
    return len(set(path)) == len(path) and all(path[-1] not in facts.named_in(i) for i in path[:-2])


def _are_apart(chains: tuple[Chain, Chain], facts: Facts, *, shared: int) -> bool:
    """Both sides are sound and meet in exactly ``shared`` entities."""
    a, b = (set(walk(c, facts)) for c in chains)
    return len(a & b) == shared and all(_is_sound(c, facts) for c in chains)


def word(form: Form, *, facts: Facts, style: Style, templates: Templates, stream: Stream) -> str:
    """The question's text."""
    frames = style.frames[templates]
    if form.kind == "chain":
        (chain,) = form.chains
        frame = stream.pick(frames.who if _end_kind(chain, facts) == "person" else frames.what)
        return frame.format(np=_phrase(chain, facts, style, templates, stream))
    if form.kind == "comparison":
        a, b = (_phrase(c, facts, style, templates, stream) for c in form.chains)
        return stream.pick(frames.comparison).format(a=a, b=b, r=style.speech.years[_end_kind(form.chains[0], facts)])
    if form.kind == "code":
        return _word_code(form, facts, style, templates, stream)
    a, b = (_phrase(Chain(c.start, c.words[:-1]), facts, style, templates, stream) for c in form.chains)
    return stream.pick(frames.yes_no).format(a=a, b=b, r=style.speech.relations[form.chains[0].words[-1]])


def _word_code(form: Form, facts: Facts, style: Style, templates: Templates, stream: Stream) -> str:
    """Dates are asked for by their own words: the birth year of X."""
    frame, speech = stream.pick(style.frames[templates].code[form.operation]), style.speech
    phrases = [_phrase(chain, facts, style, templates, stream) for chain in form.chains]
    dates = [speech.of.format(r=speech.years[_end_kind(c, facts)], x=x) for c, x in zip(form.chains, phrases)]
    return frame.format(a=phrases[0] if form.operation == "age" else dates[0], b=dates[1])


def _end_kind(chain: Chain, facts: Facts) -> str:
    return facts.entities[walk(chain, facts)[-1]].kind


def _phrase(chain: Chain, facts: Facts, style: Style, templates: Templates, stream: Stream) -> str:
    start = facts.entities[chain.start]
    kind = style.speech.kinds[start.kind]
    phrase = style.speech.named.format(k=kind, x=start.name) if stream.chance(0.3) else start.name
    for name in chain.words:
        phrase = style.noun_phrase(name, phrase, templates=templates)
    return phrase
