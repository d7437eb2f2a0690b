"""E15 (model calls): timeouts are finite and positive, and one request always ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from turntree.agents.engines.chat import ChatClient
from turntree.agents.engines.endpoint import Endpoint
from turntree.errors import ConfigError, EngineError


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -1.0, True])
def test_e15_timeouts_are_validated(value: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        Endpoint("http://127.0.0.1:9/v1", "m", timeout_s=value)


def test_e15_null_is_the_documented_default() -> None:
    assert Endpoint("http://127.0.0.1:9/v1", "m").timeout_s == 600.0


def test_e15_a_model_call_is_bounded(openai_server: Any) -> None:
    openai_server.faults({"kind": "hang", "seconds": 1.0})
    client = ChatClient(Endpoint(openai_server.url, "tiny", timeout_s=0.2, retries=0))
    with pytest.raises(EngineError, match=r"within timeout_s=0\.2"):
        client.complete([{"role": "user", "content": "q"}], max_tokens=3)
    client.close()
