"""C23 (requests): an option of the environment never reaches a server; unknown sampling keys are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.agents.engines.chat import ChatClient
from turntree.agents.engines.endpoint import Endpoint
from turntree.errors import ConfigError


def test_c23_unknown_sampling_keys_are_refused_before_any_request(openai_server: Any) -> None:
    openai_server.faults()
    client = ChatClient(Endpoint(openai_server.url, "tiny"))
    env_and_sampling = {"temperature": 0.5, "top_p": 0.9, "max_turns": 4}
    with pytest.raises(ConfigError, match="unknown sampling key 'max_turns'"):
        client.complete([{"role": "user", "content": "q"}], max_tokens=3, **env_and_sampling)
    with pytest.raises(ConfigError, match="unknown sampling key 'max_turns'"):
        Endpoint(openai_server.url, "tiny", sampling={"max_turns": 4})
    assert openai_server.log() == []
    client.close()
