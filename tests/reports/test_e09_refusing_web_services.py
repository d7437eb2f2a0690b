"""E09: a web service answers 403 or 429: who asks is said, Retry-After honoured, the rest stopped; replay works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from turntree.errors import RetrievalError
from turntree.search_backend.replay import ReplayBackend
from turntree.search_backend.web import WebBackend

FOUND = {"query": {"search": [{"title": "Paris", "pageid": 7, "snippet": "capital"}]}}


def wikipedia(url: str, **options: Any) -> WebBackend:
    return WebBackend(url, style="mediawiki", user_agent="my-study/1.0 (me@example.org)", backoff_s=0.01, **options)


def test_e09_the_user_agent_is_set(scripted_server: Any) -> None:
    scripted_server.always = (200, {}, FOUND)
    wikipedia(scripted_server.url).search(["q"], k=1)
    assert scripted_server.requests[0]["headers"]["user-agent"] == "my-study/1.0 (me@example.org)"


@pytest.mark.parametrize("status", [403, 429])
def test_e09_retry_after_is_honoured(status: int, scripted_server: Any) -> None:
    scripted_server.answers = [(status, {"Retry-After": "1"}, b"too many"), (200, {}, FOUND)]
    assert wikipedia(scripted_server.url).search(["q"], k=1)[0][0].id == "7"
    first, second = scripted_server.times
    assert second - first >= 1


def test_e09_a_service_that_forbids_is_left_alone(scripted_server: Any) -> None:
    """After a few refusals nothing is sent for a while, whoever asks."""
    scripted_server.always = (403, {}, b"forbidden")
    backend = wikipedia(scripted_server.url, breaker_failures=3, breaker_reset_s=60.0)
    for _ in range(3):
        with pytest.raises(RetrievalError, match="status 403: forbidden"):
            backend.search(["q"], k=1)
    start = time.monotonic()
    for _ in range(20):
        with pytest.raises(RetrievalError, match="not asked"):
            backend.search(["q"], k=1)
    assert time.monotonic() - start < 5
    assert len(scripted_server.requests) == 3


def test_e09_what_was_seen_stays_usable_offline(scripted_server: Any, tmp_path: Path) -> None:
    scripted_server.always = (200, {}, FOUND)
    live = ReplayBackend(tmp_path / "s.sqlite", wikipedia(scripted_server.url))
    found = live.search(["paris"], k=1)
    scripted_server.always = (403, {}, b"forbidden")
    assert live.search(["paris"], k=1) == found
    assert ReplayBackend(tmp_path / "s.sqlite", mode="replay").search(["paris"], k=1) == found
    assert len(scripted_server.requests) == 1
