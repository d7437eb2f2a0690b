"""Building a dense index folder: embed the corpus, train, add; resumable, deterministic, estimated first."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turntree.errors import ConfigError, SearchIndexError
from turntree.search_backend.embedding import CHUNK, VectorFile, embed_corpus
from turntree.search_backend.encoder import Encoder, EncoderSettings, load_encoder
from turntree.search_backend.faiss_index import (
    CODEBOOK,
    Shape,
    import_faiss,
    index_shape,
    is_flat,
    make_index,
    read_index,
    set_defaults,
    threads,
    train_index,
)
from turntree.search_backend.machine import cores, human_bytes
from turntree.search_backend.passage import Passage
from turntree.search_backend.store import CorpusStore, Progress
from turntree.search_backend.survey import Estimate, Survey

__all__ = ["DenseKind", "DenseSettings", "index_vectors"]

_INDEX, _VECTORS, _JOURNAL = "index.faiss", "vectors.faiss", "embedding.json"
_CALIBRATION = 32  # passages
_ADD = 65_536  # vectors that are added together


@dataclass(frozen=True, slots=True)
class DenseSettings:
    """Settings of a dense index: those of :class:`EncoderSettings`, with ``encoder`` for its folder, and these.

    ``factory``: a FAISS index-factory string. ``seed``: of the training sample. ``deterministic``: one thread for
    HNSW graphs, whose links otherwise depend on the threads' timing; false uses all. ``keep_vectors``: leave the
    plain vectors (``vectors.faiss``, a flat index) beside an index that is not flat. ``faiss_file``: an index that is
    there already, with the corpus's row order; it is linked, not copied, and nothing is embedded.
    """

    encoder: str
    factory: str = "Flat"
    seed: int = 0
    deterministic: bool = True
    keep_vectors: bool = False
    faiss_file: str = ""
    family: str = "auto"
    query_prefix: str | None = None
    passage_prefix: str | None = None
    pooling: str = "auto"
    normalize: bool = True
    max_length: int = 0
    dtype: str = "float32"
    device: str = "auto"
    batch_size: int = 64

    def encoder_settings(self) -> EncoderSettings:
        names = [field.name for field in dataclasses.fields(EncoderSettings) if field.name != "model"]
        return EncoderSettings(self.encoder, **{name: getattr(self, name) for name in names})


class DenseKind:
    """The kind ``dense``, all but opening. Options are the fields of :class:`DenseSettings`."""

    name = "dense"

    def settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        known = [field.name for field in dataclasses.fields(DenseSettings)]
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"dense has no option {unknown!r}; expected some of {known}")
        if not options.get("encoder"):
            raise ConfigError(
                "a dense index needs an encoder: a model folder, as `turntree model minilm --out DIR` or `turntree "
                "model wordllama --out DIR` (for weak machines) write"
            )
        settings = DenseSettings(**{**options, "encoder": os.path.abspath(str(options["encoder"]))})
        _check_types(settings)
        settings.encoder_settings()
        if "IDMap" in settings.factory:
            raise ConfigError(f"factory={settings.factory!r}: rows are passages in order; leave IDMap out")
        if settings.faiss_file:
            path = Path(settings.faiss_file)
            if not path.is_file():
                raise ConfigError(f"faiss_file: expected a FAISS index at {path}, found none")
            settings = dataclasses.replace(settings, faiss_file=str(path.absolute()))
        return asdict(settings)

    def packages(self, settings: Mapping[str, Any]) -> Sequence[str]:
        return ("faiss-cpu", "faiss-gpu", "sentence-transformers", "transformers", "tokenizers", "torch")

    def estimate(self, corpus: Survey, settings: Mapping[str, Any]) -> Estimate:
        wanted, rows = DenseSettings(**settings), corpus.passages
        encoder = _calibrate(wanted.encoder_settings(), corpus.sample)
        shape = index_shape(make_index(wanted.factory, encoder.dimension), rows)
        base = _base_memory(wanted)
        if wanted.faiss_file:
            size = Path(wanted.faiss_file).stat().st_size
            note = f"the index {wanted.faiss_file} is used where it is ({human_bytes(size)}, mapped)"
            return Estimate(base, 0, base, size, 5.0, (note,))
        vectors, flat = 4 * rows * encoder.dimension, is_flat(wanted.factory)
        index, chunk = shape.bytes(rows), 8 * CHUNK * encoder.dimension
        work = 0 if flat else max(4 * shape.training * encoder.dimension, index + 8 * _ADD * encoder.dimension)
        embed = rows * encoder.seconds
        adding = 0.0 if flat else _adding_seconds(wanted, shape, encoder.dimension, rows)
        return Estimate(
            build_memory=base + chunk + work,
            disk=vectors if flat else vectors + index,
            load_memory=base,
            mapped=index,
            seconds=embed + adding,
            notes=_notes(wanted, encoder, shape, embed, adding),
        )

    def alternatives(self, corpus: Survey, settings: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        defaults = {f.name: f.default for f in dataclasses.fields(DenseSettings)}
        given = {name: value for name, value in settings.items() if value != defaults[name] and name != "faiss_file"}
        cells = 2 ** max(2, round(math.log2(max(4 * math.sqrt(max(corpus.passages, 1)), 4))))
        dimension = _calibrate(DenseSettings(**settings).encoder_settings(), corpus.sample).dimension
        pieces = next((m for m in (96, 64, 48, 32, 16, 8, 4, 2, 1) if dimension % m == 0 and m <= dimension // 4), 1)
        enough = corpus.passages >= max(cells, CODEBOOK)  # to train it on
        smaller = ("Flat", "SQ8", *([f"IVF{cells},PQ{pieces}"] if enough else []))
        return [{**given, "factory": factory} for factory in smaller if factory != settings["factory"]]

    def build(
        self, store: CorpusStore, folder: Path, settings: Mapping[str, Any], progress: Progress
    ) -> dict[str, Any]:
        wanted = DenseSettings(**settings)
        encoder = load_encoder(wanted.encoder_settings())
        built: dict[str, Any] = {"encoder": encoder.describe(), "dimension": encoder.dimension}
        if wanted.faiss_file:
            return {**built, **_adopt(store, folder, wanted, encoder)}
        _check_cells(wanted, index_shape(make_index(wanted.factory, encoder.dimension), len(store)), len(store))
        flat = is_flat(wanted.factory)
        index, journal = folder / _INDEX, folder / _JOURNAL
        built |= {"file": _INDEX, "factory": wanted.factory, "seed": wanted.seed}
        built |= {"defaults": set_defaults(make_index(wanted.factory, encoder.dimension))}
        target = folder / (_INDEX if flat else _VECTORS)
        if flat or not index.is_file():
            vectors = embed_corpus(store, encoder, target, journal, progress=progress)
            if not flat:
                index_vectors(vectors, index, wanted, progress)
        if not flat and not wanted.keep_vectors:
            target.unlink(missing_ok=True)
        journal.unlink(missing_ok=True)
        return built


def _check_types(settings: DenseSettings) -> None:
    """Values come from the command line as JSON: a wrong type is refused by name."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        kinds: dict[str, Any] = {"str": str, "int": int, "bool": bool, "str | None": (str, type(None))}
        wanted = kinds[str(field.type)]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(f"dense: expected {field.name} of type {field.type}, found {value!r}")


