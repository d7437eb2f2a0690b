"""Objectives on random trees: packed equals one row per trajectory (law 3), masked tokens are inert (law 2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import LossModule
from transformers import LlamaForCausalLM

from turntree.errors import ConfigError
from turntree.trainers.forward import row_logprobs, score_packs
from turntree.trainers.losses import Denominators, Occurrences, PolicyLoss, aggregate, kl_estimate, policy_loss
from turntree.trainers.objectives import (
    ObjectiveArgs,
    PolicyObjective,
    at2po,
    combine_metrics,
    dapo,
    grpo,
    gspo,
    tree_grpo,
)
from turntree.trainers.packing import Pack, column, pack_groups, table
from turntree.trainers.tree import Group

Groups = Callable[..., list[Group]]
seeds = st.integers(0, 10_000)
OBJECTIVES: dict[str, ObjectiveArgs] = {
    "grpo": grpo(),
    "tree_grpo": tree_grpo(),
    "at2po": at2po(),
    "gspo": gspo(),
    "dapo": dapo(),
    "product": {**at2po(), "turn_ratio": "product", "ratio_gradient": "true", "clip_low": 0.2, "clip_high": 0.2},
    "everything": {
        **grpo(),
        "ratio": "sequence",
        "ratio_gradient": "true",
        "aggregation": "seq-mean-token-sum-norm",
        "kl_coef": 0.3,
        "kl_estimator": "k1+",
        "importance_cap": 1.5,
    },
}


def prepared(
    groups: Sequence[Group], model: LlamaForCausalLM, seed: int, *, budget: int = 10_000, noise: float = 0.05
) -> list[Pack]:
    """Packs with random advantages, and old and reference log-probs near the model's own."""
    packs = pack_groups(groups, max_pack_tokens=budget, shared_turns="once" if seed % 2 else "per_leaf")
    score_packs(model, packs)
    score_packs(model, packs, key="ref_logp")
    for pack in packs:
        # Values depend on the row and token, not on how the trees were cut.
        tokens, occurrences = table(pack, "tokens"), table(pack, "occurrences")
        name = column(pack, "tokens", "ids") * 37 + column(pack, "tokens", "position") * 11 + seed
        tokens.set("old_logp", column(pack, "tokens", "old_logp") + noise * torch.sin(name.double()).float())
        tokens.set("ref_logp", column(pack, "tokens", "ref_logp") + noise * torch.cos(name.double()).float())
        row = column(pack, "rows", "group") * 101 + column(pack, "rows", "leaf")
        turn = column(pack, "occurrences", "turn_index")
        value = torch.sin((row[column(pack, "occurrences", "leaf")] * 7 + turn * 3 + seed).double())
        occurrences.set("advantage", value.float())
    return packs


def gradients(model: LlamaForCausalLM, losses: Tensor) -> Tensor:
    parameters = list(model.parameters())
    found = torch.autograd.grad(losses, parameters, allow_unused=True)
    return torch.cat([(g if g is not None else torch.zeros_like(p)).flatten() for g, p in zip(found, parameters)])


def total(outputs: Sequence[TensorDict]) -> Tensor:
    parts = [o[name] for o in outputs for name in ("loss_objective", "loss_kl", "loss_entropy")]
    return torch.stack([p for p in parts if isinstance(p, Tensor)]).sum()


