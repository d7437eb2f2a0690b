"""A21: an engine that returns more than the limit is cut, so that lengths describe the rows that are trained."""

from __future__ import annotations

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import Prefix, Request, SamplingParams, ScriptedEngine


def test_a21_four_tokens_for_a_limit_of_two() -> None:
    engine = ScriptedEngine(["abc"], ignore_limit=True)
    request = Request(Prefix([1]), SamplingParams(2), seed=0)
    turn = engine.generate([request])[0]
    assert len(turn.ids) == 4
    cut = Dialogue(engine.tokenizer).cut_at_stop(turn, request.params.stop, max_tokens=request.params.max_tokens)
    assert cut.ids == turn.ids[:2]
    assert (cut.logprobs, cut.entropies) == (turn.logprobs[:2], turn.entropies[:2])
    assert (cut.finish_reason, cut.metrics["overrun_tokens"]) == ("length", 2)
    assert len(cut.continuation) == 1 + 2
