"""A17: where pad and end-of-text share an id, the end-of-text token keeps its log-prob and gradient."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turntree.trainers.forward import packed_logprobs
from turntree.trainers.losses import Denominators
from turntree.trainers.objectives import gather_occurrences
from turntree.trainers.packing import column, pack_groups
from turntree.trainers.tree import Group, Node, Tree

EOS = 0


def test_a17_objective_keeps_the_end_of_text_log_prob() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=12,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=EOS,
            eos_token_id=EOS,
        )
    )
    root = Node(observation_ids=(EOS, 1, 2))
    root.add_child(Node(turn_ids=(3, EOS), logprobs=(-1.0, -1.0), status="answered", reward=1.0))
    root.add_child(Node(ordinal=1, turn_ids=(4, 5, EOS), logprobs=(-1.0,) * 3, status="answered", reward=0.0))
    (pack,) = pack_groups([Group("q", [Tree(root)])], max_pack_tokens=100)
    ids = column(pack, "tokens", "ids")
    ends = torch.nonzero((ids == EOS) & column(pack, "tokens", "loss_mask")).flatten()
    assert len(ends) == 2
    logp = packed_logprobs(model, pack).logp
    for end, path in zip(ends.tolist(), ([EOS, 1, 2, 3], [EOS, 1, 2, 4, 5]), strict=True):
        expected = torch.log_softmax(model(torch.tensor([path])).logits[0, -1].float(), -1)[EOS]
        torch.testing.assert_close(logp[end], expected, rtol=0, atol=1e-5)
        assert logp[end] < -0.1
    occurrences = gather_occurrences(pack, logp)
    (grad,) = torch.autograd.grad(occurrences.logp.sum(), logp)
    assert grad[ends].tolist() == [1.0, 1.0]
    assert Denominators.of([pack]).weight == 5.0
