"""Sampling of next tokens, vectorised over rows; a row's draw depends on its own seed only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turntree.agents.engines.protocol import SamplingParams

__all__ = ["RowParams", "Sampled", "sample", "uniforms"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Next tokens ``(B,)``, their log-probs at the sampling temperature, and exact entropies in nats."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    entropies: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of a batch as tensors ``(B,)``; None where no row uses them."""

    temperatures: torch.Tensor | None
    greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device) -> RowParams:
        """Collect the parameters of the rows."""
        temperatures = torch.tensor([p.temperature or 1.0 for p in params], device=device)
        greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        top_k = torch.tensor([p.top_k or torch.iinfo(torch.int64).max for p in params], device=device)
        top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)
        return RowParams(
            temperatures=temperatures if any(p.temperature not in (0, 1) for p in params) else None,
            greedy=greedy if any(p.temperature == 0 for p in params) else None,
            top_k=top_k if any(p.top_k > 0 for p in params) else None,
            top_p=top_p if any(p.top_p < 1 for p in params) else None,
        )


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """The first ``count`` uniform numbers in [0, 1) of a request: one a token, a function of the seed alone."""
    return np.random.Generator(np.random.Philox(seed % 2**128)).random(count)


def sample(logits: torch.Tensor, uniform: torch.Tensor, params: RowParams) -> Sampled:
    """Draw by the inverse of the cumulative distribution.

    ``logits`` is ``(B, V)``; ``uniform`` is float64 ``(B,)``, one number a row. Log-probs and entropies are those of
    the whole distribution at the sampling temperature, also under top-k and top-p.
    """
    scores = logits.float()
    if params.temperatures is not None:
        scores = scores / params.temperatures[:, None]
    logprobs = scores.log_softmax(dim=-1)
    probs = logprobs.exp()
    # 0 * -inf is NaN: tokens that a model rules out add nothing to the entropy.
    entropies = -(probs * logprobs.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)
    cdf = _support(probs.double(), params).cumsum(dim=-1)
    # The first token whose cumulative mass exceeds the draw: tokens without mass are never taken.
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(1)
    tokens = tokens.clamp_max(logits.shape[-1] - 1)
    if params.greedy is not None:
        tokens = torch.where(params.greedy, scores.argmax(dim=-1), tokens)
    return Sampled(tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), entropies)


def _support(probs: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Probabilities with everything outside top-k and top-p set to 0 (not renormalised)."""
    if params.top_k is None and params.top_p is None:
        return probs
    order = probs.argsort(dim=-1, descending=True, stable=True)
    ranked = probs.gather(1, order)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if params.top_k is not None:
        keep &= torch.arange(ranked.shape[1], device=ranked.device)[None] < params.top_k[:, None]
    if params.top_p is not None:
        # top-p looks at the distribution that top-k left; a token is kept while the mass before it is below p.
        left = ranked * keep
        before = left.cumsum(dim=-1) - left
        keep &= before < params.top_p[:, None] * left.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(1, order, ranked * keep)
