"""The question sets of an evaluation: which ones, their questions, and the configuration that each is played with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from turntree.envs.datasets import DATASETS, dataset_spec, load_dataset_questions, read_questions
from turntree.envs.datasets.reading import Unanswerable
from turntree.envs.task import Question
from turntree.errors import ConfigError
from turntree.trainers.config import RunConfig
from turntree.trainers.eval_config import PAPER_SETS
from turntree.trainers.evaluation.passport import ids_hash
from turntree.trainers.options import did_you_mean
from turntree.trainers.seeds import derive_rng
from turntree.trainers.task import QUESTION_ANSWERING, questions_file

__all__ = ["EvalSet", "load_sets", "set_labels"]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One set: its name ('' : the questions of ``env``), what it is played with, and what a passport says of it.

    ``questions`` is None where the environment brings its own tasks.
    """

    name: str
    config: RunConfig
    file: Path | None = None
    questions: tuple[Question, ...] | None = field(default=None, repr=False)
    data: Mapping[str, Any] = field(default_factory=dict)


def set_labels(config: RunConfig) -> list[str]:
    """Names of the sets, in order: published names, names of files, or NAME of NAME=FILE."""
    return [_entry(entry)[0] for entry in _entries(config)]


def load_sets(config: RunConfig) -> list[EvalSet]:
    """Read every set before anything is played, so that a missing file shows at once.

    Raises ``ConfigError`` for options that do not fit, ``DataError`` for a set that is not there or cannot be read.
    """
    entries = _entries(config)
    if not entries:
        return [_own(config)]
    if config.env.id not in QUESTION_ANSWERING:
        raise ConfigError(f"eval.sets are sets of questions, but env.id={config.env.id} brings tasks of its own")
    labels = [_entry(entry)[0] for entry in entries]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ConfigError(f"eval.sets names {repeated} twice; give another name as NAME=FILE")
    options = {_label(name): dict(own) for name, own in config.eval.set_options.items()}
    if unknown := next((name for name in options if name not in labels), None):
        hint = did_you_mean(unknown, labels)
        raise ConfigError(f"eval.set_options.{unknown}: expected one of the sets {labels}.{hint}")
    return [_named(config, *_entry(entry), options.get(_entry(entry)[0], {})) for entry in entries]


def _entries(config: RunConfig) -> list[str]:
    """The sets as they were asked for; ``all`` stands for those of the papers."""
    return [name for entry in config.eval.sets for name in (PAPER_SETS if entry == "all" else (entry,))]


def _entry(entry: str) -> tuple[str, str]:
    """Name and file ('' : a published set) of an entry."""
    label, equals, path = entry.partition("=")
    if equals:
        return _folder_name(label, entry), path
    if Path(entry).exists() and ("/" in entry or "." in entry or not _published(entry)):
        found = Path(entry).resolve()
        return _folder_name(found.stem if found.is_file() else found.name, entry), entry
    return dataset_spec(entry).name, ""


def _folder_name(label: str, entry: str) -> str:
    """The label, which names a folder of results. Raises ``ConfigError`` where it cannot."""
    if not label or label in (".", "..") or set(label) & set("/\\\0"):
        raise ConfigError(
            f"eval.sets: {entry!r} names a set {label!r}, but its results lie in a folder of that name; expected "
            "NAME=FILE, the name without slashes"
        )
    return label


def _published(name: str) -> bool:
    return any(name.lower() in (spec.name, *spec.aliases) for spec in DATASETS.values())


def _label(name: str) -> str:
    return dataset_spec(name).name if _published(name) else name


def _own(config: RunConfig) -> EvalSet:
    """The questions of ``env``; those of another environment are its tasks."""
    env = config.env
    name = env.test_questions or env.dev_questions
    if config.eval.set_options:
        raise ConfigError("eval.set_options are for eval.sets, which is empty; give the options of env and search")
    if env.id not in QUESTION_ANSWERING or not name:
        return EvalSet("", config, data={"dataset": env.id if env.id not in QUESTION_ANSWERING else ""})
    path = questions_file(name)
    found = read_questions(path, limit=_whole(config.eval.limit, config))
    kept = _subset(found.questions, config.eval.limit, config, path.stem)
    dataset = path.parent.name if path.stem == "questions" else path.stem
    data = {"dataset": dataset, "split": "", "sha256": found.sha256, "file": path.name}
    return EvalSet("", _with(config, {}, None), Path(name), kept, _about(data, kept))


