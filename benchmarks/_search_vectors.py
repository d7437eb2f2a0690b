"""FAISS indexes of generated vectors: build, size, memory, rates, what they find, and our wrapper beside FAISS."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _common import Figure
from _search_measure import in_process, own_memory_mb, rates, ratio

from turntree.search_backend.dense import DenseBackend, DenseSearch, open_faiss
from turntree.search_backend.dense_build import DenseSettings, index_vectors
from turntree.search_backend.embedding import VectorFile
from turntree.search_backend.faiss_index import FlatHeader, index_shape, make_index
from turntree.search_backend.passage import Passage
from turntree.search_backend.store import CorpusStore

__all__ = ["projection", "vector_scale"]

DIMENSION = 384  # that of all-MiniLM-L6-v2
_BLOCK = 10_000
WIKI = (21_015_324, 768)
"""Passages of wiki-18 and dimensions of e5-base-v2."""


def vector_scale(sizes: Sequence[int], *, queries: int, folder: Path, factories: Sequence[str] = ()) -> list[Figure]:
    """Each index of each size, in processes of their own; memory that grows with the corpus is a missed target."""
    figures: list[Figure] = []
    memory: dict[tuple[str, int], float] = {}
    disk: dict[tuple[str, int], float] = {}
    for size in sizes:
        place = folder / str(size)
        place.mkdir()
        write_corpus(place, size)
        for factory in factories or ("Flat", "SQ8", "HNSW32", _ivf(size)):
            kind = factory.partition(",")[0].rstrip("0123456789") if factory.startswith("IVF") else factory
            built = in_process("_search_vectors:build", str(place), factory)
            mapped = in_process("_search_vectors:serve", str(place), factory, queries, True)
            read = in_process("_search_vectors:serve", str(place), factory, min(queries, 64), False)
            memory[kind, size], disk[kind, size] = mapped["anonymous_mb"], built["disk_mb"]
            name = f"{factory}, {size} vectors of {DIMENSION}"
            figures += [
                Figure(f"{name}: train and add", built["seconds"], "s", "lower"),
                Figure(f"{name}: build, peak memory", built["rss_mb"], "MB", "lower"),
                Figure(f"{name}: size on disk", built["disk_mb"], "MB", "lower"),
                Figure(f"{name}: size as estimated, in that on disk", built["estimated"], "x", "lower", 1.1),
                Figure(f"{name}: found of the exact ten", 100 * mapped["found"], "%", "higher"),
                Figure(f"{name}: opening, mapped", 1e3 * mapped["open"], "ms", "lower"),
                Figure(f"{name}: own memory after searches, mapped", mapped["anonymous_mb"], "MB", "lower"),
                Figure(f"{name}: own memory after searches, read", read["anonymous_mb"], "MB", "lower"),
                Figure(f"{name}: one query at a time", mapped["single"], "queries/s", "higher"),
                Figure(f"{name}: batches of 64", mapped["batched"], "queries/s", "higher"),
                Figure(f"{name}: latency of one query, p50", mapped["p50"], "ms", "lower"),
                Figure(f"{name}: latency of one query, p99", mapped["p99"], "ms", "lower"),
                Figure(f"{name}: batches against FAISS's own", mapped["against_faiss"], "x", "higher", 0.9),
            ]
            if factory != "Flat":
                _index(place, factory).unlink()
        (place / "vectors.faiss").unlink()  # the flat index, which the others are made of
    small, large = min(sizes), max(sizes)
    for kind in dict.fromkeys(kind for kind, _ in memory):
        if large > small:
            growth = memory[kind, large] - memory[kind, small]
            figures.append(Figure(f"{kind}: own memory, mapped, {small} to {large}", growth, "MB more", "lower", 50))
    return figures + projection(disk, small, large)


def projection(disk: dict[tuple[str, int], float], small: int, large: int) -> list[Figure]:
    """Sizes for 21 million passages of 768 dimensions: the shape's formula, and what was measured, grown in line."""
    rows, dimension = WIKI
    figures = []
    for factory in ("Flat", "SQ8", "HNSW32", "HNSW64", "IVF65536,PQ96"):
        size = index_shape(make_index(factory, dimension), rows).bytes(rows) / 1e9
        figures.append(Figure(f"{factory}, {rows} vectors of {dimension}: size by formula", size, "GB", "lower"))
    for kind in ("Flat", "SQ8", "HNSW32"):
        if large == small or (kind, large) not in disk:
            continue
        each = 1e6 * (disk[kind, large] - disk[kind, small]) / (large - small)
        # Links of a graph do not grow with the dimensions.
        links = each - DIMENSION * (1 if kind == "SQ8" else 4)
        grown = (links + (each - links) * dimension / DIMENSION) * rows / 1e9
        figures.append(Figure(f"{kind}, {rows} vectors of {dimension}: size from growth", grown, "GB", "lower"))
    return figures


