"""Dense search: queries and passages as vectors of one encoder, found by inner product with FAISS."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from turntree.errors import CapacityError, ConfigError, RetrievalError, SearchIndexError
from turntree.search_backend.bm25 import check_request
from turntree.search_backend.dense_build import DenseKind
from turntree.search_backend.encoder import Encoder, EncoderSettings, load_encoder
from turntree.search_backend.faiss_index import import_faiss, on_gpus, read_index, search_parameters, threads
from turntree.search_backend.machine import human_bytes, parse_bytes
from turntree.search_backend.passage import Passage
from turntree.search_backend.store import scored_passages

__all__ = ["KIND", "DenseBackend", "DenseSearch", "open_faiss"]

_SPARE = 8  # results beyond k, to see whether the last one is tied
_MOST = 2048  # results that a search of FAISS on a GPU gives at most
_DIGITS = 6  # of scores: below it lies the noise of float32 between batches of different sizes


@dataclass(frozen=True, slots=True)
class DenseSearch:
    """How an index is opened and searched; options of ``open_index``, ``turntree index search`` and ``serve``.

    ``nprobe``: cells of an IVF index that a search looks at; ``ef_search``: candidates of an HNSW search; 0 for the
    index's own. ``threads`` of FAISS; 0 for all. ``mmap``: leave the index on disk, where pages that searches touch
    are cached by the system and shared between processes; false reads it whole. ``memory_limit``: refuse to read more
    than this (``8GB``). ``gpu``: ``none``, ``one`` or ``shard`` (split over all GPUs); ``gpu_half``: float16 there.
    ``encoder``, ``device``, ``batch_size``: where the encoder lies and runs now, if not where the index was built.
    """

    nprobe: int = 0
    ef_search: int = 0
    threads: int = 0
    mmap: bool = True
    memory_limit: str = ""
    gpu: str = "none"
    gpu_half: bool = False
    encoder: str = ""
    device: str = ""
    batch_size: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> DenseSearch:
        """Options checked. Raises :class:`ConfigError` for an unknown name or a value out of range."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"a dense index has no search option {unknown!r}; expected some of {known}")
        given: dict[str, Any] = dict(options)
        if "memory_limit" in given:
            given["memory_limit"] = str(given["memory_limit"])
        made = cls(**given)
        for field in dataclasses.fields(cls):
            value = getattr(made, field.name)
            flag = isinstance(value, bool)
            if field.type == "int" and (flag or not isinstance(value, int) or value < 0):
                raise ConfigError(f"dense search: expected {field.name} of at least 0 (0: default), found {value!r}")
            if field.type == "bool" and not flag:
                raise ConfigError(f"dense search: expected {field.name} true or false, found {value!r}")
            if field.type == "str" and field.name != "gpu" and not isinstance(value, str):
                raise ConfigError(f"dense search: expected a string as {field.name}, found {value!r}")
        if made.gpu not in ("none", "one", "shard"):
            raise ConfigError(f"dense search: expected gpu=none, one or shard, found gpu={made.gpu!r}")
        made.memory_bytes()
        return made

    def memory_bytes(self) -> int | None:
        """``memory_limit`` in bytes, None without one. Raises :class:`ConfigError` for what is no size."""
        try:
            return parse_bytes(self.memory_limit) if self.memory_limit else None
        except ValueError as error:
            raise ConfigError(f"memory_limit: {error}") from error


