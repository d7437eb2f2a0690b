"""Engines on any OpenAI-compatible server: ``chat`` for text, ``completions`` where token ids come back.

Neither can take the trainer's weights; both serve evaluation, and rollouts with a model that stays as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from turntree.agents.engines.chat import ChatClient, Reply, sampling_body
from turntree.agents.engines.endpoint import Endpoint, Usage
from turntree.agents.engines.protocol import FinishReason, Generation, Prefix, Request, SamplingParams, check_requests
from turntree.agents.engines.transcript import messages, turn_ids
from turntree.agents.engines.transport import Transport
from turntree.agents.stops import find_stop
from turntree.agents.tokenizer import Tokenizer, decode, encode, special_tokens
from turntree.errors import EngineError

__all__ = ["Capabilities", "ChatEngine", "CompletionsEngine", "refuse_weights"]

T = TypeVar("T")


def refuse_weights(version: int) -> None:
    """Why a plain OpenAI-compatible server trains nothing. Raises ``EngineError``."""
    raise EngineError(
        f"weights of version {version} cannot be sent to an OpenAI-compatible server; train with engine=vllm_server, "
        "engine=vllm or engine=hf"
    )


class _Server:
    """What both engines share: one generation a request, each on its own, whatever happens to the others."""

    version = 0

    @property
    def in_flight(self) -> int:
        """Requests that may be under way at the same time, each asked for by a thread of its own."""
        return self._transport.endpoint.concurrency

    def abandon(self) -> None:
        """Start no further try of the requests that are under way in other threads."""
        self._transport.abandon()

    def update_weights(self, version: int) -> None:
        """Always raises ``EngineError``: the server's weights are not the trainer's."""
        refuse_weights(version)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in the same order. Raises the first ``EngineError`` after all have ended."""
        outcomes = dict(self.as_completed(requests))
        found = [outcomes[i] for i in range(len(requests))]
        for outcome in found:
            if isinstance(outcome, EngineError):
                raise outcome
        return [outcome for outcome in found if isinstance(outcome, Generation)]

    def as_completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation | EngineError]]:
        """(index of the request, its generation or its error), as they arrive."""
        check_requests(requests)
        return self._transport.map([functools.partial(self._one, request) for request in requests])

    @property
    def usage(self) -> Usage:
        """Tokens, requests and cost so far."""
        return self._transport.meter.usage

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    @property
    def _transport(self) -> Transport:
        raise NotImplementedError

    def _one(self, request: Request) -> Generation:
        raise NotImplementedError


class ChatEngine(_Server):
    """Plays episodes through ``/chat/completions``: text in, text out, no log-probs (they are NaN).

    Its requests come from ``Dialogue(TextTokenizer(), style="chat")``: each observation is a message of the user. A
    turn has as many ids as the server counted tokens (its hidden reasoning included), and the context is as long as the
    server says it is after each turn; between turns the newest observation is estimated.
    """

    def __init__(self, endpoint: Endpoint, *, spent: Usage | None = None) -> None:
        self.client = ChatClient(endpoint, spent=spent)

    @property
    def _transport(self) -> Transport:
        return self.client.transport

    def _one(self, request: Request) -> Generation:
        body = sampling_body(request.params, seed=request.seed, endpoint=self.client.endpoint)
        reply = self.client.ask(messages(request.prefix), body)
        ids = turn_ids(reply.text, reply.completion_tokens, stops=request.params.stop)
        return Generation(
            ids=ids,
            logprobs=(math.nan,) * len(ids),
            finish_reason=reply.finish,
            version=self.version,
            continuation=_continuation(request.prefix, ids, reply),
            stop_string=reply.stop_string,
        )


