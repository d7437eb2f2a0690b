"""A cross-encoder that reads query and passage together and puts the passages of a search in a new order."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turntree.errors import ConfigError, DataError, MissingExtraError, RetrievalError
from turntree.quiet import quiet_progress
from turntree.search_backend.bm25 import check_request
from turntree.search_backend.encoder import LOADING_ERRORS, clean, model_fingerprint, passage_text
from turntree.search_backend.families import safe_modules
from turntree.search_backend.files import read_json
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["CrossEncoderReranker", "RerankBackend", "RerankSettings", "Reranker", "load_reranker"]


@dataclass(frozen=True, slots=True)
class RerankSettings:
    """``model``: a local folder of a sentence-transformers cross-encoder or a Hugging Face sequence classifier with
    one output. ``max_length``: tokens of a pair; 0 for the model's own. ``dtype``, ``device`` (``auto``) and
    ``batch_size`` (pairs) as for encoders.
    """

    model: str
    max_length: int = 0
    dtype: str = "float32"
    device: str = "auto"
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16") or self.max_length < 0 or self.batch_size < 1:
            raise ConfigError(
                "reranker: expected dtype of float32, bfloat16, float16, max_length >= 0 and batch_size >= 1, found "
                f"dtype={self.dtype!r}, max_length={self.max_length}, batch_size={self.batch_size}"
            )


class Reranker(Protocol):
    """Anything that scores passages for queries."""

    @property
    def fingerprint(self) -> str:
        """Hash of model and settings."""
        ...

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """One list of scores for each query, one score for each of its passages; higher is better."""
        ...


def load_reranker(model: str | Path | RerankSettings) -> CrossEncoderReranker:
    """The cross-encoder in a local folder.

    Raises :class:`ConfigError` for a folder that holds no sequence classifier with one output,
    :class:`MissingExtraError` without sentence-transformers, :class:`DataError` for files that cannot be loaded.
    """
    return CrossEncoderReranker(model if isinstance(model, RerankSettings) else RerankSettings(str(model)))


class CrossEncoderReranker:
    """A sentence-transformers ``CrossEncoder``; a :class:`Reranker`. Safe to share between threads."""

    def __init__(self, settings: RerankSettings) -> None:
        self.settings = settings
        folder = Path(settings.model)
        _require_head(folder)
        self._model = _load(settings)
        self._lock = threading.Lock()  # fast tokenizers change their padding state while they work
        identity = {"rerank": True, "max_length": settings.max_length, "dtype": settings.dtype}
        self._fingerprint = model_fingerprint(folder, identity)

    def __reduce__(self) -> tuple[Any, ...]:
        return (CrossEncoderReranker, (self.settings,))

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        """Settings and fingerprint, JSON-able."""
        return {**asdict(self.settings), "fingerprint": self.fingerprint}

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Scores of all pairs in batches sorted by length, as float32 values; the model's own activation is kept.

        Raises :class:`RetrievalError` for another number of lists than queries, or a score that is not finite.
        """
        if len(queries) != len(passages):
            raise RetrievalError(
                f"expected passages for each of {len(queries)} queries, found {len(passages)} lists of them"
            )
        pairs = [(clean(q), clean(passage_text(p))) for q, mine in zip(queries, passages) for p in mine]
        if not pairs:
            return [[] for _ in queries]
        with self._lock:
            found = self._model.predict(
                pairs, batch_size=self.settings.batch_size, show_progress_bar=False, convert_to_numpy=True
            )
        scores = np.asarray(found, dtype=np.float32).reshape(len(pairs))
        if not np.isfinite(scores).all():
            raise RetrievalError(
                f"the reranker {self.settings.model} gave scores that are not finite; use dtype=float32 or bfloat16"
            )
        ends = np.cumsum([len(mine) for mine in passages])
        return [part.tolist() for part in np.split(scores, ends[:-1])]


class RerankBackend:
    """A :class:`SearchBackend` that asks another one for ``depth`` passages and keeps the reranker's best.

    Equal scores keep the other backend's order. Scores are the reranker's.
    """

    def __init__(self, inner: SearchBackend, reranker: Reranker, *, depth: int = 50) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ConfigError(f"rerank: expected a depth of at least 1, found {depth!r}")
        self.inner, self.reranker, self.depth = inner, reranker, depth
        about = ["rerank", inner.fingerprint, reranker.fingerprint, depth]
        self._fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """Hash of the inner backend's and the reranker's fingerprints and the depth."""
        return self._fingerprint

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """The best ``k`` of ``max(depth, k)`` passages for each query by the reranker's score."""
        check_request(queries, k)
        different = list(dict.fromkeys(queries))
        found = self.inner.search(different, k=max(k, self.depth))
        ranked: dict[str, list[Passage]] = {}
        for query, passages, scores in zip(different, found, self.reranker.score(different, found), strict=True):
            order = sorted(range(len(passages)), key=lambda i: -scores[i])[:k]
            ranked[query] = [replace(passages[i], score=float(scores[i])) for i in order]
        return [list(ranked[query]) for query in queries]


def _require_head(folder: Path) -> None:
    """Refuse a model without a scoring head: it would be given random weights, and rank at random."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"reranker: expected a model folder with config.json in {folder}, found none")
    config = read_json(folder / "config.json", what="a model's configuration")
    architectures = [str(name) for name in config.get("architectures") or ()]
    modules = bool(safe_modules(folder))
    if not modules and not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ConfigError(
            f"reranker: expected a sequence classifier in {folder}, found {architectures or 'no architecture'}; an "
            "encoder has no scoring head"
        )
    labels = len(config.get("id2label") or {}) or 2  # what transformers assumes of a configuration that says nothing
    if not modules and labels != 1:
        raise ConfigError(f"reranker: expected a model with one output in {folder}, found {labels} labels")


def _load(settings: RerankSettings) -> Any:
    try:
        import sentence_transformers
    except ImportError as error:
        raise MissingExtraError(
            f"reranking needs sentence-transformers ({error}): pip install 'turntree[dense]'"
        ) from error
    import torch

    load: Callable[..., Any] = sentence_transformers.CrossEncoder
    try:
        with quiet_progress():
            return load(
                settings.model,
                device=None if settings.device == "auto" else settings.device,
                max_length=settings.max_length or None,
                local_files_only=True,
                model_kwargs={"dtype": getattr(torch, settings.dtype), "use_safetensors": True},
            ).eval()
    except LOADING_ERRORS as error:
        raise DataError(
            f"cannot load the cross-encoder in {settings.model} ({type(error).__name__}: {error}); expected a whole "
            "model folder with safetensors weights, and a device that exists"
        ) from error
