"""Text from a chat endpoint, for teachers, checkers, summarisers, and for evaluation in the chat protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turntree.agents.engines.endpoint import Endpoint, Usage, check_sampling
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.transcript import Message, estimate
from turntree.agents.engines.transport import Transport
from turntree.agents.stops import find_stop
from turntree.errors import ConfigError, EngineError

__all__ = ["ChatClient", "Reply", "sampling_body"]

_TAG = re.compile(r"</(\w+)>")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a chat endpoint answered.

    ``text`` holds the stop string that ended it, also where the server stripped it (``restored``: it said so;
    ``inferred``: an open tag says so). ``finish``: ``stop``, ``length``, or ``abort`` (to be discarded). Token counts
    are the server's, unless ``estimated``.
    """

    text: str
    finish: Literal["stop", "length", "abort"]
    stop_string: str | None
    prompt_tokens: int
    completion_tokens: int
    estimated: bool = False
    restored: bool = False
    inferred: bool = False


class ChatClient:
    """Completes conversations at an OpenAI-compatible endpoint: concurrent, rate-limited, retried, counted.

    One client serves any number of threads; all of them share its limits and its cost. ``spent`` is what counts against
    ``max_cost`` already. Raises ``ConfigError`` when the key's environment variable is not set.
    """

    def __init__(self, endpoint: Endpoint, *, spent: Usage | None = None) -> None:
        self.endpoint = endpoint
        self.transport = Transport(endpoint, spent=spent)

    @property
    def usage(self) -> Usage:
        """Tokens, requests and cost so far."""
        return self.transport.meter.usage

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()

    def complete(self, messages: Sequence[Message], *, max_tokens: int, **sampling: Any) -> Reply:
        """The assistant's next message.

        ``sampling``: ``temperature``, ``top_p``, ``stop``, ``seed``, ... (``SAMPLING_KEYS``); without a temperature
        it is 0. Raises ``ConfigError`` for other keys, before any request; ``CostLimitError`` when ``max_cost`` is
        spent; ``EngineError`` when no try was answered, or the answer was aborted or filtered.
        """
        (outcome,) = self.complete_all([messages], max_tokens=max_tokens, **sampling)
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    def complete_all(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int,
        seeds: Sequence[int] | None = None,
        **sampling: Any,
    ) -> list[Reply | EngineError]:
        """One outcome a conversation, in order; what failed is the error that :meth:`complete` would raise.

        ``seeds``: one a conversation, in the place of ``seed``.
        """
        check_sampling(sampling, what="complete")
        stop = sampling.pop("stop", None) or ()
        body = {**self.endpoint.sampling, "temperature": 0.0, **sampling, self.endpoint.max_tokens_key: max_tokens}
        if isinstance(stop, str) or stop:
            body["stop"] = [stop] if isinstance(stop, str) else list(stop)
        own: Sequence[dict[str, Any]] = [{}] * len(conversations) if seeds is None else [{"seed": s} for s in seeds]
        calls = [_finished(self, talk, {**body, **mine}) for talk, mine in zip(conversations, own, strict=True)]
        outcomes: dict[int, Reply | EngineError] = dict(self.transport.map(calls))
        return [outcomes[i] for i in range(len(conversations))]

    def ask(self, messages: Sequence[Message], body: Mapping[str, Any]) -> Reply:
        """One request whose other keys are ``body``; an aborted answer is a reply here."""
        if not messages:
            raise ConfigError("expected at least one message, found an empty conversation")
        prompt = sum(estimate(m["content"]) + 4 for m in messages)
        limit = int(body.get(self.endpoint.max_tokens_key, 0))
        stops = tuple(body.get("stop", ()))

        def guess(document: Mapping[str, Any]) -> Usage:
            return Usage(requests=1, prompt_tokens=prompt, completion_tokens=estimate(_content(document)), estimated=1)

        reply = self.transport.post(
            "chat/completions",
            {**body, "model": self.endpoint.model, "messages": list(messages)},
            read=lambda document, usage: _reply(document, usage, stops),
            tokens=prompt + limit,
            guess=guess,
        )
        self.transport.meter.add(Usage(restored_stops=reply.restored, inferred_stops=reply.inferred))
        return reply


