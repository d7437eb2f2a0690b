"""Loss values, gradients and metrics against numbers produced by the published implementations."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from turntree.trainers.losses import (
    Aggregation,
    Denominators,
    Occurrences,
    Pairs,
    PolicyLoss,
    aggregate,
    clipped_surrogate,
    entropy_balanced,
    importance_ratio,
    kl_estimate,
    kl_rewards,
    policy_loss,
    step_dpo,
    value_loss,
)

TOLERANCE = 1e-6


def load(golden_dir: Path, name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((golden_dir / f"{name}.json").read_text(encoding="utf-8")))


def dense(values: Any) -> Tensor:
    """A tensor of numbers; the files write NaN and infinities as strings."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


def close(found: float, expected: Any) -> None:
    """Equal numbers; where the reference gives NaN (a row without any model token), ours is finite."""
    if math.isnan(float(expected)):
        assert math.isfinite(found)
    else:
        torch.testing.assert_close(found, float(expected), rtol=0, atol=TOLERANCE)


def close_tensors(found: Tensor, expected: Any) -> None:
    """:func:`close` for every number."""
    wanted = dense(expected).reshape(found.shape)
    assert torch.isfinite(found[wanted.isnan()]).all()
    torch.testing.assert_close(found[~wanted.isnan()], wanted[~wanted.isnan()], rtol=0, atol=TOLERANCE)


def flatten(inputs: dict[str, Any]) -> tuple[Occurrences, Tensor, Denominators]:
    """Dense [B, T] inputs as occurrences, every cell one, with the mask as weight; the leaf tensor is logp."""
    logp = dense(inputs["log_prob"]).flatten().requires_grad_()
    mask = dense(inputs["response_mask"])
    rows, width = mask.shape
    leaf = torch.arange(rows).repeat_interleave(width)
    turn_ids = torch.tensor(inputs["turn_ids"]).flatten()
    per_row = int(turn_ids.max()) + 1
    occurrences = Occurrences(
        logp=logp,
        old_logp=dense(inputs["old_log_prob"]).flatten(),
        advantage=dense(inputs["advantages"]).flatten(),
        weight=mask.flatten(),
        leaf=leaf,
        turn=leaf * per_row + turn_ids,
        n_leaves=rows,
        n_turns=rows * per_row,
    )
    denominators = Denominators.of_occurrences(occurrences.weight, leaf, n_leaves=rows)
    return occurrences, logp, Denominators(denominators.weight, denominators.rows, float(width))


def check(
    result: PolicyLoss, logp: Tensor, expected: dict[str, Any], *, kl: bool = True, rows: Denominators | None = None
) -> None:
    """``rows``, for references that count rows without any model token: their loss is then NaN, and they divide the
    gradients of the others by the number of all rows."""
    close(result.loss.item(), expected["loss"])
    if "clip_fraction" in expected:
        close(result.clip_fraction.item(), expected["clip_fraction"])
    if kl and "ppo_kl" in expected:
        close(result.approx_kl.item(), expected["ppo_kl"])
    if "clip_fraction_lower" in expected:
        close(result.clip_fraction_lower.item(), expected["clip_fraction_lower"])
    if "grad_log_prob" in expected:
        (grad,) = torch.autograd.grad(result.loss, logp, retain_graph=True)
        wanted = expected["grad_log_prob"]
        if rows is not None and math.isnan(float(expected["loss"])):
            grad = grad * rows.rows / len(wanted)
        close_tensors(grad, wanted)


def test_golden_atpo_loss(golden_dir: Path) -> None:
    for case in load(golden_dir, "atpo_loss")["cases"]:
        occurrences, logp, denominators = flatten(case["inputs"])
        result = policy_loss(
            occurrences,
            denominators,
            ratio="turn",
            clip_low=case["inputs"]["clip_low"],
            clip_high=case["inputs"]["clip_high"],
            aggregation="seq-mean-token-mean",
        )
        check(result, logp, case["expected"], rows=denominators)
        kept = occurrences.kept()
        ratio = importance_ratio(kept, level="turn").detach()
        expected = dense(case["expected"]["turn_ratio_per_token"]).flatten()[occurrences.weight > 0]
        torch.testing.assert_close(ratio, expected, rtol=0, atol=TOLERANCE)