def _adopt(store: CorpusStore, folder: Path, wanted: DenseSettings, encoder: Encoder) -> dict[str, Any]:
    """Link a FAISS file that is there already, after its rows and dimensions were compared."""
    from turntree.search_backend.dense import file_identity

    source = Path(wanted.faiss_file)
    read_index(source, mmap=True, rows=len(store), dimension=encoder.dimension)
    link = folder / _INDEX
    link.unlink(missing_ok=True)
    link.symlink_to(source)
    return {"file": _INDEX, "factory": "", "file_identity": file_identity(source)}


def _check_cells(wanted: DenseSettings, shape: Shape, rows: int) -> None:
    """Refuse more cells than passages: known before anything is embedded."""
    if shape.cells > rows:
        raise ConfigError(
            f"factory={wanted.factory!r}: expected at least one passage for each of its {shape.cells} cells, found "
            f"{rows} passages; use fewer cells, or Flat for a corpus this small"
        )


def index_vectors(vectors: VectorFile, out: Path, wanted: DenseSettings, progress: Progress) -> None:
    """Train and fill an index; the file appears whole or not at all. After a stop this stage starts again."""
    faiss = import_faiss()
    index = make_index(wanted.factory, vectors.dimension)
    set_defaults(index)
    shape = index_shape(index, vectors.rows)
    _check_cells(wanted, shape, vectors.rows)
    if shape.training:
        progress("train", 0, shape.training, wanted.factory)
        train_index(index, vectors.sample(shape.training, wanted.seed), wanted.factory)
        progress("train", shape.training, shape.training, wanted.factory)
    done = 0
    with threads(1 if wanted.deterministic and shape.graph else 0):
        for chunk in vectors.chunks(_ADD):
            index.add(chunk)
            done += len(chunk)
            progress("add", done, vectors.rows, wanted.factory)
    part = out.with_name(f"{out.name}.part")
    try:
        faiss.write_index(index, str(part))
    except RuntimeError as error:  # faiss has no other word for a full disk
        raise SearchIndexError(
            f"cannot write {part}: {error!s:.200}; make room, and give the same command again, which goes on"
        ) from error
    with part.open("rb") as file:
        os.fsync(file.fileno())
    if index.ntotal != vectors.rows:
        raise SearchIndexError(f"{part}: expected {vectors.rows} vectors in the index, found {index.ntotal}")
    part.replace(out)


