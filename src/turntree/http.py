"""What every HTTP client here shares: waits between tries, bounded answers, words of a server in a message."""

from __future__ import annotations

import email.utils
import json
import math
import os
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from turntree.errors import ConfigError

if TYPE_CHECKING:
    import httpx2

__all__ = [
    "BadAnswer",
    "check_address",
    "check_number",
    "check_seconds",
    "read_body",
    "retry_after",
    "retry_wait",
    "said",
    "secret_from",
]

MAX_BYTES = 64 * 2**20
_MAX_WAIT_S = 30.0
"""Longest wait that is chosen here; a server may ask for more with Retry-After."""


class BadAnswer(Exception):
    """An answer that does not end, or does not fit; the message says why."""


def retry_wait(attempt: int, *, backoff_s: float, after: float | None, jitter: float) -> float:
    """Seconds before try ``attempt`` + 1: doubled each time and spread by ``jitter`` (0..1), but at least ``after``."""
    wait_s = min(backoff_s * (1 << min(attempt, 30)), _MAX_WAIT_S) * (0.5 + 0.5 * jitter)
    return wait_s if after is None else after + min(wait_s, 1.0) * jitter


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or an HTTP date; None where it says nothing usable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def read_body(response: httpx2.Response, *, timeout_s: float, max_bytes: int = MAX_BYTES) -> bytes:
    """The whole body of a streamed answer.

    A client's own timeout is one of silence; a server that dribbles is stopped here, ``timeout_s`` after the call.
    Raises :class:`BadAnswer`.
    """
    deadline, content = time.monotonic() + timeout_s, bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if time.monotonic() > deadline:
            raise BadAnswer(f"no whole answer within timeout_s={timeout_s:g}")
        if len(content) > max_bytes:
            raise BadAnswer(f"an answer of more than {max_bytes} bytes")
    return bytes(content)


def said(content: bytes) -> str:
    """A server's own words, short: the message of an error object, else the beginning of the text."""
    text = content[:2000].decode("utf-8", "replace").strip()
    try:
        document = json.loads(content)
        error = document.get("error", document)
        text = " ".join(str(error[k]) for k in ("code", "message") if error.get(k)) or text
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass  # plain text, or JSON of another shape: shown as it is
    return text[:500] or "(empty answer)"


def check_address(url: str, *, what: str, example: str) -> None:
    """Refuse what is no http address, and secrets in it, which would be stored with a run. Raises ``ConfigError``."""
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, ok = urlsplit(""), False
    if not ok:
        raise ConfigError(f"{what}={url!r}: expected an address such as {example}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{what} holds a user, a query or a fragment, which would be stored with the run; give the plain address, "
            "and a key by the name of its environment variable"
        )


def secret_from(variable: str, *, what: str) -> str:
    """The value of an environment variable, '' where none is named.

    White space around it goes: files that secrets are mounted as end with a line end, which no header may hold, and
    whose refusal would quote the secret. Raises ``ConfigError`` where it is not set, or holds what no header can.
    """
    value = os.environ.get(variable, "").strip() if variable else ""
    if variable and not value:
        raise ConfigError(f"the environment variable {variable} is not set; expected {what} in it")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(
            f"the environment variable {variable} holds characters that no header can; expected {what} in it, in ASCII "
            "on one line"
        )
    return value


def check_seconds(name: str, value: float) -> None:
    """A time limit: finite and above 0. Raises ``ConfigError``."""
    wrong = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0
    if wrong:
        raise ConfigError(f"{name}={value!r}: expected finite seconds above 0, or null for the default")


def check_number(name: str, value: float, *, minimum: float, whole: bool = False) -> None:
    """A finite number of at least ``minimum``, an integer where it must be ``whole``. Raises ``ConfigError``."""
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value < minimum:
        what = "an integer" if whole else "a finite number"
        raise ConfigError(f"{name}={value!r}: expected {what} of at least {minimum:g}")