def _finished(client: ChatClient, messages: Sequence[Message], body: Mapping[str, Any]) -> Callable[[], Reply]:
    """A call whose reply is whole: for a text client nobody asks again after an aborted one."""

    def call() -> Reply:
        reply = client.ask(messages, body)
        if reply.finish == "abort":
            raise EngineError(f"{client.endpoint.model} aborted its answer after {reply.text[-40:]!r}; ask again")
        return reply

    return call


def sampling_body(params: SamplingParams, *, seed: int, endpoint: Endpoint) -> dict[str, Any]:
    """The keys of a request that follow from sampling parameters; exactly what was asked for, nothing from training."""
    body: dict[str, Any] = {
        **endpoint.sampling,
        "temperature": params.temperature,
        "seed": seed % 2**31,  # llama.cpp takes 32 bits
        endpoint.max_tokens_key: params.max_tokens,
    }
    if params.top_p < 1:
        body["top_p"] = params.top_p
    if params.top_k:
        body["top_k"] = params.top_k
    if params.stop:
        body["stop"] = list(params.stop)
    return body


def _content(document: Mapping[str, Any]) -> str:
    """The text of an answer, of whatever shape; for estimates only."""
    try:
        return str(document["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError):
        return ""


def _reply(document: Mapping[str, Any], usage: Usage, stops: Sequence[str]) -> Reply:
    choice = document["choices"][0]
    text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
    if not isinstance(text, str):
        raise TypeError(f"content is a {type(text).__name__}")
    finish = _finish(reason)
    text, stop, how = restore_stop(text, stops, said=_matched(choice), stopped=reason == "stop")
    return Reply(
        text=text,
        finish="stop" if stop is not None and finish != "abort" else finish,
        stop_string=stop,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        estimated=bool(usage.estimated),
        restored=how == "said",
        inferred=how == "open tag",
    )


def _finish(reason: Any) -> Literal["stop", "length", "abort"]:
    """Our word for the server's. What is no end of a text is ``abort``: it is never taken for a whole turn."""
    if reason in ("content_filter", "tool_calls", "function_call"):
        raise EngineError(
            f"the server ended the answer with finish_reason={reason!r}, which is no turn: a filter of the provider "
            "cut it, or the model called a function that nobody offered"
        )
    return reason if reason in ("stop", "length") else "abort"


def _matched(choice: Mapping[str, Any]) -> str | None:
    """The stop string that the server says it met: ``stop_reason`` (vLLM), ``matched_stop`` (SGLang)."""
    return next(
        (v for k in ("stop_reason", "matched_stop", "stopping_word") if isinstance(v := choice.get(k), str)), None
    )


def restore_stop(
    text: str, stops: Sequence[str], *, said: str | None, stopped: bool
) -> tuple[str, str | None, Literal["kept", "said", "open tag", "none"]]:
    """The text with the stop string that ended it, that string, and how it is known.

    Chat servers strip the stop string, and most do not say which. A text that ended by itself with ``<search>`` open
    and ``</search>`` among the stop strings can only have met it, or a model that stopped in the middle of a tag:
    the two look alike, and the first is taken.
    """
    match = find_stop(text, stops)
    if match is not None:
        return text, match[1], "kept"
    if not stopped:
        return text, None, "none"
    if said in stops and said is not None:
        return text + said, said, "said"
    opened = {stop: text.rfind(f"<{tag[1]}>") for stop in stops if (tag := _TAG.fullmatch(stop.strip()))}
    last = max(opened, key=lambda stop: opened[stop], default=None)
    if last is None or opened[last] < 0:
        return text, None, "none"
    return text + last, last, "open tag"
