"""Texts to vectors: sentence-transformers models from local folders, with the prefixes they were trained with."""

from __future__ import annotations

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from turntree.errors import ConfigError, DataError, MissingExtraError
from turntree.quiet import quiet_progress
from turntree.search_backend.families import Family, Layout, find_family, read_layout
from turntree.search_backend.passage import Passage

__all__ = [
    "Encoder",
    "EncoderSettings",
    "FolderEncoder",
    "TransformerEncoder",
    "Vectors",
    "load_encoder",
    "passage_text",
]

Vectors = npt.NDArray[np.float32]
"""(texts, dimensions), float32."""

_POOLINGS = ("auto", "mean", "cls", "lasttoken", "max")
_DTYPES = ("float32", "bfloat16", "float16")
_HASHED = (".json", ".txt", ".model", ".safetensors")
_FORMAT = 1  # raise when vectors change for the same files and settings, so that fingerprints change too


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """How texts become vectors.

    ``model``: a local folder. ``family``: one of :data:`turntree.search_backend.families.FAMILIES`, or ``auto`` (by
    the model's name). Prefixes are None for the model's own, else its family's. ``pooling``: ``auto`` (the model's
    own, else its family's), ``mean``, ``cls``, ``lasttoken`` or ``max``. ``normalize``: scale vectors to length 1, so
    that the inner product is the cosine. ``max_length``: tokens, prefix included; 0 for the model's own limit.
    ``dtype`` of the weights: ``float32``, ``bfloat16`` or ``float16``. ``device``: ``auto`` or a torch device.
    ``batch_size``: texts of one forward pass.
    """

    model: str
    family: str = "auto"
    query_prefix: str | None = None
    passage_prefix: str | None = None
    pooling: str = "auto"
    normalize: bool = True
    max_length: int = 0
    dtype: str = "float32"
    device: str = "auto"
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.pooling not in _POOLINGS:
            raise ConfigError(f"encoder: expected a pooling of {', '.join(_POOLINGS)}; found {self.pooling!r}")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"encoder: expected a dtype of {', '.join(_DTYPES)}; found {self.dtype!r}")
        if self.max_length < 0 or self.batch_size < 1:
            raise ConfigError(
                "encoder: expected max_length >= 0 (0: the model's own) and batch_size >= 1, found "
                f"max_length={self.max_length}, batch_size={self.batch_size}"
            )


@runtime_checkable
class Encoder(Protocol):
    """Anything that embeds queries and passages into one space."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of the model's files and of the settings that change vectors: equal fingerprints, equal vectors."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was chosen, JSON-able, for manifests: model, family, prefixes, pooling, lengths, dtype, fingerprint."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """One row a query: ``[queries, dimension]``."""
        ...

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """One row a passage: ``[passages, dimension]``."""
        ...


LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError)
"""What loading a model raises for missing or damaged files and for devices that are not there (torch asserts)."""


def load_encoder(settings: EncoderSettings | str | Path) -> Encoder:
    """The encoder in a local folder, static or transformer by what lies there.

    Raises :class:`ConfigError` for a folder without an encoder or settings that do not fit it,
    :class:`MissingExtraError` without sentence-transformers (transformers only), :class:`DataError` for bad files.
    """
    if not isinstance(settings, EncoderSettings):
        settings = EncoderSettings(str(settings))
    layout = read_layout(Path(settings.model))
    if layout.kind == "static":
        from turntree.search_backend.static_encoder import StaticEncoder

        return StaticEncoder(settings, layout)
    return TransformerEncoder(settings, layout)


def passage_text(passage: Passage) -> str:
    """What of a passage is embedded: the title on its own line, then the text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


