"""Objectives on random trees: packed equals one row per trajectory (law 3), masked tokens are inert (law 2)."""

from __future__ import annotations

import copy
import functools
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
from turntree.trainers import sft
from turntree.trainers.forward import packed_logprobs, row_logprobs, score_packs
from turntree.trainers.losses import (
    Denominators,
    Occurrences,
    Pairs,
    PolicyLoss,
    aggregate,
    kl_estimate,
    nll,
    policy_loss,
    step_dpo,
)
from turntree.trainers.objectives import (
    LossFunction,
    ObjectiveArgs,
    PolicyObjective,
    at2po,
    combine_metrics,
    dapo,
    grpo,
    gspo,
    loss_needs,
    tree_grpo,
)
from turntree.trainers.packing import Pack, column, pack_groups, pack_pairs, table
from turntree.trainers.pairs import sibling_pairs
from turntree.trainers.tree import Group
from turntree.trainers.value_head import ValueHead

Groups = Callable[..., list[Group]]
seeds = st.integers(0, 10_000)
OBJECTIVES: dict[str, ObjectiveArgs] = {
    "grpo": grpo(),
    "tree_grpo": tree_grpo(),
    "at2po": at2po(),
    "gspo": gspo(),
    "dapo": dapo(),
    "product": {**at2po(), "turn_ratio": "product", "ratio_gradient": "true", "clip_low": 0.2, "clip_high": 0.2},
    "aepo": {**grpo(), "clip": "soft_upper", "clip_low": 0.02, "clip_high": 0.02},
    "soft": {**gspo(), "clip": "soft", "aggregation": "turn-mean"},
    "cispo": {
        "ratio": "turn",
        "clip": "cispo",
        "clip_low": 0.01,
        "clip_high": 0.01,
        "kl_coef": 0.1,
        "kl_estimator": "k2",
    },
    "by_turns": {
        **at2po(),
        "by_turns": [{"max_turns": 1, "ratio": "token", "clip_high": 0.02}, {"max_turns": 2, "ratio": "sequence"}],
        "aggregation": "turn-mean",
    },
    "likelihood": {"aggregation": "turn-mean", "kl_coef": 0.1},
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
LOSSES: dict[str, LossFunction] = {"likelihood": functools.partial(nll, aggregation="turn-mean")}
SURROGATE = (
    "ratio",
    "turn_ratio",
    "ratio_gradient",
    "clip",
    "clip_low",
    "clip_high",
    "dual_clip",
    "by_turns",
    "aggregation",
)


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
    parts = [o[name] for o in outputs for name in ("loss_objective", "loss_kl", "loss_entropy", "loss_value")]
    return torch.stack([p for p in parts if isinstance(p, Tensor)]).sum()


def rows_loss(
    model: LlamaForCausalLM, pack: Pack, args: ObjectiveArgs, denominators: Denominators, custom: LossFunction | None
) -> Tensor:
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
    surrogate: dict[str, Any] = {k: v for k, v in args.items() if k in SURROGATE}
    chosen = custom if custom is not None else lambda occ, den: policy_loss(occ, den, **surrogate)
    loss = chosen(occurrences, denominators).loss
    kl = kl_estimate(logp, ref, kind=args.get("kl_estimator", "k3"))
    how = args.get("aggregation", "token-mean")
    return loss + args.get("kl_coef", 0.0) * aggregate(kl, occurrences, denominators, how=how)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=3, deadline=None)
@given(seed=seeds, budget=st.sampled_from([40, 10_000]))
def test_packed_equals_one_row_per_trajectory(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, name: str, seed: int, budget: int
) -> None:
    args: ObjectiveArgs = {**OBJECTIVES[name], "entropy_coef": 0.0}
    packs = prepared(random_groups(seed), tiny_llama, seed, budget=budget)
    if not packs:
        return
    denominators = Denominators.of(packs)
    objective = PolicyObjective(tiny_llama, **args, loss=LOSSES.get(name))
    packed = total([objective(p, denominators) for p in packs])
    rows = torch.stack([rows_loss(tiny_llama, p, args, denominators, LOSSES.get(name)) for p in packs]).sum()
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
        objective = PolicyObjective(tiny_llama, **OBJECTIVES[name], loss=LOSSES.get(name))
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
    objective = PolicyObjective(tiny_llama, **OBJECTIVES[name], loss=LOSSES.get(name))
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
    objective = PolicyObjective(tiny_llama, **OBJECTIVES[name], loss=LOSSES.get(name))
    metrics = combine_metrics([objective(p, denominators) for p in packs])
    assert [metrics[f"ess_{level}"] for level in ("token", "turn", "sequence")] == [1.0, 1.0, 1.0]
    for name in ("ratio_mean", "ratio_min", "ratio_max"):
        assert [metrics[f"{name}_{level}"] for level in ("token", "turn", "sequence")] == [1.0, 1.0, 1.0]
    assert [metrics[f"clip_fraction_{level}"] for level in ("token", "turn", "sequence")] == [0.0, 0.0, 0.0]
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


