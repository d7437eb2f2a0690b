"""Requests to an OpenAI-compatible endpoint: bounded, retried, rate-limited, counted; the key stays out of messages."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import httpx2

from turntree.agents.engines.endpoint import Endpoint, Meter, RateLimiter, Usage
from turntree.errors import EngineError
from turntree.http import BadAnswer, read_body, retry_after, retry_wait, said

__all__ = ["Transport"]

T = TypeVar("T")


class _Again(Exception):
    """A try that failed in a way that another try may mend; ``after``: what Retry-After says, in seconds."""

    def __init__(self, reason: str, *, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Transport:
    """A connection pool to one endpoint, for any number of threads. ``spent`` is what counts against the cost already.

    Raises ``ConfigError`` when the key's environment variable is not set.
    """

    def __init__(self, endpoint: Endpoint, *, spent: Usage | None = None) -> None:
        self.endpoint = endpoint
        self.meter = Meter(endpoint, spent=spent)
        self._key = endpoint.api_key()
        self._rate = RateLimiter(requests=endpoint.requests_per_minute, tokens=endpoint.tokens_per_minute)
        self._local = threading.local()
        self._stops: set[threading.Event] = set()
        self._random = random.Random()  # only spreads retries of many clients: nothing that is measured depends on it
        # trust_env=False: no proxy and no netrc of the environment, so that only base_url is contacted.
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(endpoint.timeout_s),
            limits=httpx2.Limits(max_connections=endpoint.concurrency),
            follow_redirects=False,
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        read: Callable[[Mapping[str, Any], Usage], T],
        tokens: int,
        guess: Callable[[Mapping[str, Any]], Usage],
    ) -> T:
        """Post ``body`` and return what ``read`` makes of the answer and its usage; another try where it cannot.

        ``tokens`` is what the request may use, for the rate limit. ``guess`` gives the usage of an answer without one.
        Raises ``CostLimitError`` before a try past the cost, ``EngineError`` when all tries failed, or at once where
        another one cannot help (a refused key, an unknown model, a context that is too long).
        """
        for attempt in range(self.endpoint.retries + 1):
            self._admit(tokens)
            try:
                document = self._send(path, body)
                usage = _usage(document) or guess(document)
                self.meter.add(usage)
                return _read(read, document, usage)
            except _Again as again:
                if attempt == self.endpoint.retries or (again.after or 0) > self.endpoint.timeout_s:
                    tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
                    raise EngineError(self._hide(f"{self._where(path)} failed after {tries}: {again}")) from None
                self.meter.add(Usage(retries=1))
                backoff, jitter = self.endpoint.backoff_s, self._random.random()
                self._pause(retry_wait(attempt, backoff_s=backoff, after=again.after, jitter=jitter))
        raise AssertionError("the last try returns or raises")

    def map(self, calls: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T | EngineError]]:
        """Run calls, ``concurrency`` at a time, and yield (index, result or error) as they end.

        When the consumer stops (Ctrl-C, an exception), requests in flight end and nothing more is started.
        """
        stop = threading.Event()
        self._stops.add(stop)
        pool = ThreadPoolExecutor(
            self.endpoint.concurrency, "endpoint", initializer=lambda: setattr(self._local, "stop", stop)
        )
        try:
            pending: dict[Future[T], int] = {pool.submit(call): i for i, call in enumerate(calls)}
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=pending.__getitem__):
                    index = pending.pop(future)
                    error = future.exception()
                    if error is None:
                        yield index, future.result()
                    elif isinstance(error, EngineError):
                        yield index, error
                    else:
                        raise error
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._stops.discard(stop)

    def abandon(self) -> None:
        """Nobody waits any more: of all that :meth:`map` runs, in any thread, no further try is started."""
        for stop in list(self._stops):
            stop.set()

    def _admit(self, tokens: int) -> None:
        self.meter.check()
        now = time.monotonic()
        start = self._rate.book(tokens, now=now)
        if start > now:
            self._pause(start - now)
            self.meter.check()

    def _pause(self, seconds: float) -> None:
        """Wait, unless whoever reads the answers has stopped: then nothing more is started."""
        stop: threading.Event | None = getattr(self._local, "stop", None)
        if stop is None:
            time.sleep(seconds)
        elif stop.wait(seconds):
            raise EngineError("the answers are not read any more; the request was not started")

    def _send(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """One try: the JSON object that the server answers with status 200."""
        url = f"{self.endpoint.base_url.rstrip('/')}/{path}"
        try:
            with self._client.stream("POST", url, json=body) as response:
                content = read_body(response, timeout_s=self.endpoint.timeout_s)
        except BadAnswer as error:
            raise _Again(str(error)) from None
        except httpx2.TimeoutException:
            raise _Again(f"no answer within timeout_s={self.endpoint.timeout_s:g}") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if response.status_code != 200:
            self._refuse(path, response, content)
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            raise _Again(f"expected JSON, found {content[:80]!r}") from None
        if not isinstance(document, dict):
            raise _Again(f"expected a JSON object, found {content[:80]!r}")
        return document

    def _refuse(self, path: str, response: httpx2.Response, content: bytes) -> None:
        """Raise for a status other than 200: another try, or the end."""
        status, words = response.status_code, said(content)
        reason = f"status {status}: {words}"
        # An account without credit answers 429 too; waiting does not fill it.
        hopeless = "insufficient_quota" in words
        if (status in (408, 409, 425, 429) or status >= 500) and not hopeless:
            raise _Again(reason, after=retry_after(response.headers.get("retry-after")))
        if 300 <= status < 400:
            reason = f"status {status}: it redirects, and redirects are not followed; set engine.base_url to the target"
        raise EngineError(self._hide(f"{self._where(path)} refused the request, {reason}"))

    def _where(self, path: str) -> str:
        return f"{self.endpoint.base_url.rstrip('/')}/{path} (model {self.endpoint.model})"

    def _hide(self, text: str) -> str:
        """Servers quote what they were sent; the key goes into no message."""
        return text.replace(self._key, "[key]") if self._key else text


def _read(read: Callable[[Mapping[str, Any], Usage], T], document: Mapping[str, Any], usage: Usage) -> T:
    try:
        return read(document, usage)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _Again(f"expected a completion, found {str(dict(document))[:200]} ({error!r})") from None


def _usage(document: Mapping[str, Any]) -> Usage | None:
    """The server's count; None where it gives none."""
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    if not all(isinstance(n, int) and n >= 0 for n in counts):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(
        requests=1,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=cached if isinstance(cached, int) else 0,
    )