def rows_loss(model: LlamaForCausalLM, pack: Pack, args: ObjectiveArgs, denominators: Denominators) -> Tensor:
    """The objective without its entropy bonus, from one plain forward pass per trajectory."""
    logp = torch.cat(row_logprobs(model, pack))
    token = column(pack, "occurrences", "token")
    old, ref = column(pack, "tokens", "old_logp")[token], column(pack, "tokens", "ref_logp")[token]
    cap = args.get("importance_cap")
    sampler = column(pack, "tokens", "sampler_logp")[token]
    occurrences = Occurrences(
        logp=logp,
        old_logp=old,
        advantage=column(pack, "occurrences", "advantage"),
        weight=column(pack, "occurrences", "weight"),
        leaf=column(pack, "occurrences", "leaf"),
        turn=column(pack, "occurrences", "turn"),
        n_leaves=len(table(pack, "rows")),
        n_turns=len(token),
        importance=None if cap is None else (old - sampler).exp().clamp(max=cap),
    )
    surrogate: dict[str, Any] = {
        k: v
        for k, v in args.items()
        if k in ("ratio", "turn_ratio", "ratio_gradient", "clip_low", "clip_high", "dual_clip", "aggregation")
    }
    loss = policy_loss(occurrences, denominators, **surrogate).loss
    kl = kl_estimate(logp, ref, kind=args.get("kl_estimator", "k3"))
    how = args.get("aggregation", "token-mean")
    return loss + args.get("kl_coef", 0.0) * aggregate(kl, occurrences, denominators, how=how)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=6, deadline=None)
