"""A05: ids, log-probs and entropies have one length, at any cut, and a breach is loud."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import Generation, Prefix
from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import decode, encode
from turntree.errors import EngineError


def test_a05_a_turn_with_a_shorter_canonical_encoding_is_cut_as_it_was_sampled() -> None:
    tokenizer = build_tokenizer(["hello"])
    dialogue = Dialogue(tokenizer)
    ids = (*encode(tokenizer, "hel"), *encode(tokenizer, "lo"), *encode(tokenizer, " hello hello"))
    assert len(encode(tokenizer, decode(tokenizer, ids))) < len(ids)
    turn = Generation(ids, (-1.0,) * len(ids), "stop", 0, Prefix([9]).extend(ids), (0.5,) * len(ids), "exact")
    cut = dialogue.cut_at_stop(turn, (), max_tokens=len(ids) - 1)
    assert cut.ids == ids[:-1]
    assert len(cut.logprobs) == len(cut.entropies) == len(cut.continuation.ids) == len(ids) - 1
    for broken in (replace(turn, logprobs=(-1.0,)), replace(turn, entropies=(0.5,)), replace(turn, ids=ids[:-1])):
        with pytest.raises(EngineError, match="breaks the contract"):
            dialogue.cut_at_stop(broken, ())
