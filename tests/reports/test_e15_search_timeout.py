"""E15 (searches): time limits are finite and positive, null is the default, and one search always ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from turntree.errors import ConfigError, RetrievalError
from turntree.search_backend.client import RemoteBackend
from turntree.search_backend.server import ServerSettings
from turntree.search_backend.web import WebBackend

URL = "http://127.0.0.1:9/retrieve"
MAKERS: dict[str, Callable[[Any], Any]] = {
    "client": lambda value: RemoteBackend(URL, timeout_s=value).settings.limits.seconds,
    "web": lambda value: WebBackend(URL, timeout_s=value).settings.limits.seconds,
    "server": lambda value: ServerSettings(search_timeout_s=value).search_timeout_s,
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0, 0.0, -1, True, "30"])
def test_e15_time_limits_are_validated(maker: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s=.*expected finite seconds above 0"):
        MAKERS[maker](value)


@pytest.mark.parametrize("maker", ["client", "web"])
def test_e15_null_is_the_documented_default(maker: str) -> None:
    assert MAKERS[maker](None) == 30.0


def test_e15_a_search_always_ends(scripted_server: Any) -> None:
    scripted_server.always = (200, {}, {"result": [[]]}, 1.0)
    start = time.monotonic()
    with RemoteBackend(scripted_server.url, timeout_s=0.2, retries=1, backoff_s=0.01) as remote:
        with pytest.raises(RetrievalError, match=r"failed after 2 tries: no answer within timeout_s=0\.2"):
            remote.search(["q"], k=1)
    assert time.monotonic() - start < 5
