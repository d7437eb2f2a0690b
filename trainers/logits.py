"""Log-probs and entropies of chosen tokens from logits, with a backward pass that holds one tensor of their size."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["read_logits", "widen"]


def read_logits(logits: Tensor, ids: Tensor, *, scale: float = 1.0, entropy: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probs [P] of ``ids`` [P] under soft-max(``scale`` * ``logits``) [P, V], and its entropies [P] in nats.

    Without ``entropy`` the second is empty. Both are float32 at least. What autograd would keep and make by itself
    (scaled logits, log-probs, three gradients) is up to five tensors of the logits' size at the step's worst moment;
    here the logits are kept as they are, and their gradient is the one tensor that is made (one more where entropies
    have a gradient). Logits of minus infinity have no probability and add nothing to the entropy.
    """
    return cast("tuple[Tensor, Tensor]", cast("Any", _Read).apply(logits, ids, scale, entropy))


def widen(logits: Tensor) -> Tensor:
    """To float32, unless they are wider already."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_softmax(logits: Tensor, scale: float) -> Tensor:
    wide = widen(logits)
    return torch.log_softmax(wide if scale == 1.0 else wide * scale, dim=-1)


def _finite(logp: Tensor) -> Tensor:
    return logp.masked_fill(logp == float("-inf"), 0.0)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, scale: float, entropy: bool) -> tuple[Tensor, Tensor]:
        logp = _log_softmax(logits, scale)
        picked = logp.gather(1, ids[:, None])[:, 0]
        spread = -(logp.exp() * _finite(logp)).sum(-1) if entropy else picked.new_zeros(0)
        ctx.scale = scale
        ctx.save_for_backward(logits, ids, spread)
        ctx.set_materialize_grads(False)  # None, rather than zeros, of entropies that are reported alone
        return picked, spread

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor, None, None, None]:
        """d logp(i) / d x(j) = [i = j] - p(j), and d H / d x(j) = -p(j) (log p(j) + H), of scaled logits x."""
        picked, spread = grad_outputs
        logits, ids, entropies = ctx.saved_tensors
        grad = _log_softmax(logits, ctx.scale)
        picked = grad.new_zeros(len(ids)) if picked is None else picked
        if spread is not None and len(spread):
            slope = (_finite(grad) + entropies[:, None]).mul_(spread[:, None])
            grad.exp_().mul_(slope.add_(picked[:, None])).neg_()
        else:
            grad.exp_().mul_(-picked[:, None])
        grad.scatter_add_(1, ids[:, None], picked[:, None])
        if ctx.scale != 1.0:
            grad.mul_(ctx.scale)
        return grad.to(logits.dtype), None, None, None
