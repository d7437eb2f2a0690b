"""Fictional multi-hop worlds: the same arguments give the same bytes on every machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from turntree.envs.datasets import load_questions, save_questions
from turntree.envs.task import EMPTY, FrozenDict, Question, thaw
from turntree.envs.worlds.drawing import draw_forms
from turntree.envs.worlds.facts import Entity, Facts, Telltale, apportion, make_facts
from turntree.envs.worlds.forms import Form, Lookup, computation_of, evaluate, steps_of
from turntree.envs.worlds.languages import style_of
from turntree.envs.worlds.names import Split, draw_pairs
from turntree.envs.worlds.profiles import PROFILES, WorldConfig
from turntree.envs.worlds.schema import SHARES, VAGUE, relation, vague_group
from turntree.envs.worlds.speech import Language, Speech
from turntree.envs.worlds.stream import Stream
from turntree.envs.worlds.styles import Style, Templates
from turntree.envs.worlds.variations import vary
from turntree.envs.worlds.wording import word
from turntree.errors import ConfigError, DataError
from turntree.search_backend.corpus import load_corpus, save_corpus
from turntree.search_backend.passage import Passage

__all__ = ["PROFILES", "World", "WorldConfig", "generate_world", "load_world"]

_FORMAT = 1
# In worlds of vague questions: how many wrong guesses a turn are seen to be wrong.
_FOUND_NOTHING = 2
# Fields that came later: where they are not used they stay out of the meta data, and old worlds keep their bytes.
_LATER: dict[str, object] = {"language": "en", "inverse": 0, "withheld": 0, "stale": 0, "asides": 0}
_FIRST_YEAR, _YEARS = 1820, 200


@dataclass(frozen=True)
class World:
    """A corpus and questions about it. ``meta`` says how it was made."""

    questions: list[Question]
    passages: list[Passage]
    meta: FrozenDict = EMPTY

    def save(self, folder: str | Path) -> Path:
        """Write ``corpus.jsonl`` (wiki-18 layout), ``questions.jsonl`` (FlashRAG layout) and ``meta.json``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_corpus(path / "corpus.jsonl", self.passages)
        save_questions(path / "questions.jsonl", self.questions)
        text = json.dumps(thaw(self.meta), indent=1, ensure_ascii=False, sort_keys=True)
        (path / "meta.json").write_bytes(f"{text}\n".encode())
        return path


def load_world(folder: str | Path) -> World:
    """Read what :meth:`World.save` wrote; raises :class:`DataError` for anything else."""
    path = Path(folder)
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"expected a world folder with a meta.json at {path}, found {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise DataError(f"{path / 'meta.json'}: expected a world of format {_FORMAT}; generate the world again")
    return World(load_questions(path / "questions.jsonl"), load_corpus(path / "corpus.jsonl"), FrozenDict(meta))


