"""Who may ask the studio what: an access key, the Host and Origin of requests, limits, and headers of every answer.

The studio shows what models wrote and web pages said, and plays turns that people type. So a page of another site, a
name that was pointed at this machine (DNS rebinding) and other users of this machine must not reach it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

__all__ = ["POLICY", "Guard", "is_loopback"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

# Nothing comes from elsewhere, nothing runs inline.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_MAX_BODY = 1_000_000


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a name or address of this machine alone."""
    bare = host.strip("[]").lower()
    if bare == "localhost" or bare.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Guard:
    """ASGI middleware before the whole application.

    ``key``: what the first request must bring as ``?key=`` (it then gets a cookie and an address without the key).
    ``hosts``: names besides those of the loopback interface that requests may be addressed to; all others are refused.
    """

    app: Any
    key: str
    cookie: str
    hosts: frozenset[str] = frozenset()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            host = self._check_host(headers)
            _check_origin(headers, host, unsafe=scope["method"] not in ("GET", "HEAD"))
            location = self._check_key(scope, headers)
            if location is not None:
                await _respond(send, 303, b"", {"location": location, "set-cookie": self._cookie_header()})
                return
            await self.app(scope, _bounded(receive), _with_headers(send))
        except _RefusedError as refused:
            body, kind = _refusal(refused, scope["path"])
            await _respond(send, refused.status, body, {"content-type": kind})

    def _check_host(self, headers: MutableMapping[str, str]) -> str:
        given = headers.get("host", "")
        name = _hostname(given) if _plain_host(given) else ""
        if not name or not (is_loopback(name) or name in self.hosts):
            raise _RefusedError(421, f"this page is served to localhost, found Host {given[:100]!r}")
        return given

    def _check_key(self, scope: Message, headers: MutableMapping[str, str]) -> str | None:
        """The address to go to after the key was brought, None if the cookie is there already."""
        for name, value in parse_qsl(scope["query_string"].decode("latin-1")):
            if name == "key" and scope["method"] == "GET" and scope["path"] == "/":
                if _same(value, self.key):
                    return "/"
                raise _RefusedError(401, _STALE)
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            found = None
        if found is None or not _same(found.value, self.key):
            raise _RefusedError(401, _STALE)
        return None

    def _cookie_header(self) -> str:
        return f"{self.cookie}={self.key}; Path=/; HttpOnly; SameSite=Lax"


_STALE = "This page needs the address that `turntree view` printed when it started; it holds the key of this session."


def _plain_host(given: str) -> bool:
    return bool(given) and not set(given) & set("/\\@?# \t")


def _check_origin(headers: MutableMapping[str, str], host: str, *, unsafe: bool) -> None:
    """Refuse what other sites' pages send. Browsers tell where a request comes from; other clients send neither."""
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host:
        raise _RefusedError(403, f"a page of {origin[:100]!r} may not ask this server")
    site = headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and (unsafe or headers.get("sec-fetch-mode") != "navigate"):
        raise _RefusedError(403, "a page of another site may not ask this server")
    if unsafe and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # What a form of another site can send without being asked for permission is never JSON.
        raise _RefusedError(415, "expected Content-Type application/json")


def _hostname(given: str) -> str:
    """The name in a Host header without its port; '' for what is none."""
    try:
        return urlsplit(f"//{given}").hostname or ""
    except ValueError:  # half of an IPv6 address
        return ""


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None for what is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _same(given: str, expected: str) -> bool:
    # Digests have one length, so that the comparison says nothing about the key's.
    return hmac.compare_digest(hashlib.sha256(given.encode()).digest(), hashlib.sha256(expected.encode()).digest())


def _bounded(receive: Receive) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > _MAX_BODY:
            raise _RefusedError(413, f"expected a body of at most {_MAX_BODY} bytes")
        return message

    return bounded


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            extra = [(n.encode(), v.encode()) for n, v in _HEADERS.items() if n.encode() not in own]
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return sending


def _refusal(refused: _RefusedError, path: str) -> tuple[bytes, str]:
    if path.startswith("/api/"):
        return json.dumps({"error": type(refused).__name__.strip("_"), "message": str(refused)}).encode(), (
            "application/json"
        )
    return f"{refused}\n".encode(), "text/plain; charset=utf-8"


async def _respond(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    everything = _HEADERS | headers | {"content-length": str(len(body))}
    pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in everything.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
