"""A search backend that is a server: turntree's own, or any of the published ones that answer ``POST /retrieve``."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from turntree.errors import ConfigError, RetrievalError
from turntree.http import check_address, check_number, said, secret_from
from turntree.search_backend.bm25 import check_request
from turntree.search_backend.dialects import DIALECTS, ShapeError, read_answer
from turntree.search_backend.passage import Passage
from turntree.search_backend.transport import Answer, Limits, Refusal, Sender, Unreadable

__all__ = ["FINGERPRINT_HEADER", "RemoteBackend", "RemoteSettings", "check_queries", "json_value"]

FINGERPRINT_HEADER = "turntree-fingerprint"
"""Header of every answer of turntree's server: the fingerprint of the index that gave it."""

_EXAMPLE = "http://127.0.0.1:8000/retrieve"


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Where the server is and how it is asked.

    ``url`` is the whole address. ``dialect``: a name in :data:`~turntree.search_backend.dialects.DIALECTS`.
    ``token_env`` is the *name* of the environment variable that holds the bearer token ('' : none is sent).
    ``fingerprint``: what the results belong to, for a server that does not say ('' : asked at ``/info``).
    ``max_queries``: queries of one request; more are sent as several. Raises ``ConfigError`` for values out of range.
    """

    url: str
    dialect: str = "search_r1"
    token_env: str = ""
    fingerprint: str = ""
    max_queries: int = 256
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_address(self.url, what="url", example=_EXAMPLE)
        if self.dialect not in DIALECTS:
            raise ConfigError(f"dialect={self.dialect!r}: expected one of {', '.join(DIALECTS)}")
        check_number("max_queries", self.max_queries, minimum=1, whole=True)


class RemoteBackend:
    """A retrieval server as a :class:`SearchBackend`, for any number of threads.

    Keyword arguments are the fields of :class:`RemoteSettings` and :class:`Limits`. Pickling carries these, and the
    fingerprint once it is known, but neither connections nor the token. ``stats`` counts requests and retries.
    """

    def __init__(
        self,
        url: str,
        *,
        dialect: str = "search_r1",
        token_env: str = "",
        fingerprint: str = "",
        max_queries: int = 256,
        timeout_s: float | None = None,
        retries: int = 3,
        backoff_s: float = 0.2,
        concurrency: int = 16,
        breaker_failures: int = 10,
        breaker_reset_s: float = 5.0,
    ) -> None:
        limits = Limits(timeout_s, retries, backoff_s, concurrency, breaker_failures, breaker_reset_s)
        self.settings = RemoteSettings(url, dialect, token_env, fingerprint, max_queries, limits)
        token = secret_from(token_env, what=f"the bearer token of {url}")
        headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._sender = Sender(limits, what=f"the search server at {url}", headers=headers, secrets=[token])
        self._fingerprint = fingerprint
        self._lock = threading.Lock()

    @property
    def stats(self) -> Mapping[str, int]:
        """How often it was asked, had to ask again, gave up, or did not ask since the server is down."""
        return dict(self._sender.stats)

    @property
    def in_flight(self) -> int:
        """Searches that may run at the same time, from several threads."""
        return self.settings.limits.concurrency

    @property
    def fingerprint(self) -> str:
        """As configured; else what a server of turntree says; else ``unverified:`` and a hash of the address.

        A server that does not say what it searches may search something else tomorrow, which nobody would notice;
        such fingerprints say so. Raises :class:`RetrievalError` when the server cannot be reached to ask.
        """
        with self._lock:
            if not self._fingerprint:
                self._fingerprint = self._ask_fingerprint()
            return self._fingerprint

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """Up to ``k`` passages for each query, best first, as the server ranks them; equal queries are sent once.

        Raises :class:`RetrievalError` when the server cannot be reached, refuses, or answers something else.
        """
        check_queries(queries, k)
        unique = list(dict.fromkeys(queries))
        size = 1 if DIALECTS[self.settings.dialect].single else self.settings.max_queries
        parts = [unique[first : first + size] for first in range(0, len(unique), size)]
        if len(parts) <= 1:
            lists = [self._ask(part, k) for part in parts]
        else:
            with ThreadPoolExecutor(min(len(parts), self.settings.limits.concurrency), "search") as pool:
                lists = list(pool.map(lambda part: self._ask(part, k), parts))
        found = dict(zip(unique, (passages for part in lists for passages in part), strict=True))
        return [list(found[query]) for query in queries]

    def close(self) -> None:
        """Close the connections; further searches raise :class:`RetrievalError`."""
        self._sender.close()

    def __enter__(self) -> RemoteBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (self.settings, self._fingerprint))

    def _ask(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        body = DIALECTS[self.settings.dialect].request(queries, k)

        def read(answer: Answer) -> list[list[Passage]]:
            self._check_fingerprint(answer.headers.get(FINGERPRINT_HEADER, ""))
            try:
                found = read_answer(json_value(answer.content), len(queries))
            except ShapeError as error:
                raise Unreadable(str(error)) from None
            return [passages[:k] for passages in found]

        return self._sender.send("POST", self.settings.url, read, body=body)

    def _check_fingerprint(self, found: str) -> None:
        """Results of another index than before must not pass as results of this one."""
        if found and not self._fingerprint:
            self._fingerprint = found
        if found and found != self._fingerprint:
            raise RetrievalError(
                f"the search server at {self.settings.url}: expected the index {self._fingerprint}, found {found}; it "
                "serves another index than before (or than search.args.fingerprint says): start it with the right one"
            )

    def _ask_fingerprint(self) -> str:
        parts = urlsplit(self.settings.url)
        info = f"{parts.scheme}://{parts.netloc}/info"
        try:
            return self._sender.send("GET", info, _read_info)
        except _NotOurs:
            pass
        except Refusal as error:
            if error.status in (401, 403):
                raise
        address = hashlib.sha256(json.dumps([self.settings.url, self.settings.dialect]).encode()).hexdigest()[:16]
        return f"unverified:{address}"


class _NotOurs(Exception):
    """``/info`` is something else's page."""


def _read_info(answer: Answer) -> str:
    try:
        document = json.loads(answer.content)
        if document["server"] == "turntree":
            return str(document["fingerprint"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _NotOurs


def _rebuilt(settings: RemoteSettings, fingerprint: str) -> RemoteBackend:
    own: dict[str, Any] = {
        "dialect": settings.dialect,
        "token_env": settings.token_env,
        "max_queries": settings.max_queries,
    }
    return RemoteBackend(settings.url, fingerprint=fingerprint, **own, **asdict(settings.limits))


def json_value(content: bytes) -> Any:
    """The JSON value of an answer. Raises :class:`Unreadable`, quoting what came, for everything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        what = "an empty answer" if not content.strip() else repr(said(content)[:200])
        raise Unreadable(f"expected JSON, found {what}") from None


def check_queries(queries: Sequence[str], k: int) -> None:
    """Raise :class:`RetrievalError` for queries that are not strings of valid Unicode, and for ``k < 1``."""
    check_request(queries, k)
    for query in queries:
        if not query.isascii() and any("\ud800" <= char <= "\udfff" for char in query):
            raise RetrievalError(f"expected valid Unicode, found a lone surrogate in the query {query!r:.60}")