def generate_world(
    profile: str | WorldConfig,
    *,
    seed: int,
    split: Split = "train",
    templates: Templates | None = None,
    entities: int | None = None,
    questions: int | None = None,
    language: Language | None = None,
) -> World:
    """Make a world of a profile (one of ``PROFILES``), or of an own :class:`WorldConfig`.

    Names of different splits never coincide, for any seeds. ``templates="test"`` words questions in ways held out from
    training; it is the default for ``split="test"``. ``entities``, ``questions`` and ``language`` (``en`` or
    ``zh``) override the profile's.

    Each question carries in ``metadata``: ``hops`` (its searches), ``type`` (a :data:`Kind`), ``supporting_ids`` and
    ``steps`` (``query``, ``supporting_id``, ``answer``, and the query's parts ``subject`` and ``relation``). The last
    step of a code question is ``{"tool": "python", "query": code, "answer"}``, and ``operation`` says what is computed.
    A step that several passages answer has ``supporting_ids`` and ``parts`` (of the answer), one whose passage does not
    tell is ``missing``, and ``options`` are the relations that a vague word may mean. ``year`` of a ``stale`` question
    is that asked for, None for now. Questions in another language than English say so in ``language``. Raises
    :class:`ConfigError` for sizes that the world cannot hold.
    """
    config = _resize(_profile(profile), entities, questions, language)
    if split not in get_args(Split):
        raise ConfigError(f"expected a split of {get_args(Split)}, found {split!r}")
    templates = templates or ("test" if split == "test" else "train")
    if templates not in get_args(Templates):
        raise ConfigError(f"expected templates of {get_args(Templates)}, found {templates!r}")
    # The number of questions is no part of the key: it changes the questions only, never the corpus.
    key = (config.profile, config.style, config.entities, split, seed, *_foreign(config))
    facts = make_facts(_entities(config, split, Stream("names", *key)), stream=Stream("facts", *key))
    facts = vary(
        facts,
        inverse=config.inverse,
        withheld=config.withheld,
        stale=config.stale,
        asides=config.asides,
        stream=Stream("variations", *key),
    )
    prefix = "-".join((config.profile, *_foreign(config), split, str(seed)))
    style = style_of(config.style, config.language)
    passages, stated = _passages(facts, config, prefix, Stream("texts", *key))
    forms = _forms(config, facts, Stream("forms", *key))
    wording = Stream("wording", templates, *key)
    made = [
        _question(
            f"{prefix}-q{i:05d}",
            form,
            facts,
            stated,
            word(form, facts=facts, style=style, templates=templates, stream=wording),
            style,
        )
        for i, form in enumerate(forms)
    ]
    meta = {"format": _FORMAT, "seed": seed, "split": split, "templates": templates, "config": _described(config)}
    return World(made, passages, FrozenDict(meta))


def _profile(profile: str | WorldConfig) -> WorldConfig:
    if isinstance(profile, WorldConfig):
        return profile
    if profile not in PROFILES:
        raise ConfigError(f"expected a profile of {sorted(PROFILES)}, found {profile!r}")
    return PROFILES[profile]


def _foreign(config: WorldConfig) -> tuple[str, ...]:
    """The language where it is not English: worlds of before there were others keep their bytes."""
    return () if config.language == "en" else (config.language,)


def _described(config: WorldConfig) -> dict[str, object]:
    return {name: value for name, value in asdict(config).items() if name not in _LATER or value != _LATER[name]}


def _resize(config: WorldConfig, entities: int | None, questions: int | None, language: Language | None) -> WorldConfig:
    return replace(
        config,
        language=config.language if language is None else language,
        entities=config.entities if entities is None else entities,
        questions=config.questions if questions is None else questions,
    )


def _entities(config: WorldConfig, split: Split, stream: Stream) -> list[Entity]:
    style = style_of(config.style, config.language)
    kinds = [k for k, n in zip(SHARES, apportion(config.entities, list(SHARES.values()))) for _ in range(n)]
    pairs = draw_pairs(style.inventory, len(kinds), split=split, stream=stream)
    drawn: dict[tuple[str, tuple[str, str]], None] = {}
    for i, (kind, pair) in enumerate(zip(kinds, pairs)):
        shared = pairs[stream.below(i)] if i and stream.chance(style.shared_names) else pair
        drawn[kind, pair if (kind, shared) in drawn else shared] = None
    return [_entity(i, kind, pair, style, stream) for i, (kind, pair) in enumerate(drawn)]


def _entity(index: int, kind: str, pair: tuple[str, str], style: Style, stream: Stream) -> Entity:
    name = style.name(kind, pair)
    has_alias = not style.prose or stream.chance(0.4)
    aliases = (style.name(kind, pair, alias=True),) if has_alias else ()
    return Entity(index, kind, pair, name, aliases, _FIRST_YEAR + stream.below(_YEARS))


