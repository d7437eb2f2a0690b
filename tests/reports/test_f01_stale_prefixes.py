"""Report F01: KV prefixes that old weights had computed were used by new ones."""

from __future__ import annotations

from typing import Any

import torch

from turntree.agents.engines import HFEngine, Prefix, Request, SamplingParams
from turntree.agents.models import load_model


def test_f01_a_fork_after_an_update_is_that_of_a_fresh_engine(bed: Any) -> None:
    model, tokenizer = load_model(bed.model)
    engine = HFEngine(model, tokenizer)
    shared = Prefix(tuple(range(5, 45)))

    def fork(on: HFEngine, branch: int) -> tuple[int, tuple[int, ...], tuple[float, ...]]:
        (said,) = on.generate([Request(shared.extend((50 + branch,)), SamplingParams(6), seed=branch)])
        return said.version, said.ids, said.logprobs

    before = fork(engine, 0)
    assert fork(engine, 0) == before, "the shared prefix is in the cache"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.update_weights(1)
    after = fork(engine, 0)
    assert (before[0], after[0]) == (0, 1), "each generation says whose it is"
    assert after[2] != before[2]
    for branch in (0, 1, 2):
        assert fork(engine, branch)[1:] == fork(HFEngine(model, tokenizer), branch)[1:]
