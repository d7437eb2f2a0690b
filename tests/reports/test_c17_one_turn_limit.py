"""C17: limits live in the environment's spec and fingerprint, so every user of an id has the same ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium

import turntree.envs as envs


def test_c17_limits_come_from_the_spec_and_are_enforced_inside() -> None:
    env = gymnasium.make("turntree/SearchQA-v0", max_turns=3)
    assert env.spec is not None
    again: Any = gymnasium.make(env.spec).unwrapped
    inner: Any = env.unwrapped
    assert env.spec.kwargs == {"max_turns": 3}
    assert again.core.fingerprint == inner.core.fingerprint
    assert dataclasses.asdict(again.core.limits)["max_turns"] == 3
    env.reset(seed=0)
    flags = [env.step("hm")[3] for _ in range(3)]
    assert flags == [False, False, True]


def test_c17_another_limit_is_another_environment() -> None:
    default: Any = gymnasium.make("turntree/SearchQA-v0").unwrapped
    other: Any = gymnasium.make("turntree/SearchQA-v0", max_turns=2).unwrapped
    assert default.core.limits == envs.Limits()
    assert default.core.fingerprint != other.core.fingerprint