def _passages(
    facts: Facts, config: WorldConfig, prefix: str, stream: Stream
) -> tuple[list[Passage], dict[Telltale, str]]:
    """All passages, lectures last, and the id of the passage that states each fact."""
    style = style_of(config.style, config.language)
    passages: list[Passage] = []
    stated: dict[Telltale, str] = {}

    def add(title: str, text: str) -> str:
        passages.append(Passage(f"{prefix}-p{len(passages):05d}", title, text))
        return passages[-1].id

    for entity in facts.entities:
        for told in style.passages(entity, facts, stream):
            id = add(entity.name, told.text)
            stated |= dict.fromkeys(told.stated, id)
    if style.nothing:
        for name, spoken, end in _leads(facts, stream):
            template = style.fact if end else style.nothing
            add(name, template.format(s=name, r=style.speech.relations[spoken], o=end))
    for entity in stream.sample(facts.entities, len(facts.entities) * config.lectures // 100):
        add(*_lecture(entity, facts.entities, style.speech, stream))
    return passages, stated


def _leads(facts: Facts, stream: Stream) -> list[tuple[str, str, str]]:
    """Of each name the relations of :data:`VAGUE` that nobody in the world has under it, with what is told of them.

    Of each vague word nothing is told of two relations, where there are as many. The others lead to some entity of the
    right type: they are told of somebody else of this name, whom no question is about.
    """
    known = {(entity.name, word) for entity in facts.entities for word in facts.objects[entity.index]}
    kinds = {kind: [e.name for e in facts.entities if e.kind == kind] for kind in SHARES}
    leads: list[tuple[str, str, str]] = []
    for name in dict.fromkeys(entity.name for entity in facts.entities):
        for words in VAGUE.values():
            unknown = stream.sample([w for w in words if (name, w) not in known], len(words))
            for i, w in enumerate(unknown):
                others = [other for other in kinds[relation(w).object] if other != name]
                leads.append((name, w, "" if i < _FOUND_NOTHING else stream.pick(others)))
    return leads


def _lecture(entity: Entity, entities: Sequence[Entity], speech: Speech, stream: Stream) -> tuple[str, str]:
    a, b = (stream.pick(entities).name for _ in range(2))
    title = speech.lecture_title.format(s=entity.name)
    return title, speech.lecture.format(t=title, s=entity.name, a=a, b=b)


def _forms(config: WorldConfig, facts: Facts, stream: Stream) -> list[Form]:
    vague = style_of(config.style, config.language).vague
    counts = apportion(config.questions, [weight for *_, weight in config.mix])
    forms = [
        form
        for (kind, hops, _), n in zip(config.mix, counts)
        for form in draw_forms(kind, hops, n, facts=facts, stream=stream, vague=vague)
    ]
    stream.shuffle(forms)
    return forms


def _question(id: str, form: Form, facts: Facts, stated: Mapping[Telltale, str], text: str, style: Style) -> Question:
    speech = style.speech
    lookups = steps_of(form, facts, speech=speech)
    steps = [_step(lookup, facts, stated, style) for lookup in lookups]
    metadata: dict[str, object] = {} if speech.language == "en" else {"language": speech.language}
    metadata |= {
        "type": form.kind,
        "hops": len(steps),
        "supporting_ids": list(dict.fromkeys(stated[fact] for lookup in lookups for fact in lookup.sources)),
        "steps": steps,
    }
    if form.kind == "stale":
        metadata["year"] = form.year or None
    computation = computation_of(form, facts)
    if computation is not None:
        steps.append({"tool": "python", "query": computation.code, "answer": computation.answer})
        metadata["operation"] = form.operation
    return Question(id, text, evaluate(form, facts, speech=speech), FrozenDict(metadata))


def _step(lookup: Lookup, facts: Facts, stated: Mapping[Telltale, str], style: Style) -> dict[str, object]:
    name, spoken = facts.entities[lookup.subject].name, style.speech.spoken(lookup.word)
    step: dict[str, object] = {
        "query": style.speech.query.format(x=name, r=spoken),
        "supporting_id": stated[lookup.sources[0]],
        "answer": lookup.answer,
        "subject": name,
        "relation": spoken,
    }
    if lookup.parts:
        step["supporting_ids"] = list(dict.fromkeys(stated[fact] for fact in lookup.sources))
        step["parts"] = list(lookup.parts)
    if lookup.missing:
        step["missing"] = True
    if style.vague:
        step["options"] = [style.speech.relations[w] for w in VAGUE[vague_group(lookup.word)]]
    return step
