"""The published question sets by name: where they lie, which split is meant, how they are scored by default."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turntree.envs.datasets.reading import QuestionFile, Unanswerable, read_questions
from turntree.envs.metrics import Normalizer
from turntree.envs.task import Question
from turntree.errors import ConfigError, DataError

__all__ = ["DATASETS", "DatasetSpec", "LoadedSet", "dataset_spec", "load_dataset_questions"]

_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
# The newest commit of that repository whose files were looked at; PopQA was corrected shortly before it.
_FLASHRAG_REVISION = "feff516e9eea0a57c1c6826c8cbc3ca67e84b65f"
_SUFFIXES = (".jsonl", ".json", ".parquet", ".tsv", ".csv")


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One published set.

    ``splits``: file in the hub repository, by split; '' where it is not on the hub. ``sizes``: questions of a whole
    split as its authors state them. ``split`` is what evaluations mean by the set's name. ``aliases`` are other names
    it goes by. ``metric`` and ``normalizer`` are defaults for scoring, ``language`` is ``en`` or ``zh``.
    """

    name: str
    split: str
    sizes: Mapping[str, int]
    splits: Mapping[str, str] = field(default_factory=dict)
    repo: str = ""
    revision: str = ""
    language: Literal["en", "zh"] = "en"
    metric: Literal["em", "f1"] = "em"
    normalizer: Normalizer = "squad"
    aliases: tuple[str, ...] = ()
    about: str = ""


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """Questions of a published set, and all that a passport needs to say which ones they are.

    ``origin`` is ``file`` or ``hub``; ``revision`` the commit of the hub repository, '' for files. ``expected`` is the
    size of the whole split, None where it is not known; ``complete`` compares it with what the file holds.
    """

    spec: DatasetSpec
    split: str
    origin: Literal["file", "hub"]
    revision: str
    file: QuestionFile
    expected: int | None
    limited: bool = False
    questions: tuple[Question, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool | None:
        """Whether every question of the split is there; None where the size is unknown or a limit was given."""
        if self.limited or self.expected is None:
            return None
        return len(self.questions) + self.file.skipped == self.expected

    def passport(self) -> dict[str, Any]:
        """Plain data for a result file."""
        return {
            "dataset": self.spec.name,
            "split": self.split,
            "origin": self.origin,
            "repo": self.spec.repo if self.origin == "hub" else "",
            "revision": self.revision,
            "file": self.file.path.name,
            "sha256": self.file.sha256,
            "layout": self.file.layout,
            "questions": len(self.questions),
            "skipped": self.file.skipped,
            "expected": self.expected,
            "complete": self.complete,
        }


def _flashrag(name: str, split: str, sizes: Mapping[str, int], **options: Any) -> DatasetSpec:
    splits = {part: f"{name}/{part}.jsonl" for part in sizes}
    return DatasetSpec(name, split, sizes, splits, _FLASHRAG, _FLASHRAG_REVISION, **options)


# Sizes: the READMEs of FlashRAG, FRAMES, Chinese SimpleQA, CMRC 2018 and DRCD.
_SPECS = (
    _flashrag("hotpotqa", "dev", {"train": 90447, "dev": 7405}, aliases=("hotpot",), about="two hops"),
    _flashrag("2wikimultihopqa", "dev", {"train": 15000, "dev": 12576}, aliases=("2wiki",), about="two to four hops"),
    _flashrag("musique", "dev", {"train": 19938, "dev": 2417}, about="two to four hops"),
    _flashrag("bamboogle", "test", {"test": 125}, about="two hops, small"),
    _flashrag("nq", "test", {"train": 79168, "dev": 8757, "test": 3610}, aliases=("nq_open",), about="one hop"),
    _flashrag("triviaqa", "test", {"train": 78785, "dev": 8837, "test": 11313}, about="one hop, many aliases"),
    _flashrag("popqa", "test", {"test": 14267}, about="one hop, rare entities"),
    DatasetSpec(
        name="chinese_simpleqa",
        repo="OpenStellarTeam/Chinese-SimpleQA",
        revision="336305fc5f1da8184e3f70aff4473408418383a0",
        split="test",
        splits={"test": "chinese_simpleqa.jsonl"},
        sizes={"test": 3000},
        language="zh",
        normalizer="zh",
        about="one hop, Chinese",
    ),
    DatasetSpec(
        name="frames",
        repo="google/frames-benchmark",
        revision="2383b440f3de33d9c003f089fb66f6677436d696",
        split="test",
        splits={"test": "test.tsv"},
        sizes={"test": 824},
        metric="f1",
        about="two to fifteen articles a question",
    ),
    DatasetSpec(
        name="cmrc",
        split="dev",
        sizes={"trial": 1002, "dev": 3219},
        language="zh",
        normalizer="cmrc",
        aliases=("cmrc2018",),
        about="reading, Chinese (simplified)",
    ),
    DatasetSpec(
        name="drcd",
        split="dev",
        sizes={"dev": 3524},
        language="zh",
        normalizer="cmrc",
        about="reading, Chinese (traditional)",
    ),
)
DATASETS: Mapping[str, DatasetSpec] = {spec.name: spec for spec in _SPECS}
"""Every published set by its name."""


def dataset_spec(name: str) -> DatasetSpec:
    """The set of that name or alias. Raises ``ConfigError`` with a did-you-mean for another one."""
    wanted = name.strip().lower().replace("-", "_")
    for spec in DATASETS.values():
        if wanted in (spec.name, *spec.aliases):
            return spec
    names = [n for spec in DATASETS.values() for n in (spec.name, *spec.aliases)]
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"data set {name!r} is not known; expected one of {list(DATASETS)} or a file.{hint}")


