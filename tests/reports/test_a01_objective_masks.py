"""A01: tokens of an observation count in no loss, KL, entropy, ratio or gradient, whatever log-probs they carry."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turntree.trainers.forward import score_packs
from turntree.trainers.objectives import ObjectiveArgs, PolicyObjective, combine_metrics, tree_grpo
from turntree.trainers.packing import Pack, column, pack_groups, table
from turntree.trainers.tree import Group, Node, Tree


def two_turn_pack() -> Pack:
    """A search turn, an observation that would merge with its closing tag in text, and an answer turn."""
    root = Node(observation_ids=(1, 2, 3))
    search = root.add_child(Node(turn_ids=(4, 5), logprobs=(-1.0, -2.0), observation_ids=(6, 7, 8, 6)))
    search.add_child(Node(turn_ids=(9, 5), logprobs=(-0.5, -0.1), status="answered", reward=1.0))
    (pack,) = pack_groups([Group("q", [Tree(root)])], max_pack_tokens=100)
    table(pack, "occurrences").set("advantage", torch.tensor([0.3, 0.3, 1.0, 1.0]))
    return pack


def test_a01_objective_ignores_observation_tokens() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    args: ObjectiveArgs = {**tree_grpo(), "kl_coef": 1.0, "importance_cap": 2.0}
    objective = PolicyObjective(model, **args)
    results = []
    for level in (0.0, -50.0, float("nan")):
        pack = two_turn_pack()
        score_packs(model, [pack])
        score_packs(model, [pack], key="ref_logp", temperature=1.5)
        observation = ~column(pack, "tokens", "loss_mask")
        assert int(observation.sum()) == 7
        for key in ("old_logp", "ref_logp", "sampler_logp"):
            table(pack, "tokens").set(key, column(pack, "tokens", key).masked_fill(observation, level))
        output = objective(pack)
        loss = output["loss_objective"] + output["loss_kl"] + output["loss_entropy"]
        grads = torch.autograd.grad(loss, list(model.parameters()))
        results.append((combine_metrics([output]), torch.cat([g.flatten() for g in grads])))
    assert results[0][0]["kl_reference"] > 0
    for metrics, grad in results[1:]:
        assert metrics == results[0][0]
        assert torch.equal(grad, results[0][1])
