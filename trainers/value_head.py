"""A value function on the policy's own backbone, for credit rules that need values (PPO)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["ValueHead"]


class ValueHead(nn.Module):
    """One linear unit on the last hidden states, in float32; it starts at 0, so that the first advantages are rewards.

    The backbone is shared: its gradient is the sum of the policy's and of the value loss's.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    @classmethod
    def of(cls, model: nn.Module) -> ValueHead:
        """For a transformers causal language model, on its device."""
        size: int = cast("Any", model).get_output_embeddings().weight.shape[1]
        return cls(size).to(next(model.parameters()).device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [P] of hidden states [P, D]."""
        # DeepSpeed casts all weights of a bfloat16 run to bfloat16; values are computed in float32 all the same.
        kind = torch.promote_types(self.weight.dtype, torch.float32)
        return hidden.to(kind) @ self.weight.to(kind) + self.bias.to(kind)
