"""C07 (engine side): an engine that strips the stop string is found out, and the error says what to switch."""

from __future__ import annotations

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tokenizer import decode
from turntree.errors import EngineError


def test_c07_stripped_stop_string_is_refused() -> None:
    engine = ScriptedEngine(["<search>foo</search>"], strip_stop=True)
    dialogue = Dialogue(engine.tokenizer)
    turn = engine.generate([Request(Prefix([1]), SamplingParams(100, stop=("</search>",)), seed=0)])[0]
    assert (decode(dialogue.tokenizer, turn.ids), turn.stop_string) == ("<search>foo", "</search>")
    with pytest.raises(EngineError, match="include_stop_str_in_output"):
        dialogue.read_turn(turn)
    with pytest.raises(EngineError, match="include_stop_str_in_output"):
        dialogue.cut_at_stop(turn, ("</search>",))
