"""A25: every end token of the generation config finishes a turn, and so does a stop string."""

from __future__ import annotations

from typing import Any

import torch

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import HFEngine, Prefix, Request, SamplingParams
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import encode


def model_that_says(tokenizer: Any, token: int) -> Any:
    """A model whose greedy next token is ``token``, whatever came before."""
    model = build_tiny_model(tokenizer, hidden=32, layers=1)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.fill_(0.0)
        embedding[:, 0] = 1.0
        embedding[token, 1:] = 1.0
        model.model.norm.weight[:] = 1.0
        # Without residual updates the last state is the embedding of the last token; favour it for every token.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding[token] *= 3
    return model


def test_a25_second_end_token_and_stop_string_both_finish() -> None:
    tokenizer = build_tokenizer(["stop"])
    second = encode(tokenizer, "stop")[0]
    model = model_that_says(tokenizer, second)
    params = SamplingParams(9, temperature=0.0)
    request = Request(Prefix([9, 10]), params, seed=0)
    unfinished = HFEngine(model, tokenizer).generate([request])[0]
    assert (len(unfinished.ids), unfinished.finish_reason) == (9, "length")

    model.generation_config.eos_token_id = [tokenizer.eos_token_id, second]
    finished = HFEngine(model, tokenizer).generate([request])[0]
    assert (finished.ids, finished.finish_reason, finished.stop_string) == ((second,), "stop", None)
    dialogue = Dialogue(tokenizer, generation_config=model.generation_config)
    assert {tokenizer.eos_token_id, second} <= dialogue.end_ids
    assert dialogue.read_turn(finished).finish == "stop"

    tag = encode(tokenizer, "</answer>")[0]
    by_string = Request(Prefix([9, 10]), SamplingParams(9, temperature=0.0, stop=("</answer>",)), seed=0)
    finished = HFEngine(model_that_says(tokenizer, tag), tokenizer).generate([by_string])[0]
    assert (finished.ids, finished.finish_reason, finished.stop_string) == ((tag,), "stop", "</answer>")