class FolderEncoder(ABC):
    """What encoders of model folders share: layout, prefixes, and a fingerprint of files and settings.

    A subclass calls :meth:`_describe_as` once its model is loaded, and writes :meth:`_encode`. Pickling carries the
    settings and loads the model again.
    """

    _dimension: int
    _identity: dict[str, Any]
    _fingerprint: str

    def __init__(self, settings: EncoderSettings, layout: Layout | None = None) -> None:
        self.settings = settings
        self.layout = layout or read_layout(Path(settings.model))
        self.family = find_family(self.layout, settings.family)
        self.query_prefix, self.passage_prefix = choose_prefixes(settings, self.layout, self.family)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.settings,))

    def _describe_as(self, *, dimension: int, pooling: str, max_length: int, dtype: str) -> None:
        """Fix the length of a vector and the settings that change vectors."""
        self._dimension = dimension
        self._identity = {
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "pooling": pooling,
            "normalize": self.settings.normalize,
            "max_length": max_length,
            "dtype": dtype,
        }
        self._fingerprint = model_fingerprint(self.layout.folder, self._identity)

    @property
    def dimension(self) -> int:
        return self._dimension

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.layout.folder.resolve().name,
            "family": self.family.name,
            **self._identity,
            "dimension": self.dimension,
            "fingerprint": self.fingerprint,
        }

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode([self.query_prefix + query for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        return self._encode([self.passage_prefix + passage_text(passage) for passage in passages])

    @abstractmethod
    def _encode(self, texts: list[str]) -> Vectors:
        """Rows [texts, dimension], float32."""


class TransformerEncoder(FolderEncoder):
    """A sentence-transformers model. Batches are sorted by length; vectors come back as float32 in the given order.
    Safe to share between threads; pickling carries the settings and loads the model again.

    Vectors of one text may differ in the last digits between batches of another make-up: the padding differs.
    """

    def __init__(self, settings: EncoderSettings, layout: Layout | None = None) -> None:
        super().__init__(settings, layout)
        self._model = _load_model(settings)
        self._lock = threading.Lock()  # fast tokenizers change their padding state while they work
        self.pooling = self._set_pooling()
        self.max_length = _set_length(self._model, settings)
        self._describe_as(
            dimension=int(self._model.get_embedding_dimension()),
            pooling=self.pooling,
            max_length=self.max_length,
            dtype=settings.dtype,
        )

    def _encode(self, texts: list[str]) -> Vectors:
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        # The prefix is part of the text, not sentence-transformers' `prompt`: that one may be left out of the pooling.
        with self._lock:
            found = self._model.encode(
                [clean(text) for text in texts],
                prompt="",
                batch_size=self.settings.batch_size,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        vectors = np.asarray(found, dtype=np.float32)
        return unit_rows(vectors) if self.settings.normalize else vectors

    def _set_pooling(self) -> str:
        """Put the wanted pooling in place of the folder's; returns what is used."""
        from sentence_transformers.sentence_transformer.modules import Pooling

        position = next((i for i, module in enumerate(self._model) if isinstance(module, Pooling)), None)
        if position is None:
            if self.settings.pooling != "auto":
                raise ConfigError(f"the model in {self.layout.folder} has no pooling to replace; leave pooling=auto")
            return "own"
        own: Any = self._model[position]
        wanted: Any = self.settings.pooling
        if wanted == "auto":
            wanted = own.pooling_mode if self.layout.modules else self.family.pooling
        if wanted != own.pooling_mode:
            self._model[position] = Pooling(own.embedding_dimension, wanted)
        return wanted if isinstance(wanted, str) else "+".join(wanted)


def choose_prefixes(settings: EncoderSettings, layout: Layout, family: Family) -> tuple[str, str]:
    """Query and passage prefix: the settings', else those stored with the model, else the family's."""
    stored = layout.prompts if settings.family == "auto" else {}
    query, passage = settings.query_prefix, settings.passage_prefix
    if query is None:
        query = stored.get("query", family.query_prefix)
    if passage is None:
        passage = stored.get("passage", stored.get("document", family.passage_prefix))
    return query, passage


def model_fingerprint(folder: Path, identity: dict[str, Any]) -> str:
    """Hash of the files that a model is loaded from, and of settings: 16 hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(["encoder", _FORMAT, identity], sort_keys=True).encode())
    exported = ("onnx", "openvino")  # other forms of the same weights, which are not loaded
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and path.suffix in _HASHED and name.parts[0] not in exported:
            with path.open("rb") as file:
                digest.update(f"{name.as_posix()}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def clean(text: str) -> str:
    """Text that tokenizers take: lone surrogates, which UTF-8 cannot hold, become replacement characters."""
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


def unit_rows(vectors: Vectors) -> Vectors:
    """Rows scaled to length 1 in float32; rows of zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return scaled


def _load_model(settings: EncoderSettings) -> Any:
    """The model in evaluation mode. Pickled weights are not read."""
    try:
        import sentence_transformers
    except ImportError as error:
        raise MissingExtraError(
            f"a transformer encoder needs sentence-transformers ({error}): pip install 'turntree[dense]'"
        ) from error
    import torch

    device = None if settings.device == "auto" else settings.device
    options = {"dtype": getattr(torch, settings.dtype), "use_safetensors": True}
    load: Callable[..., Any] = sentence_transformers.SentenceTransformer
    try:
        with quiet_progress():
            model = load(settings.model, device=device, local_files_only=True, model_kwargs=options)
    except LOADING_ERRORS as error:
        raise DataError(
            f"cannot load the encoder in {settings.model} ({type(error).__name__}: {error}); expected a whole model "
            "folder with safetensors weights, and a device that exists"
        ) from error
    return model.eval()


def _set_length(model: Any, settings: EncoderSettings) -> int:
    """The length limit in tokens, set on the model where asked for; 0 where it has none."""
    own = model.max_seq_length
    if settings.max_length:
        if own is not None and settings.max_length > own and settings.max_length > _positions(model, own):
            raise ConfigError(
                f"encoder: max_length={settings.max_length} is more than the {_positions(model, own)} tokens that "
                f"{settings.model} has positions for; lower it"
            )
        model.max_seq_length = settings.max_length
    found = settings.max_length or own
    return int(found) if found and np.isfinite(found) else 0


def _positions(model: Any, default: int) -> int:
    config = getattr(getattr(model[0], "auto_model", None), "config", None)
    return int(getattr(config, "max_position_embeddings", None) or default)
