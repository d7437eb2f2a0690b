"""The contract between rollouts and generation engines: token ids in, token ids out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from turntree.errors import EngineError

__all__ = [
    "Engine",
    "EntropyKind",
    "FinishReason",
    "Generation",
    "Prefix",
    "Request",
    "SamplingParams",
    "check_requests",
]

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: a stop string or an end-of-text token; ``length``: the limit; ``abort``: discard, never train on it."""

EntropyKind = Literal["exact", "topk", "none"]
"""How an engine's entropies were computed."""


class Prefix:
    """A context as a handle: a parent context plus the token ids added to it.

    Handles form a tree with the shape of the rollout tree. An engine may keep what it computed for a handle (HF: the
    KV cache) keyed by the object itself, weakly, so that dropping a tree drops its caches.
    """

    __slots__ = ("__weakref__", "ids", "length", "parent")

    def __init__(self, ids: Sequence[int], parent: Prefix | None = None) -> None:
        self.parent = parent
        self.ids: tuple[int, ...] = tuple(ids)
        self.length: int = len(self.ids) + (parent.length if parent is not None else 0)

    def __len__(self) -> int:
        return self.length

    def extend(self, ids: Sequence[int]) -> Prefix:
        """The context that continues this one by ``ids``."""
        return Prefix(ids, self)

    def ancestors(self) -> Iterator[Prefix]:
        """This handle and its parents, nearest first."""
        node: Prefix | None = self
        while node is not None:
            yield node
            node = node.parent

    def token_ids(self) -> list[int]:
        """All token ids from the start."""
        return [i for p in reversed(list(self.ancestors())) for i in p.ids]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. ``temperature=0`` is greedy; log-probs are then those of the untempered distribution."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    @property
    def truncates_support(self) -> bool:
        """Whether sampled log-probs would need renormalising before training on them."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to make. ``key`` is the caller's name for it; ``seed`` alone decides the draw."""

    prefix: Prefix
    params: SamplingParams
    seed: int
    key: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled.

    ``ids``: the sampled tokens, the one that completed a stop string and a sampled end-of-text included.
    ``logprobs``: float per token, at the sampling temperature. ``entropies``: float per token in nats, of the kind
    ``entropy_kind`` (empty for ``none``). ``version``: of the weights that sampled. ``continuation``: the handle
    of prefix + ids, whose cache the engine may have kept.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    continuation: Prefix
    entropies: tuple[float, ...] = ()
    entropy_kind: EntropyKind = "none"
    stop_string: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """Generates for a batch of requests."""

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in the same order. Raises ``EngineError`` when it cannot."""
        ...

    def update_weights(self, version: int) -> None:
        """Take the trainer's weights as ``version`` and drop every cache computed with older ones."""
        ...


def check_requests(requests: Sequence[Request], *, max_context_tokens: int | None = None) -> None:
    """Refuse what no engine can do: an empty prefix, ``max_tokens`` below 1, a context that cannot fit.

    Raises ``EngineError``. A rollout ends an episode whose context is full (see ``dialogue.turn_budget``) instead of
    asking for it.
    """
    for request in requests:
        params, length = request.params, len(request.prefix)
        if length < 1:
            raise EngineError(f"request {request.key}: expected a prefix of at least one token, found an empty one")
        if params.max_tokens < 1:
            raise EngineError(
                f"request {request.key}: expected max_tokens of at least 1, found {params.max_tokens} after "
                f"{length} tokens; end the episode when its context is full"
            )
        if not 0 <= params.temperature < math.inf or not 0 < params.top_p <= 1 or params.top_k < 0:
            raise EngineError(
                f"request {request.key}: expected a finite temperature >= 0, 0 < top_p <= 1 and top_k >= 0, "
                f"found {params}"
            )
        if max_context_tokens is not None and length + params.max_tokens > max_context_tokens:
            raise EngineError(
                f"request {request.key}: {length} prefix tokens and max_tokens={params.max_tokens} exceed the model's "
                f"{max_context_tokens} positions; lower max_turn_tokens or max_context_tokens"
            )
