"""Fictional multi-hop worlds: the same arguments give the same bytes on every machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

from turntree.envs.datasets import load_questions, save_questions
from turntree.envs.task import FrozenDict, Question, thaw
from turntree.envs.worlds.facts import Entity, Facts, apportion, make_facts
from turntree.envs.worlds.languages import style_of
from turntree.envs.worlds.names import Split, draw_pairs
from turntree.envs.worlds.questions import Form, Kind, computation_of, draw_forms, evaluate, steps_of, word
from turntree.envs.worlds.schema import SHARES
from turntree.envs.worlds.speech import Language, Speech
from turntree.envs.worlds.stream import Stream
from turntree.envs.worlds.styles import STYLES, Style, StyleName, Templates
from turntree.errors import ConfigError, DataError
from turntree.search_backend.corpus import load_corpus, save_corpus
from turntree.search_backend.passage import Passage

__all__ = ["PROFILES", "World", "WorldConfig", "generate_world", "load_world"]

_FORMAT = 1
_FEWEST_ENTITIES = 60
_FIRST_YEAR, _YEARS = 1820, 200


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """Size and kind of a world.

    ``mix`` rows are (kind, hops, weight): ``hops`` counts gold steps, weights are relative. ``lectures`` is the
    percentage of entities that get one more passage, which names them in its title but states none of their relations.
    ``language``: in which names, passages and questions are written, ``en`` or ``zh``.
    """

    profile: str
    style: StyleName
    entities: int
    questions: int
    mix: tuple[tuple[Kind, int, int], ...]
    lectures: int = 0
    language: Language = "en"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ConfigError(f"expected a style of {sorted(STYLES)}, found {self.style!r}")
        if self.language not in get_args(Language):
            raise ConfigError(f"expected a language of {get_args(Language)}, found {self.language!r}")
        if unknown := {kind for kind, *_ in self.mix} - set(get_args(Kind)):
            raise ConfigError(f"expected question kinds of {get_args(Kind)}, found {sorted(unknown)}")
        if self.entities < _FEWEST_ENTITIES:
            raise ConfigError(f"expected at least {_FEWEST_ENTITIES} entities, found {self.entities}")
        if self.questions < 0 or not self.mix or any(w < 0 for *_, w in self.mix) or not any(w for *_, w in self.mix):
            raise ConfigError(f"expected questions >= 0 and positive weights, found {self.questions} and {self.mix}")
        if any(hops < 1 for _, hops, _ in self.mix):
            raise ConfigError(f"expected at least one hop, found {self.mix}")
        frames = style_of(self.style, self.language).frames["train"]
        if not frames.comparison and any(kind == "comparison" for kind, *_ in self.mix):
            raise ConfigError(
                f"the {self.style} style tells no dates to compare; use style 'prose' for comparison questions"
            )
        if not frames.code and any(kind == "code" for kind, *_ in self.mix):
            raise ConfigError(
                f"the {self.style} style tells no numbers; use style 'dated' or 'prose' for code questions"
            )


PROFILES = {
    "quickstart": WorldConfig(
        profile="quickstart",
        style="short",
        entities=180,
        questions=2000,
        mix=(("chain", 1, 15), ("chain", 2, 50), ("chain", 3, 20), ("yes_no", 2, 15)),
    ),
    "standard": WorldConfig(
        profile="standard",
        style="prose",
        entities=3000,
        questions=1000,
        mix=(
            ("chain", 1, 10),
            ("chain", 2, 30),
            ("chain", 3, 20),
            ("chain", 4, 10),
            ("comparison", 2, 10),
            ("comparison", 4, 5),
            ("yes_no", 2, 10),
            ("yes_no", 4, 5),
        ),
        lectures=10,
    ),
    "code": WorldConfig(
        profile="code",
        style="dated",
        entities=180,
        questions=2000,
        mix=(("chain", 1, 10), ("chain", 2, 25), ("yes_no", 2, 5), ("code", 2, 60)),
    ),
    "code_prose": WorldConfig(
        profile="code_prose",
        style="prose",
        entities=3000,
        questions=1000,
        mix=(("chain", 1, 10), ("chain", 2, 25), ("comparison", 2, 10), ("code", 2, 35), ("code", 4, 20)),
        lectures=10,
    ),
}


@dataclass(frozen=True)
class World:
    """A corpus and questions about it. ``meta`` says how it was made."""

    questions: list[Question]
    passages: list[Passage]
    meta: FrozenDict = field(default_factory=FrozenDict)

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

    Each question carries in ``metadata``: ``hops`` (its searches), ``type`` (``chain``, ``comparison``, ``yes_no``,
    ``code``), ``supporting_ids`` and ``steps`` (``query``, ``supporting_id``, ``answer``, and the query's parts
    ``subject`` and ``relation``). The last step of a code question is ``{"tool": "python", "query": code, "answer"}``,
    and ``operation`` says what is computed. Questions in another language than English say so in ``language``. Raises
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
            style.speech,
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
    described = asdict(config)
    return described if _foreign(config) else {name: value for name, value in described.items() if name != "language"}


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
) -> tuple[list[Passage], dict[tuple[int, str], str]]:
    """All passages, lectures last, and the id of the passage that states each (entity number, relation)."""
    style = style_of(config.style, config.language)
    passages: list[Passage] = []
    stated: dict[tuple[int, str], str] = {}

    def add(title: str, text: str) -> str:
        passages.append(Passage(f"{prefix}-p{len(passages):05d}", title, text))
        return passages[-1].id

    for entity in facts.entities:
        for told in style.passages(entity, facts, stream):
            id = add(entity.name, told.text)
            stated |= {(entity.index, word): id for word in told.stated}
    for entity in stream.sample(facts.entities, len(facts.entities) * config.lectures // 100):
        add(*_lecture(entity, facts.entities, style.speech, stream))
    return passages, stated


def _lecture(entity: Entity, entities: Sequence[Entity], speech: Speech, stream: Stream) -> tuple[str, str]:
    a, b = (stream.pick(entities).name for _ in range(2))
    title = speech.lecture_title.format(s=entity.name)
    return title, speech.lecture.format(t=title, s=entity.name, a=a, b=b)


def _forms(config: WorldConfig, facts: Facts, stream: Stream) -> list[Form]:
    counts = apportion(config.questions, [weight for *_, weight in config.mix])
    forms = [
        form
        for (kind, hops, _), n in zip(config.mix, counts)
        for form in draw_forms(kind, hops, n, facts=facts, stream=stream)
    ]
    stream.shuffle(forms)
    return forms


def _question(
    id: str, form: Form, facts: Facts, stated: Mapping[tuple[int, str], str], text: str, speech: Speech
) -> Question:
    lookups = [(facts.entities[s.subject].name, speech.spoken(s.word), s) for s in steps_of(form, facts)]
    steps = [
        {
            "query": speech.query.format(x=name, r=relation),
            "supporting_id": stated[lookup.subject, lookup.word],
            "answer": lookup.answer,
            "subject": name,
            "relation": relation,
        }
        for name, relation, lookup in lookups
    ]
    metadata: dict[str, object] = {} if speech.language == "en" else {"language": speech.language}
    metadata |= {
        "type": form.kind,
        "hops": len(steps),
        "supporting_ids": list(dict.fromkeys(s["supporting_id"] for s in steps)),
        "steps": steps,
    }
    computation = computation_of(form, facts)
    if computation is not None:
        steps.append({"tool": "python", "query": computation.code, "answer": computation.answer})
        metadata["operation"] = form.operation
    return Question(id, text, evaluate(form, facts, speech=speech), FrozenDict(metadata))
