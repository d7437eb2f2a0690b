"""F05: an aborted generation is discarded and asked for again with its seed; it is never a turn."""

from __future__ import annotations

from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.endpoint import Endpoint
from turntree.agents.engines.openai import ChatEngine
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.transcript import TextTokenizer
from turntree.envs import SearchQAEnv
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow


def test_f05_an_aborted_answer_is_never_a_turn(openai_server: Any) -> None:
    usage = {"prompt_tokens": 90, "completion_tokens": 4}
    half = {"kind": "say", "text": "<answer>ye", "finish": "abort", "usage": usage}
    openai_server.faults(half, {"kind": "say", "text": "<answer>yes</answer>", "usage": usage})
    env = SearchQAEnv()
    engine = ChatEngine(Endpoint(openai_server.url, "tiny"))
    rollout = grow(
        [Prompt("q", env.tasks[0])],
        core=env.core,
        engine=engine,
        dialogue=Dialogue(TextTokenizer(), style="chat"),
        plan=GrowthPlan(),
        sampling=SamplingParams(64, stop=tuple(env.core.grammar.stop)),
        limits=Limits(64, max_context_tokens=4096),
    )
    (leaf,) = rollout.groups[0].scored_leaves()
    assert (leaf.text, leaf.status) == ("<answer>yes</answer>", "answered")
    assert (rollout.stats.aborted, rollout.stats.generated_tokens, rollout.stats.discarded_tokens) == (1, 8, 4)
    first, second = (request["body"] for request in openai_server.log())
    assert first == second, "the same request, with the same seed"
    engine.close()
