"""A09: only sampled tokens count; the template's scaffold never does."""

from __future__ import annotations

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer, decode


def test_a09_generation_prompt_and_newline_after_the_end_are_not_the_models() -> None:
    tokenizer = ByteTokenizer()
    dialogue = Dialogue(tokenizer, style="chat")
    prompt = dialogue.prompt_ids("q")
    turn = ScriptedEngine(["hi"], tokenizer).generate([Request(Prefix(prompt), SamplingParams(9), seed=0)])[0]
    added = dialogue.observation_ids("o", after=turn.ids)
    assert decode(tokenizer, prompt).endswith("<|im_start|>assistant\n")
    assert decode(tokenizer, turn.ids) == "hi<|im_end|>"
    assert decode(tokenizer, added) == "\n<|im_start|>user\no<|im_end|>\n<|im_start|>assistant\n"
    assert len(turn.logprobs) == 3  # h, i and the sampled end of turn.
