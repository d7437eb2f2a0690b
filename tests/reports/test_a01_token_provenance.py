"""A01: the mask comes from provenance, never from re-encoded text."""

from __future__ import annotations

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import decode, encode


def test_a01_observation_that_would_merge_with_the_turn_keeps_its_own_tokens() -> None:
    # "><" is one token, so encoding turn and observation as one text would shift the border between them.
    tokenizer = build_tokenizer(["><", "find"])
    dialogue = Dialogue(tokenizer)
    engine = ScriptedEngine(["<find>x</find>", "<answer>é</answer>"], tokenizer)
    params = SamplingParams(50, stop=("</find>", "</answer>"))
    prefix = Prefix(dialogue.prompt_ids("q"))
    ids, mask = list(prefix.ids), [0] * len(prefix)
    texts = []
    for observation in ("<info>é中</info>\n\n<information>é中</information>", None):
        turn = engine.generate([Request(prefix, params, seed=0)])[0]
        added = () if observation is None else dialogue.observation_ids(observation, after=turn.ids)
        ids += [*turn.ids, *added]
        mask += [1] * len(turn.ids) + [0] * len(added)
        prefix = turn.continuation.extend(added)
        texts.append(dialogue.read_turn(turn).text)
    assert texts == ["<find>x</find>", "<answer>é</answer>"]
    assert prefix.token_ids() == ids
    sampled = [i for i, m in zip(ids, mask, strict=True) if m]
    assert decode(tokenizer, sampled) == "".join(texts)
    # The trap is real: the text of the row has another tokenisation.
    assert encode(tokenizer, decode(tokenizer, ids), allow_special=True) != tuple(ids)
