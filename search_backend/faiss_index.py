"""What of FAISS is used here: indexes by factory string, their size, training, mapping, search parameters, GPUs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from turntree.errors import CapacityError, ConfigError, MissingExtraError, SearchIndexError
from turntree.search_backend.machine import human_bytes

__all__ = [
    "CODEBOOK",
    "FlatHeader",
    "Shape",
    "import_faiss",
    "index_shape",
    "is_flat",
    "make_index",
    "on_gpus",
    "read_index",
    "search_parameters",
    "set_defaults",
    "threads",
    "train_index",
]

CODEBOOK = 256
"""Codes of a product quantiser's piece: it cannot be trained on fewer vectors."""
_TRAIN_BYTES = 1_000_000_000  # the largest training sample held in memory
_PER_CENTROID = 64
_EF_SEARCH = 128  # FAISS's own 16 finds three quarters of the nearest vectors where 128 finds nearly all
_LEAST_TRAINING = 65_536
_REFINED = 4  # candidates a result whose exact scores a refined index (",RFlat") compares; FAISS's own 1 reorders only


def import_faiss() -> Any:
    """The ``faiss`` module. Raises :class:`MissingExtraError` with what to install."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise MissingExtraError(
            f"dense search needs FAISS ({error}): pip install 'turntree[dense]', or a faiss-gpu package with its CUDA "
            "runtime in place of faiss-cpu"
        ) from error


def is_flat(factory: str) -> bool:
    """Whether the factory string names the plain exact index."""
    return factory.strip() == "Flat"


def make_index(factory: str, dimension: int) -> Any:
    """An empty inner-product index. Raises :class:`ConfigError` for a string that FAISS does not take."""
    faiss = import_faiss()
    try:
        return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, TypeError) as error:
        reason = str(error).rpartition(": ")[2].strip() or error
        raise ConfigError(
            f"factory={factory!r}: expected a FAISS index factory string for vectors of {dimension} dimensions and the "
            f"inner product, such as Flat, SQ8, HNSW32, IVF4096,Flat or IVF4096,PQ48 (PQ divides the dimension); "
            f"found {reason}"
        ) from error


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of an index: bytes of a vector in it, bytes whatever the number, cells, training rows, pieces of a
    product quantiser, whether exact, whether a graph."""

    row_bytes: float
    fixed_bytes: int
    cells: int
    training: int
    pieces: int
    exact: bool
    graph: bool

    def bytes(self, rows: int) -> int:
        """Bytes of an index of so many vectors."""
        return round(self.row_bytes * rows) + self.fixed_bytes