def test_maximum_likelihood_is_supervised_training_on_demonstrations(
    random_groups: Groups, tiny_llama: LlamaForCausalLM
) -> None:
    """With advantages of 1 and one trajectory a tree, the objective's loss is the cold start's."""
    groups = random_groups(8, groups=4, trees=1, branch=1)
    packs = pack_groups(groups, max_pack_tokens=20)
    denominators = Denominators.of(packs)
    for pack in packs:
        table(pack, "occurrences").set("advantage", torch.ones(len(table(pack, "occurrences"))))
    objective = PolicyObjective(tiny_llama, loss=nll)
    loss = torch.stack([objective(pack, denominators)["loss_objective"] for pack in packs]).sum()
    assert len(packs) > 1
    assert loss.item() == pytest.approx(sft.nll(tiny_llama, packs), rel=1e-5)


def test_options_are_checked_before_the_first_rollout(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ratio": "node"}, "ratio must be"),
        ({"aggregation": "sum"}, "aggregation must be one of"),
        ({"kl_estimator": "k7"}, "unknown KL estimator"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"importance_cap": 0.0}, "importance_cap must be positive"),
        ({"ratio": "turn", "turn_ratio": "max"}, "turn_ratio must be"),
        ({"clip": "soft", "by_turns": [{"max_turns": 0}]}, r"by_turns\[0\]"),
        ({"clip": "cispo", "dual_clip": 3.0}, "set dual_clip to None"),
        ({"turn_ratio": "product"}, "no pool"),
        ({"sum_norm": 100.0}, "aggregation=token-mean has a denominator of its own"),
        ({"sum_norm": 0.0, "aggregation": "seq-mean-token-sum-norm"}, "sum_norm must be positive"),
        ({"value_coef": -1.0}, "value_coef must be at least 0"),
        ({"value_clip": float("nan")}, "value_clip must be at least 0"),
    ]
    for options, words in wrong:
        with pytest.raises(ConfigError, match=words):
            PolicyObjective(tiny_llama, **options)
    (pack,) = pack_groups(random_groups(6), max_pack_tokens=10_000)
    with pytest.raises(ConfigError, match=r"no ref_logp; run score_packs"):
        PolicyObjective(tiny_llama, kl_coef=0.1)(pack)


def test_the_divisor_of_sums_may_be_a_constant(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    packs = prepared(random_groups(8), tiny_llama, 8, budget=60)
    denominators = Denominators.of(packs)
    losses = []
    for norm in (None, 100.0):
        objective = PolicyObjective(tiny_llama, aggregation="seq-mean-token-sum-norm", sum_norm=norm)
        losses.append(sum(objective(p, denominators)["loss_objective"].item() for p in packs))
    assert losses[1] == pytest.approx(losses[0] * denominators.width / 100.0, rel=1e-5)


# -- values and pairs -----------------------------------------------------------------------------------------------


def value_head(seed: int = 0) -> ValueHead:
    head = ValueHead(32)
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.sin(torch.arange(32) + float(seed)))
    return head


def with_returns(packs: Sequence[Pack], model: LlamaForCausalLM, head: ValueHead) -> None:
    """Old values near the head's, and returns that depend on the token only."""
    score_packs(model, packs, value_head=head)
    for pack in packs:
        tokens, occurrences = table(pack, "tokens"), table(pack, "occurrences")
        name = column(pack, "tokens", "ids") * 3 + column(pack, "tokens", "position")
        tokens.set("value", column(pack, "tokens", "value") + 0.1 * torch.sin(name.float()))
        occurrences.set("ret", torch.cos(name.float())[column(pack, "occurrences", "token")])


