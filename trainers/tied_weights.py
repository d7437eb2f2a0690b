"""A model's weights for a file in which tied tensors stand once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["without_copies"]


def without_copies(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state dict with each tied tensor once, and the names left out: ``{dropped: kept}``.

    Of tied names the one that Hugging Face would save stays (``_tied_weights_keys`` lists those that it drops).
    """
    state = model.state_dict()
    droppable = _tied_patterns(model)
    kept_names: dict[tuple[Any, ...], str] = {}
    for name in sorted(state, key=lambda name: any(re.search(pattern, name) for pattern in droppable)):
        kept_names.setdefault(_identity(name, state[name]), name)
    kept = {n: t for n, t in state.items() if kept_names[_identity(n, t)] == n}
    uses = Counter(t.untyped_storage().data_ptr() for t in kept.values())
    weights = {n: _storable(t, alone=uses[t.untyped_storage().data_ptr()] == 1) for n, t in kept.items()}
    tied = {n: first for n, t in state.items() if (first := kept_names[_identity(n, t)]) != n}
    return weights, tied


def _tied_patterns(model: nn.Module) -> list[str]:
    """Names, as regular expressions, that each Hugging Face submodule declares as copies of another tensor."""
    patterns: list[str] = []
    for module_name, module in model.named_modules():
        declared: Iterable[str] = getattr(module, "_tied_weights_keys", None) or ()
        prefix = f"^{re.escape(module_name)}\\." if module_name else "^"
        patterns.extend(prefix + str(name).removeprefix("^") for name in declared)
    return patterns


def _identity(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor; an empty tensor has no address to share."""
    if tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _storable(tensor: torch.Tensor, *, alone: bool) -> torch.Tensor:
    """On the CPU, contiguous, sharing memory with nothing else that is saved; copied only where that needs it."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone and whole else tensor.clone()