def index_shape(index: Any, rows: int) -> Shape:
    """The size of an index with ``rows`` vectors, told from an empty one."""
    row_bytes, fixed = _measure(index)
    faiss = import_faiss()
    inner = _extract_ivf(index)
    cells = int(inner.nlist) if inner is not None else 0
    training = 0 if index.is_trained else min(rows, max(_PER_CENTROID * cells, _LEAST_TRAINING))
    training = min(training, _TRAIN_BYTES // (4 * index.d))
    kind = type(faiss.downcast_index(index)).__name__
    pq = getattr(inner, "pq", None) or getattr(faiss.downcast_index(index), "pq", None)
    pieces = int(pq.M) if pq is not None else 0
    return Shape(
        row_bytes, fixed, cells, training, pieces, exact=kind in ("IndexFlat", "IndexFlatIP"), graph="HNSW" in kind
    )


def _extract_ivf(index: Any) -> Any:
    """The IVF index inside, as its own class, or None."""
    faiss = import_faiss()
    found = faiss.try_extract_index_ivf(index)
    return None if found is None else faiss.downcast_index(found)


def _measure(index: Any) -> tuple[float, int]:
    """Bytes a vector, and bytes of the rest, through wrappers. ``downcast`` borrows, so ``index`` is kept alive."""
    faiss = import_faiss()
    own = faiss.downcast_index(index)
    if isinstance(own, faiss.IndexPreTransform):
        row, fixed = _measure(own.index)
        chain = [own.chain.at(i) for i in range(own.chain.size())]
        return row, fixed + sum(4 * t.d_in * t.d_out for t in chain)
    if isinstance(own, (faiss.IndexIDMap, faiss.IndexIDMap2)):
        row, fixed = _measure(own.index)
        return row + 8, fixed
    if isinstance(own, faiss.IndexRefine):
        (row, fixed), (more, rest) = _measure(own.base_index), _measure(own.refine_index)
        return row + more, fixed + rest
    if isinstance(own, faiss.IndexHNSW):
        row, fixed = _measure(own.storage)
        base, upper = own.hnsw.nb_neighbors(0), own.hnsw.nb_neighbors(1)
        return row + 4 * base + 4 * upper / max(upper - 1, 1) + 12, fixed
    if isinstance(own, faiss.IndexIVF):
        row, fixed = _measure(own.quantizer)
        return float(own.code_size) + 8, fixed + round(row * own.nlist)
    return float(getattr(own, "code_size", 0) or 4 * own.d), 0


def train_index(index: Any, sample: npt.NDArray[np.float32], factory: str) -> None:
    """Train with FAISS's own fixed seeds. Raises :class:`ConfigError` where there are too few vectors."""
    faiss = import_faiss()
    if index.is_trained:
        return
    inner, own = _extract_ivf(index), faiss.downcast_index(index)
    owners: list[Any] = [inner, own, getattr(inner, "pq", None), getattr(own, "pq", None)]
    rotations = [rotation for rotation in _rotations(own) if rotation.d_out % rotation.M == 0]
    for rotation in rotations:  # each trains on a quantiser of its own, and borrows this one instead
        owners.append(faiss.ProductQuantizer(rotation.d_out, rotation.M, 8))
        rotation.pq = owners[-1]
    for owner in owners:
        if hasattr(owner, "cp"):
            owner.cp.min_points_per_centroid = 1  # FAISS prints a warning for each sub-quantiser otherwise
        if hasattr(owner, "do_polysemous_training"):
            # It reorders codes for a filter by Hamming distance that is not used here, and takes two seconds a piece.
            owner.do_polysemous_training = False
    try:
        index.train(sample)
    except RuntimeError as error:
        reason = str(error).rpartition(": ")[2].strip()
        raise ConfigError(
            f"factory={factory!r} cannot be trained on {len(sample)} vectors ({reason}); use fewer cells or smaller "
            "codes, or Flat for a corpus this small"
        ) from error
    finally:
        for rotation in rotations:
            rotation.pq = None


def _rotations(index: Any) -> list[Any]:
    """The rotations of OPQ in front of an index."""
    faiss = import_faiss()
    if not isinstance(index, faiss.IndexPreTransform):
        return []
    chain = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]
    return [transform for transform in chain if isinstance(transform, faiss.OPQMatrix)]


def set_defaults(index: Any) -> dict[str, int]:
    """Give a new index search parameters that find most of what there is; they are stored in its file.

    FAISS's own (one cell, 16 candidates) are for speed: with them an index misses much of what an exact one finds.
    """
    faiss = import_faiss()
    outer = faiss.downcast_index(index)
    if isinstance(outer, faiss.IndexRefine):
        outer.k_factor = _REFINED
        return {**set_defaults(outer.base_index), "k_factor": _REFINED}
    inner = faiss.downcast_index(outer.index) if isinstance(outer, faiss.IndexPreTransform) else outer
    if isinstance(inner, faiss.IndexIVF):
        inner.nprobe = min(inner.nlist, round(4 * math.sqrt(inner.nlist)))
        return {"nprobe": int(inner.nprobe)}
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efSearch = _EF_SEARCH
        return {"ef_search": _EF_SEARCH}
    return {}


@dataclass(frozen=True, slots=True)
class FlatHeader:
    """The start of a FAISS file of a flat inner-product index; after it come the vectors as they are.

    Vectors can therefore be written to the final file as they are made, in constant memory.
    """

    bytes: bytes

    @classmethod
    def of(cls, rows: int, dimension: int) -> FlatHeader:
        """The header for ``rows`` vectors: FAISS's own of an empty index, with the two counts filled in."""
        faiss = import_faiss()
        raw = bytearray(faiss.serialize_index(make_index("Flat", dimension)).tobytes())
        # Fourcc, dimension (int32), count (int64), ...; at the end the number of float32 values (uint64).
        raw[8:16] = int(rows).to_bytes(8, "little")
        raw[-8:] = int(rows * dimension).to_bytes(8, "little")
        return cls(bytes(raw))

    def file_bytes(self, rows: int, dimension: int) -> int:
        """Size of the file with so many rows."""
        return len(self.bytes) + 4 * rows * dimension


