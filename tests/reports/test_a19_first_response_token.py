"""Report A19: the mask was not shifted with the labels, so that the first response token was never trained."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turntree.trainers.packing import column, pack_groups, table
from turntree.trainers.sft import nll
from turntree.trainers.tree import Group, Node, Tree

PROMPT, RESPONSE = (1, 2, 3), (4, 5)


def tiny() -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: LlamaForCausalLM = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, tie_word_embeddings=False,
            )
        )  # fmt: skip
    model.eval()
    return model


def head_gradient(labels: tuple[int, ...]) -> torch.Tensor:
    """Gradient of the output layer, [vocabulary, hidden], with loss on these response tokens only."""
    root = Node(observation_ids=PROMPT)
    leaf = root.add_child(Node(turn_ids=RESPONSE, logprobs=(0.0, 0.0), status="answered", reward=1.0))
    assert leaf.is_scored
    (pack,) = pack_groups([Group("row", [Tree(root, "row")])], max_pack_tokens=16)
    mask = column(pack, "tokens", "loss_mask").clone()
    assert mask.tolist() == [False, False, False, True, True]
    for index, token in enumerate(RESPONSE, start=len(PROMPT)):
        mask[index] = token in labels
    table(pack, "tokens").set("loss_mask", mask)
    model = tiny()
    nll(model, [pack], backward=True)
    gradient = model.lm_head.weight.grad
    assert isinstance(gradient, torch.Tensor)
    return gradient * len(labels)  # the mean's denominator taken back


def test_a19_both_response_tokens_contribute() -> None:
    both, first, second = head_gradient(RESPONSE), head_gradient((4,)), head_gradient((5,))
    assert first.abs().max() > 1e-4
    assert second.abs().max() > 1e-4
    torch.testing.assert_close(both, first + second)


def test_a19_a_label_is_predicted_from_the_token_before_it() -> None:
    """d loss / d W = (softmax - onehot) x hidden state: the one-hot row tells the label, the state its place."""
    model = tiny()
    with torch.no_grad():
        hidden = model.model(torch.tensor([[*PROMPT, *RESPONSE]])).last_hidden_state[0]
        probabilities = torch.softmax(model.lm_head(hidden), dim=-1)
    for token, place in ((4, len(PROMPT) - 1), (5, len(PROMPT))):
        error = probabilities[place].clone()
        error[token] -= 1
        torch.testing.assert_close(head_gradient((token,)), torch.outer(error, hidden[place]), atol=1e-6, rtol=1e-4)