def test_the_value_loss_of_packs_is_that_of_rows(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    head = value_head()
    results = []
    for budget in (1, 60, 10_000):
        packs = pack_groups(random_groups(8), max_pack_tokens=budget, shared_turns="once")
        with_returns(packs, tiny_llama, head)
        denominators = Denominators.of(packs)
        objective = PolicyObjective(tiny_llama, value_head=head, value_coef=0.7, value_clip=0.05)
        outputs = [objective(p, denominators) for p in packs]
        loss = torch.stack([o["loss_value"] for o in outputs]).sum()
        grads = torch.autograd.grad(loss, [head.weight, head.bias, next(iter(tiny_llama.parameters()))])
        results.append((combine_metrics(outputs), torch.cat([g.flatten() for g in grads])))
        assert set(head.parameters()) < set(objective.parameters())
    for metrics, grad in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-4, atol=1e-5)
    assert results[0][0]["loss_value"] == pytest.approx(0.7 * results[0][0]["value_loss"])
    assert results[0][0]["value_clip_fraction"] > 0
    assert results[0][0]["value_explained_variance"] < 1


def test_junk_values_of_environment_tokens_change_no_value_loss(
    random_groups: Groups, tiny_llama: LlamaForCausalLM
) -> None:
    head = value_head()
    (pack,) = pack_groups(random_groups(6), max_pack_tokens=10_000)
    with_returns([pack], tiny_llama, head)
    off = column(pack, "occurrences", "leaf") == 0
    table(pack, "occurrences").set("weight", column(pack, "occurrences", "weight").masked_fill(off, 0.0))
    changed = pack.clone()
    environment = ~column(pack, "tokens", "loss_mask")
    table(changed, "tokens").set("value", column(pack, "tokens", "value").masked_fill(environment, torch.nan))
    table(changed, "occurrences").set("ret", column(pack, "occurrences", "ret").masked_fill(off, torch.nan))
    objective = PolicyObjective(tiny_llama, value_head=head)
    first, second = objective(pack), objective(changed)
    for key in ("loss_value", "value_loss", "value_clip_fraction", "value_moments"):
        torch.testing.assert_close(second[key], first[key], rtol=0, atol=0)


