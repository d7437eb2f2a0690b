"""A test double with the manners of a real engine: fixed texts, deterministic log-probs, and faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from turntree.agents.engines.protocol import FinishReason, Generation, Request, check_requests
from turntree.agents.stops import tokens_to_stop
from turntree.agents.tokenizer import ByteTokenizer, Tokenizer, decode, encode, end_ids
from turntree.errors import EngineError

__all__ = ["Fault", "Script", "ScriptedEngine"]


class Script(Protocol):
    """What the "model" says: ``script(context, seed)`` gives the text of the turn that continues ``context``."""

    def __call__(self, context: str, seed: int, /) -> str: ...


Fault = Callable[[Request], bool]
"""Whether something should go wrong with this request."""


class ScriptedEngine:
    """Speaks given texts.

    ``script`` is a function of the context's text and the seed (equal for any batch or arrival order), a mapping from
    ``request.key`` to text, or a sequence of texts that is served in call order (for single chains). A text without a
    stop string is followed by the end-of-text token, as a model that ends by itself would.

    Log-probs and entropies are pseudo-random numbers that depend on seed, context length and sampled ids only.
    Faults: ``ignore_stop`` runs on after stop strings, ``strip_stop`` leaves the stop string out of the tokens,
    ``ignore_limit`` runs on after ``max_tokens``, ``fail`` raises ``EngineError`` for the whole batch, ``abort`` gives
    aborted generations. ``arrival_seed`` shuffles the order in which :meth:`as_completed` yields.
    """

    def __init__(
        self,
        script: Script | Mapping[tuple[Any, ...], str] | Sequence[str],
        tokenizer: Tokenizer | None = None,
        *,
        version: int = 0,
        ignore_stop: bool = False,
        strip_stop: bool = False,
        ignore_limit: bool = False,
        fail: Fault | None = None,
        abort: Fault | None = None,
        arrival_seed: int | None = None,
    ) -> None:
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.script = script
        self.ignore_stop = ignore_stop
        self.strip_stop = strip_stop
        self.ignore_limit = ignore_limit
        self.fail = fail
        self.abort = abort
        self.requests: list[Request] = []
        self._version = version
        self._served = 0
        self._arrival = None if arrival_seed is None else np.random.default_rng(arrival_seed)

    @property
    def version(self) -> int:
        """Version of the pretended weights."""
        return self._version

    def update_weights(self, version: int) -> None:
        """Pretend to take new weights."""
        self._version = version

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in the same order."""
        check_requests(requests)
        if self.fail is not None and any(self.fail(r) for r in requests):
            raise EngineError(f"scripted failure of a batch of {len(requests)} requests")
        self.requests.extend(requests)
        return [self._one(request) for request in requests]

    def as_completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation]]:
        """(index of the request, its generation), in an order of arrival shuffled by ``arrival_seed``."""
        generations = self.generate(requests)
        order = np.arange(len(requests)) if self._arrival is None else self._arrival.permutation(len(requests))
        return iter([(int(i), generations[i]) for i in order])

    def _one(self, request: Request) -> Generation:
        ids = encode(self.tokenizer, self._text(request), allow_special=True)
        match = tokens_to_stop(self.tokenizer, ids, request.params.stop)
        stop: str | None = None
        if match is not None and not self.ignore_stop:
            ids, stop = ids[: match[0]], match[1]
        elif not ids or ids[-1] not in end_ids(self.tokenizer):
            ids = (*ids, *sorted(end_ids(self.tokenizer))[:1])
        finish: FinishReason = "stop"
        if len(ids) > request.params.max_tokens and not self.ignore_limit:
            ids, finish, stop = ids[: request.params.max_tokens], "length", None
        if stop is not None and self.strip_stop:
            ids = encode(self.tokenizer, decode(self.tokenizer, ids).split(stop)[0])
        if self.abort is not None and self.abort(request):
            finish = "abort"
        return self._generation(request, ids, finish, stop)

    def _text(self, request: Request) -> str:
        if isinstance(self.script, Mapping):
            if request.key not in self.script:
                raise EngineError(f"expected one of the scripted keys {list(self.script)[:5]}..., found {request.key}")
            return str(self.script[request.key])
        if callable(self.script):
            return self.script(decode(self.tokenizer, request.prefix.token_ids()), request.seed)
        if self._served >= len(self.script):
            raise EngineError(
                f"all {len(self.script)} scripted texts are used up; give more, or a function of the context"
            )
        self._served += 1
        return str(self.script[self._served - 1])

    def _generation(self, request: Request, ids: tuple[int, ...], finish: FinishReason, stop: str | None) -> Generation:
        rng = np.random.default_rng([request.seed % 2**63, request.prefix.length, crc32(repr(ids).encode())])
        noise = rng.exponential(0.5, size=(2, len(ids)))
        generation = Generation(
            ids=ids,
            logprobs=tuple((-noise[0]).tolist()),
            finish_reason=finish,
            version=self._version,
            continuation=request.prefix.extend(ids),
            entropies=tuple(noise[1].tolist()),
            entropy_kind="exact",
        )
        return replace(generation, stop_string=stop)
