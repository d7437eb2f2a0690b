"""C23: an option that belongs elsewhere is refused by name, with the nearest valid one."""

from __future__ import annotations

import gymnasium
import pytest

from turntree.envs import SearchQAEnv
from turntree.errors import ConfigError


def test_c23_unknown_environment_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown environment option 'max_turn' \(did you mean 'max_turns'\?\)"):
        gymnasium.make("turntree/SearchQA-v0", max_turn=3)
    with pytest.raises(ConfigError, match="unknown environment option 'temperature'"):
        SearchQAEnv(temperature=0.7)


def test_c23_unknown_reset_options_are_refused_by_name() -> None:
    env = gymnasium.make("turntree/SearchQA-v0")
    with pytest.raises(ConfigError, match=r"unknown reset option 'snapshots' \(did you mean 'snapshot'\?\)"):
        env.reset(options={"snapshots": None})
