"""What an encoder's family wants before its texts, and how its token vectors become one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turntree.errors import ConfigError, DataError

__all__ = ["FAMILIES", "Family", "Layout", "find_family", "read_layout", "safe_modules"]


@dataclass(frozen=True, slots=True)
class Family:
    """Prefixes and pooling that a family of models was trained with.

    ``pooling``: ``mean`` over the tokens, ``cls`` (the first token) or ``lasttoken``.
    """

    name: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str = "mean"


_TASK = "Given a web search query, retrieve relevant passages that answer the query"

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            # Wang et al. 2022 (E5), model cards of intfloat/e5-*-v2 and multilingual-e5-*.
            Family("e5", "query: ", "passage: ", "mean"),
            # Model cards of multilingual-e5-large-instruct and e5-mistral-7b-instruct: passages take no prefix.
            Family("e5-instruct", f"Instruct: {_TASK}\nQuery: ", "", "mean"),
            # Xiao et al. 2023 (C-Pack), model cards of BAAI/bge-*-en-v1.5 and bge-*-zh-v1.5.
            Family("bge-en", "Represent this sentence for searching relevant passages: ", "", "cls"),
            Family("bge-zh", "为这个句子生成表示以用于检索相关文章：", "", "cls"),
            Family("bge-m3", "", "", "cls"),
            # sentence-transformers/all-MiniLM-*, multi-qa-MiniLM-*, paraphrase-MiniLM-*.
            Family("minilm"),
            Family("plain"),
        )
    }
)
"""Prefixes, pooling and normalisation of known encoders."""

_NAMES = (
    (re.compile(r"(?<![a-z0-9])e5(?![a-z0-9]).*instruct"), "e5-instruct"),
    (re.compile(r"(?<![a-z0-9])e5(?![a-z0-9])"), "e5"),
    (re.compile(r"(?<![a-z0-9])bge[-_]m3"), "bge-m3"),
    (re.compile(r"(?<![a-z0-9])bge(?![a-z0-9]).*[-_]zh"), "bge-zh"),
    (re.compile(r"(?<![a-z0-9])bge(?![a-z0-9]).*[-_]en"), "bge-en"),
    (re.compile(r"minilm"), "minilm"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model folder says of itself.

    ``kind``: ``static`` (a table of token vectors) or ``transformer``. ``modules``: whether sentence-transformers
    wrote it, so that its own pooling holds. ``names``: what it is called, the folder's name first. ``prompts``: the
    prefixes that its authors stored, empty ones left out.
    """

    folder: Path
    kind: str
    modules: bool
    names: tuple[str, ...]
    prompts: Mapping[str, str]


def read_layout(folder: Path) -> Layout:
    """Read a model folder's JSON files. Raises :class:`ConfigError` where it is none, :class:`DataError` for bad JSON.

    Layouts: sentence-transformers (``modules.json``), a plain Hugging Face encoder (``config.json``), model2vec.
    """
    folder = Path(folder)
    modules = safe_modules(folder)
    config = _json(folder / "config.json", dict) or {}
    if not modules and not config:
        raise ConfigError(
            f"expected a folder with an encoder (modules.json or config.json), found none in {folder}; models are "
            "local folders here: `turntree model minilm --out DIR` writes one"
        )
    about = folder / "config_sentence_transformers.json"
    stored = _object((_json(about, dict) or {}).get("prompts") or {}, about)
    static = config.get("model_type") == "model2vec" or any(
        str(module.get("type", "")).endswith("StaticEmbedding") for module in modules
    )
    return Layout(
        folder=folder,
        kind="static" if static else "transformer",
        modules=bool(modules),
        names=tuple(str(name) for name in (folder.resolve().name, config.get("_name_or_path")) if name),
        prompts={str(name): str(text) for name, text in stored.items() if text},
    )


def safe_modules(folder: Path) -> list[dict[str, Any]]:
    """The modules that a folder of sentence-transformers lists; none without a list.

    Whatever the library's version does with them, nothing of the folder may run: raises :class:`ConfigError` for
    classes that are not the library's own, for parts outside of the folder, and for weights that are only pickled.
    """
    file = folder / "modules.json"
    modules = [_object(module, file) for module in _json(file, list) or []]
    for module in modules:
        kind, path = str(module.get("type", "")), str(module.get("path", ""))
        if not kind.startswith("sentence_transformers."):
            raise ConfigError(
                f"{file}: expected classes of sentence-transformers, found {kind!r:.80}, which brings code of its own; "
                "code of a model folder is never run: use another model"
            )
        part = folder / path
        if not part.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{file}: expected parts inside of {folder}, found {path!r:.80}; use another model")
        pickled = [*part.glob("*.bin"), *part.glob("*.pt"), *part.glob("*.pth")]
        if pickled and not any(part.glob("*.safetensors")):
            raise ConfigError(
                f"expected safetensors weights in {part}, found {pickled[0].name}; pickled weights can run code and "
                "are not loaded: convert them once with save_pretrained"
            )
    return modules


def find_family(layout: Layout, name: str) -> Family:
    """The family called ``name``; for ``auto`` the one that the model's names tell.

    A folder of sentence-transformers whose name tells nothing is ``plain``: its own pooling, its own stored prefixes.
    Raises :class:`ConfigError` for an unknown name, a reranker, and a plain Hugging Face folder that tells nothing.
    """
    if name != "auto":
        if name not in FAMILIES:
            raise ConfigError(f"expected an encoder family of auto, {', '.join(FAMILIES)}; found {name!r}")
        return FAMILIES[name]
    for called in (called.lower() for called in layout.names):
        if "reranker" in called or "cross-encoder" in called:
            raise ConfigError(
                f"{layout.folder} holds a cross-encoder ({called}), which scores pairs and embeds nothing; "
                "use it for reranking"
            )
        for pattern, family in _NAMES:
            if pattern.search(called):
                return FAMILIES[family]
    if layout.modules or layout.kind == "static":
        return FAMILIES["plain"]
    raise ConfigError(
        f"cannot tell the prefixes and pooling of the encoder in {layout.folder} (called {', '.join(layout.names)}); "
        f"name its family: one of {', '.join(FAMILIES)}"
    )


def _json(path: Path, kind: type[Any]) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"expected JSON in {path}, found {error}; write the model folder again") from error
    if value is not None and not isinstance(value, kind):
        raise DataError(f"expected a {kind.__name__} in {path}, found {value!r:.60}; write the model folder again")
    return value


def _object(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"expected JSON objects in {path}, found {value!r:.60}; write the model folder again")
    return value
