"""Advantages that depend on how sure the policy was."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["entropy_balanced"]


def entropy_balanced(advantage: Tensor, entropy: Tensor, weight: Tensor, *, coef: float = 0.2) -> Tensor:
    """A (1 + coef z) with z the z-score of each token's entropy, detached; [O].

    AEPO's entropy-balanced advantage, arXiv 2510.14545. ``advantage``, ``entropy``, ``weight`` [O] are those of the
    whole mini-batch, all packs together: mean and unbiased standard deviation are over the occurrences of positive
    weight (each counts once), and equal entropies give z = 0. Advantages of weight 0 stay as they are.
    """
    keep = weight > 0
    kept = entropy.detach()[keep].double()
    z = torch.zeros_like(entropy, dtype=torch.float64)
    # Of equal numbers the deviation may round to something that is not 0, and z to +-1.
    if len(kept) > 1 and bool(kept.max() > kept.min()):
        z[keep] = (kept - kept.mean()) / kept.std()
    return advantage * (1.0 + coef * z).to(advantage.dtype)
