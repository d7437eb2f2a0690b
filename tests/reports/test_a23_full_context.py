"""A23 (dialogue and engine side): a full context gives no turn, never a request with max_tokens < 1."""

from __future__ import annotations

import pytest

from turntree.agents.dialogue import turn_budget
from turntree.agents.engines import Engine, HFEngine, Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import ByteTokenizer
from turntree.errors import EngineError


@pytest.mark.parametrize(("context", "room"), [(200, 56), (255, 1), (256, 0), (300, 0)])
def test_a23_turn_budget_at_the_edge(context: int, room: int) -> None:
    assert turn_budget(context, max_turn_tokens=100, max_context_tokens=256) == room


def engines() -> list[Engine]:
    tokenizer = build_tokenizer(["a"])
    return [
        ScriptedEngine(["x"], ByteTokenizer()),
        HFEngine(build_tiny_model(tokenizer, hidden=32, layers=1, max_positions=256), tokenizer),
    ]


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("max_tokens", [0, -44])
def test_a23_engines_refuse_to_sample_nothing(engine: Engine, max_tokens: int) -> None:
    with pytest.raises(EngineError, match="max_tokens of at least 1"):
        engine.generate([Request(Prefix([5] * 10), SamplingParams(max_tokens), seed=0)])


def test_a23_the_last_position_can_be_used() -> None:
    engine = engines()[1]
    assert len(engine.generate([Request(Prefix([5] * 255), SamplingParams(1), seed=0)])[0].ids) == 1
    with pytest.raises(EngineError, match="256 positions"):
        engine.generate([Request(Prefix([5] * 256), SamplingParams(1), seed=0)])