def _continuation(prefix: Prefix, ids: tuple[int, ...], reply: Reply) -> Prefix:
    """The context after a turn, as long as the server counted it."""
    after = prefix.extend(ids)
    if not reply.estimated:
        after.length = reply.prompt_tokens + reply.completion_tokens
    return after


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a completions endpoint gave for one small request of token ids.

    ``token_ids``: it returns the ids it sampled. ``logprobs``: one for each. ``same_text``: the ids mean the same text
    to the tokenizer here. ``tempered``: whether log-probs are at the sampling temperature (None: not found out).
    ``error``: what the server said where it refused the request.
    """

    token_ids: bool = False
    logprobs: bool = False
    same_text: bool = False
    tempered: bool | None = None
    error: str = ""

    def refusal(self, *, training: bool = False) -> str:
        """Why the engine cannot run on this server, or train (``training``); '' if it can."""
        if self.error:
            return f"it refused a prompt of token ids: {self.error}"
        if not self.token_ids:
            return "it returned text without token ids (vLLM returns them for return_token_ids)"
        if not self.logprobs:
            return "it returned no log-prob for each token"
        if not self.same_text:
            return "its token ids mean another text to the tokenizer in model.path: the models differ"
        if training and not self.tempered:
            return "its log-probs are not those at the sampling temperature (vLLM: --logprobs-mode processed_logprobs)"
        return ""


class CompletionsEngine(_Server):
    """Token ids in and out through ``/completions``, for servers that return ids and log-probs (vLLM does).

    ``tokenizer`` is that of the served model; :meth:`probe` finds out whether the server can do this at all.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: Tokenizer, *, spent: Usage | None = None) -> None:
        self.endpoint = endpoint
        self.tokenizer = tokenizer
        self.transport = Transport(endpoint, spent=spent)

    @property
    def _transport(self) -> Transport:
        return self.transport

    def probe(self) -> Capabilities:
        """Ask for a few tokens, at two temperatures. Raises ``EngineError`` when the server cannot be reached."""
        prefix = Prefix(encode(self.tokenizer, "The capital of France is the city of"))
        params = SamplingParams(max_tokens=4)
        try:
            choice, _ = self._ask(Request(prefix, params, seed=0), _choice)
            cool, _ = self._ask(Request(prefix, SamplingParams(max_tokens=1, temperature=0.25), seed=0), _choice)
        except EngineError as error:
            if "refused the request" not in str(error):
                raise
            return Capabilities(error=str(error))
        ids, logprobs = choice.get("token_ids"), _logprobs(choice)
        if not isinstance(ids, list) or not ids:
            return Capabilities(logprobs=bool(logprobs))
        return Capabilities(
            token_ids=True,
            logprobs=len(logprobs) == len(ids),
            same_text=_bare(self.tokenizer, decode(self.tokenizer, ids)) == _bare(self.tokenizer, str(choice["text"])),
            tempered=_tempered(_top(choice), _top(cool)),
        )

    def _one(self, request: Request) -> Generation:
        read = functools.partial(_generation, request=request, version=self.version, tokenizer=self.tokenizer)
        return self._ask(request, read)

    def _ask(self, request: Request, read: Callable[[Mapping[str, Any], Usage], T]) -> T:
        params, prompt = request.params, request.prefix.token_ids()
        body = {
            **sampling_body(params, seed=request.seed, endpoint=self.endpoint),
            "model": self.endpoint.model,
            "prompt": prompt,
            "logprobs": 1,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }

        def guess(document: Mapping[str, Any]) -> Usage:
            sampled = document["choices"][0].get("token_ids") or () if document.get("choices") else ()
            return Usage(requests=1, prompt_tokens=len(prompt), completion_tokens=len(sampled), estimated=1)

        return self.transport.post("completions", body, read=read, tokens=len(prompt) + params.max_tokens, guess=guess)


def _choice(document: Mapping[str, Any], usage: Usage) -> tuple[dict[str, Any], Usage]:
    return dict(document["choices"][0]), usage


def _logprobs(choice: Mapping[str, Any]) -> list[float]:
    found = choice.get("logprobs")
    listed = found.get("token_logprobs") if isinstance(found, dict) else None
    return [float(v) for v in listed] if isinstance(listed, list) else []


def _top(choice: Mapping[str, Any]) -> float | None:
    """The log-prob of the most likely first token."""
    found = choice.get("logprobs")
    tops = found.get("top_logprobs") if isinstance(found, dict) else None
    values = list(tops[0].values()) if isinstance(tops, list) and tops and isinstance(tops[0], dict) else []
    return max(values) if values else None


def _tempered(warm: float | None, cool: float | None) -> bool | None:
    """Whether the most likely token gained by cooling; None where it was certain already, or is not shown."""
    if warm is None or cool is None or warm > -1e-3:
        return None
    return cool > warm + 1e-4


def _bare(tokenizer: Tokenizer, text: str) -> str:
    for token in special_tokens(tokenizer):
        text = text.replace(token, "")
    return text.strip()


def _generation(
    document: Mapping[str, Any], usage: Usage, *, request: Request, version: int, tokenizer: Tokenizer
) -> Generation:
    del usage  # a turn's ids are its tokens
    choice = document["choices"][0]
    ids, logprobs = tuple(int(i) for i in choice["token_ids"]), tuple(_logprobs(choice))
    if len(ids) != len(logprobs):
        raise EngineError(f"expected a log-prob for each of {len(ids)} tokens, found {len(logprobs)}")
    match = find_stop(decode(tokenizer, ids), request.params.stop)
    reasons: dict[Any, FinishReason] = {"stop": "stop", "length": "length"}
    reason: FinishReason | Literal["abort"] = reasons.get(choice.get("finish_reason"), "abort")
    return Generation(
        ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        version=version,
        continuation=request.prefix.extend(ids),
        stop_string=match[1] if match and reason != "abort" else None,
    )
