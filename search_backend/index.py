"""An index folder: a manifest, a corpus store (or where one is), and the files of one kind of index.

Kinds are objects (:class:`IndexKind`) that are found by name in :data:`KINDS`, or by import path; what they need
for themselves (faiss, an encoder) is imported when they are used.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, cast

from turntree.errors import CapacityError, ConfigError, SearchIndexError
from turntree.search_backend.files import building, holds_others, read_json, write_json
from turntree.search_backend.machine import available_memory, free_disk, human_bytes
from turntree.search_backend.passage import SearchBackend
from turntree.search_backend.selftest import self_test
from turntree.search_backend.store import CorpusStore, Progress, is_store, quiet
from turntree.search_backend.survey import Estimate, Survey, survey

__all__ = [
    "KINDS",
    "IndexKind",
    "build_index",
    "check_fits",
    "check_index",
    "estimate_index",
    "find_kind",
    "is_index",
    "is_shipped",
    "open_index",
    "open_store",
    "read_manifest",
    "survey_corpus",
    "total_estimate",
]

KINDS: dict[str, str] = {
    "bm25": "turntree.search_backend.lexical:KIND",
    "dense": "turntree.search_backend.dense:KIND",
    "hybrid": "turntree.search_backend.hybrid:KIND",
}
"""Import paths of the kinds that have a name."""

_FORMAT = 1
_MANIFEST, _REQUEST = "manifest.json", "building.json"
_CORPUS, _FILES = "corpus", "index"
_OWN = "turntree"


class IndexKind(Protocol):
    """One kind of index. Options are the ``--set`` values; settings are options that were checked and completed."""

    name: str

    def settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check options and fill in defaults: a plain JSON object, which the manifest keeps.

        Raises :class:`ConfigError` for unknown names and values out of range.
        """
        ...

    def estimate(self, corpus: Survey, settings: Mapping[str, Any]) -> Estimate:
        """What building and searching take, without the corpus store."""
        ...

    def alternatives(self, corpus: Survey, settings: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Options of the same kind that need less memory, best quality first."""
        ...

    def build(
        self, store: CorpusStore, folder: Path, settings: Mapping[str, Any], progress: Progress
    ) -> dict[str, Any]:
        """Write the index of ``store`` to ``folder``; returns plain JSON for the manifest (encoder, dimensions, ...).

        Called again with the same arguments after a build was killed at any point, it goes on and leaves the same
        bytes as one that was never stopped. Temporary files are gone at the end.
        """
        ...

    def open(self, store: CorpusStore, folder: Path, manifest: Mapping[str, Any], **options: Any) -> SearchBackend:
        """The backend over the files in ``folder``. ``manifest["settings"]`` and ``manifest["built"]`` say what they
        are; options are those of searching. Raises :class:`ConfigError` for an unknown option.
        """
        ...

    def packages(self, settings: Mapping[str, Any]) -> Sequence[str]:
        """Distributions whose versions the manifest keeps."""
        ...


_METHODS = ("settings", "estimate", "alternatives", "build", "open", "packages")


def find_kind(kind: str) -> IndexKind:
    """The kind with this name, or at this import path ``module:object``. Raises :class:`ConfigError`."""
    path = KINDS.get(kind, kind)
    module, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"kind={kind!r} is not known; expected one of {sorted(KINDS)} or module:object")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"kind={kind!r}: expected an index kind at {path}, found {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"kind={kind!r}: expected an index kind at {path}, found {found!r:.60} without {missing}")
    return cast("IndexKind", found)


def is_index(folder: str | Path) -> bool:
    """Whether there is a finished index."""
    return (Path(folder) / _MANIFEST).is_file()


# -- estimate -------------------------------------------------------------------------------------------------


def estimate_index(
    corpus: str | Path | CorpusStore, *, kind: str, options: Mapping[str, Any] | None = None
) -> Estimate:
    """What an index of ``corpus`` needs, its corpus store included where that is not there yet."""
    about = survey_corpus(corpus)
    found = find_kind(kind)
    return total_estimate(found, about, found.settings(options or {}))


def survey_corpus(corpus: str | Path | CorpusStore) -> Survey:
    """As :func:`survey`, also of the folder of an index, whose store an index of it would share."""
    return survey(corpus if isinstance(corpus, CorpusStore) or not is_index(corpus) else open_store(corpus))


def total_estimate(kind: IndexKind, about: Survey, settings: Mapping[str, Any]) -> Estimate:
    """The kind's own estimate with the corpus store on top."""
    own = kind.estimate(about, settings)
    store_memory = 60_000_000 + 16 * about.passages
    return Estimate(
        build_memory=max(own.build_memory, store_memory),
        disk=own.disk + about.disk,
        load_memory=own.load_memory,
        mapped=own.mapped + 16 * about.passages,
        seconds=own.seconds + about.seconds,
        notes=own.notes,
    )


def check_fits(
    kind: IndexKind,
    about: Survey,
    settings: Mapping[str, Any],
    out: Path,
    *,
    memory_limit: int | None = None,
    disk_limit: int | None = None,
) -> Estimate:
    """The estimate, where it fits; else :class:`CapacityError` with what is missing and what would fit."""
    memory = available_memory() if memory_limit is None else memory_limit
    disk = free_disk(out) if disk_limit is None else disk_limit
    needs = total_estimate(kind, about, settings)
    missing = _missing(needs, memory, disk)
    if not missing:
        return needs
    ways = _alternatives(kind, about, settings, memory, disk)
    instead = f"what would fit: {'; '.join(ways)}" if ways else "no smaller index of this corpus would fit either"
    raise CapacityError(f"{kind.name} index of {about.passages} passages: {missing}; {instead}")


def _missing(needs: Estimate, memory: int, disk: int) -> str:
    short = [
        f"{what} needs about {human_bytes(need)} of {where}, found {human_bytes(have)}"
        for what, where, need, have in (
            ("building", "memory", needs.build_memory, memory),
            ("searching", "memory", needs.load_memory, memory),
            ("building", "disk", needs.disk, disk),
        )
        if need > have
    ]
    return " and ".join(short)


def _alternatives(kind: IndexKind, about: Survey, settings: Mapping[str, Any], memory: int, disk: int) -> list[str]:
    """What fits instead, as arguments of ``turntree index build``."""
    ways = [(kind, dict(options)) for options in kind.alternatives(about, settings)]
    if kind.name != "bm25":
        ways.append((find_kind("bm25"), {}))
    fitting = []
    for other, options in ways:
        needs = total_estimate(other, about, other.settings(options))
        if not _missing(needs, memory, disk):
            spelled = " ".join([f"--kind {other.name}", *(f"--set {k}={v}" for k, v in options.items())])
            fitting.append(f"{spelled} ({human_bytes(needs.build_memory)} to build, {human_bytes(needs.disk)} of disk)")
    return fitting


# -- build ----------------------------------------------------------------------------------------------------


def build_index(
    corpus: str | Path | CorpusStore,
    out: str | Path,
    *,
    kind: str,
    options: Mapping[str, Any] | None = None,
    progress: Progress = quiet,
    replace: bool = False,
) -> SearchBackend:
    """Build an index folder and open it.

    ``corpus``: a corpus file, whose store is then written into the folder, or a :class:`CorpusStore` (or its folder),
    which the manifest refers to. A build that was stopped, even by kill -9, goes on and gives the same bytes; a
    finished one is opened. ``replace`` removes another index that the folder holds (but not the corpus that it is
    built from); without it that is a :class:`SearchIndexError`. A new index must find passages by their own words
    (:func:`self_test`). Nothing is estimated here, see :func:`check_fits`.
    """
    folder = Path(out)
    found = find_kind(kind)
    settings = found.settings(options or {})
    request = {"kind": kind, "settings": settings}
    with building(folder):
        if replace:
            _expect_elsewhere(corpus, folder)
        _make_room(folder, request, replace=replace)
        if not is_index(folder):
            write_json(folder / _REQUEST, request)
        store = _store(corpus, folder, progress)
        if is_index(folder):
            _expect_corpus(folder, store)
        else:
            files = folder / _FILES
            files.mkdir(exist_ok=True)
            built = found.build(store, files, settings, progress)
            manifest = _manifest(kind, found, store, folder, settings, built)
            self_test(found.open(store, files, manifest), store)  # an index that fails never gets a manifest
            write_json(folder / _MANIFEST, manifest)
        (folder / _REQUEST).unlink(missing_ok=True)
    return open_index(folder, kind=kind)


def _make_room(folder: Path, request: Mapping[str, Any], *, replace: bool) -> None:
    if is_index(folder):
        there = {key: read_manifest(folder)[key] for key in ("kind", "settings")}
    elif (folder / _REQUEST).is_file():
        there = read_json(folder / _REQUEST, what="the request of a build")
    elif holds_others(folder, _REQUEST):
        raise SearchIndexError(f"expected an index or an empty folder, found other files in {folder}; choose another")
    else:
        return
    if there == request and not replace:
        return
    if not replace:
        raise SearchIndexError(
            f"{folder}: expected an index with {dict(request)}, found one with {there}; choose another folder, or "
            f"--replace it"
        )
    for name in (_MANIFEST, _REQUEST):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / _FILES, ignore_errors=True)
    shutil.rmtree(folder / _CORPUS, ignore_errors=True)