def read_index(path: Path, *, mmap: bool, rows: int, dimension: int | None = None) -> Any:
    """Read an index file; mapped, its vectors and graph stay on disk until a search touches them.

    Raises :class:`SearchIndexError` for a file that is no index, or one of another number of rows or dimensions,
    :class:`CapacityError` where memory does not suffice to read it.
    """
    faiss = import_faiss()
    # IO_FLAG_MMAP maps inverted lists only; IO_FLAG_MMAP_IFC maps every kind, graphs included.
    flag = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP) if mmap else 0
    try:
        index = faiss.read_index(str(path), flag)
    except RuntimeError as error:
        reason = str(error).rpartition(": ")[2].strip()
        raise SearchIndexError(f"expected a FAISS index in {path}, found {reason}; build it again") from error
    except MemoryError as error:
        raise CapacityError(
            f"{path}: too little memory to read the index, a file of {human_bytes(path.stat().st_size)}; leave "
            "mmap=true (it stays on disk), or build it again where it is mapped already: then the file is damaged"
        ) from error
    if index.metric_type not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
        raise SearchIndexError(
            f"{path}: expected an index of inner products or squared Euclidean distances, found FAISS's metric "
            f"{index.metric_type}; build it with METRIC_INNER_PRODUCT"
        )
    if index.ntotal != rows:
        raise SearchIndexError(
            f"{path}: expected one vector for each of the corpus's {rows} passages, found {index.ntotal}; the index "
            "belongs to another corpus, or to another version of it"
        )
    if dimension is not None and index.d != dimension:
        raise SearchIndexError(
            f"{path}: expected vectors of {dimension} dimensions as the encoder makes them, found {index.d}; name the "
            "encoder that the index was built with"
        )
    return index


def search_parameters(index: Any, *, nprobe: int, ef_search: int) -> Any:
    """Parameters of a search; None for FAISS's own. Zeros leave the index's value.

    Raises :class:`ConfigError` for a parameter that this index does not have.
    """
    faiss = import_faiss()
    if not (nprobe or ef_search):
        return None
    outer = faiss.downcast_index(index)
    inner = faiss.downcast_index(outer.index) if isinstance(outer, faiss.IndexPreTransform) else outer
    if nprobe and isinstance(inner, faiss.IndexIVF) and not ef_search:
        made = faiss.SearchParametersIVF(nprobe=min(nprobe, inner.nlist))
    elif ef_search and isinstance(inner, faiss.IndexHNSW) and not nprobe:
        made = faiss.SearchParametersHNSW(efSearch=ef_search)
    else:
        given = " ".join(f"{n}={v}" for n, v in (("nprobe", nprobe), ("ef_search", ef_search)) if v)
        raise ConfigError(
            f"{given}: expected nprobe for an IVF index or ef_search for an HNSW index, found a "
            f"{type(inner).__name__}; leave it out"
        )
    if outer is inner:
        return made
    wrapped = faiss.SearchParametersPreTransform()
    wrapped.index_params = made
    wrapped.kept = made  # the wrapper only borrows it
    return wrapped


def on_gpus(index: Any, *, gpus: str, half: bool) -> Any:
    """The index on one GPU (``one``) or split over all (``shard``).

    Raises :class:`ConfigError` without a GPU or for an index that GPUs do not run, :class:`CapacityError` where the
    GPUs are too small.
    """
    faiss = import_faiss()
    if gpus not in ("one", "shard"):
        raise ConfigError(f"expected gpu=none, one or shard, found {gpus!r}")
    # FAISS's own index_cpu_to_all_gpus gives the index back without a word where there is no GPU.
    count = faiss.get_num_gpus()
    if count == 0:
        raise ConfigError(
            f"gpu={gpus}: expected a GPU that FAISS can use, found faiss.get_num_gpus() = 0 (FAISS "
            f"{faiss.__version__}); install faiss-gpu in place of faiss-cpu on a machine with a GPU, or leave gpu=none"
        )
    if "HNSW" in type(faiss.downcast_index(index)).__name__:
        raise ConfigError(f"gpu={gpus}: HNSW graphs run on the CPU only; use Flat or IVF, or leave gpu=none")
    used = count if gpus == "shard" else 1
    row, fixed = _measure(index)
    _check_gpu_memory((row * index.ntotal * (0.5 if half else 1) + fixed) / used, used)
    options = faiss.GpuMultipleClonerOptions()
    options.shard = used > 1
    options.useFloat16 = half
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options, ngpu=used)
    except RuntimeError as error:
        raise ConfigError(f"gpu={gpus}: FAISS cannot put this index on {used} GPU(s): {error}") from error


def _check_gpu_memory(need: float, used: int) -> None:
    import torch

    if not torch.cuda.is_available():  # a torch without CUDA says nothing about FAISS's GPUs
        return
    free = min(torch.cuda.mem_get_info(i)[0] for i in range(min(used, torch.cuda.device_count())))
    if need > free:
        raise CapacityError(
            f"the index needs about {human_bytes(need)} on each of {used} GPU(s), found {human_bytes(free)} free; use "
            "gpu_half=true (half the memory), gpu=shard over more GPUs, an IVF,PQ or SQ8 index, or gpu=none"
        )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run FAISS with so many threads in the calling thread; 0 leaves its own number."""
    if not count:
        yield
        return
    faiss = import_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
