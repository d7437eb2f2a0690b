"""What this machine can hold of a corpus, and which search backend to take; and whether an index can be searched."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turntree.errors import TurnTreeError
from turntree.search_backend.faiss_index import CODEBOOK
from turntree.search_backend.index import find_kind, is_index, open_index, read_manifest, total_estimate
from turntree.search_backend.machine import available_memory, free_disk, human_bytes
from turntree.search_backend.survey import Estimate, Survey, survey
from turntree.trainers.config import RunConfig, SearchConfig

__all__ = ["SearchLine", "search_lines"]

_QUERY = "Who wrote Hamlet?"
_DIMENSION = 768  # of e5-base-v2 and bge-base; other encoders in proportion
_ENCODER_MEMORY = 1_500_000_000
_IN_PROCESS = 100_000  # passages; past this an index folder starts at once where memory takes minutes
_BYTES_IN_PROCESS = 9_000  # of memory a passage, its index in bm25s included


@dataclass(frozen=True, slots=True)
class SearchLine:
    """One line: its name, whether it fits, what was found, what it means, what to do."""

    name: str
    fits: bool
    found: str
    means: str
    do: str = ""


def search_lines(config: RunConfig) -> Iterator[SearchLine]:
    """The corpus or index of the configuration against this machine; nothing without one."""
    path = config.search.index or config.search.corpus
    if not path:
        return
    try:
        if config.search.index or is_index(path):
            yield _index(Path(path), config.search)
            return
        about = survey(path)
    except TurnTreeError as error:
        name = "index" if config.search.index else "corpus"
        yield SearchLine(name, False, path, str(error), "correct --corpus, search.corpus or search.index")
        return
    memory, disk = available_memory(), free_disk(Path(path))
    size = f"{'' if about.exact else 'about '}{about.passages} passages, {human_bytes(about.text_bytes)} of text"
    yield SearchLine(
        "corpus", True, f"{path}: {size}", f"{human_bytes(memory)} of memory available, and of disk {human_bytes(disk)}"
    )
    yield from _choices(about, Path(path), memory, disk)


def _index(folder: Path, search: SearchConfig) -> SearchLine:
    """Open it as a run does, its encoder too, and search it once."""
    manifest = read_manifest(folder)
    size, memory = sum(manifest["files"].values()), available_memory()
    try:
        backend = open_index(folder, **search.args)
        start = time.monotonic()
        backend.search([_QUERY], k=search.top_k)
        seconds = time.monotonic() - start
    except TurnTreeError as error:
        found = f"{folder}: {manifest['kind']}, {manifest['corpus']['passages']} passages"
        do = f"as it says; turntree index build --corpus FILE --out {folder} --replace makes it anew"
        return SearchLine("index", False, found, str(error), do)
    close = getattr(backend, "close", None)
    if close is not None:
        close()
    found = (
        f"{folder}: {manifest['kind']}, {manifest['corpus']['passages']} passages, {human_bytes(size)} of mapped "
        f"files, searched in {seconds:.2g} s"
    )
    means = (
        "all of it stays in memory" if size < memory else f"more than the {human_bytes(memory)} there is: slow at first"
    )
    return SearchLine("index", True, found, means)


def _choices(about: Survey, corpus: Path, memory: int, disk: int) -> Iterator[SearchLine]:
    """The backends, simplest first; the first that fits is the one to take to begin with."""
    build = f"turntree index build --corpus {corpus} --out DIR"
    bm25 = find_kind("bm25")
    lexical = total_estimate(bm25, about, bm25.settings({}))
    process = _BYTES_IN_PROCESS * about.passages + 200_000_000
    small = about.passages <= _IN_PROCESS and process < memory
    take = "take this to begin with: nothing to build"
    later = "starts anew with every run; take an index folder"
    yield SearchLine(
        "search bm25", process < memory, f"{human_bytes(process)} of memory", take if small else later,
        "" if small else f"{build} --kind bm25",
    )  # fmt: skip
    yield _line("search index bm25", lexical, memory, disk, f"{build} --kind bm25", first=not small)
    for name, needs in _dense(about):
        yield _line(
            f"search index dense {name}",
            needs,
            memory,
            disk,
            f"{build} --kind dense --encoder MODEL --set factory={name}",
        )


def _line(name: str, needs: Estimate, memory: int, disk: int, command: str, *, first: bool = False) -> SearchLine:
    short = [
        what
        for what, need, have in (
            ("memory", max(needs.build_memory, needs.load_memory), memory),
            ("disk", needs.disk, disk),
        )
        if need > have
    ]
    found = f"{human_bytes(needs.build_memory)} of memory to build, {human_bytes(needs.disk)} of disk"
    if short:
        return SearchLine(name, False, found, f"does not fit: too little {' and '.join(short)}", "take one that fits")
    kept = "" if needs.mapped < memory else "; larger than memory, so searches wait for the disk"
    return SearchLine(name, True, found, f"fits{'; take this to begin with' if first else ''}{kept}", command)


def _dense(about: Survey) -> Iterator[tuple[str, Estimate]]:
    """Sizes by arithmetic, so that no encoder is loaded: bytes of a passage's vector, training sample, passages."""
    rows = about.passages
    cells = 2 ** max(2, round(math.log2(4 * math.sqrt(max(rows, 1)))))
    choices = [("Flat", 4 * _DIMENSION, 0), ("SQ8", _DIMENSION, 4 * _DIMENSION)]
    if rows >= max(cells, CODEBOOK):
        choices.append((f"IVF{cells},PQ96", 96 + 8, 4 * _DIMENSION))
    for name, vector, temporary in choices:
        index = vector * rows
        work = 0 if name == "Flat" else index + 4 * _DIMENSION * min(rows, 256 * cells)
        disk = index + temporary * rows + about.disk
        yield name, Estimate(_ENCODER_MEMORY + work, disk, _ENCODER_MEMORY, index, 0.0)
