"""Puts the forms of questions into words."""

from __future__ import annotations

from turntree.envs.worlds.facts import Facts
from turntree.envs.worlds.forms import Chain, Form, walk
from turntree.envs.worlds.schema import relation
from turntree.envs.worlds.stream import Stream
from turntree.envs.worlds.styles import Style, Templates

__all__ = ["word"]


def word(form: Form, *, facts: Facts, style: Style, templates: Templates, stream: Stream) -> str:
    """The question's text."""
    frames = style.frames[templates]
    if form.kind in ("chain", "unanswerable"):
        (chain,) = form.chains
        frame = stream.pick(frames.who if _asked_kind(chain, facts) == "person" else frames.what)
        return frame.format(np=_phrase(chain, facts, style, templates, stream))
    if form.kind == "intersection":
        return _word_intersection(form, facts, style, templates, stream)
    if form.kind == "count":
        first, member = form.chains[0], form.chains[1]
        about = _phrase(first, facts, style, templates, stream)
        return stream.pick(frames.count).format(a=about, r=style.speech.relations[member.words[0]])
    if form.kind == "stale":
        frame = stream.pick(frames.as_of if form.year else frames.current)
        return frame.format(np=_phrase(form.chains[0], facts, style, templates, stream), y=form.year)
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


def _word_intersection(form: Form, facts: Facts, style: Style, templates: Templates, stream: Stream) -> str:
    first, second, rest = form.chains
    frames, speech = style.frames[templates], style.speech
    a, b = (facts.entities[walk(chain, facts)[-1]].name for chain in (first, second))
    r, q = (speech.relations[chain.words[0]] for chain in (first, second))
    kind = facts.entities[first.start].kind
    phrase = stream.pick(frames.both).format(k=speech.kinds[kind], r=r, a=a, q=q, b=b)
    for name in rest.words:
        phrase = style.noun_phrase(name, phrase, templates=templates)
    return stream.pick(frames.who if _end_kind(rest, facts) == "person" else frames.what).format(np=phrase)


def _asked_kind(chain: Chain, facts: Facts) -> str:
    """The type of what is asked for, whether it is told or not."""
    return relation(chain.words[-1]).object if chain.words else facts.entities[chain.start].kind


def _end_kind(chain: Chain, facts: Facts) -> str:
    return facts.entities[walk(chain, facts)[-1]].kind


def _phrase(chain: Chain, facts: Facts, style: Style, templates: Templates, stream: Stream) -> str:
    start = facts.entities[chain.start]
    kind = style.speech.kinds[start.kind]
    phrase = style.speech.named.format(k=kind, x=start.name) if style.vague or stream.chance(0.3) else start.name
    for name in chain.words:
        phrase = style.noun_phrase(name, phrase, templates=templates)
    return phrase
