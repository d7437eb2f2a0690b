"""Models as Hugging Face folders: load, save, count."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["count_parameters", "load_model", "load_tokenizer", "save_model"]


def load_model(
    path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A causal language model in eval mode and its tokenizer, from a folder or a hub name (``owner/name``).

    ``dtype`` is ``float32``, ``bfloat16`` or ``float16``. Raises ``ConfigError`` when there is no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ConfigError(f"dtype must be one of {sorted(kinds)}, found {dtype!r}")
    name = _check_source(path)
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(name, dtype=kinds[dtype])
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a causal language model from {name}: {error}") from error
    return model.to(device).eval(), load_tokenizer(path)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder or hub name. Raises ``ConfigError``."""
    from transformers import AutoTokenizer

    name = _check_source(path)
    try:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a tokenizer from {name}: {error}") from error
    return tokenizer


def save_model(model: Any, tokenizer: Any, folder: str | Path) -> Path:
    """Write model (safetensors) and tokenizer as a Hugging Face folder; ``folder`` is whole or not there.

    An existing model folder is replaced. Raises ``ConfigError`` when ``folder`` holds something else.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"expected a new, empty or model folder, found other files in {folder}; name another one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "new"
        with _no_progress_bars():
            model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(fresh, folder)
    return folder


def count_parameters(model: torch.nn.Module, *, trainable: bool = False) -> int:
    """Number of parameters, shared ones once; with ``trainable`` only those that require gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def _check_source(path: str | Path) -> str:
    """A model folder as it is, or a hub name; anything else is a ``ConfigError``."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"expected a model folder with config.json, found none in {folder}")
        return str(folder)
    looks_like_hub = isinstance(path, str) and path.count("/") == 1 and not path.startswith((".", "/", "~"))
    if folder.exists() or not looks_like_hub:
        raise ConfigError(
            f"expected the folder of a Hugging Face model, found nothing at {folder}; `turntree model smollm2 --out DIR` "
            "makes one without a hub"
        )
    return str(path)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading and saving one file needs no bar of its own beside the caller's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
