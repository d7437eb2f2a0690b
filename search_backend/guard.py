"""What stands between the network and the application: limits of time and size, the token, typed errors."""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from turntree.search_backend.batching import Closed, Late, Overloaded
from turntree.search_backend.forms import BadRequest
from turntree.search_backend.observe import ServerMetrics

__all__ = [
    "Guard",
    "GuardSettings",
    "GuardedConfig",
    "GuardedProtocol",
    "Refused",
    "counted",
    "error_body",
    "error_headers",
    "is_loopback",
    "refusal",
]

_log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LINGER_S = 5.0
_MAX_HEADER_BYTES = 64 * 1024


class Refused(Exception):
    """A request that is answered with an error: its status, kind and reason."""

    def __init__(self, status: int, kind: str, reason: str, *, param: str = "", retry_after: int = 0) -> None:
        super().__init__(reason)
        self.status, self.kind, self.param, self.retry_after = status, kind, param, retry_after


def refusal(error: Exception) -> Refused:
    """Any error as an answer. What is not the client's fault says no more than its class and message."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, BadRequest):
        return Refused(422, "invalid_request", str(error), param=error.param)
    if isinstance(error, Overloaded):
        return Refused(503, "overloaded", str(error), retry_after=1)
    if isinstance(error, Closed):
        return Refused(503, "shutting_down", str(error), retry_after=1)
    if isinstance(error, Late):
        return Refused(503, "timeout", str(error), retry_after=1)
    return Refused(500, "search_failed", f"{type(error).__name__}: {error}"[:1000])


def error_body(refused: Refused) -> bytes:
    """``{"error": {"type", "message", "param"}}``."""
    error = {"type": refused.kind, "message": str(refused)}
    if refused.param:
        error["param"] = refused.param
    return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", "backslashreplace")


def error_headers(refused: Refused) -> dict[str, str]:
    """Headers that say what to do."""
    headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
    return headers | ({"WWW-Authenticate": "Bearer"} if refused.status == 401 else {})


def counted(error: Exception, metrics: ServerMetrics) -> Refused:
    """The error as an answer, counted; logged where it is the server's own."""
    refused = refusal(error)
    if refused.kind == "search_failed":
        _log.error("a search failed: %s", refused, exc_info=error)
    metrics.errors.labels(refused.kind).inc()
    return refused


@functools.lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """``local``: only requests that name this machine are answered (no page of a browser's can rebind a name to it)."""

    max_body_bytes: int
    body_timeout_s: float
    local: bool