def _ivf(size: int) -> str:
    return f"IVF{2 ** round(np.log2(4 * np.sqrt(size)))},PQ48"


def _index(place: Path, factory: str) -> Path:
    return place / ("vectors.faiss" if factory == "Flat" else f"{factory}.faiss")


# -- data -----------------------------------------------------------------------------------------------------


def vectors(count: int, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """Unit vectors around 1,000 centres, as texts cluster by subject; in blocks, equal for equal arguments."""
    centres = np.random.default_rng(0).standard_normal((1000, DIMENSION), dtype=np.float32)
    for start in range(0, count, _BLOCK):
        rng = np.random.default_rng((seed, start))
        rows = min(_BLOCK, count - start)
        block = centres[rng.integers(0, 1000, rows)] + rng.standard_normal((rows, DIMENSION), dtype=np.float32)
        yield block / np.linalg.norm(block, axis=1, keepdims=True)


def write_corpus(place: Path, size: int) -> None:
    """A store of short passages and the file of their vectors."""
    CorpusStore.from_passages((Passage(str(i), f"Title {i}", f"text {i} " * 12) for i in range(size)), place / "store")
    with (place / "vectors.faiss").open("wb") as file:
        file.write(FlatHeader.of(size, DIMENSION).bytes)
        for block in vectors(size, seed=1):
            file.write(block.tobytes())


class Encoded:
    """An encoder whose queries were encoded before: ``q7`` is row 7."""

    dimension, fingerprint = DIMENSION, "encoded"

    def __init__(self, queries: npt.NDArray[np.float32]) -> None:
        self.queries = queries

    def describe(self) -> dict[str, Any]:
        return {}

    def encode_queries(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.queries[[int(q[1:]) for q in queries]]

    def encode_passages(self, passages: Sequence[Passage]) -> npt.NDArray[np.float32]:
        raise NotImplementedError


# -- in processes of their own ----------------------------------------------------------------------------------


def build(place: str, factory: str) -> dict[str, float]:
    """Train and fill an index from the vectors on disk."""
    folder = Path(place)
    rows = len(CorpusStore.open(folder / "store"))
    began = time.perf_counter()
    if factory != "Flat":
        file = VectorFile(folder / "vectors.faiss", rows, DIMENSION)
        index_vectors(file, _index(folder, factory), DenseSettings("", factory), lambda *_: None)
    seconds = time.perf_counter() - began
    disk = _index(folder, factory).stat().st_size
    told = index_shape(make_index(factory, DIMENSION), rows).bytes(rows)
    return {"seconds": seconds, "disk_mb": disk / 1e6, "estimated": told / disk}


def serve(place: str, factory: str, count: int, mmap: bool) -> dict[str, float]:
    """Open an index and search it; ``found`` compares with the flat one."""
    folder, store = Path(place), CorpusStore.open(Path(place) / "store")
    encoder = Encoded(next(vectors(count, seed=2)))
    began = time.perf_counter()
    backend = open_faiss(store, _index(folder, factory), encoder, search=DenseSearch(mmap=mmap))
    opened = time.perf_counter() - began
    queries = [f"q{i}" for i in range(count)]
    found = rates(backend, queries)
    memory = own_memory_mb()
    fresh = open_faiss(store, _index(folder, factory), encoder, search=DenseSearch(mmap=mmap))
    return {
        "open": opened,
        "single": found.single,
        "batched": found.batched,
        "p50": found.p50,
        "p99": found.p99,
        "anonymous_mb": memory,
        "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "against_faiss": _against_faiss(fresh, encoder, queries),
        "found": 1.0 if factory == "Flat" else _found(backend, folder, encoder, store, min(count, 256)),
    }


def _against_faiss(backend: DenseBackend, encoder: Encoded, queries: Sequence[str]) -> float:
    """Our batches, query text in and passages out, against FAISS's from the same vectors to row numbers.

    New queries in each round, so that passages come from disk unless earlier queries found them too.
    """
    batches = [queries[start : start + 64] for start in range(0, len(queries), 64)]
    blocks = [np.ascontiguousarray(encoder.encode_queries(batch)) for batch in batches]
    ours, theirs = itertools.cycle(batches), itertools.cycle(blocks)
    return ratio(
        lambda: backend.search(next(ours), k=10),
        lambda: backend.index.search(next(theirs), 10),
        rounds=max(1, len(batches) - 1),
    )


def _found(backend: DenseBackend, folder: Path, encoder: Encoded, store: CorpusStore, count: int) -> float:
    exact = open_faiss(store, folder / "vectors.faiss", encoder)
    block = encoder.queries[:count]
    (_, rows), (_, wanted) = (b.search_vectors(block, k=10) for b in (backend, exact))
    return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows.tolist(), wanted.tolist())]))