@given(seed=seeds, budget=st.sampled_from([40, 10_000]))
def test_packed_equals_one_row_per_trajectory(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, name: str, seed: int, budget: int
) -> None:
    args: ObjectiveArgs = {**OBJECTIVES[name], "entropy_coef": 0.0}
    packs = prepared(random_groups(seed), tiny_llama, seed, budget=budget)
    if not packs:
        return
    denominators = Denominators.of(packs)
    objective = PolicyObjective(tiny_llama, **args)
    packed = total([objective(p, denominators) for p in packs])
    rows = torch.stack([rows_loss(tiny_llama, p, args, denominators) for p in packs]).sum()
    torch.testing.assert_close(packed, rows, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(tiny_llama, packed), gradients(tiny_llama, rows)
    assert float((ours - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_splitting_a_mini_batch_into_packs_changes_nothing(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, name: str
) -> None:
    results = []
    for budget in (1, 60, 10_000):
        packs = prepared(random_groups(8), tiny_llama, 8, budget=budget)
        denominators = Denominators.of(packs)
        for pack in packs:
            denominators.write(pack)
        objective = PolicyObjective(tiny_llama, **OBJECTIVES[name])
        outputs = [objective(p) for p in packs]
        results.append((len(packs), combine_metrics(outputs), gradients(tiny_llama, total(outputs))))
    assert results[0][0] > results[1][0] > results[2][0] == 1
    for _, metrics, grad in results[1:]:
        assert metrics == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(grad, results[0][2], rtol=1e-4, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    seed=seeds,
    name=st.sampled_from(sorted(OBJECTIVES)),
    junk=st.sampled_from([-50.0, 7.0, float("nan"), float("inf")]),
)
def test_environment_tokens_and_masked_occurrences_are_inert(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, seed: int, name: str, junk: float
) -> None:
    packs = prepared(random_groups(seed), tiny_llama, seed)
    if not packs:
        return
    (pack,) = packs
    generator = torch.Generator().manual_seed(seed)
    leaf = column(pack, "occurrences", "leaf")
    off = (torch.rand(len(leaf), generator=generator) < 0.2) | (leaf == 0)
    table(pack, "occurrences").set("weight", column(pack, "occurrences", "weight").masked_fill(off, 0.0))
    changed = pack.clone()
    environment = ~column(pack, "tokens", "loss_mask")
    for key in ("sampler_logp", "old_logp", "ref_logp"):
        table(changed, "tokens").set(key, column(pack, "tokens", key).masked_fill(environment, junk))
    table(changed, "occurrences").set("advantage", column(pack, "occurrences", "advantage").masked_fill(off, junk))
    objective = PolicyObjective(tiny_llama, **OBJECTIVES[name])
    first, second = objective(pack), objective(changed)
    for key in sorted(str(k) for k in first.keys()):  # noqa: SIM118
        torch.testing.assert_close(second[key], first[key], rtol=0, atol=0)
    assert combine_metrics([first]) == combine_metrics([second])
    ours, theirs = gradients(tiny_llama, total([first])), gradients(tiny_llama, total([second]))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_unchanged_weights_are_on_policy_at_every_level(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, name: str
) -> None:
    packs = prepared(random_groups(6), tiny_llama, 6, budget=60, noise=0.0)
    denominators = Denominators.of(packs)
    objective = PolicyObjective(tiny_llama, **OBJECTIVES[name])
    metrics = combine_metrics([objective(p, denominators) for p in packs])
    assert [metrics[f"ess_{level}"] for level in ("token", "turn", "sequence")] == [1.0, 1.0, 1.0]
    assert metrics["ratio_mean"] == 1.0
    assert metrics["approx_kl"] == metrics["kl_reference"] == metrics["loss_kl"] == metrics["clip_fraction"] == 0.0


def test_without_old_log_probs_the_current_ones_serve(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    (scored,) = prepared(random_groups(6), tiny_llama, 6, noise=0.0)
    (bare,) = prepared(random_groups(6), tiny_llama, 6, noise=0.0)
    table(bare, "tokens").pop("old_logp")
    objective = PolicyObjective(tiny_llama, **at2po())
    a, b = objective(scored), objective(bare)
    torch.testing.assert_close(a["loss_objective"], b["loss_objective"], rtol=0, atol=0)
    torch.testing.assert_close(gradients(tiny_llama, total([a])), gradients(tiny_llama, total([b])))


def test_it_is_a_torchrl_loss_over_the_networks_parameters(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    model = copy.deepcopy(tiny_llama)
    (pack,) = prepared(random_groups(6), tiny_llama, 6)
    objective = PolicyObjective(model, **tree_grpo())
    assert isinstance(objective, LossModule)
    assert {id(p) for p in objective.parameters()} == {id(p) for p in model.parameters()}
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        output = objective(pack)
        optimizer.zero_grad()
        loss = total([output])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    output = objective(pack)
    assert not any(v.requires_grad for k, v in output.items() if not str(k).startswith("loss_"))


def test_the_entropy_bonus_raises_entropy(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    model = copy.deepcopy(tiny_llama)
    (pack,) = prepared(random_groups(6), tiny_llama, 6)
    table(pack, "occurrences").set("advantage", torch.zeros(len(table(pack, "occurrences"))))
    objective = PolicyObjective(model, entropy_coef=1.0)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.05)
    entropies = []
    for _ in range(3):
        output = objective(pack)
        optimizer.zero_grad()
        total([output]).backward()
        optimizer.step()
        entropies.append(float(output["entropy"]))
    assert entropies[0] < entropies[1] < entropies[2]


def test_a_custom_loss_is_a_function_of_occurrences(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    def reinforce(occurrences: Occurrences, denominators: Denominators) -> PolicyLoss:
        zero = torch.zeros(())
        loss = aggregate(-occurrences.advantage * occurrences.logp, occurrences, denominators, how="token-mean")
        return PolicyLoss(loss, zero, zero, zero)

    (pack,) = prepared(random_groups(6), tiny_llama, 6)
    table(pack, "tokens").pop("old_logp")
    ours = gradients(tiny_llama, total([PolicyObjective(tiny_llama, loss=reinforce)(pack)]))
    # One update a rollout: the surrogate's gradient is that of REINFORCE.
    torch.testing.assert_close(ours, gradients(tiny_llama, total([PolicyObjective(tiny_llama)(pack)])))


def test_options_are_checked_before_the_first_rollout(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    wrong: list[dict[str, Any]] = [
        {"ratio": "node"},
        {"aggregation": "sum"},
        {"kl_estimator": "k7"},
        {"dual_clip": 0.5},
        {"importance_cap": 0.0},
        {"ratio": "turn", "turn_ratio": "max"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError):
            PolicyObjective(tiny_llama, **options)
    (pack,) = pack_groups(random_groups(6), max_pack_tokens=10_000)
    with pytest.raises(ConfigError, match=r"no ref_logp; run score_packs"):
        PolicyObjective(tiny_llama, kl_coef=0.1)(pack)