def test_without_a_value_head_there_is_no_value_loss(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    (pack,) = prepared(random_groups(6), tiny_llama, 6)
    output = PolicyObjective(tiny_llama)(pack)
    assert output["loss_value"] == 0
    assert not any(str(key).startswith("value_") for key in output.keys())  # noqa: SIM118


def pair_packs(groups: Sequence[Group], model: LlamaForCausalLM, *, budget: int) -> list[Pack]:
    packs = pack_pairs(groups, max_pack_tokens=budget, pairs=sibling_pairs)
    score_packs(model, packs)
    score_packs(model, packs, key="ref_logp")
    for pack in packs:
        name = column(pack, "tokens", "ids") * 37 + column(pack, "tokens", "position") * 11
        noise = torch.cos(name.float()) * column(pack, "tokens", "loss_mask")
        table(pack, "tokens").set("ref_logp", column(pack, "tokens", "ref_logp") + noise)
    return packs


def test_step_dpo_on_packs_is_dpo_on_the_sibling_turns_alone(
    random_groups: Groups, tiny_llama: LlamaForCausalLM
) -> None:
    groups = random_groups(8)
    results = []
    for budget in (60, 10_000):
        packs = pair_packs(groups, tiny_llama, budget=budget)
        denominators = Denominators.of(packs)
        objective = PolicyObjective(tiny_llama, loss=step_dpo)
        outputs = [objective(p, denominators) for p in packs]
        results.append((len(packs), combine_metrics(outputs), gradients(tiny_llama, total(outputs))))
    (several, first, grad), (one, second, other) = results
    assert several > one == 1
    assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)

    pairs = [pair for group in groups for pair in sibling_pairs(group)]
    (pack,) = pair_packs(groups, tiny_llama, budget=10_000)
    ref = column(pack, "tokens", "ref_logp")
    logp = torch.cat(row_logprobs(tiny_llama, pack))
    losses = []
    for winner, loser in zip(pack["pairs", "winner"].tolist(), pack["pairs", "loser"].tolist()):
        sides = []
        for segment in (winner, loser):
            mine = column(pack, "occurrences", "turn") == segment
            sides.append((logp[mine] - ref[column(pack, "occurrences", "token")[mine]]).sum())
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (sides[0] - sides[1])))
    assert len(losses) == len(pairs) > 3
    assert second["loss_objective"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert second["pair_margin"] == pytest.approx(sum(p.margin for p in pairs) / len(pairs), rel=1e-5)
    assert 0 < second["pair_accuracy"] < 1


def test_step_dpo_prefers_the_winners_after_some_steps(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    model = copy.deepcopy(tiny_llama)
    (pack,) = pair_packs(random_groups(8), tiny_llama, budget=10_000)
    score_packs(model, [pack], key="ref_logp")
    objective = PolicyObjective(model, loss=functools.partial(step_dpo, beta=0.5))
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    accuracy = []
    for _ in range(6):
        output = objective(pack)
        optimizer.zero_grad()
        total([output]).backward()
        optimizer.step()
        accuracy.append(output["pair_accuracy"].item())
    assert accuracy[0] == 0.5
    assert accuracy[-1] > 0.6


def test_environment_tokens_and_the_shared_prefix_are_inert_in_step_dpo(
    random_groups: Groups, tiny_llama: LlamaForCausalLM
) -> None:
    (pack,) = pair_packs(random_groups(8), tiny_llama, budget=10_000)
    changed = pack.clone()
    weight = column(pack, "occurrences", "weight")
    compared = torch.zeros(len(table(pack, "tokens")), dtype=torch.bool)
    compared[column(pack, "occurrences", "token")[weight > 0]] = True
    assert not compared[column(pack, "tokens", "loss_mask")].all()
    table(changed, "tokens").set("ref_logp", column(pack, "tokens", "ref_logp").masked_fill(~compared, torch.nan))
    objective = PolicyObjective(tiny_llama, loss=step_dpo)
    first, second = objective(pack), objective(changed)
    for key in sorted(str(k) for k in first.keys()):  # noqa: SIM118
        torch.testing.assert_close(second[key], first[key], rtol=0, atol=0)


def test_a_loss_of_pairs_says_what_it_lacks(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    objective = PolicyObjective(tiny_llama, loss=step_dpo)
    (plain,) = prepared(random_groups(8), tiny_llama, 8)
    with pytest.raises(ConfigError, match="pack with pack_pairs"):
        objective(plain)
    (pack,) = pack_pairs(random_groups(8), max_pack_tokens=10_000, pairs=sibling_pairs)
    with pytest.raises(ConfigError, match="no ref_logp"):
        objective(pack)


def test_what_a_loss_is_called_with() -> None:
    def odd(pairs: Pairs, denominators: Denominators) -> PolicyLoss:
        raise NotImplementedError

    assert loss_needs(nll) == "occurrences"
    assert loss_needs(step_dpo) == loss_needs(functools.partial(step_dpo, beta=1.0)) == "pairs"
    odd.__dict__["needs"] = "triples"
    with pytest.raises(ConfigError, match="needs must be 'occurrences' or 'pairs', found 'triples'"):
        loss_needs(odd)


# -- what is reported, and what options default to -------------------------------------------------------------------

SCALARS = {
    *("loss_objective", "loss_kl", "loss_entropy", "loss_value", "kl_reference", "entropy", "sampler_mismatch"),
    *("clip_fraction", "clip_fraction_lower", "approx_kl"),
}
OF_LEVELS = {
    f"{name}_{level}"
    for level in ("token", "turn", "sequence")
    for name in ("ratio_moments", "ratio_extremes", "clip_fraction")
}
DEFAULTS: dict[str, Any] = {
    "ratio": "token",
    "turn_ratio": "geometric",
    "ratio_gradient": "straight_through",
    "clip": "hard",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "by_turns": (),
    "aggregation": "token-mean",
    "sum_norm": None,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "entropy_coef": 0.0,
    "value_coef": 0.5,
    "value_clip": 0.5,
    "importance_cap": None,
    "temperature": 1.0,
    "loss": None,
    "entropy_metric": True,
}


def test_the_published_settings() -> None:
    of_grpo = {
        "ratio": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "aggregation": "token-mean",
        "kl_coef": 0.001,
        "kl_estimator": "k3",
    }
    of_at2po = {
        "ratio": "turn",
        "turn_ratio": "geometric",
        "ratio_gradient": "straight_through",
        "clip_low": 3e-3,
        "clip_high": 4e-3,
        "aggregation": "seq-mean-token-mean",
        "kl_coef": 0.0,
    }
    assert grpo() == of_grpo
    assert tree_grpo() == {**of_grpo, "entropy_coef": 0.001}
    assert dapo() == {**of_grpo, "clip_high": 0.28, "kl_coef": 0.0}
    assert at2po() == of_at2po
    assert gspo() == {**of_at2po, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}


def test_the_defaults_are_those_of_ppo(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    head = value_head()
    (pack,) = prepared(random_groups(8), tiny_llama, 8, noise=0.7)
    with_values = pack.clone()
    scored = pack_groups(random_groups(8), max_pack_tokens=10_000)
    with_returns(scored, tiny_llama, head)
    table(with_values, "tokens").set("value", column(scored[0], "tokens", "value") + 1.0)
    table(with_values, "occurrences").set("ret", column(scored[0], "occurrences", "ret"))
    for head_, batch in ((None, pack), (head, with_values)):
        plain = PolicyObjective(tiny_llama, value_head=head_)(batch)
        spelled = PolicyObjective(tiny_llama, value_head=head_, **DEFAULTS)(batch)
        assert set(plain.keys()) == set(spelled.keys())
        for key in plain.keys():  # noqa: SIM118
            torch.testing.assert_close(plain[key], spelled[key], rtol=0, atol=0)
        # They matter here: another clip range, clip of values and temperature give other numbers.
        assert plain["clip_fraction"] > 0
        for other in ({"clip_low": 0.3}, {"clip_high": 0.3}, {"temperature": 2.0}, {"aggregation": "turn-mean"}):
            changed: dict[str, Any] = other
            assert (
                PolicyObjective(tiny_llama, value_head=head_, **changed)(batch)["loss_objective"]
                != plain["loss_objective"]
            )
    assert (
        PolicyObjective(tiny_llama, value_head=head, value_clip=0.6)(with_values)["loss_value"] != plain["loss_value"]
    )


def test_what_it_reports(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    (pack,) = prepared(random_groups(6), tiny_llama, 6)
    objective = PolicyObjective(tiny_llama)
    assert (objective.needs, objective.in_keys) == ("occurrences", ["tokens", "occurrences", "rows"])
    assert objective.out_keys == ["loss_objective", "loss_kl", "loss_entropy", "loss_value"]
    assert not objective.functional
    output = objective(pack)
    assert set(output.keys()) == SCALARS | OF_LEVELS
    assert all(output[key].ndim == 0 for key in SCALARS)
    values = {"value_loss", "value_clip_fraction", "value_mean", "value_moments"}
    head = value_head()
    with_returns([pack], tiny_llama, head)
    assert set(PolicyObjective(tiny_llama, value_head=head)(pack).keys()) == SCALARS | OF_LEVELS | values


def test_a_coefficient_of_zero_reports_and_adds_nothing(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    head = value_head()
    (pack,) = prepared(random_groups(6), tiny_llama, 6, noise=0.5)
    off = PolicyObjective(tiny_llama, value_head=head, kl_coef=0.0, entropy_coef=0.0, value_coef=0.0)(pack)
    for loss, metric in (("loss_kl", "kl_reference"), ("loss_entropy", "entropy"), ("loss_value", "value_loss")):
        assert off[loss] == 0
        assert not off[loss].requires_grad
        assert off[metric] > 0
    on = PolicyObjective(tiny_llama, value_head=head, kl_coef=0.25, entropy_coef=0.5, value_coef=2.0)(pack)
    assert on["loss_kl"].item() == pytest.approx(0.25 * off["kl_reference"].item(), rel=1e-5)
    assert on["loss_entropy"].item() == pytest.approx(-0.5 * off["entropy"].item(), rel=1e-5)
    assert on["loss_value"].item() == pytest.approx(2.0 * off["value_loss"].item(), rel=1e-5)


def test_the_entropy_is_computed_where_it_is_asked_for(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    (pack,) = prepared(random_groups(6), tiny_llama, 6)
    shown = PolicyObjective(tiny_llama)(pack)["entropy"]
    assert shown > 0
    assert PolicyObjective(tiny_llama, entropy_metric=False)(pack)["entropy"] == 0
    assert PolicyObjective(tiny_llama, entropy_metric=False, entropy_coef=0.1)(pack)["entropy"] == shown


def test_the_mismatch_is_the_weighted_mean_of_the_gaps(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    for seed in (6, 7):  # weights of 1, and of shared turns
        (pack,) = prepared(random_groups(seed), tiny_llama, seed)
        token, weight = column(pack, "occurrences", "token"), column(pack, "occurrences", "weight")
        gap = (column(pack, "tokens", "old_logp") - column(pack, "tokens", "sampler_logp")).abs()[token]
        found = PolicyObjective(tiny_llama, **at2po())(pack)["sampler_mismatch"]
        torch.testing.assert_close(found, (weight * gap).sum() / weight.sum())


def test_the_summaries_of_ratios(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    packs = prepared(random_groups(8), tiny_llama, 8, budget=60, noise=0.5)
    assert len(packs) > 1
    ratios, weights = [], []
    for pack in packs:
        token = column(pack, "occurrences", "token")
        ratios.append((torch.cat(row_logprobs(tiny_llama, pack)) - column(pack, "tokens", "old_logp")[token]).exp())
        weights.append(column(pack, "occurrences", "weight"))
    ratio, weight = torch.cat(ratios).detach().double(), torch.cat(weights).double()
    denominators = Denominators.of(packs)
    objective = PolicyObjective(tiny_llama)
    found = combine_metrics([objective(pack, denominators) for pack in packs])
    first, second = (weight * ratio).sum(), (weight * ratio**2).sum()
    assert found["ratio_mean_token"] == pytest.approx(float(first / weight.sum()), rel=1e-4)
    assert found["ess_token"] == pytest.approx(float(first**2 / (weight.sum() * second)), rel=1e-4)
    assert found["ratio_min_token"] == pytest.approx(float(ratio.min()), rel=1e-4)
    assert found["ratio_max_token"] == pytest.approx(float(ratio.max()), rel=1e-4)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_clip_fractions_follow_the_clip_of_the_loss(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, level: str
) -> None:
    """At every level, whichever the loss uses: a wider clip binds less, a clip nobody reaches never."""
    packs = prepared(random_groups(8), tiny_llama, 8, noise=0.5)
    denominators = Denominators.of(packs)

    def fraction(**options: Any) -> float:
        objective = PolicyObjective(tiny_llama, **options)
        return combine_metrics([objective(pack, denominators) for pack in packs])[f"clip_fraction_{level}"]

    tight, wide = fraction(clip_low=0.001, clip_high=0.001), fraction(clip_low=0.2, clip_high=0.2)
    assert tight > wide
    assert fraction(clip_low=1.0, clip_high=1e6) == 0
    mean, product = (
        fraction(ratio="turn", turn_ratio=how, clip_low=0.2, clip_high=0.2) for how in ("geometric", "product")
    )
    assert (product == mean) == (level == "token")


def test_without_any_pack_ratios_are_one() -> None:
    names = ("ess", "ratio_mean", "ratio_min", "ratio_max")
    assert combine_metrics([]) == {f"{n}_{level}": 1.0 for n in names for level in ("token", "turn", "sequence")}


def test_the_network_is_called_as_it_was_asked(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    """A forward pass of one's own gets the temperature, whether entropies are wanted, and the value head."""
    (pack,) = prepared(random_groups(6), tiny_llama, 6)
    seen: list[dict[str, Any]] = []

    def forward(pack: Pack, **options: Any) -> Any:
        seen.append(options)
        return packed_logprobs(tiny_llama, pack, **options)

    head = value_head()
    PolicyObjective(tiny_llama, temperature=0.7, entropy_metric=False, value_head=head, forward=forward)(pack)
    assert seen == [{"temperature": 0.7, "entropy": False, "value_head": head}]


@pytest.mark.parametrize("option", ["importance_cap", "value_coef", "value_clip"])
def test_limits_at_their_ends(tiny_llama: LlamaForCausalLM, option: str) -> None:
    at_zero: dict[str, Any] = {option: 0.0}
    if option == "importance_cap":
        with pytest.raises(ConfigError, match=r"^importance_cap must be positive or None, found 0\.0$"):
            PolicyObjective(tiny_llama, **at_zero)
    else:
        PolicyObjective(tiny_llama, **at_zero)
        below: dict[str, Any] = {option: -1e-9}
        with pytest.raises(ConfigError, match=f"^{option} must be at least 0, found -1e-09$"):
            PolicyObjective(tiny_llama, **below)
