"""Requests to a search server: pooled, bounded in time and number, tried again with jitter, stopped by a breaker."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, quote_plus

from turntree.errors import RetrievalError
from turntree.http import MAX_BYTES, BadAnswer, check_number, check_seconds, read_body, retry_after, retry_wait, said

if TYPE_CHECKING:
    import httpx2

__all__ = ["Answer", "CircuitBreaker", "Limits", "Refusal", "Sender", "Unreadable"]

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a client.

    ``timeout_s`` bounds one try from its start to the last byte (None: 30 s), ``retries`` the further tries, which
    start after ``backoff_s``, then twice as long, and so on, spread at random; ``concurrency`` the requests in flight.
    After ``breaker_failures`` failed tries in a row nothing is sent for ``breaker_reset_s``, then one request probes.
    Raises ``ConfigError`` for values out of range.
    """

    timeout_s: float | None = None
    retries: int = 3
    backoff_s: float = 0.2
    concurrency: int = 16
    breaker_failures: int = 10
    breaker_reset_s: float = 5.0

    def __post_init__(self) -> None:
        if self.timeout_s is None:
            object.__setattr__(self, "timeout_s", DEFAULT_TIMEOUT_S)
        check_seconds("timeout_s", self.seconds)
        check_seconds("breaker_reset_s", self.breaker_reset_s)
        check_number("backoff_s", self.backoff_s, minimum=0)
        for name, minimum in (("retries", 0), ("concurrency", 1), ("breaker_failures", 1)):
            check_number(name, getattr(self, name), minimum=minimum, whole=True)

    @property
    def seconds(self) -> float:
        """``timeout_s`` as a number."""
        return DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of status 200. Header names are lower case."""

    headers: Mapping[str, str]
    content: bytes


class Unreadable(Exception):
    """What a reader raises for an answer that is no result; the request is tried again within its bounds."""


class Refusal(RetrievalError):
    """A status that is final."""

    status: int = 0


class _Again(Exception):
    """A try that failed in a way that another try may mend; ``after``: what Retry-After says, in seconds."""

    def __init__(self, reason: str, *, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class CircuitBreaker:
    """Says when a server that fails may be asked again, so that a dead one costs nobody a time limit.

    Closed: everything passes. After ``failures`` in a row it opens for ``reset_s``; then one request passes, and its
    outcome closes the breaker or opens it anew. For any number of threads.
    """

    def __init__(self, failures: int, reset_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures, self._reset, self._clock = failures, reset_s, clock
        self._count = 0
        self._until = 0.0
        self._probing = False
        self._lock = threading.Lock()

    def admit(self) -> float:
        """0 where a request may be sent, whose outcome must then be told; else the seconds until one may."""
        with self._lock:
            if not self._until:
                return 0.0
            left = self._until - self._clock()
            if left > 0:
                return left
            if self._probing:
                return self._reset
            self._probing = True
            return 0.0

    def success(self) -> None:
        """A request was answered, be it with a refusal."""
        with self._lock:
            self._count, self._until, self._probing = 0, 0.0, False

    def failure(self, *, hold_s: float = 0.0) -> None:
        """A request failed; ``hold_s``: nothing before this many seconds, however few have failed."""
        with self._lock:
            self._count += 1
            if self._probing or self._count >= self._failures or hold_s:
                self._until = max(self._until, self._clock() + max(hold_s, self._reset))
            self._probing = False

    def abandon(self) -> None:
        """The request that was admitted did not take place; the next one probes."""
        with self._lock:
            self._probing = False


class Sender:
    """A connection pool with :class:`Limits`, for any number of threads; each process makes its own connections.

    ``what`` names the server in messages; ``secrets`` go into no message and no log. ``stats`` counts ``requests``
    (answered), ``retries``, ``failures`` (requests given up) and ``stopped`` (by the breaker, not sent).
    """

    def __init__(self, limits: Limits, *, what: str, headers: Mapping[str, str], secrets: Sequence[str] = ()) -> None:
        self.limits = limits
        self.breaker = CircuitBreaker(limits.breaker_failures, limits.breaker_reset_s)
        self.stats: Counter[str] = Counter()
        self._what, self._headers = what, dict(headers)
        self._secrets = tuple(form for secret in secrets if secret for form in _forms(secret))
        self._slots = threading.BoundedSemaphore(limits.concurrency)
        self._lock = threading.Lock()
        self._random = random.Random()  # only spreads retries of many clients: nothing that is measured depends on it
        self._client: httpx2.Client | None = None
        self._process = 0
        self._closed = threading.Event()

    def close(self) -> None:
        """Close the connections; waits between tries end at once."""
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None and self._process == os.getpid():
            client.close()

    def send(
        self,
        method: str,
        url: str,
        read: Callable[[Answer], T],
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> T:
        """What ``read`` makes of the answer. It raises :class:`Unreadable` for one that is no result.

        Tried again are connections that fail, time limits, statuses 408, 429 and 5xx, any status with Retry-After, and
        unreadable answers; other statuses are final. Raises :class:`RetrievalError` with the reason and the tries.
        """
        for attempt in range(self.limits.retries + 1):
            self._admit()
            try:
                found = self._try(method, url, read, body, params)
            except _Again as again:
                hopeless = (again.after or 0) > self.limits.seconds
                self.breaker.failure(hold_s=again.after or 0 if hopeless else 0)
                if hopeless or attempt == self.limits.retries:
                    raise self._failed(again, attempt + 1) from None
                self._count("retries")
                self._pause(attempt, again.after)
            except BaseException:
                self.breaker.abandon()
                raise
            else:
                self.breaker.success()
                self._count("requests")
                return found
        raise AssertionError("the last try returns or raises")

    def _count(self, name: str) -> None:
        with self._lock:
            self.stats[name] += 1

    def _admit(self) -> None:
        if self._closed.is_set():
            raise RetrievalError(f"{self._what}: this client is closed; make a new one")
        wait_s = self.breaker.admit()
        if wait_s:
            self._count("stopped")
            raise RetrievalError(
                f"{self._what}: not asked, since its last requests all failed; asked again in {wait_s:.1f} s. Check "
                "that the server runs and that this is its address"
            )

    def _failed(self, again: _Again, tries: int) -> RetrievalError:
        self._count("failures")
        after = f"; it asks to wait {again.after:.0f} s" if again.after else ""
        many = "1 try" if tries == 1 else f"{tries} tries"
        return RetrievalError(self._hide(f"{self._what} failed after {many}: {again}{after}"))

    def _pause(self, attempt: int, after: float | None) -> None:
        wait_s = retry_wait(attempt, backoff_s=self.limits.backoff_s, after=after, jitter=self._random.random())
        self._closed.wait(wait_s)

    def _try(
        self, method: str, url: str, read: Callable[[Answer], T], body: Any, params: Mapping[str, Any] | None
    ) -> T:
        import httpx2

        seconds = self.limits.seconds
        if not self._slots.acquire(timeout=seconds):
            raise _Again(f"no free place among concurrency={self.limits.concurrency} within timeout_s={seconds:g}")
        try:
            with self._pool().stream(method, url, json=body, params=dict(params) if params else None) as response:
                content = read_body(response, timeout_s=seconds, max_bytes=MAX_BYTES)
        except BadAnswer as error:
            raise _Again(str(error)) from None
        except httpx2.TimeoutException:
            raise _Again(f"no answer within timeout_s={seconds:g}") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        finally:
            self._slots.release()
        headers = {name.lower(): value for name, value in response.headers.items()}
        if response.status_code != 200:
            self._refuse(response.status_code, headers, content)
        try:
            return read(Answer(headers, content))
        except Unreadable as error:
            raise _Again(str(error)) from None

    def _refuse(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Raise for a status other than 200: another try, or the end."""
        after = retry_after(headers.get("retry-after"))
        reason = f"status {status}: {said(content)}"
        if status in (408, 429) or status >= 500 or after is not None:
            raise _Again(reason, after=after)
        if 300 <= status < 400:
            target = headers.get("location", "")
            reason = f"status {status}: it redirects to {target!r}, and redirects are not followed; give that address"
        if status in (401, 403):  # nobody gets further before someone changes something
            self.breaker.failure()
        else:
            self.breaker.success()
        self._count("failures")
        refusal = Refusal(self._hide(f"{self._what} refused the request, {reason}"))
        refusal.status = status
        raise refusal

    def _pool(self) -> httpx2.Client:
        import httpx2

        with self._lock:
            if self._client is None or self._process != os.getpid():  # sockets must not be shared after a fork
                self._process = os.getpid()
                # trust_env=False: no proxy and no netrc of the environment; only the given address is contacted.
                self._client = httpx2.Client(
                    headers=self._headers,
                    timeout=httpx2.Timeout(self.limits.seconds),
                    limits=httpx2.Limits(max_connections=self.limits.concurrency),
                    follow_redirects=False,
                    trust_env=False,
                )
                if self._secrets:
                    _keep_out_of_logs(self._secrets)
            return self._client

    def _hide(self, text: str) -> str:
        """Servers quote what they were sent; secrets go into no message."""
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return text


class _Redact(logging.Filter):
    """Takes secrets out of records: the HTTP library logs addresses, and an address may hold a key."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if any(secret in text for secret in self.secrets):
            for secret in self.secrets:
                text = text.replace(secret, "[key]")
            record.msg, record.args = text, ()
        return True


_REDACT = _Redact()


def _forms(secret: str) -> tuple[str, ...]:
    """As it is, and as it stands in an address."""
    return tuple(dict.fromkeys((secret, quote(secret, safe=""), quote_plus(secret))))


def _keep_out_of_logs(secrets: Sequence[str]) -> None:
    _REDACT.secrets.update(secrets)
    for name in ("httpx2", "httpcore2.connection", "httpcore2.http11", "httpcore2.proxy"):
        logging.getLogger(name).addFilter(_REDACT)  # the same filter is added once
