"""One optimiser step that a gradient which is not finite cannot ruin."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["guarded_step"]


def guarded_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], *, max_grad_norm: float
) -> float:
    """Clip the gradients to ``max_grad_norm`` (0: no clipping), step, and return their norm before clipping.

    With a norm that is NaN or infinite nothing is stepped: weights and moments stay as they were, the gradients are
    dropped, and the caller sees it by the value returned.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf"))
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
