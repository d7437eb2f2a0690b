"""What vLLM is asked and how its answers are read, in process and over HTTP alike. Nothing here imports vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from turntree.agents.engines.protocol import EntropyKind, FinishReason, Generation, Request, SamplingParams
from turntree.errors import EngineError

__all__ = ["finish_reason", "make_generation", "sampling_arguments", "topk_entropy"]

_COLDEST = 0.01
"""Lower temperatures are raised to this one by vLLM, silently: the log-probs would be those of another policy."""


def sampling_arguments(
    params: SamplingParams, *, seed: int, end_ids: frozenset[int], entropy_topk: int = 0
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.SamplingParams``, and keys of a ``/v1/completions`` body; the same words in both.

    Everything that a server could have another default for is said. Token ids stay whole: the text is decoded with
    special tokens, and the stop string stays in the output.

    Raises ``EngineError`` for a temperature that vLLM would change.
    """
    if 0 < params.temperature < _COLDEST:
        raise EngineError(
            f"temperature={params.temperature}: vLLM raises temperatures below {_COLDEST} to {_COLDEST}, and its "
            "log-probs would be those of that one; use 0 (greedy) or more"
        )
    return {
        "n": 1,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None if params.temperature == 0 else seed % 2**63,
        "stop": list(params.stop),
        "stop_token_ids": sorted(end_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": entropy_topk,
    }


def finish_reason(reason: str | None) -> FinishReason:
    """Our word for vLLM's. Whatever is no end of a text is ``abort``: never trained on."""
    if reason == "stop":
        return "stop"
    return "length" if reason == "length" else "abort"


def topk_entropy(logprobs: Sequence[float]) -> float:
    """Entropy in nats of the distribution renormalised over the given tokens."""
    top = max(logprobs)
    weights = [math.exp(value - top) for value in logprobs]
    total = math.fsum(weights)
    return math.log(total) - math.fsum(w * (v - top) for w, v in zip(weights, logprobs, strict=True)) / total


def make_generation(
    request: Request,
    *,
    ids: Sequence[int],
    logprobs: Sequence[float],
    reason: str | None,
    stop: Any,
    version: int,
    entropies: Sequence[float] = (),
    metrics: Mapping[str, float] | None = None,
) -> Generation:
    """One answer as a :class:`Generation`; ``stop`` is vLLM's stop reason (a string, a token id, or None).

    Raises ``EngineError`` when ids and log-probs disagree in number or a log-prob is no number: the weights diverged.
    """
    finish = finish_reason(reason)
    if len(ids) != len(logprobs):
        raise EngineError(
            f"request {request.key}: expected a log-prob for each of {len(ids)} tokens, found {len(logprobs)}"
        )
    if not all(math.isfinite(value) for value in logprobs):
        raise EngineError(
            f"request {request.key}: expected finite log-probs, found {list(logprobs[:5])}; the weights diverged"
        )
    if not ids and finish != "abort":
        raise EngineError(f"request {request.key}: expected at least one token, found none (finish reason {reason!r})")
    kind: EntropyKind = "topk" if entropies else "none"
    return Generation(
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish_reason=finish,
        version=version,
        continuation=request.prefix.extend(ids),
        entropies=tuple(entropies),
        entropy_kind=kind,
        stop_string=stop if isinstance(stop, str) else None,
        metrics=dict(metrics or {}),
    )