# -- estimates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Speed:
    dimension: int
    seconds: float
    """A passage."""


@functools.lru_cache(maxsize=4)
def _calibrate(settings: EncoderSettings, sample: tuple[Passage, ...]) -> _Speed:
    """Dimension of an encoder, and its time a passage on a few of them."""
    encoder = load_encoder(settings)
    if not sample:
        return _Speed(encoder.dimension, 0.0)
    step = max(1, len(sample) // _CALIBRATION)
    chosen = list(sample[::step][:_CALIBRATION])
    encoder.encode_passages(chosen[:4])  # what happens once is no part of the rate
    began = time.perf_counter()
    encoder.encode_passages(chosen)
    return _Speed(encoder.dimension, (time.perf_counter() - began) / len(chosen))


def _base_memory(settings: DenseSettings) -> int:
    """Bytes of libraries and model: measured on an x86 CPU, fp32 weights as they lie on disk."""
    from turntree.search_backend.families import read_layout

    layout = read_layout(Path(settings.encoder))
    weights = sum(path.stat().st_size for path in layout.folder.rglob("*.safetensors"))
    return round((250e6 if layout.kind == "static" else 700e6) + 1.5 * weights)


def _adding_seconds(settings: DenseSettings, shape: Shape, dimension: int, rows: int) -> float:
    """Rough: training is ten rounds of k-means, 25 in a product quantiser; adding is tried on random vectors."""
    rng = np.random.default_rng(0)
    count = max(1, min(2048, rows))
    sample = rng.standard_normal((count, dimension), dtype=np.float32)
    began = time.perf_counter()
    (sample[:1024] @ sample[:1024].T).sum()
    rate = 2 * min(count, 1024) ** 2 * dimension / max(time.perf_counter() - began, 1e-6)
    seconds = 10 * 2 * shape.training * shape.cells * dimension / rate
    # Each round looks up every training vector's nearest of 256 centroids in each piece: two microseconds a core.
    rounds = 25 * (10 if "OPQ" in settings.factory else 1)
    seconds += 2e-6 / cores() * rounds * shape.training * shape.pieces
    if not shape.graph:
        return seconds + 2 * rows * max(shape.cells, 256) * dimension / rate
    index = make_index(settings.factory, dimension)
    train_index(index, sample, settings.factory)
    with threads(1 if settings.deterministic else 0):
        began = time.perf_counter()
        index.add(sample)
    once = (time.perf_counter() - began) / count
    return seconds + once * rows * max(1.0, math.log(max(rows, 2)) / math.log(count + 1))


def _notes(settings: DenseSettings, encoder: _Speed, shape: Shape, embed: float, adding: float) -> tuple[str, ...]:
    notes = [
        f"embedding: {1 / max(encoder.seconds, 1e-9):.0f} passages/s measured on this machine, {embed:.0f} s in all; "
        f"the rest {adding:.0f} s"
    ]
    if shape.graph and settings.deterministic and cores() > 1:
        notes.append(
            f"HNSW links are made by one thread so that the bytes are always the same; --set deterministic=false uses "
            f"{cores()}"
        )
    if shape.cells and shape.training < 39 * shape.cells:
        notes.append(f"{shape.training} training vectors are few for {shape.cells} cells (39 a cell are enough)")
    return tuple(notes)
