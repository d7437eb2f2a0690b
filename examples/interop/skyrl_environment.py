"""A turn environment as a SkyRL-Gym environment: SkyRL trains on ``turntree/SearchQA-v0`` as on its own.

    skyrl_gym.register("turntree_search_qa", entry_point="skyrl_environment:SearchQATextEnv")

``env_config`` holds the arguments of ``SearchQAEnv``; a row's ``task`` (a question in JSON) or ``index`` says what its
episode is about. A tool that fails past its retries raises, so that SkyRL sees a failed trajectory and no reward.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import (  # type: ignore[import-not-found]
    BaseTextEnv,  # pyright: ignore[reportMissingImports]
    BaseTextEnvStepOutput,  # pyright: ignore[reportMissingImports]
)

from turntree.envs import SearchQAEnv

Messages = list[dict[str, str]]


class SearchQATextEnv(BaseTextEnv):  # type: ignore[misc]
    """One episode. SkyRL makes an environment for every trajectory, so the corpus is read once for all of them."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.env = _shared(json.dumps(dict(env_config or {}), sort_keys=True)).sibling()
        self.max_turns = self.env.core.limits.max_turns
        self.extras = dict(extras or {})

    def init(self, prompt: Messages) -> tuple[Messages, dict[str, Any]]:
        """The environment's prompt as the last message of ``prompt``; messages of the system before it stay."""
        options = {key: value for key, value in self.extras.items() if key in ("task", "index")}
        observation, info = self.env.reset(seed=self.extras.get("seed"), options=options)
        system = [message for message in prompt if message["role"] == "system"]
        return [*system, {"role": "user", "content": observation}], info

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """One turn."""
        self.turns += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        done = terminated or truncated
        observations: Messages = [] if done else [{"role": "user", "content": observation}]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata=info)


@functools.cache
def _shared(options: str) -> SearchQAEnv:
    return SearchQAEnv(**json.loads(options))
