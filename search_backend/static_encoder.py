"""An encoder for weak machines: a table of token vectors, averaged. No forward pass, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from turntree.errors import ConfigError, DataError
from turntree.search_backend.encoder import (
    EncoderSettings,
    FolderEncoder,
    Vectors,
    clean,
    unit_rows,
)
from turntree.search_backend.families import Layout

__all__ = ["StaticEncoder"]


class StaticEncoder(FolderEncoder):
    """Mean of the vectors of a text's tokens, scaled to length 1.

    Reads folders of sentence-transformers' ``StaticEmbedding`` and of model2vec: a ``tokenizer.json`` and a
    ``model.safetensors`` with ``embedding.weight`` or ``embeddings`` (``mapping`` and ``weights`` are folded in). A
    text without a known token gets zeros. A text's vector does not depend on what else is encoded with it.
    """

    def __init__(self, settings: EncoderSettings, layout: Layout | None = None) -> None:
        super().__init__(settings, layout)
        if settings.pooling not in ("auto", "mean") or settings.dtype != "float32":
            raise ConfigError(
                "a static encoder averages float32 vectors: expected pooling=auto and dtype=float32, found "
                f"pooling={settings.pooling}, dtype={settings.dtype}"
            )
        folder = _table_folder(self.layout)
        self._table = _read_table(folder / "model.safetensors")
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json", settings.max_length)
        self._describe_as(
            dimension=int(self._table.shape[1]),
            pooling="static mean",
            max_length=settings.max_length,
            dtype="float32",
        )

    def _encode(self, texts: list[str]) -> Vectors:
        found = np.zeros((len(texts), self.dimension), np.float32)
        step = self.settings.batch_size
        for start in range(0, len(texts), step):
            batch = [clean(text) for text in texts[start : start + step]]
            for row, encoding in enumerate(self._tokenizer.encode_batch_fast(batch, add_special_tokens=False), start):
                found[row] = self._mean(encoding.ids)
        return unit_rows(found) if self.settings.normalize else found

    def _mean(self, ids: list[int]) -> npt.NDArray[np.float32]:
        # A tokenizer may know tokens that were added after the table was made.
        known = [i for i in ids if i < len(self._table)]
        if not known:
            return np.zeros(self.dimension, np.float32)
        mean: npt.NDArray[np.float32] = self._table[known].mean(axis=0, dtype=np.float32)
        return mean


def _table_folder(layout: Layout) -> Path:
    """Where the table lies: in the folder itself, or in the module's (``0_StaticEmbedding``)."""
    inner = sorted(layout.folder.glob("*StaticEmbedding"))
    return inner[0] if inner and not (layout.folder / "model.safetensors").is_file() else layout.folder


def _read_table(path: Path) -> Vectors:
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except Exception as error:  # the library's own exception class is not exported in every version
        raise DataError(f"expected token vectors in {path}, found {error}; write the model folder again") from error
    table = tensors.get("embedding.weight", tensors.get("embeddings"))
    if table is None or table.ndim != 2:
        raise DataError(
            f"expected a two-dimensional tensor embedding.weight or embeddings in {path}, found {sorted(tensors)}"
        )
    if (mapping := tensors.get("mapping")) is not None:
        table = table[mapping.astype(np.int64)]
    vectors: Vectors = table.astype(np.float32)
    if (weights := tensors.get("weights")) is not None:
        vectors = vectors * weights.astype(np.float32)[:, None]
    return vectors


def _read_tokenizer(path: Path, max_length: int) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"expected a tokenizer in {path}, found {error}; write the model folder again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if max_length:
        tokenizer.enable_truncation(max_length)
    return tokenizer