def test_golden_gspo_loss(golden_dir: Path) -> None:
    for case in load(golden_dir, "gspo_loss")["cases"]:
        occurrences, logp, denominators = flatten(case["inputs"])
        low, high = case["inputs"]["clip_low"], case["inputs"]["clip_high"]
        expected = case["expected"]
        result = policy_loss(
            occurrences,
            denominators,
            ratio="sequence",
            clip_low=low,
            clip_high=high,
            aggregation="seq-mean-token-mean",
        )
        check(result, logp, expected["gspo_token_straight_through"], rows=denominators)
        check(result, logp, expected["verl_new"])
        ratio = importance_ratio(occurrences.kept(), level="sequence").detach()
        torch.testing.assert_close(ratio, dense(expected["seq_ratio"])[occurrences.kept().leaf], rtol=0, atol=TOLERANCE)
        repo = policy_loss(
            occurrences,
            denominators,
            ratio="sequence",
            ratio_gradient="true",
            clip_low=low,
            clip_high=high,
            dual_clip=case["inputs"].get("clip_ratio_c", 3.0),
            aggregation="token-mean",
        )
        # Its ppo_kl averages one value a row, not a token: not a metric of ours.
        check(repo, logp, expected["tree_grpo_repo_GSPO_token_mean_dual_clip"], kl=False)


def test_golden_ppo_grpo_dapo_loss(golden_dir: Path) -> None:
    for case in load(golden_dir, "ppo_grpo_dapo_loss")["cases"]:
        inputs = case["inputs"]
        occurrences, logp, denominators = flatten(inputs)
        result = policy_loss(
            occurrences,
            denominators,
            clip_low=inputs["clip_low"],
            clip_high=inputs["clip_high"],
            dual_clip=inputs["clip_ratio_c"],
            aggregation=cast("Aggregation", inputs["loss_agg_mode"]),
        )
        check(result, logp, case["expected"])
        single = case["expected"].get("search_r1_single_clip_eps_0p2_token_mean_no_dual")
        if single is not None:
            check(policy_loss(occurrences, denominators, clip_low=0.2, clip_high=0.2), logp, single)


def test_golden_tree_grpo_turn_loss(golden_dir: Path) -> None:
    """The reference knows turns 1 to 9 only: the ratio of later ones is 0 there, which this adds by hand."""
    for case in load(golden_dir, "tree_grpo_turn_loss")["cases"]:
        inputs = case["inputs"]
        occurrences, logp, denominators = flatten(inputs)
        late = torch.tensor(inputs["turn_ids"]).flatten() >= 10
        how = cast("Aggregation", inputs["loss_agg_mode"])
        bounds: dict[str, Any] = {
            "clip_low": inputs["clip_low"],
            "clip_high": inputs["clip_high"],
            "dual_clip": inputs["clip_ratio_c"],
        }
        early = replace(occurrences, weight=occurrences.weight * ~late)
        result = policy_loss(early, denominators, ratio="turn", ratio_gradient="true", aggregation=how, **bounds)
        rest = replace(occurrences, weight=occurrences.weight * late)
        values, clipped, _ = clipped_surrogate(torch.zeros_like(rest.advantage), rest.advantage, **bounds)
        result = replace(
            result,
            loss=result.loss + aggregate(values, rest, denominators, how=how),
            clip_fraction=result.clip_fraction + aggregate(clipped.double(), rest, denominators, how="token-mean"),
        )
        # The reference averages its ppo_kl over padding cells too.
        check(result, logp, case["expected"], kl=False)


SOFT_CLIPS: dict[str, dict[str, Any]] = {
    "compute_policy_loss_gppo": {"clip": "soft"},
    "compute_policy_loss_gppo_half": {"clip": "soft_upper"},
    "compute_policy_loss_gspo_soft_clip": {"ratio": "sequence", "clip": "soft"},
    "compute_policy_loss_gspo_turn_soft_clip": {"ratio": "turn", "clip": "soft"},
}


def test_golden_soft_clip_variants(golden_dir: Path) -> None:
    for case in load(golden_dir, "soft_clip_variants")["cases"]:
        inputs, chosen = case["inputs"], SOFT_CLIPS[case["function"]]
        occurrences, logp, denominators = flatten(inputs)
        # The functions with token ratios have a dual clip of 3 unless told; the others have none and one aggregation.
        token = "ratio" not in chosen
        result = policy_loss(
            occurrences,
            denominators,
            clip_low=inputs["clip_low"],
            clip_high=inputs["clip_high"],
            dual_clip=inputs.get("clip_ratio_c", 3.0) if token else None,
            aggregation=inputs.get("loss_agg_mode", "token-mean" if token else "seq-mean-token-mean"),
            **chosen,
        )
        check(result, logp, case["expected"], rows=None if token else denominators)


def test_golden_aepo_loss(golden_dir: Path) -> None:
    for case in load(golden_dir, "aepo_loss")["cases"]:
        inputs = case["inputs"]
        occurrences, logp, denominators = flatten(inputs)
        if inputs.get("enable_entropy_balanced_advantage") and inputs.get("entropy") is not None:
            entropy = dense(inputs["entropy"]).flatten()
            balanced = entropy_balanced(occurrences.advantage, entropy, occurrences.weight)
            occurrences = replace(occurrences, advantage=balanced)
        result = policy_loss(
            occurrences,
            denominators,
            clip="soft_upper" if inputs.get("enable_entropy_balanced_clipping") else "hard",
            clip_low=inputs["clip_low"],
            clip_high=inputs["clip_high"],
            dual_clip=inputs.get("clip_ratio_c", 3.0),
            aggregation=cast("Aggregation", inputs.get("loss_agg_mode", "token-mean")),
        )
        check(result, logp, case["expected"])


