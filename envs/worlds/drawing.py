"""Draws the forms of a world's questions: different ones, without shortcuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turntree.envs.worlds.facts import Facts
from turntree.envs.worlds.forms import Chain, Form, Kind, Operation, end_of, walk
from turntree.envs.worlds.schema import VAGUE
from turntree.envs.worlds.stream import Stream
from turntree.errors import ConfigError

__all__ = ["draw_forms"]

# Draws in a row without a new question after which a world counts as exhausted.
_PATIENCE = 5000
# More members do not fit what one search shows.
_MOST_COUNTED = 3


def draw_forms(kind: Kind, hops: int, n: int, *, facts: Facts, stream: Stream, vague: bool = False) -> list[Form]:
    """``n`` different forms with ``hops`` gold steps each, without shortcuts; half of the yes/no answers are yes.

    ``vague``: chains of relations that :data:`VAGUE` has a word for only. Raises :class:`ConfigError` when the world
    does not hold as many.
    """
    one = _ONE_BY_ONE.get(kind)
    if kind == "chain":
        draw = _vague_chain if vague else _chain
        return _distinct(lambda: draw(hops, facts, stream), n, f"chain questions of {hops} hops")
    if one is not None:
        if kind == "intersection" and hops < 2:
            raise ConfigError(f"expected at least two hops for intersection questions, found {hops}")
        return _distinct(lambda: one(hops, facts, stream), n, f"{kind} questions of {hops} hops")
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
    forms: dict[tuple[frozenset[Chain], int], Form] = {}
    misses = 0
    while len(forms) < n and misses < _PATIENCE:
        form = draw()
        known = form is None or (frozenset(form.chains), form.year) in forms
        misses = misses + 1 if known else 0
        if form is not None and not known:
            forms[frozenset(form.chains), form.year] = form
    if len(forms) < n:
        raise ConfigError(
            f"expected {n} {what}, but this world seems to hold only {len(forms)} different ones; "
            "ask for fewer questions or more entities"
        )
    return list(forms.values())


def _chain(hops: int, facts: Facts, stream: Stream) -> Form | None:
    chain = _random_chain(hops, facts, stream)
    return Form("chain", (chain,)) if _is_sound(chain, facts) else None


def _vague_chain(hops: int, facts: Facts, stream: Stream) -> Form | None:
    form = _chain(hops, facts, stream)
    return form if form and all(any(w in group for group in VAGUE.values()) for w in form.chains[0].words) else None


def _unanswerable(hops: int, facts: Facts, stream: Stream) -> Form | None:
    known = _random_chain(hops - 1, facts, stream) if hops > 1 else Chain(stream.pick(list(facts.lost) or [0]), ())
    lost = facts.lost.get(walk(known, facts)[-1])
    if lost is None or not _is_sound(known, facts):
        return None
    return Form("unanswerable", (Chain(known.start, (*known.words, lost[0])),))


def _stale(hops: int, facts: Facts, stream: Stream) -> Form | None:
    known = _random_chain(hops - 1, facts, stream) if hops > 1 else Chain(stream.pick(list(facts.past) or [0]), ())
    path = walk(known, facts)
    past = facts.past.get(path[-1])
    if past is None:
        return None
    # Half of the questions ask for the present value, the others for that of a year before or after the change.
    span = past.changed - past.since
    year = 0 if stream.chance(0.5) else past.since + stream.below(2 * span)
    form = Form("stale", (Chain(known.start, (*known.words, past.word)),), year=year)
    names = [facts.entities[i].name for i in (*path, end_of(form, facts))]
    told = any(_tells(i, names[-1], facts) for i in path[:-1])
    return None if told or len(set(names)) < len(names) else form


def _intersection(hops: int, facts: Facts, stream: Stream) -> Form | None:
    """Both descriptions are needed: of at least one of them there are others that fit it alone."""
    start = stream.below(len(facts.entities))
    if len(facts.objects[start]) < 2:
        return None
    words = stream.sample(list(facts.objects[start]), 2)
    fits = [facts.subjects(w, facts.objects[start][w]) for w in words]
    if facts.past.get(start) or fits[0] & fits[1] != {start} or max(map(len, fits)) < 2:
        return None
    # The description that fits fewer is looked up first.
    first, second = sorted(words, key=lambda w: len(facts.subjects(w, facts.objects[start][w])))
    rest = _random_chain(hops - 2, facts, stream, start=start)
    path = walk(rest, facts)
    known = {facts.objects[start][first], facts.objects[start][second]}
    if len({*path, *known}) < len(path) + 2 or (rest.words and rest.words[0] in words):
        return None
    if not _is_sound(rest, facts) or any(path[-1] in facts.named_in(i) for i in known if rest.words):
        return None
    return Form("intersection", (Chain(start, (first,)), Chain(start, (second,)), rest))


def _count(hops: int, facts: Facts, stream: Stream) -> Form | None:
    known = _random_chain(hops - 1, facts, stream)
    end = walk(known, facts)[-1]
    words = sorted({word for _, word in facts.pointing_at(end)})
    if not words or not _is_sound(known, facts):
        return None
    word = stream.pick(words)
    members = sorted(facts.subjects(word, end))
    if (
        len(members) > _MOST_COUNTED
        or any(facts.past.get(i) for i in members)
        or set(members) & set(walk(known, facts))
    ):
        return None
    return Form("count", (known, *(Chain(i, (word,)) for i in members)))


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


def _random_chain(hops: int, facts: Facts, stream: Stream, *, start: int | None = None) -> Chain:
    start = here = stream.below(len(facts.entities)) if start is None else start
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
    """No name twice, and no passage before the last one names the end: the chain must be followed."""
    path = walk(chain, facts)
    names = [facts.entities[i].name for i in path]
    return len(set(names)) == len(names) and not any(_tells(i, names[-1], facts) for i in path[:-2])


def _tells(subject: int, name: str, facts: Facts) -> bool:
    """Whether the passages about an entity name another one."""
    return any(facts.entities[i].name == name for i in facts.named_in(subject))


def _are_apart(chains: tuple[Chain, Chain], facts: Facts, *, shared: int) -> bool:
    """Both sides are sound and meet in exactly ``shared`` entities."""
    a, b = (set(walk(c, facts)) for c in chains)
    return len(a & b) == shared and all(_is_sound(c, facts) for c in chains)


_ONE_BY_ONE: dict[Kind, Callable[[int, Facts, Stream], Form | None]] = {
    "intersection": _intersection,
    "count": _count,
    "unanswerable": _unanswerable,
    "stale": _stale,
}
