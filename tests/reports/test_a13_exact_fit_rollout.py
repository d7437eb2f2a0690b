"""A13 and A23 in a rollout: observations that fit exactly, fill the context, or do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.core import Finish, Step, TurnCore
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.tree import Node


class Echo(TurnCore[int]):
    """Answers every turn with ``length`` bytes; truncated episodes are worth 0.5."""

    def __init__(self, length: int) -> None:
        self.length = length

    @property
    def fingerprint(self) -> str:
        return "echo"

    def initial(self, task: Any, *, seed: int) -> tuple[int, str]:
        return 0, str(task)

    def transition(self, state: int, text: str) -> Step[int]:
        return Step(state + 1, "o" * self.length)

    def act(self, state: int, text: str, *, finish: Finish = "stop") -> Step[int]:
        return self.transition(state, text)

    def truncate(self, state: int, reason: str) -> Step[int]:
        return Step(state, "", 0.5, truncated=True)

    def reseed(self, state: int, seed: int) -> int:
        return state

    def encode_state(self, state: int) -> dict[str, Any]:
        return {"turns": state}

    def decode_state(self, data: Mapping[str, Any]) -> int:
        return int(data["turns"])


def leaf(observation: int, limits: Limits, *, prompt: str = "go", turns: int = 1) -> Node:
    tokens = ByteTokenizer()
    rollout = grow(
        [Prompt("p", prompt)],
        core=Echo(observation),
        engine=ScriptedEngine(["a;"] * turns, tokens),
        dialogue=Dialogue(tokens),
        plan=GrowthPlan(),
        sampling=SamplingParams(max_tokens=1, stop=(";",)),
        limits=limits,
    )
    assert rollout.stats.failed == 0
    assert rollout.stats.as_dict()["truncated/context/count"] == 1
    (end,) = rollout.groups[0].scored_leaves()
    assert (end.status, end.reward, end.info["stop_reason"]) == ("truncated", 0.5, "context")
    return end


def test_a13_budget_4_turn_2_observation_2() -> None:
    end = leaf(2, Limits(8, 4096, max_response_tokens=4))
    assert (len(end.turn_ids), len(end.observation_ids)) == (2, 2)
    assert len(end.logprobs) == 2, "log-probs, hence mask 1, for the sampled tokens only"


@pytest.mark.parametrize("to", [256, 300])
def test_a23_observation_brings_the_prompt_to_or_over_the_context(to: int) -> None:
    prompt = len(Dialogue(ByteTokenizer()).prompt_ids("go"))
    end = leaf(to - prompt - 2, Limits(64, 256))
    kept = prompt + len(end.turn_ids) + len(end.observation_ids)
    assert kept == (256 if to == 256 else prompt + 2)


def test_a23_overlong_prompt() -> None:
    end = leaf(1, Limits(64, 256), prompt="x" * 300, turns=0)
    assert end.turn_ids == ()
