"""Laws of the pure losses: inert occurrences, global denominators, on-policy values, options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses import (
    Aggregation,
    Denominators,
    Occurrences,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    aggregate,
    clipped_surrogate,
    importance_ratio,
    kl_estimate,
    policy_loss,
    ratio_moments,
)

LEVELS = get_args(RatioLevel)
AGGREGATIONS = get_args(Aggregation)
options = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from(LEVELS),
        "turn_ratio": st.sampled_from(get_args(TurnRatio)),
        "ratio_gradient": st.sampled_from(get_args(RatioGradient)),
        "dual_clip": st.sampled_from([None, 3.0]),
        "aggregation": st.sampled_from(AGGREGATIONS),
    }
)
seeds = st.integers(0, 10_000)


def occurrences(seed: int, *, leaves: int = 4, masked: float = 0.3, noise: float = 0.3) -> Occurrences:
    """Random ragged occurrences; a share of them has weight 0, others 1/3, 1/2 or 1."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, 5, (leaves, 3), generator=generator)
    turn = torch.arange(leaves * 3).repeat_interleave(lengths.flatten())
    n = len(turn)
    old = -2 * uniform(n)
    weight = torch.tensor([1 / 3, 1 / 2, 1.0], dtype=torch.float64)[torch.randint(0, 3, (n,), generator=generator)]
    weight = torch.where(uniform(n) < masked, 0.0, weight)
    return Occurrences(
        logp=(old + noise * (uniform(n) - 0.5)).requires_grad_(),
        old_logp=old,
        advantage=4 * uniform(n) - 2,
        weight=weight,
        leaf=turn // 3,
        turn=turn,
        n_leaves=leaves,
        n_turns=leaves * 3,
    )


def denominators(occ: Occurrences) -> Denominators:
    return Denominators.of_occurrences(occ.weight, occ.leaf, n_leaves=occ.n_leaves)


def part(occ: Occurrences, leaves: range) -> Occurrences:
    """The occurrences of some leaves, renumbered."""
    keep = (occ.leaf >= leaves.start) & (occ.leaf < leaves.stop)
    return replace(
        occ,
        logp=occ.logp[keep],
        old_logp=occ.old_logp[keep],
        advantage=occ.advantage[keep],
        weight=occ.weight[keep],
        leaf=occ.leaf[keep] - leaves.start,
        turn=occ.turn[keep] - leaves.start * 3,
        n_leaves=len(leaves),
        n_turns=len(leaves) * 3,
    )


@settings(max_examples=80, deadline=None)
@given(seed=seeds, chosen=options, junk=st.sampled_from([0.0, -50.0, 1e30, float("nan"), float("inf")]))
def test_occurrences_of_weight_zero_are_inert(seed: int, chosen: dict[str, Any], junk: float) -> None:
    occ = occurrences(seed)
    total = denominators(occ)
    off = occ.weight == 0
    changed = replace(
        occ,
        logp=torch.where(off, junk, occ.logp.detach()).requires_grad_(),
        old_logp=torch.where(off, -junk, occ.old_logp),
        advantage=torch.where(off, junk, occ.advantage),
    )
    first, second = policy_loss(occ, total, **chosen), policy_loss(changed, total, **chosen)
    for name in ("loss", "clip_fraction", "clip_fraction_lower", "approx_kl"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=0)
    for level in LEVELS:
        torch.testing.assert_close(ratio_moments(occ, level=level), ratio_moments(changed, level=level), rtol=0, atol=0)
    (a,) = torch.autograd.grad(first.loss, occ.logp)
    (b,) = torch.autograd.grad(second.loss, changed.logp)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (b[off] == 0).all()


@settings(max_examples=60, deadline=None)
@given(seed=seeds, chosen=options, cut=st.integers(0, 4))
def test_parts_add_up_to_the_whole(seed: int, chosen: dict[str, Any], cut: int) -> None:
    occ = occurrences(seed)
    total = denominators(occ)
    whole = policy_loss(occ, total, **chosen)
    parts = [policy_loss(part(occ, r), total, **chosen) for r in (range(cut), range(cut, 4))]
    for name in ("loss", "clip_fraction", "clip_fraction_lower", "approx_kl"):
        torch.testing.assert_close(sum(getattr(p, name) for p in parts), getattr(whole, name))
    (a,) = torch.autograd.grad(whole.loss, occ.logp)
    (b,) = torch.autograd.grad(parts[0].loss + parts[1].loss, occ.logp)
    torch.testing.assert_close(a, b)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, chosen=options)
