"""An OpenAI-compatible endpoint: where it is, what it may cost, how fast it may be asked, and what was used of it."""

from __future__ import annotations

import difflib
import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

from turntree.errors import ConfigError, CostLimitError
from turntree.http import secret_from

__all__ = ["SAMPLING_KEYS", "Endpoint", "Meter", "RateLimiter", "Usage", "check_sampling"]

SAMPLING_KEYS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "max_tokens", "stop", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("reasoning_effort", "chat_template_kwargs", "response_format", "skip_special_tokens"),
        *("include_stop_str_in_output", "service_tier"),
    }
)
"""Sampling keys that are sent to a server; every other one is refused by name, before any request."""

MEASURED = ("temperature", "max_tokens", "stop", "seed")


def check_sampling(keys: Mapping[str, Any], *, what: str, taken: tuple[str, ...] = ()) -> None:
    """Refuse sampling keys that no server knows, and those in ``taken``, which are set elsewhere.

    Raises ``ConfigError`` naming the key, with a did-you-mean.
    """
    for key in keys:
        if key in taken:
            raise ConfigError(f"{what}: {key!r} is set by the run itself (sampling.*, seed, the grammar); leave it out")
        if key not in SAMPLING_KEYS:
            close = difflib.get_close_matches(key, sorted(SAMPLING_KEYS - set(taken)), n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            known = sorted(SAMPLING_KEYS - set(taken))
            raise ConfigError(f"{what}: unknown sampling key {key!r}{hint}; known are {known}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address, limits and prices of a server.

    ``base_url`` ends before ``/chat/completions``; nothing else is contacted: no redirect is followed and no proxy of
    the environment is used. ``api_key_env`` is the *name* of the environment variable that holds the key ('' : no key);
    the key itself is in no field. ``timeout_s`` bounds one request in all, ``backoff_s`` is the first wait before a
    retry. Prices are per million tokens; at ``max_cost``, in the same currency, nothing new is started.
    ``sampling``: further keys of each request (``top_p``, ``reasoning_effort``, ...). ``max_tokens_key``: how the
    server calls the limit of a turn.

    Raises ``ConfigError`` for values out of range.
    """

    base_url: str
    model: str
    api_key_env: str = ""
    concurrency: int = 16
    timeout_s: float = 600.0
    retries: int = 3
    backoff_s: float = 0.5
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    prompt_price: float = 0.0
    completion_price: float = 0.0
    max_cost: float | None = None
    max_tokens_key: str = "max_tokens"
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        if not self.model:
            raise ConfigError("engine.model is empty: expected the name under which the server knows the model")
        for name, minimum in (("concurrency", 1), ("requests_per_minute", 1), ("tokens_per_minute", 1), ("retries", 0)):
            _number(name, getattr(self, name), minimum=minimum)
        for name in ("backoff_s", "prompt_price", "completion_price", "max_cost"):
            _number(name, getattr(self, name), minimum=0)
        if not _number("timeout_s", self.timeout_s, minimum=0) > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: expected seconds above 0, in all for one request")
        if self.max_cost is not None and not (self.prompt_price or self.completion_price):
            raise ConfigError(
                f"max_cost={self.max_cost} without prices bounds nothing; set prompt_price and completion_price "
                "(per million tokens)"
            )
        if self.max_tokens_key not in ("max_tokens", "max_completion_tokens"):
            raise ConfigError(
                f"max_tokens_key={self.max_tokens_key!r}: expected 'max_tokens' or 'max_completion_tokens'"
            )
        check_sampling(self.sampling, what="openai.sampling", taken=MEASURED)

    def api_key(self) -> str:
        """The key, read now; '' without one. Raises ``ConfigError`` naming the variable, as :func:`secret_from`."""
        return secret_from(self.api_key_env, what=f"the API key of {self.base_url}")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, ok = urlsplit(""), False
    if not ok:
        raise ConfigError(
            f"engine.base_url={url!r}: expected an address such as http://127.0.0.1:8000/v1 or https://HOST/v1"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            "engine.base_url holds a user, a query or a fragment, which would be stored with the run; give the plain "
            "address, and the key by the name of its environment variable (openai.api_key_env)"
        )


def _number(name: str, value: float | None, *, minimum: float) -> float:
    if value is None:
        return math.inf
    if isinstance(value, bool) or not math.isfinite(value) or value < minimum:
        raise ConfigError(f"{name}={value}: expected a finite number of at least {minimum}")
    return value


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used. Tokens are the server's own counts, except in ``estimated`` requests, whose answer had none.

    ``requests``: those that were answered; ``retries``: tries before them that failed. ``restored_stops``: turns that
    got back the stop string that the server says it stripped; ``inferred_stops``: where the server does not say so.
    ``cost`` is in the currency of the prices; cached prompt tokens count at full price.
    """

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    estimated: int = 0
    restored_stops: int = 0
    inferred_stops: int = 0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


class Meter:
    """Counts what several threads use, and says when the cost is reached."""

    def __init__(self, endpoint: Endpoint, *, spent: Usage | None = None) -> None:
        self._endpoint = endpoint
        self._usage = spent or Usage()
        self._lock = threading.Lock()

    @property
    def usage(self) -> Usage:
        """Everything so far, what was spent before included."""
        return self._usage

    def add(self, usage: Usage) -> None:
        """Count tokens and events; the cost follows from the prices."""
        price = usage.prompt_tokens * self._endpoint.prompt_price
        price += usage.completion_tokens * self._endpoint.completion_price
        with self._lock:
            self._usage += replace(usage, cost=price / 1e6)

    def check(self) -> None:
        """Before a request is started. Raises ``CostLimitError`` when ``max_cost`` is spent."""
        limit = self._endpoint.max_cost
        if limit is not None and self._usage.cost >= limit:
            raise CostLimitError(
                f"the endpoint has cost {self._usage.cost:.6g} of max_cost={limit:g}; nothing new is started. Raise "
                "openai.max_cost to go on"
            )


class RateLimiter:
    """When a request may start, so that no minute holds more than so many requests and tokens.

    A request that is larger than ``tokens`` on its own starts in an empty minute.
    """

    def __init__(self, *, requests: int | None, tokens: int | None, minute_s: float = 60.0) -> None:
        self._requests = math.inf if requests is None else requests
        self._tokens = math.inf if tokens is None else tokens
        self._minute = minute_s
        self._booked: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def book(self, tokens: int, *, now: float) -> float:
        """Book a start at or after ``now`` (seconds of any clock) and return it; starts keep the order of booking."""
        with self._lock:
            start = max(now, self._booked[-1][0]) if self._booked else now
            while self._booked:
                held = sum(t for _, t in self._booked)
                if self._booked[0][0] > start - self._minute:
                    if len(self._booked) < self._requests and held + tokens <= self._tokens:
                        break
                    start = self._booked[0][0] + self._minute
                self._booked.popleft()
            self._booked.append((start, tokens))
            return start
