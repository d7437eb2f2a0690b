"""C07 (chat servers): a stop string that the server cut off is put back, named by the server or not, and counted."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.endpoint import Endpoint
from turntree.agents.engines.openai import ChatEngine
from turntree.agents.engines.protocol import Prefix, Request, SamplingParams
from turntree.agents.engines.transcript import TextTokenizer
from turntree.envs.core import Action
from turntree.envs.grammar import TagGrammar


@pytest.mark.parametrize(
    ("named", "counter"), [({"stop_reason": "</search>"}, "restored_stops"), ({}, "inferred_stops")]
)
def test_c07_the_environment_sees_a_closed_action(openai_server: Any, named: dict[str, str], counter: str) -> None:
    openai_server.faults({"kind": "say", "text": "<search>foo", "choice": named})
    grammar, dialogue = TagGrammar(), Dialogue(TextTokenizer(), style="chat")
    engine = ChatEngine(Endpoint(openai_server.url, "tiny"))
    request = Request(Prefix(dialogue.prompt_ids("q")), SamplingParams(9, stop=tuple(grammar.stop)), seed=0)
    (turn,) = engine.generate([request])
    assert grammar.parse(dialogue.read_turn(turn).text).action == Action("search", "foo")
    assert getattr(engine.usage, counter) == 1
    engine.close()
