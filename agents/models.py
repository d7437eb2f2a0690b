"""Models as Hugging Face folders: load, save, count."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.agents.lora import has_adapter, merged_state, save_adapter
from turntree.errors import CheckpointError, ConfigError
from turntree.quiet import quiet_progress

if TYPE_CHECKING:
    import torch

__all__ = [
    "count_parameters",
    "is_model_folder",
    "load_model",
    "load_tokenizer",
    "model_source",
    "save_model",
    "save_weights",
]


def load_model(path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """A causal language model in eval mode and its tokenizer, from a folder or a hub name (``owner/name``).

    ``dtype`` is ``float32``, ``bfloat16`` or ``float16``. Only safetensors are read: other weights are pickles, which
    can run code. Raises ``ConfigError`` when there is no such model, device, or safetensors.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ConfigError(f"dtype must be one of {sorted(kinds)}, found {dtype!r}")
    name = model_source(path)
    _refuse_pickles(path)
    try:
        with quiet_progress():
            model: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=kinds[dtype], use_safetensors=True, trust_remote_code=False
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load a causal language model from {name}: {error}") from error
    try:
        model = model.to(device)
    except (AssertionError, RuntimeError) as error:  # an unknown name, or torch was built without it
        raise ConfigError(f"cannot put the model on device {str(device)!r}: {error}") from error
    return model.eval(), load_tokenizer(path)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder or hub name. Raises ``ConfigError``."""
    from transformers import AutoTokenizer

    name = model_source(path)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # None would ask on a terminal
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a tokenizer from {name}: {error}") from error


def save_model(model: Any, tokenizer: Any, folder: str | Path) -> Path:
    """Write model (safetensors) and tokenizer as a Hugging Face folder; ``folder`` is whole or not there.

    Of a model with an adapter the merged weights are written, and the adapter alone, as PEFT reads it, in ``adapter``.
    An existing model folder is replaced. Raises ``ConfigError`` when ``folder`` holds something else,
    ``CheckpointError`` when it cannot be written (disk full).
    """
    folder = Path(folder)
    if folder.exists() and not (folder / "config.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"expected a new, empty or model folder, found other files in {folder}; name another one")
    from safetensors import SafetensorError

    try:
        _replace_model(model, tokenizer, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the model folder {folder}: {error}; what lay there before is whole. Make room, or mend what "
            "it says, and give the command again (resume=true for runs)"
        ) from error
    return folder


def _replace_model(model: Any, tokenizer: Any, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "new"
        save_weights(model, fresh)
        if has_adapter(model):
            save_adapter(model, fresh / "adapter")
        tokenizer.save_pretrained(fresh)
        for weights in fresh.glob("*.safetensors"):  # Written readable by the owner only, unlike the rest.
            weights.chmod((fresh / "config.json").stat().st_mode)
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(fresh, folder)


def save_weights(model: Any, folder: Path, *, untie: bool = False) -> None:
    """Write configuration and weights (safetensors) into ``folder``, for an engine that reads them at once.

    ``untie`` writes an output layer that shares the embedding as a tensor of its own, and a configuration that says so:
    vLLM on CPU packs its output layer once, and reloads it only where the folder holds it. An adapter is merged.
    """
    merged = merged_state(model) if has_adapter(model) else None
    if not untie or not _is_tied(model):
        with quiet_progress():
            model.save_pretrained(folder, state_dict=merged)
        return
    from safetensors.torch import save_file

    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    output = model.get_output_embeddings().weight
    named = _named_tensors(model) if merged is None else merged.items()
    address = output.data_ptr()
    tensors = {n: t.detach().clone() if t.data_ptr() == address else t.detach() for n, t in named}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def _is_tied(model: Any) -> bool:
    output = model.get_output_embeddings()
    return output is not None and output.weight is model.get_input_embeddings().weight


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by every name they have, and persistent buffers."""
    yield from model.named_parameters(remove_duplicate=False)
    known = dict(model.named_parameters(remove_duplicate=False))
    yield from ((name, t) for name, t in model.state_dict().items() if name not in known)


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a configuration, weights and a tokenizer."""
    weights = any(folder.glob("*.safetensors"))
    return weights and all((folder / name).is_file() for name in ("config.json", "tokenizer_config.json"))


def count_parameters(model: torch.nn.Module, *, trainable: bool = False) -> int:
    """Number of parameters, shared ones once; with ``trainable`` only those that require gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def _refuse_pickles(path: str | Path) -> None:
    """Name the weights that are there but not read; a hub name is left to transformers."""
    folder = Path(path)
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern))
    if folder.is_dir() and others and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"expected safetensors weights in {folder}, found {', '.join(others[:3])}; pickled weights can run "
            "code and are not loaded: convert them once with model.save_pretrained(folder)"
        )


def model_source(path: str | Path) -> str:
    """A model folder as it is, or a hub name; anything else is a ``ConfigError``."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"expected a model folder with config.json, found none in {folder}")
        return str(folder)
    looks_like_hub = isinstance(path, str) and path.count("/") == 1 and not path.startswith((".", "/", "~"))
    if folder.exists() or not looks_like_hub:
        raise ConfigError(
            f"expected the folder of a Hugging Face model, found none at {folder}; "
            "`turntree model smollm2 --out DIR` makes one without a hub"
        )
    return str(path)