def load_dataset_questions(
    name: str,
    *,
    split: str | None = None,
    source: str | Path | None = None,
    revision: str | None = None,
    limit: int | None = None,
    unanswerable: Unanswerable = "refuse",
) -> LoadedSet:
    """The questions of a published set (:data:`DATASETS`).

    ``source``: a file; a folder, in which the set is looked for; ``"hub"`` for the hub and nothing else; or None for
    the folders of ``$TURNTREE_DATA``, then the hub. In a folder these count, in order: the hub's own path
    (``nq/test.jsonl``; ``chinese_simpleqa.jsonl``, also in a folder ``chinese_simpleqa``), ``NAME/SPLIT.*``,
    ``NAME_SPLIT.*``, ``NAME_SPLIT/questions.jsonl``, and for the split that the set is evaluated on ``NAME.*`` and
    ``NAME/questions.jsonl``, each gzipped or not.
    ``revision``: another commit of the hub repository than the pinned one.

    Raises:
        ConfigError: the name or the split is unknown.
        DataError: the set is not there, and why the hub could not give it; or the file cannot be read.
    """
    spec = dataset_spec(name)
    chosen = split or spec.split
    known = {*spec.splits, *spec.sizes}
    if chosen not in known:
        raise ConfigError(f"{spec.name} has no split {chosen!r}; expected one of {sorted(known)}")
    path = _local(spec, chosen, source)
    commit = ""
    if path is None:
        path, commit = _download(spec, chosen, revision or spec.revision, source)
    file = read_questions(path, limit=limit, unanswerable=unanswerable)
    return LoadedSet(
        spec=spec,
        split=chosen,
        origin="hub" if commit else "file",
        revision=commit,
        file=file,
        expected=spec.sizes.get(chosen),
        limited=limit is not None,
        questions=file.questions,
    )


def _local(spec: DatasetSpec, split: str, source: str | Path | None) -> Path | None:
    """The file of the set on this machine; None to ask the hub."""
    if source == "hub":
        return None
    if source is not None:
        path = Path(source)
        if not path.exists():
            raise DataError(f"{spec.name}: expected a file or folder at {path}, found nothing; check the path")
        found = path if path.is_file() else next(_candidates(path, spec, split), None)
        if found is None:
            raise DataError(
                f"{spec.name}: expected {_wanted(spec, split)} in the folder {path}, found none of them; "
                "pass the file itself"
            )
        return found
    folders = [Path(folder) for folder in os.environ.get("TURNTREE_DATA", "").split(os.pathsep) if folder]
    return next((file for folder in folders for file in _candidates(folder, spec, split)), None)


def _candidates(folder: Path, spec: DatasetSpec, split: str) -> Iterator[Path]:
    stems = [f"{name}/{split}" for name in (spec.name, *spec.aliases)]
    stems += [f"{name}_{split}" for name in (spec.name, *spec.aliases)]
    stems += [f"{name}_{split}/questions" for name in (spec.name, *spec.aliases)]
    if split == spec.split:
        stems += [part for name in (spec.name, *spec.aliases) for part in (name, f"{name}/questions")]
    own = [spec.splits[split]] if split in spec.splits else []
    if own and "/" not in own[0]:  # of a hub repository that holds one set: in the folder of that name too
        own += [f"{name}/{own[0]}" for name in (spec.name, *spec.aliases)]
    names = [*own, *(f"{stem}{suffix}" for stem in stems for suffix in _SUFFIXES)]
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                yield path


def _wanted(spec: DatasetSpec, split: str) -> str:
    return f"{spec.splits.get(split, f'{spec.name}/{split}.json')} or {spec.name}_{split}.jsonl"


def _download(spec: DatasetSpec, split: str, revision: str, source: str | Path | None) -> tuple[Path, str]:
    """The hub's file in its cache, and the commit that it is of."""
    ways = (
        f"put {_wanted(spec, split)} into a folder and name it in TURNTREE_DATA, or pass source=FILE"
        if source != "hub"
        else "pass source=FILE"
    )
    if not spec.repo or split not in spec.splits:
        raise DataError(
            f"{spec.name}, split {split}: expected a local file, found none (it is not on the hub in a form that can "
            f"be read); {ways}"
        )
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise DataError(
            f"{spec.name}: the hub needs huggingface_hub: pip install huggingface_hub; or {ways}"
        ) from error
    try:
        found = hf_hub_download(spec.repo, spec.splits[split], repo_type="dataset", revision=revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{spec.name}, split {split}: expected {spec.splits[split]} of {spec.repo} at {revision} from the hub, "
            f"found {type(error).__name__} ({reason:.200}). Two ways on: go online (HF_HUB_OFFLINE unset) so that "
            f"it is downloaded once, or {ways}"
        ) from error
    return Path(found), _commit(Path(found), revision)


def _commit(path: Path, revision: str) -> str:
    """The commit in the hub cache's path ``snapshots/<commit>/...``."""
    parts = path.parts
    if "snapshots" in parts:
        return parts[parts.index("snapshots") + 1]
    return revision
