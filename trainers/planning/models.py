"""The sizes of a decoder that decide about memory: from a folder's config.json, or known by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.errors import ConfigError, DataError
from turntree.trainers.options import did_you_mean

__all__ = ["KNOWN", "ModelShape", "model_shape"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the Llama and Qwen families: grouped-query attention, gated MLP, RMS norms.

    ``biased``: q, k and v have biases (Qwen2). ``normed``: q and k have norms of their own (Qwen3). ``tied``: the
    output layer is the embedding.
    """

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    tied: bool
    biased: bool = False
    normed: bool = False
    positions: int | None = None

    @property
    def parameters(self) -> int:
        """Weights, embedding and output layer included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q * self.hidden + (q + 2 * kv) * self.biased
        norms = 2 * self.hidden + 2 * self.head_dim * self.normed
        layer = attention + 3 * self.hidden * self.inner + norms
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * layer + self.hidden

    def kv_values(self) -> int:
        """Numbers that a token leaves in a KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def _qwen2(
    name: str, hidden: int, inner: int, layers: int, heads: int, kv: int, *, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(
        name, vocab, hidden, layers, heads, kv, hidden // heads, inner, tied, biased=True, positions=32768
    )


def _qwen3(name: str, hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> ModelShape:
    return ModelShape(name, 151936, hidden, layers, heads, 8, 128, inner, tied, normed=True, positions=40960)


def _llama(
    name: str, hidden: int, inner: int, layers: int, heads: int, kv: int, *, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(name, vocab, hidden, layers, heads, kv, hidden // heads, inner, tied)


_SHAPES = (
    _qwen2("Qwen2.5-0.5B", 896, 4864, 24, 14, 2, vocab=151936, tied=True),
    _qwen2("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, vocab=151936, tied=True),
    _qwen2("Qwen2.5-3B", 2048, 11008, 36, 16, 2, vocab=151936, tied=True),
    _qwen2("Qwen2.5-7B", 3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    _qwen2("Qwen2.5-14B", 5120, 13824, 48, 40, 8, vocab=152064, tied=False),
    _qwen2("Qwen2.5-32B", 5120, 27648, 64, 40, 8, vocab=152064, tied=False),
    _qwen2("Qwen2.5-72B", 8192, 29568, 80, 64, 8, vocab=152064, tied=False),
    _qwen3("Qwen3-0.6B", 1024, 3072, 28, 16, tied=True),
    _qwen3("Qwen3-1.7B", 2048, 6144, 28, 16, tied=True),
    _qwen3("Qwen3-4B", 2560, 9728, 36, 32, tied=True),
    _qwen3("Qwen3-8B", 4096, 12288, 36, 32, tied=False),
    _qwen3("Qwen3-14B", 5120, 17408, 40, 40, tied=False),
    _qwen3("Qwen3-32B", 5120, 25600, 64, 64, tied=False),
    _llama("Llama-3.2-1B", 2048, 8192, 16, 32, 8, vocab=128256, tied=True),
    _llama("Llama-3.2-3B", 3072, 8192, 28, 24, 8, vocab=128256, tied=True),
    _llama("Llama-3.1-8B", 4096, 14336, 32, 32, 8, vocab=128256, tied=False),
    _llama("Llama-3.1-70B", 8192, 28672, 80, 64, 8, vocab=128256, tied=False),
    _llama("SmolLM2-135M", 576, 1536, 30, 9, 3, vocab=49152, tied=True),
    _llama("SmolLM2-360M", 960, 2560, 32, 15, 5, vocab=49152, tied=True),
    _llama("SmolLM2-1.7B", 2048, 8192, 24, 32, 32, vocab=49152, tied=True),
)

KNOWN: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
"""Sizes by name, as the models' own config.json files have them."""


def model_shape(name: str) -> ModelShape:
    """The shape of a model folder, a ``config.json``, or a known name (``Qwen3-4B``, also with owner and suffix).

    Raises ``ConfigError`` for a name that is neither, ``DataError`` for a configuration of another kind of model.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _read(file)
    bare = path.name.lower().removesuffix("-instruct").removesuffix("-base")
    found = next((shape for key, shape in KNOWN.items() if key.lower() == bare), None)
    if found is None:
        raise ConfigError(
            f"{name!r} is no folder with a config.json and no known model.{did_you_mean(path.name, KNOWN)} Known: "
            f"{', '.join(KNOWN)}"
        )
    return found


def _read(file: Path) -> ModelShape:
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
        kind = str(data.get("model_type", ""))
        return ModelShape(
            name=str(file.parent.name or file),
            vocab=int(data["vocab_size"]),
            hidden=hidden,
            layers=int(data["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or hidden // heads),
            inner=int(data["intermediate_size"]),
            tied=bool(data.get("tie_word_embeddings", False)),
            biased=bool(data.get("attention_bias", kind == "qwen2")) and kind != "qwen3",
            normed=kind.startswith("qwen3"),
            positions=data.get("max_position_embeddings"),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} is not the configuration of a decoder of the Llama or Qwen family ({type(error).__name__}: "
            f"{error}); give the name of a known model instead: {', '.join(KNOWN)}"
        ) from error
