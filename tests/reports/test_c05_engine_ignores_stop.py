"""C05 (engine side): what an engine says after the stop string is cut away with its log-probs, and counted."""

from __future__ import annotations

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tokenizer import decode


def test_c05_ids_and_logprobs_are_cut_together_at_the_tag() -> None:
    engine = ScriptedEngine(["<search>a</search>junk<information>fake</information>"], ignore_stop=True)
    dialogue = Dialogue(engine.tokenizer)
    request = Request(Prefix([1]), SamplingParams(100, stop=("</search>", "</answer>")), seed=0)
    turn = engine.generate([request])[0]
    cut = dialogue.cut_at_stop(turn, request.params.stop)
    assert decode(dialogue.tokenizer, cut.ids) == "<search>a</search>"
    assert cut.logprobs == turn.logprobs[: len(cut.ids)]
    assert cut.metrics["overrun_tokens"] == len(turn.ids) - len(cut.ids)
    assert cut.continuation.token_ids() == [1, *cut.ids]
    assert dialogue.read_turn(cut).text == "<search>a</search>"