def _expect_elsewhere(corpus: str | Path | CorpusStore, folder: Path) -> None:
    """Refuse to remove what is to be read."""
    source = (corpus.folder if isinstance(corpus, CorpusStore) else Path(corpus)).resolve()
    removed = [folder.resolve() / name for name in (_CORPUS, _FILES)]
    if source == folder.resolve() or any(source.is_relative_to(part) for part in removed):
        raise SearchIndexError(
            f"expected a corpus outside of {folder}, which is to be replaced, found {source} in it: the corpus would "
            "be removed too; build in another folder, or from the corpus file"
        )


def _store(corpus: str | Path | CorpusStore, folder: Path, progress: Progress) -> CorpusStore:
    if isinstance(corpus, CorpusStore):
        return corpus
    path = Path(corpus)
    if is_store(path):
        return CorpusStore.open(path)
    if is_index(path):
        return open_store(path)
    return CorpusStore.build(path, folder / _CORPUS, progress=progress)


def _manifest(
    kind: str, found: IndexKind, store: CorpusStore, folder: Path, settings: dict[str, Any], built: dict[str, Any]
) -> dict[str, Any]:
    files = folder / _FILES
    return {
        "format": _FORMAT,
        "kind": kind,
        "settings": settings,
        "built": built,
        "corpus": {
            "path": os.path.relpath(store.folder, folder),
            "fingerprint": store.fingerprint,
            "passages": len(store),
            "source": store.source,
        },
        "files": {p.relative_to(files).as_posix(): p.stat().st_size for p in sorted(files.rglob("*")) if p.is_file()},
        "versions": {name: _version(name) for name in ("turntree", "numpy", *found.packages(settings))},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


# -- open -----------------------------------------------------------------------------------------------------


_PARTS = {"kind": str, "settings": dict, "built": dict, "corpus": dict, "files": dict, "versions": dict}
_CORPUS_PARTS = {"path", "fingerprint", "passages"}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of an index folder. Raises :class:`SearchIndexError` where there is none of this format."""
    path = Path(folder)
    if not is_index(path):
        unfinished = " (an unfinished build: run the same turntree index build again)" if _unfinished(path) else ""
        raise SearchIndexError(f"expected a search index in {path}, found no {_MANIFEST}{unfinished}")
    manifest = read_json(path / _MANIFEST, what="the manifest of an index")
    if manifest.get("format") != _FORMAT:
        raise SearchIndexError(
            f"{path}: expected an index of format {_FORMAT}, found {manifest.get('format')!r}; build it again with "
            f"this version of turntree"
        )
    wrong = [name for name, kind in _PARTS.items() if not isinstance(manifest.get(name), kind)]
    if not wrong and not (manifest["corpus"].keys() >= _CORPUS_PARTS and isinstance(manifest["corpus"]["path"], str)):
        wrong = ["corpus"]
    if wrong:
        raise SearchIndexError(
            f"{path / _MANIFEST}: expected the manifest of an index, found it without a valid {wrong[0]!r}; build the "
            "index again"
        )
    return manifest


def _unfinished(folder: Path) -> bool:
    return (folder / _REQUEST).is_file()


def open_store(folder: str | Path) -> CorpusStore:
    """The corpus store of an index folder, after its fingerprint was compared with the manifest's."""
    path = Path(folder)
    manifest = read_manifest(path)
    store = CorpusStore.open(path / manifest["corpus"]["path"])
    _expect_corpus(path, store)
    return store


def check_index(folder: Path) -> CorpusStore:
    """The store of an index folder, whose fingerprint and whose index files' sizes are those of the manifest.

    Nothing is imported and no index opened. Raises :class:`SearchIndexError` naming what was expected and found.
    """
    store = open_store(folder)
    for name, size in read_manifest(folder)["files"].items():
        file = folder / _FILES / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "no file" if found is None else f"{found} bytes"
            raise SearchIndexError(f"{file}: expected {size} bytes, found {what}; build the index again")
    return store


def open_index(folder: str | Path, *, kind: str = "", **options: Any) -> SearchBackend:
    """Open an index folder for searching; options are those of its kind.

    The corpus store's fingerprint and the sizes of all files are compared with the manifest first. ``kind``: the import
    path of a kind of one's own; an index does not choose which module is imported. Raises :class:`SearchIndexError`
    naming what was expected and found.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    _expect_kind(path, manifest["kind"], kind)
    store = check_index(path)
    try:
        return find_kind(manifest["kind"]).open(store, path / _FILES, manifest, **options)
    except KeyError as error:
        raise SearchIndexError(
            f"{path / _MANIFEST}: expected the manifest of a {manifest['kind']} index, found it without {error}; build "
            "the index again"
        ) from error


def is_shipped(kind: str) -> bool:
    """Whether a kind comes with the library, and is no module of a user's."""
    return kind in KINDS or kind.startswith(f"{_OWN}.")


def _expect_kind(folder: Path, found: str, given: str) -> None:
    """A folder that came from elsewhere must not start code: not even by the import of a module that lies in it."""
    if given and given != found:
        raise SearchIndexError(f"{folder}: expected an index of the kind {given!r}, found {found!r}; leave kind out")
    if not given and not is_shipped(found):
        raise SearchIndexError(
            f"{folder / _MANIFEST}: expected a kind of {sorted(KINDS)}, found {found!r:.100}, whose module would be "
            f"imported; where you know it, say so: kind={found:.100} among the options of opening (--set, --arg, "
            "search.args.kind)"
        )


def _expect_corpus(folder: Path, store: CorpusStore) -> None:
    expected = read_manifest(folder)["corpus"]
    if store.fingerprint != expected["fingerprint"]:
        raise SearchIndexError(
            f"{folder}: expected the corpus {expected['fingerprint']} ({expected['passages']} passages), found "
            f"{store.fingerprint} ({len(store)} passages) in {store.folder}; build the index again"
        )
