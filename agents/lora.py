"""Low-rank adapters (LoRA, Hu et al. 2021) through PEFT, inside a model that stays what it was to everybody else.

The adapter's layers are injected in place, so engines, packed training and checkpoints see a transformers model whose
other parameters are frozen. Weights leave it merged, under the names of the plain model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["add_adapter", "has_adapter", "merged_state", "save_adapter", "trained_part", "without_adapter"]

_NAME = "default"
_OWN = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b")


def add_adapter(
    model: Any, *, rank: int, alpha: float | None = None, targets: str = "all-linear", seed: int = 0
) -> None:
    """Put an adapter of ``rank`` beside the layers ``targets`` and freeze everything else, in place.

    ``alpha`` (default twice the rank) scales it by alpha / rank. ``targets``: ``all-linear`` (every linear layer but
    the output layer), or names of modules divided by commas (``q_proj,v_proj``). The adapter starts as nothing (B = 0),
    its A is drawn from ``seed``; its weights are float32, as small steps are lost in bfloat16.

    Raises ``ConfigError`` where PEFT is not installed, the model has an adapter, or no layer has such a name.
    """
    import torch

    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("model.lora_rank needs PEFT; install turntree[lora]") from error
    if has_adapter(model):
        raise ConfigError("the model has an adapter already; load it anew without one, or set model.lora_rank=0")
    names: str | list[str] = targets if targets == "all-linear" else [t for t in re.split(r"[,\s]+", targets) if t]
    scale: Any = 2 * rank if alpha is None else alpha  # PEFT says int and takes any number
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=names, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_NAME)
        except ValueError as error:
            raise ConfigError(f"model.lora_targets={targets!r} does not fit {type(model).__name__}: {error}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(layer is end for _, layer in _layers(model) for end in ends):
        raise ConfigError(f"model.lora_targets={targets!r} names the embedding or the output layer; name others")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_own(name))
        if _is_own(name):
            parameter.data = parameter.data.float()
    model.eval()


def _is_own(name: str) -> bool:
    return _OWN.search(name) is not None


def has_adapter(model: Any) -> bool:
    """Whether some layer of the model has an adapter of :func:`add_adapter`."""
    return any(_is_own(name) for name, _ in model.named_parameters())


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, by the names that they have in the plain model."""
    if not has_adapter(model):
        return
    from peft.tuners.lora import LoraLayer

    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """The model before its training: adapters are off inside the ``with`` block. Not for passes that are trained."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_state(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of the plain model with the adapter added to its weights; the model itself is left as it is.

    Tensors that no adapter changes are the model's own, not copies. Names are the plain model's.
    """
    changed = {f"{name}.base_layer.weight": layer for name, layer in _layers(model)}
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if _is_own(name):
            continue
        value = tensor.detach()
        if name in changed:
            delta = changed[name].get_delta_weight(_NAME).detach()
            value = (value.float() + delta.float()).to(value.dtype)
        merged[name.replace(".base_layer.", ".")] = value
    return merged


def save_adapter(model: Any, folder: str | Path) -> Path:
    """Write the adapter alone as PEFT reads it: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{_NAME}', '')}": tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if _is_own(name)
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    model.peft_config[_NAME].save_pretrained(str(folder))
    return folder


def trained_part(model: nn.Module) -> nn.Module:
    """What a checkpoint of the model has to hold: the adapter as a module that shares its parameters, or the model."""
    from torch import nn

    if not has_adapter(model):
        return model
    part = nn.Module()
    for name, parameter in model.named_parameters():
        if _is_own(name):
            part.register_parameter(name.replace(".", "/"), parameter)
    return part