def test_unchanged_weights_give_ratio_one_and_the_plain_gradient(seed: int, chosen: dict[str, Any]) -> None:
    occ = occurrences(seed, noise=0.0)
    for level in LEVELS:
        ratio = importance_ratio(occ, level=level, turn_ratio=chosen["turn_ratio"], gradient=chosen["ratio_gradient"])
        assert (ratio == 1).all()
        m0, m1, m2 = ratio_moments(occ, level=level).tolist()
        assert m0 == m1 == m2
    result = policy_loss(occ, denominators(occ), **chosen)
    assert float(result.approx_kl) == float(result.clip_fraction) == 0.0
    for kind in ("k1", "k2", "k3", "abs", "k3+"):
        assert (kl_estimate(occ.logp, occ.old_logp, kind=kind) == 0).all()


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("ratio", LEVELS)
def test_nothing_gives_zero_not_nan(how: Aggregation, ratio: RatioLevel) -> None:
    occ = occurrences(0, masked=1.1)
    result = policy_loss(occ, denominators(occ), ratio=ratio, aggregation=how)
    assert result.loss.item() == 0.0
    (grad,) = torch.autograd.grad(result.loss, occ.logp)
    assert (grad == 0).all()
    empty = part(occ, range(0))
    assert policy_loss(empty, denominators(empty), ratio=ratio, aggregation=how).loss.item() == 0.0


def test_rows_without_weight_are_skipped_in_the_mean_over_rows() -> None:
    values = torch.tensor([1.0, 2.0, 9.0])
    occ = Occurrences(
        values, values, values, torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), 3, 3
    )
    total = denominators(occ)
    assert total == Denominators(weight=1.5, rows=2.0, width=1.0)
    assert float(aggregate(values, occ, total, how="seq-mean-token-mean")) == 1.5
    assert float(aggregate(values, occ, total, how="token-mean")) == pytest.approx(2 / 1.5)
    assert float(aggregate(values, occ, total, how="seq-mean-token-sum")) == 1.0
    assert float(aggregate(values, occ, replace(total, width=4.0), how="seq-mean-token-sum-norm")) == 0.5


@settings(max_examples=40, deadline=None)
@given(seed=seeds, level=st.sampled_from(["turn", "sequence"]))
def test_both_gradient_forms_agree_where_the_advantage_is_constant(seed: int, level: RatioLevel) -> None:
    occ = occurrences(seed, masked=0.0)
    segment = occ.turn if level == "turn" else occ.leaf
    constant = replace(occ, advantage=(segment % 3 - 1.0).double(), weight=torch.ones_like(occ.weight))
    total = denominators(constant)
    grads = []
    for form in get_args(RatioGradient):
        result = policy_loss(constant, total, ratio=level, ratio_gradient=form, clip_low=0.01, clip_high=0.01)
        grads.append(torch.autograd.grad(result.loss, occ.logp)[0])
    torch.testing.assert_close(*grads)


def test_a_product_ratio_is_the_ratio_of_the_turns_probabilities() -> None:
    occ = occurrences(3, masked=0.0)
    ratio = importance_ratio(occ, level="turn", turn_ratio="product").detach()
    for turn in range(occ.n_turns):
        mine = occ.turn == turn
        expected = (occ.logp[mine].sum() - occ.old_logp[mine].sum()).exp().detach()
        torch.testing.assert_close(ratio[mine], expected.expand(int(mine.sum())))


def test_log_ratios_are_clamped_as_in_the_references() -> None:
    base = occurrences(0, masked=0.0)
    for shift, level, expected in (
        (50.0, "token", 20.0),
        (-50.0, "token", -20.0),
        (50.0, "turn", 10.0),
        (-50.0, "turn", -50.0),
    ):
        occ = replace(base, logp=base.old_logp + shift)
        ratio = importance_ratio(occ, level=level)  # type: ignore[arg-type]
        torch.testing.assert_close(ratio.log(), torch.full_like(ratio, expected))


def test_importance_factors_scale_each_token() -> None:
    occ = occurrences(1)
    total = denominators(occ)
    halved = policy_loss(replace(occ, importance=torch.full_like(occ.weight, 0.5)), total)
    torch.testing.assert_close(halved.loss, policy_loss(occ, total).loss / 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": "step"},
        {"aggregation": "mean"},
        {"dual_clip": 1.0},
        {"ratio": "turn", "turn_ratio": "harmonic"},
        {"ratio": "turn", "ratio_gradient": "none"},
    ],
)
def test_unknown_options_are_refused(wrong: dict[str, Any]) -> None:
    occ = occurrences(0)
    with pytest.raises(ConfigError, match=r"found|above 1"):
        policy_loss(occ, denominators(occ), **wrong)
    with pytest.raises(ConfigError, match="unknown KL estimator 'k9'"):
        kl_estimate(occ.logp, occ.old_logp, kind="k9")


def test_columns_of_other_lengths_are_refused() -> None:
    occ = occurrences(0)
    with pytest.raises(ValueError, match="advantage has shape"):
        replace(occ, advantage=occ.advantage[1:])


def test_the_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    ratio, advantage = torch.tensor([10.0, 10.0]), torch.tensor([-1.0, 1.0])
    values, clipped, held = clipped_surrogate(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert values.tolist() == pytest.approx([3.0, -1.2])
    assert clipped.tolist() == [False, True]
    assert held.tolist() == [True, False]
