"""A19: in the cold start the first response token is trained like every other, and no other token is."""

from __future__ import annotations

import pytest
import torch

from turntree.agents.dialogue import Dialogue
from turntree.agents.teacher import Demonstration, DemonstrationTurn
from turntree.agents.tiny import build_tiny_model
from turntree.agents.tokenizer import ByteTokenizer
from turntree.trainers.packing import pack_groups
from turntree.trainers.sft import demonstration_group, nll


def test_a19_prompt_of_three_response_of_two_then_an_observation_and_an_answer() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ""  # plain text: the prompt is its three bytes
    model = build_tiny_model(tokenizer, hidden=16, layers=1, heads=2)
    turns = (DemonstrationTurn("de", "fg"), DemonstrationTurn("h", ""))
    demo = Demonstration("q", prompt="abc", turns=turns, reward=1.0, em=1.0)
    group = demonstration_group(demo, Dialogue(tokenizer), uid="q", max_tokens=64)

    ids = torch.tensor([list(b"abcdefgh")])
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
    each = [-float(logp[i - 1, ids[0, i]]) for i in (3, 4, 7)]  # d and e of the response, h of the answer
    assert nll(model, pack_groups([group], max_pack_tokens=64)) == pytest.approx(sum(each) / 3, abs=1e-5)
