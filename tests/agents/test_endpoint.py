"""Limits, prices and rates of an endpoint, and what its answers mean, without a network."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.agents.engines.chat import restore_stop
from turntree.agents.engines.endpoint import Endpoint, Meter, RateLimiter, Usage
from turntree.errors import ConfigError, CostLimitError
from turntree.http import retry_wait

URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": ""}, "base_url"),
        ({"base_url": "127.0.0.1:8000/v1"}, "http://"),
        ({"base_url": "http://host:99999/v1"}, "base_url"),
        ({"base_url": "https://me:secret@host/v1"}, "api_key_env"),
        ({"base_url": "https://host/v1?key=secret"}, "api_key_env"),
        ({"model": ""}, "engine.model"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"retries": -1}, "retries=-1"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": 0}, "tokens_per_minute"),
        ({"prompt_price": -1.0}, "prompt_price"),
        ({"prompt_price": 1.0, "max_cost": math.nan}, "max_cost"),
        ({"max_cost": 1.0}, "without prices"),
        ({"max_tokens_key": "n_predict"}, "n_predict"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        Endpoint(**{"base_url": URL, "model": "m", **options})
    assert "secret" not in str(error.value)


def test_the_key_is_read_by_name_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    endpoint = Endpoint(URL, "m", api_key_env="MY_KEY")
    assert endpoint.api_key() == "sk-very-secret"
    assert "sk-very-secret" not in repr(endpoint)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="environment variable MY_KEY is not set"):
        endpoint.api_key()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    assert Endpoint(URL, "m").api_key() == "", "no key is sent that was not asked for"


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 60)), max_size=40),
    st.integers(1, 6) | st.none(),
    st.integers(1, 100) | st.none(),
)
def test_no_minute_holds_more_than_its_limits(
    asked: list[tuple[float, int]], requests: int | None, tokens: int | None
) -> None:
    """Law: in any window of a minute there are at most so many starts and tokens, unless one alone is too large."""
    limiter, now, starts = RateLimiter(requests=requests, tokens=tokens), 0.0, list[tuple[float, int]]()
    for pause, size in asked:
        now += pause
        start = limiter.book(size, now=now)
        assert start >= now
        starts.append((start, size))
    assert starts == sorted(starts, key=lambda s: s[0])
    for begin, _ in starts:
        window = [size for start, size in starts if begin <= start < begin + 60 - 1e-6]
        assert requests is None or len(window) <= requests
        assert tokens is None or sum(window) <= tokens or len(window) == 1
    if requests is None and tokens is None:
        assert [s for s, _ in starts] == pytest.approx([sum(p for p, _ in asked[: i + 1]) for i in range(len(asked))])


def test_a_request_waits_for_the_oldest_to_leave_the_minute() -> None:
    limiter = RateLimiter(requests=2, tokens=None)
    assert [limiter.book(1, now=t) for t in (0.0, 10.0, 20.0, 20.0, 200.0)] == [0.0, 10.0, 60.0, 70.0, 200.0]
    large = RateLimiter(requests=None, tokens=100)
    assert [large.book(n, now=0.0) for n in (60, 40, 1, 500, 1)] == [0.0, 0.0, 60.0, 120.0, 180.0]


def test_cost_follows_from_the_prices_and_ends_at_the_limit() -> None:
    meter = Meter(Endpoint(URL, "m", prompt_price=2.0, completion_price=8.0, max_cost=0.01), spent=Usage(cost=0.001))
    meter.check()
    meter.add(Usage(requests=1, prompt_tokens=1000, completion_tokens=500, cached_tokens=900))
    assert meter.usage.cost == pytest.approx(0.007)
    assert (meter.usage.requests, meter.usage.prompt_tokens, meter.usage.cached_tokens) == (1, 1000, 900)
    meter.check()
    meter.add(Usage(requests=1, prompt_tokens=1500))
    with pytest.raises(CostLimitError, match=r"0\.01 of max_cost=0\.01.*openai\.max_cost"):
        meter.check()


@given(st.integers(0, 40), st.floats(0, 1), st.none() | st.floats(0, 500))
def test_waits_double_are_spread_and_respect_the_server(attempt: int, jitter: float, after: float | None) -> None:
    wait = retry_wait(attempt, backoff_s=0.5, after=after, jitter=jitter)
    bound = min(0.5 * 2**attempt, 30)
    if after is None:
        assert bound / 2 <= wait <= bound
    else:
        assert after <= wait <= after + 1


STOPS = ("</search>", "</answer>")


@pytest.mark.parametrize(
    ("text", "said", "stopped", "expected"),
    [
        ("<search>a</search>", None, True, ("<search>a</search>", "</search>", "kept")),
        ("<search>a</search>more", None, False, ("<search>a</search>more", "</search>", "kept")),
        ("<search>a", "</search>", True, ("<search>a</search>", "</search>", "said")),
        ("well", "</answer>", True, ("well</answer>", "</answer>", "said")),
        ("<search>a", None, True, ("<search>a</search>", "</search>", "open tag")),
        ("<search>a <answer>b", None, True, ("<search>a <answer>b</answer>", "</answer>", "open tag")),
        ("<search>a", None, False, ("<search>a", None, "none")),
        ("<search>a", "<|eot|>", True, ("<search>a</search>", "</search>", "open tag")),
        ("plain words", None, True, ("plain words", None, "none")),
        ("", None, True, ("", None, "none")),
    ],
)
def test_a_stripped_stop_string_is_put_back(text: str, said: str | None, stopped: bool, expected: Any) -> None:
    assert restore_stop(text, STOPS, said=said, stopped=stopped) == expected