class Guard:
    """ASGI middleware. Reads the whole body, within its limits, before the application sees the request.

    ``busy`` says why a request with a body cannot be taken now, before it is read; None where it can.
    ``token``: required of every path but /healthz ('' : none).
    """

    def __init__(
        self,
        app: Any,
        *,
        settings: GuardSettings,
        metrics: ServerMetrics,
        token: str,
        paths: frozenset[str],
        busy: Callable[[], Exception | None],
    ) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._token, self._paths, self._busy = token.encode(), paths, busy

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        start, status = time.perf_counter(), [0]

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        self._metrics.flight.inc()
        try:
            await self._answer(scope, receive, watched, status)
        finally:
            self._metrics.flight.dec()
            self._metrics.latency.labels(path).observe(time.perf_counter() - start)
            self._metrics.requests.labels(path, str(status[0])).inc()

    async def _answer(self, scope: Message, receive: Receive, send: Send, status: list[int]) -> None:
        unread = True
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check_host(headers)
            self._check_token(scope["path"], headers)
            body = b""
            if scope["method"] in ("POST", "PUT", "PATCH"):
                self._check_body(headers)
                busy = self._busy()
                if busy is not None:
                    raise busy
                body = await self._read(receive)
            unread = False
            await self._app(scope, _replay(body, receive), send)
        except _Gone:
            return
        except Exception as error:
            if status[0]:
                raise  # the answer has begun: the connection is all that can be ended
            await self._refuse(counted(error, self._metrics), receive, send, unread=unread)

    def _check_host(self, headers: MutableMapping[bytes, bytes]) -> None:
        name = headers.get(b"host", b"").decode("latin-1").lower()
        host = name if name.endswith("]") else name.rpartition(":")[0] if ":" in name else name
        if self._settings.local and host and not is_loopback(host):
            reason = f"this server answers requests for 127.0.0.1 and localhost, found Host {host[:100]!r}"
            raise Refused(421, "wrong_host", f"{reason}; to serve other names, set a token")

    def _check_token(self, path: str, headers: MutableMapping[bytes, bytes]) -> None:
        if not self._token or path == "/healthz":
            return
        given = headers.get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        # The digest makes both sides one length: the comparison then says nothing about the token's.
        same = hmac.compare_digest(_digest(token.strip()), _digest(self._token))
        if scheme.lower() != b"bearer" or not same:
            what = "a wrong token" if given else "no Authorization header"
            raise Refused(401, "unauthorized", f"expected the header 'Authorization: Bearer TOKEN', found {what}")

    def _check_body(self, headers: MutableMapping[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json"):
            shown = kind.decode("latin-1")[:100]
            raise Refused(415, "unsupported_media_type", f"expected Content-Type application/json, found {shown!r}")
        if headers.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
            raise Refused(415, "unsupported_media_type", "expected a body without Content-Encoding")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise self._too_large(int(length))

    def _too_large(self, size: int) -> Refused:
        limit = self._settings.max_body_bytes
        return Refused(
            413, "body_too_large", f"expected a body of at most {limit} bytes, found {size} or more; split it"
        )

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size, limit = 0, self._settings.body_timeout_s
        try:
            async with asyncio.timeout(limit):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > self._settings.max_body_bytes:
                        raise self._too_large(size)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise Refused(
                408, "slow_body", f"the body was not complete within {limit:g} s ({size} bytes came)"
            ) from None

    async def _refuse(self, refused: Refused, receive: Receive, send: Send, *, unread: bool) -> None:
        """Answer. Of an unread body some is taken, since a client that still sends would not see the answer."""
        body = error_body(refused)
        headers = [(name.lower().encode(), value.encode()) for name, value in error_headers(refused).items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if unread:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": unread})
        if unread:
            if refused.status != 408:
                await _drain(receive, limit=4 * self._settings.max_body_bytes)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Gone(Exception):
    """The client left before its request was whole."""


async def _drain(receive: Receive, *, limit: int) -> None:
    size = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while size <= limit:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting = [body]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed


def _digest(token: bytes) -> bytes:
    return hmac.digest(b"turntree", token, "sha256")


# -- connections -----------------------------------------------------------------------------------------------


class GuardedConfig(uvicorn.Config):
    """Uvicorn's configuration with the limits of :class:`GuardedProtocol`."""

    head_timeout_s: float = 10.0
    max_connections: int = 1024


class GuardedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with what it lacks: a time and a size for a request's head, a number of connections."""

    config: GuardedConfig
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.config.max_connections
        if len(self.connections) > most:
            self._end(Refused(503, "too_many_connections", f"at most {most} connections are served", retry_after=1))
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._arm()
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > _MAX_HEADER_BYTES:
            self._end(Refused(431, "head_too_large", f"at most {_MAX_HEADER_BYTES} bytes may come before the body"))

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self.config.head_timeout_s, self._late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer, self._head_bytes = None, 0

    def _late(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            seconds = self.config.head_timeout_s
            self._end(Refused(408, "slow_head", f"the head of the request was not complete within {seconds:g} s"))
        else:
            self.transport.close()

    def _end(self, refused: Refused) -> None:
        """Answer without the application, and close."""
        self._disarm()
        if self.transport.is_closing():
            return
        body = error_body(refused)
        lines = [f"HTTP/1.1 {refused.status} {refused.kind}", "content-type: application/json", "connection: close"]
        lines += [f"{name}: {value}" for name, value in error_headers(refused).items()]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
        self.transport.write(head.encode() + body)
        self.transport.close()