def _named(config: RunConfig, label: str, path: str, own: Mapping[str, Any]) -> EvalSet:
    """A published set, or a file; ``own`` are its options."""
    config = replace(config, env=replace(config.env, dev_corpus=""))  # that one is of other questions
    limit = own.get("limit", config.eval.limit)
    whole = _whole(limit, config)
    skip: Any = own.get("unanswerable", "skip" if not path else "refuse")
    if skip not in get_args(Unanswerable):
        raise ConfigError(f"eval.set_options.{label}.unanswerable={skip!r}: expected one of {get_args(Unanswerable)}")
    if path:
        file = questions_file(path)
        found = read_questions(file, limit=whole, unanswerable=skip)
        data = {"dataset": label, "split": "", "sha256": found.sha256, "file": file.name, "skipped": found.skipped}
        kept = _subset(found.questions, limit, config, label)
        return EvalSet(label, _with(config, own, None), file, kept, _about(data, kept))
    source = own.get("source") or config.eval.data or None
    loaded = load_dataset_questions(
        label, split=own.get("split"), source=source, revision=own.get("revision"), limit=whole, unanswerable=skip
    )
    kept = _subset(loaded.questions, limit, config, label)
    known = _with(config, own, loaded.spec.normalizer, loaded.spec.language)
    return EvalSet(label, known, loaded.file.path, kept, _about(loaded.passport(), kept))


def _about(data: Mapping[str, Any], questions: Sequence[Question]) -> dict[str, Any]:
    return {**data, "questions": len(questions), "ids": ids_hash(questions)}


def _whole(limit: int | None, config: RunConfig) -> int | None:
    """How many questions to read: a random subset is drawn from all of them."""
    return limit if config.eval.subset == "first" else None


def _subset(questions: Sequence[Question], limit: int | None, config: RunConfig, label: str) -> tuple[Question, ...]:
    if limit is None or limit >= len(questions):
        return tuple(questions)
    if config.eval.subset == "first":
        return tuple(questions[:limit])
    places = derive_rng(config.seed, "eval subset", label).choice(len(questions), size=limit, replace=False)
    return tuple(questions[i] for i in sorted(places.tolist()))


def _with(config: RunConfig, own: Mapping[str, Any], normalizer: str | None, language: str | None = None) -> RunConfig:
    """The configuration with a set's own options, which win over those for all sets."""
    env, search, options = config.env, config.search, config.eval
    if "corpus" in own or "index" in own:
        search = replace(search, corpus=str(own.get("corpus", "")), index=str(own.get("index", "")))
    search = _changed(search, own.get("search"), "search")
    env = _changed(env, own.get("env"), "env")
    if "prompt" in own:
        env = replace(env, prompt=str(own["prompt"]))
    env = replace(env, normalizer=str(own.get("normalizer") or env.normalizer or normalizer or ""))
    env = replace(env, language=str(own.get("language") or (language if env.language == "en" else "") or env.language))
    options = replace(options, scorers=list(own.get("scorers", options.scorers)))
    return replace(config, env=env, search=search, eval=options)


def _changed(section: Any, own: Mapping[str, Any] | None, name: str) -> Any:
    """A section of the configuration with some options replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = [f.name for f in dataclasses.fields(section)]
    unknown = next((key for key in own or {} if key not in known), None)
    if unknown is not None:
        raise ConfigError(f"eval.set_options: {name}.{unknown} is not known.{did_you_mean(unknown, known)}")
    typed = OmegaConf.structured(type(section))
    OmegaConf.set_readonly(typed, False)
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.merge(typed, dict(own or {})))
    except OmegaConfBaseException as error:
        raise ConfigError(f"eval.set_options: {name} does not fit: {str(error).splitlines()[0]}") from None
    return replace(section, **{key: plain[key] for key in own or {}})