class DenseBackend:
    """Nearest passages by an encoder's vectors; a :class:`SearchBackend`.

    Scores are rounded to six digits and equal ones keep corpus order, so results do not depend on how queries are
    batched (beyond the encoder's own rounding). Every passage is a possible result: a query that matches nothing well
    still gets its ``k`` nearest. Safe to share between threads; pickling carries the paths. A process that was forked
    after a search opens its own: FAISS's threads do not survive a fork. ``identity`` enters the fingerprint.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        index: Any,
        encoder: Encoder,
        *,
        identity: Mapping[str, Any],
        search: DenseSearch | None = None,
    ) -> None:
        self.passages, self.encoder = passages, encoder
        self.options = search or DenseSearch()
        gpu = self.options.gpu != "none"
        self._parameters = search_parameters(index, nprobe=self.options.nprobe, ef_search=self.options.ef_search)
        self._distances = index.metric_type == import_faiss().METRIC_L2  # some peers' files
        if gpu and self._parameters is not None:
            # Indexes split over GPUs take no parameters with a search: they are set before the copy.
            import_faiss().extract_index_ivf(index).nprobe = self.options.nprobe
            self._parameters = None
        self._index = on_gpus(index, gpus=self.options.gpu, half=self.options.gpu_half) if gpu else index
        # FAISS's GPU indexes are not safe to share between threads.
        self._lock = threading.Lock() if gpu else None
        self._source: tuple[Any, ...] = ()
        about = ["dense", dict(identity), self.options.nprobe, self.options.ef_search, gpu and self.options.gpu_half]
        self._fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """Hash of corpus, encoder, index settings and search parameters: 16 hexadecimal digits."""
        return self._fingerprint

    @property
    def index(self) -> Any:
        """The FAISS index."""
        return self._index

    def __len__(self) -> int:
        return len(self.passages)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._source:
            raise TypeError(
                "a DenseBackend over an index in memory cannot be pickled; write the index and open_faiss it"
            )
        return (_reopen, self._source)

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """The ``k`` nearest passages of each query, best first; fewer where the corpus or the probed cells have fewer.

        Raises :class:`RetrievalError` for queries that are not strings and for ``k < 1``.
        """
        check_request(queries, k)
        different = list(dict.fromkeys(queries))
        if not different or not len(self.passages):
            return [[] for _ in queries]
        scores, rows = self.search_vectors(self.encoder.encode_queries(different), k=k)
        there = rows >= 0
        passages = iter(scored_passages(self.passages, rows[there].tolist(), scores[there].tolist()))
        found = {
            query: list(itertools.islice(passages, count))
            for query, count in zip(different, there.sum(axis=1).tolist())
        }
        return [list(found[query]) for query in queries]

    def search_vectors(
        self, vectors: npt.NDArray[np.float32], *, k: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Scores and rows of the nearest passages, ``[queries, k]`` each; the row is -1 where there are fewer."""
        k = min(k, len(self.passages))
        if self._lock is not None and k > _MOST - _SPARE:
            raise RetrievalError(f"on GPUs FAISS finds at most {_MOST - _SPARE} passages of a query, found k={k}")
        wanted = k + _SPARE
        scores, rows = self._ranked(vectors, wanted)
        # A tie that reaches past what was fetched could be cut anywhere: fetch more of those queries.
        while wanted < min(_MOST, len(self.passages)):
            open_ties = np.flatnonzero((scores[:, k - 1] == scores[:, -1]) & (rows[:, -1] >= 0))
            if not len(open_ties):
                break
            wanted *= 8
            more_scores, more_rows = self._ranked(vectors[open_ties], wanted)
            width = more_scores.shape[1] - scores.shape[1]
            scores = np.pad(scores, ((0, 0), (0, width)), constant_values=-np.inf)
            rows = np.pad(rows, ((0, 0), (0, width)), constant_values=-1)
            scores[open_ties], rows[open_ties] = more_scores, more_rows
        return scores[:, :k], rows[:, :k]

    def _ranked(
        self, vectors: npt.NDArray[np.float32], wanted: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """FAISS's results by rounded score, then row; missing ones last."""
        wanted = min(wanted, len(self.passages), wanted if self._lock is None else _MOST)
        found, rows = self._call(np.ascontiguousarray(vectors, dtype=np.float32), wanted)
        strange = rows[(rows < -1) | (rows >= len(self.passages))]
        if len(strange):
            raise SearchIndexError(
                f"expected row numbers of the corpus's {len(self.passages)} passages from the index, found "
                f"{strange[0]}: it has ids of its own (IndexIDMap, add_with_ids); write it again with rows as ids"
            )
        scores = np.round((-found if self._distances else found).astype(np.float64), _DIGITS)
        scores[rows < 0] = -np.inf
        order = np.lexsort((rows, -scores), axis=-1)
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)

    def _call(self, vectors: npt.NDArray[np.float32], wanted: int) -> tuple[Any, Any]:
        with threads(self.options.threads):
            if self._lock is None:
                return self._index.search(vectors, wanted, params=self._parameters)  # type: ignore[no-any-return]
            with self._lock:
                return self._index.search(vectors, wanted, params=self._parameters)  # type: ignore[no-any-return]