def test_golden_value_loss(golden_dir: Path) -> None:
    for case in load(golden_dir, "value_loss")["cases"]:
        inputs = case["inputs"]
        mask = dense(inputs["mask"])
        leaf = torch.arange(mask.shape[0]).repeat_interleave(mask.shape[1])
        flat = mask.flatten()
        occurrences = Occurrences(
            logp=flat,
            old_logp=flat,
            advantage=flat,
            weight=flat,
            leaf=leaf,
            turn=leaf,
            n_leaves=len(mask),
            n_turns=len(mask),
            value=dense(inputs["vpreds"]).flatten(),
            old_value=dense(inputs["values"]).flatten(),
            ret=dense(inputs["returns"]).flatten(),
        )
        denominators = Denominators.of_occurrences(flat, leaf, n_leaves=len(mask))
        result = value_loss(occurrences, denominators, clip=inputs["cliprange_value"])
        close(result.loss.item(), case["expected"]["loss"])
        close(result.clip_fraction.item(), case["expected"]["clip_fraction"])


def test_golden_step_dpo(golden_dir: Path) -> None:
    for case in load(golden_dir, "step_dpo")["cases"]:
        children = {child["id"]: child for child in case["inputs"]["children"]}
        chosen = [(children[winner], children[loser]) for winner, loser in case["expected"]["pairs"]]

        def column(side: int, key: str, chosen: list[Any] = chosen) -> Tensor:
            return torch.tensor([pair[side][key] for pair in chosen], dtype=torch.float64)

        pairs = Pairs(
            winner_logp=column(0, "logp"),
            loser_logp=column(1, "logp"),
            winner_ref=column(0, "ref_logp"),
            loser_ref=column(1, "ref_logp"),
            margin=column(0, "value") - column(1, "value"),
        )
        total = Denominators(0.0, 0.0, 0.0, pairs=float(len(chosen)))
        close(step_dpo(pairs, total, beta=case["inputs"]["beta"]).loss.item(), case["expected"]["loss"])
        for i, expected in enumerate(case["expected"]["pair_losses"]):
            one = Pairs(*(getattr(pairs, f.name)[i : i + 1] for f in fields(pairs)))
            alone = step_dpo(one, replace(total, pairs=1.0), beta=case["inputs"]["beta"])
            close(alone.loss.item(), expected)


def test_golden_agg_loss(golden_dir: Path) -> None:
    for case in load(golden_dir, "agg_loss")["cases"]:
        values, mask = dense(case["inputs"]["loss_mat"]), dense(case["inputs"]["loss_mask"])
        rows, width = mask.shape
        leaf = torch.arange(rows).repeat_interleave(width)
        flat = mask.flatten()
        occurrences = Occurrences(flat, flat, flat, flat, leaf, leaf, rows, rows)
        counted = Denominators.of_occurrences(flat, leaf, n_leaves=rows)
        denominators = Denominators(counted.weight, counted.rows, float(width))
        loss = aggregate(values.flatten(), occurrences, denominators, how=case["inputs"]["mode"])
        close(loss.item(), case["expected"]["verl_new"])


def test_golden_kl_estimators(golden_dir: Path) -> None:
    data = load(golden_dir, "kl_estimators")
    for case in data["cases"]:
        inputs = case.get("inputs", data["inputs"])
        reference = dense(inputs["ref_logprob"])
        logp = dense(inputs["logprob"]).requires_grad_()
        value = kl_estimate(logp, reference, kind=case["kind"])
        if isinstance(case["expected"], str):  # the reference fails; ours is checked in test_losses.py
            assert case["kind"].endswith("+")
            continue
        close_tensors(value, case["expected"]["value"])
        close_tensors(kl_rewards(logp, reference, kind=case["kind"]), case["expected"]["value"])
        (grad,) = torch.autograd.grad(value.sum(), logp)
        close_tensors(grad, case["expected"]["grad_of_sum"])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_golden_straight_through_kl_has_the_value_of_its_kind_and_the_gradient_of_k2(
    golden_dir: Path, kind: str
) -> None:
    inputs = load(golden_dir, "kl_estimators")["inputs"]
    reference = dense(inputs["ref_logprob"])
    logp = dense(inputs["logprob"]).requires_grad_()
    value = kl_estimate(logp, reference, kind=f"{kind}+")
    torch.testing.assert_close(value, kl_estimate(logp, reference, kind=kind))
    (grad,) = torch.autograd.grad(value.sum(), logp)
    torch.testing.assert_close(grad, (logp - reference).detach())
