"""A17 (engine side): with pad == eos the end-of-text token keeps its log-prob."""

from __future__ import annotations

import pytest
import torch

from turntree.agents.engines import HFEngine, Prefix, Request, SamplingParams
from turntree.agents.tiny import build_tiny_model, build_tokenizer


def test_a17_eos_logprob_is_the_models_in_a_ragged_batch() -> None:
    tokenizer = build_tokenizer(["a", "b"])
    tokenizer.pad_token = tokenizer.eos_token
    model = build_tiny_model(tokenizer, hidden=32, layers=1)
    model.config.pad_token_id = tokenizer.eos_token_id
    engine = HFEngine(model, tokenizer)
    prefixes = [Prefix([9, 10]), Prefix([9, tokenizer.eos_token_id, 11, 12, 13])]
    requests = [Request(p, SamplingParams(40, 1.0), seed=i) for i in range(60) for p in prefixes]
    ended = 0
    for request, got in zip(requests, engine.generate(requests), strict=True):
        if got.ids[-1] != tokenizer.eos_token_id:
            continue
        ended += 1
        assert got.finish_reason == "stop"
        ids = request.prefix.token_ids() + list(got.ids)
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0, -2].log_softmax(-1)
        assert got.logprobs[-1] == pytest.approx(float(logprobs[tokenizer.eos_token_id]), abs=1e-5)
    assert ended > 3