def open_faiss(
    passages: Sequence[Passage],
    path: str | Path,
    encoder: Encoder | EncoderSettings | str | Path,
    *,
    corpus: str = "",
    search: DenseSearch | None = None,
    identity: Mapping[str, Any] | None = None,
) -> DenseBackend:
    """A backend over a bare FAISS file, such as a peer's ``e5_Flat.index``, with the corpus in the same row order.

    ``corpus``: the corpus's fingerprint (a store's own by default). ``identity``: what the fingerprint is made of in
    place of the file's size and ends.

    Raises :class:`SearchIndexError` where rows or dimensions differ, and :class:`CapacityError` where
    ``search.memory_limit`` is smaller than what would be read.
    """
    options, path = search or DenseSearch(), Path(path)
    made = load_encoder(encoder) if isinstance(encoder, (str, Path, EncoderSettings)) else encoder
    _check_limit(path, options)
    index = read_index(path, mmap=options.mmap, rows=len(passages), dimension=made.dimension)
    about = {
        "corpus": corpus or str(getattr(passages, "fingerprint", "")),
        "encoder": made.fingerprint,
        **(identity or {"file": file_identity(path)}),
    }
    backend = DenseBackend(passages, index, made, identity=about, search=options)
    backend._source = (passages, path.absolute(), made, options, about)
    return backend


def _reopen(
    passages: Sequence[Passage], path: Path, encoder: Encoder, options: DenseSearch, identity: Mapping[str, Any]
) -> DenseBackend:
    return open_faiss(passages, path, encoder, search=options, identity=identity)


def file_identity(path: Path) -> str:
    """Size and hash of a file's first and last mebibyte: tells one index from another without reading it all."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return f"{size}-{digest.hexdigest()[:16]}"


def _check_limit(path: Path, options: DenseSearch) -> None:
    limit = options.memory_bytes()
    if limit is None or options.mmap or not path.is_file():
        return
    size = path.stat().st_size
    if size > limit:
        raise CapacityError(
            f"{path}: reading the index needs about {human_bytes(size)} of memory, more than memory_limit="
            f"{options.memory_limit}; leave mmap=true (it stays on disk), build a smaller one (factory=SQ8: a quarter, "
            "IVF4096,PQ64: a fortieth of Flat), or use BM25"
        )


class _Kind(DenseKind):
    def open(self, store: Any, folder: Path, manifest: Mapping[str, Any], **options: Any) -> DenseBackend:
        search, settings, built = DenseSearch.of(options), manifest["settings"], manifest["built"]
        names = [field.name for field in dataclasses.fields(EncoderSettings) if field.name != "model"]
        wanted = EncoderSettings(
            model=search.encoder or settings["encoder"], **{name: settings[name] for name in names}
        )
        if search.device:
            wanted = replace(wanted, device=search.device)
        if search.batch_size:
            wanted = replace(wanted, batch_size=search.batch_size)
        encoder = load_encoder(wanted)
        expected = built["encoder"]["fingerprint"]
        if encoder.fingerprint != expected:
            raise ConfigError(
                f"{folder.parent}: expected the encoder {built['encoder']['model']} with fingerprint {expected} that "
                f"the index was built with, found {encoder.fingerprint} in {wanted.model}; name its folder with "
                "encoder=DIR, or build the index again"
            )
        return open_faiss(
            store,
            folder / built["file"],
            encoder,
            search=search,
            identity={name: built[name] for name in ("factory", "seed", "file_identity") if name in built},
        )


KIND = _Kind()
"""The index kind ``dense``."""
