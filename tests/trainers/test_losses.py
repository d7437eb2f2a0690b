"""Laws of the pure losses: inert occurrences, global denominators, on-policy values, options."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.losses import (
    AGGREGATIONS,
    CLIPS,
    LEVELS,
    Aggregation,
    Denominators,
    Occurrences,
    Pairs,
    PolicyLoss,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    ValueLoss,
    aggregate,
    cispo,
    clipped_surrogate,
    entropy_balanced,
    explained_variance,
    importance_ratio,
    kl_estimate,
    kl_rewards,
    make_bands,
    nll,
    policy_loss,
    ratio_metrics,
    step_dpo,
    value_loss,
)

Loss = Callable[[Occurrences, Denominators], PolicyLoss | ValueLoss]
BANDS: tuple[list[dict[str, Any]], ...] = (
    [],
    [{"max_turns": 2, "ratio": "sequence", "clip_high": 0.05}],
    [{"max_turns": 1, "clip_low": 0.01}, {"max_turns": 2, "ratio": "turn"}],
)
seeds = st.integers(0, 10_000)


@st.composite
def surrogates(draw: st.DrawFn) -> dict[str, Any]:
    """Options of the clipped surrogate that go together."""
    options: dict[str, Any] = {
        "ratio": draw(st.sampled_from(LEVELS)),
        "clip": draw(st.sampled_from(CLIPS)),
        "by_turns": draw(st.sampled_from(BANDS)),
        "aggregation": draw(st.sampled_from(AGGREGATIONS)),
    }
    if options["clip"] != "cispo":
        options["dual_clip"] = draw(st.sampled_from([None, 3.0]))
    if options["ratio"] != "token":
        options["turn_ratio"] = draw(st.sampled_from(get_args(TurnRatio)))
        options["ratio_gradient"] = draw(st.sampled_from(get_args(RatioGradient)[: 1 + (options["clip"] != "cispo")]))
    return options


losses: st.SearchStrategy[Loss] = st.one_of(
    surrogates().map(lambda options: functools.partial(policy_loss, **options)),
    st.sampled_from(AGGREGATIONS).map(lambda how: functools.partial(nll, aggregation=how)),
    st.sampled_from([None, 0.0, 0.3]).map(lambda clip: functools.partial(value_loss, clip=clip)),
)


def occurrences(seed: int, *, leaves: int = 4, masked: float = 0.3, noise: float = 0.3) -> Occurrences:
    """Random ragged occurrences; a share of them has weight 0, others 1/3, 1/2 or 1. Some turns are empty."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, 5, (leaves, 3), generator=generator)
    turn = torch.arange(leaves * 3).repeat_interleave(lengths.flatten())
    n = len(turn)
    old = -2 * uniform(n)
    weight = torch.tensor([1 / 3, 1 / 2, 1.0], dtype=torch.float64)[torch.randint(0, 3, (n,), generator=generator)]
    weight = torch.where(uniform(n) < masked, 0.0, weight)
    ret = uniform(n)
    return Occurrences(
        logp=(old + noise * (uniform(n) - 0.5)).requires_grad_(),
        old_logp=old,
        advantage=4 * uniform(n) - 2,
        weight=weight,
        leaf=turn // 3,
        turn=turn,
        n_leaves=leaves,
        n_turns=leaves * 3,
        value=(ret + noise * (uniform(n) - 0.5)).requires_grad_(),
        old_value=ret + noise * (uniform(n) - 0.5),
        ret=ret,
    )


def denominators(occ: Occurrences) -> Denominators:
    return Denominators.of_occurrences(occ.weight, occ.leaf, n_leaves=occ.n_leaves, turn=occ.turn)


def changed_columns(occ: Occurrences, change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    return {f.name: change(f.name, v) for f in fields(occ) if isinstance(v := getattr(occ, f.name), Tensor)}


def part(occ: Occurrences, leaves: range) -> Occurrences:
    """The occurrences of some leaves, renumbered."""
    keep = (occ.leaf >= leaves.start) & (occ.leaf < leaves.stop)
    offset = {"leaf": leaves.start, "turn": leaves.start * 3}
    columns = changed_columns(occ, lambda name, v: v[keep] - offset[name] if name in offset else v[keep])
    return replace(occ, **columns, n_leaves=len(leaves), n_turns=len(leaves) * 3)


def gradients(loss: Tensor, occ: Occurrences) -> tuple[Tensor, ...]:
    """With respect to log-probs and values."""
    assert occ.value is not None
    return torch.autograd.grad(loss, (occ.logp, occ.value), allow_unused=True, materialize_grads=True)


def numbers(result: PolicyLoss | ValueLoss) -> dict[str, Tensor]:
    return {f.name: v for f in fields(result) if isinstance(v := getattr(result, f.name), Tensor)}


@settings(max_examples=120, deadline=None)
@given(seed=seeds, loss=losses, junk=st.sampled_from([0.0, -50.0, 1e30, float("nan"), float("inf")]))
def test_occurrences_of_weight_zero_are_inert(seed: int, loss: Loss, junk: float) -> None:
    occ = occurrences(seed)
    total = denominators(occ)
    off = occ.weight == 0

    def scrambled(name: str, column: Tensor) -> Tensor:
        if name in ("weight", "leaf", "turn"):
            return column
        return torch.where(off, -junk if name.startswith("old") else junk, column.detach()).requires_grad_()

    changed = replace(occ, **changed_columns(occ, scrambled))
    first, second = loss(occ, total), loss(changed, total)
    torch.testing.assert_close(numbers(first), numbers(second), rtol=0, atol=0)
    for level in LEVELS:
        a, b = (ratio_metrics(o, total, level=level) for o in (occ, changed))
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    found = gradients(second.loss, changed)
    torch.testing.assert_close(gradients(first.loss, occ), found, rtol=0, atol=0)
    assert all((g[off] == 0).all() for g in found)


@settings(max_examples=120, deadline=None)
@given(seed=seeds, loss=losses, cut=st.integers(0, 4))
def test_parts_add_up_to_the_whole(seed: int, loss: Loss, cut: int) -> None:
    occ = occurrences(seed)
    total = denominators(occ)
    whole = loss(occ, total)
    parts = [loss(part(occ, r), total) for r in (range(cut), range(cut, 4))]
    for name, value in numbers(whole).items():
        torch.testing.assert_close(sum(numbers(p)[name] for p in parts), value)
    torch.testing.assert_close(gradients(parts[0].loss + parts[1].loss, occ), gradients(whole.loss, occ))


@settings(max_examples=40, deadline=None)
@given(seed=seeds, level=st.sampled_from(LEVELS), cut=st.integers(0, 4))
def test_ratio_metrics_add_up(seed: int, level: RatioLevel, cut: int) -> None:
    occ = occurrences(seed)
    total = denominators(occ)
    whole = ratio_metrics(occ, total, level=level)
    a, b = (ratio_metrics(part(occ, r), total, level=level) for r in (range(cut), range(cut, 4)))
    for name in (f"ratio_moments_{level}", f"clip_fraction_{level}"):
        torch.testing.assert_close(a[name] + b[name], whole[name])
    least, largest = torch.stack([a[f"ratio_extremes_{level}"], b[f"ratio_extremes_{level}"]]).unbind(1)
    assert torch.stack([least.min(), largest.max()]).equal(whole[f"ratio_extremes_{level}"])


@settings(max_examples=60, deadline=None)
@given(seed=seeds, chosen=surrogates())
def test_unchanged_weights_give_ratio_one_and_the_plain_gradient(seed: int, chosen: dict[str, Any]) -> None:
    occ = occurrences(seed, noise=0.0)
    total = denominators(occ)
    for level in LEVELS:
        ratio = importance_ratio(occ, level=level, gradient=chosen.get("ratio_gradient", "straight_through"))
        assert (ratio == 1).all()
        found = ratio_metrics(occ, total, level=level, clip=chosen["clip"])
        m0, m1, m2 = found[f"ratio_moments_{level}"].tolist()
        assert m0 == m1 == m2
        assert found[f"clip_fraction_{level}"] == 0
        assert not total.weight or found[f"ratio_extremes_{level}"].tolist() == [1, 1]
    result = policy_loss(occ, total, **chosen)
    assert float(result.approx_kl) == float(result.clip_fraction) == 0.0
    if chosen.get("ratio_gradient") != "true":  # which spreads a turn's gradient evenly over its tokens
        plain = nll(occ, total, aggregation=chosen["aggregation"])
        torch.testing.assert_close(gradients(result.loss, occ), gradients(plain.loss, occ))
    for kind in ("k1", "k2", "k3", "abs", "k3+"):
        assert (kl_estimate(occ.logp, occ.old_logp, kind=kind) == 0).all()


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("ratio", LEVELS)
def test_nothing_gives_zero_not_nan(how: Aggregation, ratio: RatioLevel) -> None:
    occ = occurrences(0, masked=1.1)
    empty = part(occ, range(0))
    bands = [{"max_turns": 1, "ratio": "turn"}]
    for nothing in (occ, empty):
        total = denominators(nothing)
        found = policy_loss(nothing, total, ratio=ratio, aggregation=how, by_turns=bands)
        for result in (found, nll(nothing, total, aggregation=how), value_loss(nothing, total)):
            assert result.loss.item() == 0.0
            assert all((g == 0).all() for g in gradients(result.loss, nothing))


def test_rows_without_weight_are_skipped_in_the_mean_over_rows() -> None:
    values = torch.tensor([1.0, 2.0, 9.0])
    occ = Occurrences(
        values, values, values, torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), 3, 3
    )
    total = denominators(occ)
    assert total == Denominators(weight=1.5, rows=2.0, width=1.0, turns=1.5)
    assert float(aggregate(values, occ, total, how="seq-mean-token-mean")) == 1.5
    assert float(aggregate(values, occ, total, how="token-mean")) == pytest.approx(2 / 1.5)
    assert float(aggregate(values, occ, total, how="seq-mean-token-sum")) == 1.0
    assert float(aggregate(values, occ, replace(total, width=4.0), how="seq-mean-token-sum-norm")) == 0.5


def test_the_mean_over_turns_weighs_each_turn_once_whatever_its_length() -> None:
    values = torch.tensor([1.0, 3.0, 5.0, 9.0, 7.0])
    weight = torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0])  # a turn of two, half a turn of one, a turn without any
    turn, leaf = torch.tensor([0, 0, 1, 1, 3]), torch.tensor([0, 0, 0, 0, 1])
    occ = Occurrences(values, values, values, weight, leaf, turn, 2, 4)
    total = denominators(occ)
    assert total.turns == 1.5
    assert float(aggregate(values, occ, total, how="turn-mean")) == pytest.approx((1 * 2.0 + 0.5 * 5.0) / 1.5)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, level=st.sampled_from(["turn", "sequence"]), clip=st.sampled_from(["hard", "soft", "soft_upper"]))
def test_both_gradient_forms_agree_where_the_advantage_is_constant(seed: int, level: RatioLevel, clip: Any) -> None:
    occ = occurrences(seed, masked=0.0)
    segment = occ.turn if level == "turn" else occ.leaf
    constant = replace(occ, advantage=(segment % 3 - 1.0).double(), weight=torch.ones_like(occ.weight))
    total = denominators(constant)
    grads = []
    for form in get_args(RatioGradient):
        result = policy_loss(
            constant, total, ratio=level, ratio_gradient=form, clip=clip, clip_low=0.01, clip_high=0.01
        )
        grads.append(torch.autograd.grad(result.loss, occ.logp)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("level", ["turn", "sequence"])
@pytest.mark.parametrize("form", get_args(RatioGradient))
def test_a_product_ratio_is_the_ratio_of_the_probabilities(level: RatioLevel, form: RatioGradient) -> None:
    occ = occurrences(3, masked=0.0)
    ratio = importance_ratio(occ, level=level, turn_ratio="product", gradient=form).detach()
    segment = occ.turn if level == "turn" else occ.leaf
    for one in segment.unique():
        mine = segment == one
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
        true = importance_ratio(occ, level="sequence", turn_ratio="product", gradient="true")
        assert torch.isfinite(true).all()


def test_importance_factors_scale_each_token() -> None:
    occ = occurrences(1)
    total = denominators(occ)
    halved = policy_loss(replace(occ, importance=torch.full_like(occ.weight, 0.5)), total)
    torch.testing.assert_close(halved.loss, policy_loss(occ, total).loss / 2)


# -- clipping -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=seeds, level=st.sampled_from(LEVELS), dual=st.sampled_from([None, 1.4]))
def test_the_kinds_of_clip_differ_in_gradients_of_clipped_tokens_only(
    seed: int, level: RatioLevel, dual: float | None
) -> None:
    occ = replace(occurrences(seed, noise=2.0), n_turns=12)
    ratio = importance_ratio(occ, level=level)
    options: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual}
    slopes: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for kind in ("hard", "soft", "soft_upper"):
        found, clipped, held = clipped_surrogate(ratio, occ.advantage, clip=kind, **options)
        values[kind] = found.detach()
        slopes[kind] = torch.autograd.grad(found.sum(), occ.logp, retain_graph=True)[0]
        assert (slopes[kind][held] == 0).all()
    above, below = clipped & (ratio > 1), clipped & (ratio < 1)
    for kind in ("soft", "soft_upper"):
        torch.testing.assert_close(values[kind], values["hard"], rtol=0, atol=0)
        assert slopes[kind][~clipped].equal(slopes["hard"][~clipped])
        torch.testing.assert_close(slopes[kind][above], -1.28 * occ.advantage[above])
    torch.testing.assert_close(slopes["soft"][below], -0.8 * occ.advantage[below])
    assert (slopes["soft_upper"][below] == 0).all()
    assert (slopes["hard"][clipped] == 0).all()


@settings(max_examples=30, deadline=None)
@given(seed=seeds, level=st.sampled_from(LEVELS))
def test_cispo_weighs_every_token_by_the_clipped_ratio(seed: int, level: RatioLevel) -> None:
    occ = occurrences(seed, noise=2.0)
    ratio = importance_ratio(occ, level=level)
    values, clipped = cispo(ratio, occ.advantage, occ.logp, clip_low=0.2, clip_high=0.28)
    weight = ratio.detach().clamp(0.8, 1.28)
    torch.testing.assert_close(values, -weight * occ.advantage * occ.logp)
    torch.testing.assert_close(torch.autograd.grad(values.sum(), occ.logp)[0], -weight * occ.advantage)
    assert clipped.equal(ratio != weight)


@pytest.mark.parametrize("kind", ["hard", "soft", "soft_upper"])
def test_a_ratio_that_underflows_gives_no_nan(kind: Any) -> None:
    for shift in (-70.0, -90.0, -100.0, -500.0):
        logp = torch.full((3,), shift, requires_grad=True)
        values, _, _ = clipped_surrogate(
            logp.exp(), torch.tensor([-1.0, 1.0, 0.0]), clip_low=0.2, clip_high=0.2, clip=kind
        )
        torch.testing.assert_close(values.detach(), torch.tensor([0.8, 0.0, 0.0]))
        (grad,) = torch.autograd.grad(values.sum(), logp)
        assert torch.isfinite(grad).all()


def test_the_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    ratio, advantage = torch.tensor([10.0, 10.0]), torch.tensor([-1.0, 1.0])
    values, clipped, held = clipped_surrogate(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert values.tolist() == pytest.approx([3.0, -1.2])
    assert clipped.tolist() == [False, True]
    assert held.tolist() == [True, False]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, chosen=surrogates())
def test_the_metric_of_the_losss_own_level_is_its_clip_fraction(seed: int, chosen: dict[str, Any]) -> None:
    options = {**chosen, "by_turns": []}
    occ = occurrences(seed, noise=1.0)
    total = denominators(occ)
    kept = {k: v for k, v in options.items() if k in ("turn_ratio", "clip")}
    found = ratio_metrics(occ, total, level=options["ratio"], **kept)[f"clip_fraction_{options['ratio']}"]
    torch.testing.assert_close(found, policy_loss(occ, total, **options).clip_fraction)


# -- level by number of turns ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=seeds, gradient=st.sampled_from(get_args(RatioGradient)))
def test_a_band_is_the_loss_of_its_trajectories_with_its_options(seed: int, gradient: RatioGradient) -> None:
    occ = occurrences(seed, leaves=5).kept()
    total = denominators(occ)
    entries: list[dict[str, Any]] = [
        {"max_turns": 1, "ratio": "sequence", "clip_low": 0.02, "clip_high": 0.03},
        {"max_turns": 2, "ratio": "token"},
    ]
    main: dict[str, Any] = {"ratio": "turn", "ratio_gradient": gradient, "clip_low": 0.05, "clip_high": 0.06}
    found = policy_loss(occ, total, by_turns=entries, **main)
    expected = []
    for leaf in range(occ.n_leaves):
        turns = len(occ.turn[occ.leaf == leaf].unique())
        band = next((e for e in entries if turns <= e["max_turns"]), {})
        options = {**main, **{k: v for k, v in band.items() if k != "max_turns"}}
        if options["ratio"] == "token":
            options["ratio_gradient"] = "straight_through"
        expected.append(policy_loss(part(occ, range(leaf, leaf + 1)), total, **options))
    for name, value in numbers(found).items():
        torch.testing.assert_close(value, sum(numbers(e)[name] for e in expected))
    torch.testing.assert_close(
        gradients(found.loss, occ), gradients(torch.stack([e.loss for e in expected]).sum(), occ)
    )


def test_bands_take_what_they_leave_out_from_the_main_options() -> None:
    (band,) = make_bands([{"max_turns": 1, "clip_high": 0.4}], ratio="turn", clip_low=0.1, clip_high=0.2)
    assert (band.max_turns, band.ratio, band.clip_low, band.clip_high) == (1, "turn", 0.1, 0.4)
    assert make_bands([band], ratio="token", clip_low=0.0, clip_high=0.0) == (band,)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"max_turns": 1, "clip": 0.1}], r"by_turns\[0\]: expected max_turns and any of"),
        ([{"ratio": "turn"}], r"by_turns\[0\]: expected max_turns"),
        ([3], r"by_turns\[0\]: expected max_turns.*found 3"),
        ([{"max_turns": 0}], r"by_turns\[0\].max_turns=0: expected a whole number of at least 1"),
        ([{"max_turns": 1.5}], r"by_turns\[0\].max_turns=1.5"),
        ([{"max_turns": 1}, {"max_turns": 2, "ratio": "step"}], r"by_turns\[1\].ratio must be"),
        ([{"max_turns": 1}, {"max_turns": 2, "clip_low": 1.2}], r"by_turns\[1\].clip_low=1.2"),
        ([{"max_turns": 1, "clip_high": "wide"}], r"by_turns\[0\].clip_high='wide'"),
        ([{"max_turns": 2}, {"max_turns": 2}], r"by_turns\[1\].max_turns=2 is not above the 2 before it"),
    ],
)
def test_a_wrong_band_is_named(entries: list[Any], words: str) -> None:
    occ = occurrences(0)
    with pytest.raises(ConfigError, match=words):
        policy_loss(occ, denominators(occ), by_turns=entries)


# -- entropy, KL, values, pairs -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=seeds, coef=st.sampled_from([0.2, -1.0]))
def test_entropy_balanced_advantages_depend_on_the_entropies_of_kept_tokens_only(seed: int, coef: float) -> None:
    occ = occurrences(seed)
    entropy = torch.sin(torch.arange(len(occ.weight)).double())
    found = entropy_balanced(occ.advantage, entropy, occ.weight, coef=coef)
    off = occ.weight == 0
    junk = entropy_balanced(occ.advantage, torch.where(off, torch.nan, entropy), occ.weight, coef=coef)
    torch.testing.assert_close(found, junk, rtol=0, atol=0)
    assert found[off].equal(occ.advantage[off])
    if int((~off).sum()) > 1:
        z = (found / occ.advantage - 1)[~off] / coef
        assert float(z.mean()) == pytest.approx(0, abs=1e-9)
        assert float(z.std()) == pytest.approx(1)


@pytest.mark.parametrize("entropies", [[0.1] * 6, [0.7]])
def test_equal_entropies_change_no_advantage(entropies: list[float]) -> None:
    entropy = torch.tensor(entropies)
    advantage = torch.arange(len(entropies)).float() - 2
    assert entropy_balanced(advantage, entropy, torch.ones_like(entropy)).equal(advantage)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_kl_in_the_reward_is_the_estimate_without_a_gradient(kind: str) -> None:
    occ = occurrences(0)
    found = kl_rewards(occ.logp, occ.old_logp, kind=kind)
    assert not found.requires_grad
    assert found.equal(kl_estimate(occ.logp.detach(), occ.old_logp, kind=kind.rstrip("+")))


def test_the_clipped_value_loss_takes_the_worse_error() -> None:
    column = torch.zeros(3)
    occ = Occurrences(
        logp=column,
        old_logp=column,
        advantage=column,
        weight=torch.tensor([1.0, 0.5, 0.5]),
        leaf=column.long(),
        turn=column.long(),
        n_leaves=1,
        n_turns=1,
        value=torch.tensor([2.0, 0.5, 2.0], requires_grad=True),
        old_value=torch.zeros(3),
        ret=torch.tensor([1.0, 1.0, 3.0]),
    )
    total = denominators(occ)
    # |error| 1, 0.5 and 1; clipped to [-1/2, 1/2] it is 0.5, 0.5 and 2.5.
    found = value_loss(occ, total, clip=0.5)
    assert found.loss.item() == pytest.approx(0.5 * (1.0 * 1 + 0.5 * 0.25 + 0.5 * 6.25) / 2)
    assert float(found.clip_fraction) == pytest.approx(0.25)
    assert value_loss(occ, total, clip=None).loss.item() == pytest.approx(0.5 * (1 + 0.5 * 0.25 + 0.5) / 2)
    fresh = value_loss(replace(occ, old_value=None), total, clip=0.5)
    assert fresh.loss.item() == value_loss(occ, total, clip=None).loss.item()
    with pytest.raises(ConfigError, match="needs values and returns"):
        value_loss(replace(occ, ret=None), total)
    with pytest.raises(ConfigError, match="at least 0, or None"):
        value_loss(occ, total, clip=-1.0)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_explained_variance_is_that_of_numpy(seed: int) -> None:
    occ = replace(occurrences(seed, masked=0.0), weight=torch.ones(len(occurrences(seed, masked=0.0).weight)).double())
    assert occ.value is not None
    assert occ.ret is not None
    found = explained_variance(value_loss(occ, denominators(occ)).moments)
    ret, value = occ.ret.numpy(), occ.value.detach().numpy()
    if len(ret) > 1:
        assert found == pytest.approx(1 - (ret - value).var() / ret.var(), abs=1e-6)
    level = replace(occ, ret=torch.full_like(occ.ret, 0.7))
    assert explained_variance(value_loss(level, denominators(level)).moments) == 0.0
    assert explained_variance(torch.zeros(5)) == 0.0


def test_a_turn_that_trajectories_share_regresses_to_the_mean_of_its_returns() -> None:
    value = torch.zeros(1, requires_grad=True)
    weight, ret = torch.tensor([1.0, 0.5, 0.5]), torch.tensor([1.0, 3.0, -1.0])
    column, leaf = torch.zeros(3), torch.arange(3)
    for _ in range(200):
        occ = Occurrences(column, column, column, weight, leaf, leaf, 3, 3, value=value.expand(3), ret=ret)
        (grad,) = torch.autograd.grad(value_loss(occ, denominators(occ), clip=None).loss, value)
        value = (value - 0.2 * grad).detach().requires_grad_()
    assert value.item() == pytest.approx(float((weight * ret).sum() / weight.sum()), abs=1e-5)


def test_maximum_likelihood_weighs_log_probs_by_the_advantage() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    index = torch.tensor([0, 0, 1])
    ones = torch.ones(3)
    accepted = torch.tensor([1.0, 1.0, 0.0])
    occ = Occurrences(logp, logp.detach(), accepted, ones, index, index, 2, 2)
    assert float(nll(occ, denominators(occ)).loss.detach()) == pytest.approx(1.0)  # the rejected token counts
    left_out = replace(occ, weight=accepted)
    assert float(nll(left_out, denominators(left_out)).loss.detach()) == pytest.approx(1.5)
    supervised = nll(replace(occ, advantage=ones), denominators(occ), aggregation="seq-mean-token-mean")
    assert float(supervised.loss.detach()) == pytest.approx((1.5 + 3.0) / 2)


def pairs(seed: int, n: int = 5) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(5, n, generator=generator, dtype=torch.float64)
    return Pairs(logp[0].requires_grad_(), logp[1].requires_grad_(), logp[2], logp[3], -logp[4])


@settings(max_examples=30, deadline=None)
@given(seed=seeds, cut=st.integers(0, 5))
def test_pairs_add_up_and_push_winners_up(seed: int, cut: int) -> None:
    whole = pairs(seed)
    total = Denominators(0.0, 0.0, 0.0, pairs=5.0)
    found = step_dpo(whole, total)
    halves = [
        step_dpo(Pairs(*(getattr(whole, f.name)[rows] for f in fields(whole))), total)
        for rows in (slice(0, cut), slice(cut, 5))
    ]
    torch.testing.assert_close(halves[0].loss + halves[1].loss, found.loss)
    for name, value in found.metrics.items():
        torch.testing.assert_close(halves[0].metrics[name] + halves[1].metrics[name], value)
    up, down = torch.autograd.grad(found.loss, (whole.winner_logp, whole.loser_logp))
    assert (up < 0).all()
    torch.testing.assert_close(up, -down)


def test_at_the_reference_the_loss_of_pairs_is_log_two() -> None:
    column = torch.tensor([-1.0, -2.0])
    found = step_dpo(Pairs(column, 2 * column, column, 2 * column, -column), Denominators(0.0, 0.0, 0.0, pairs=2.0))
    assert float(found.loss) == pytest.approx(math.log(2))
    assert {k: float(v) for k, v in found.metrics.items()} == {
        "pair_accuracy": 0.5,
        "pair_logit": 0.0,
        "pair_margin": 1.5,
    }
    nothing = Pairs(*(torch.zeros(0) for _ in range(5)))
    assert float(step_dpo(nothing, Denominators(0.0, 0.0, 0.0)).loss) == 0.0
    with pytest.raises(ConfigError, match="beta must be positive"):
        step_dpo(nothing, Denominators(0.0, 0.0, 0.0), beta=0.0)
    with pytest.raises(ValueError, match="one shape"):
        Pairs(column, column, column, column, torch.zeros(3))


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ratio": "step"}, "found 'step'"),
        ({"aggregation": "mean"}, "found 'mean'"),
        ({"clip": "none"}, "clip must be one of hard, soft, soft_upper, cispo, found 'none'"),
        ({"clip_low": -0.1}, "expected 0 <= clip_low <= 1"),
        ({"clip_low": 1.1}, "no ratio is below 0"),
        ({"clip_high": float("nan")}, "clip_high >= 0"),
        ({"dual_clip": 1.0}, "above 1 or None, found 1.0"),
        ({"ratio": "turn", "turn_ratio": "harmonic"}, "found 'harmonic'"),
        ({"ratio": "turn", "ratio_gradient": "none"}, "found 'none'"),
        ({"turn_ratio": "product"}, "with ratio=token there is no pool"),
        ({"ratio_gradient": "true"}, "with ratio=token both forms are the same"),
        ({"clip": "cispo", "ratio": "turn", "ratio_gradient": "true"}, "would have no effect"),
        ({"clip": "cispo", "dual_clip": 3.0}, r"bounds the weight by 1 \+ clip_high on its own"),
    ],
)
def test_unknown_options_and_impossible_combinations_are_refused(wrong: dict[str, Any], words: str) -> None:
    occ = occurrences(0)
    with pytest.raises(ConfigError, match=words):
        policy_loss(occ, denominators(occ), **wrong)


def test_a_pooled_band_makes_options_of_pools_possible() -> None:
    occ = occurrences(0)
    bands = [{"max_turns": 1, "ratio": "sequence"}]
    result = policy_loss(occ, denominators(occ), turn_ratio="product", ratio_gradient="true", by_turns=bands)
    assert torch.isfinite(result.loss)


def test_unknown_kl_estimators_are_refused() -> None:
    occ = occurrences(0)
    with pytest.raises(ConfigError, match="unknown KL estimator 'k9'"):
        kl_estimate(occ.logp, occ.old_logp, kind="k9")


def test_columns_of_other_lengths_are_refused() -> None:
    occ = occurrences(0)
    with pytest.raises(ValueError, match="advantage has shape"):
        replace(occ, advantage=occ.advantage[1:])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"turn_ratio": "product"},
            "turn_ratio=product pools the tokens of a turn or sequence; with ratio=token there is no pool",
        ),
        (
            {"ratio_gradient": "true"},
            "ratio_gradient=true differentiates a pooled ratio; with ratio=token both forms are the same",
        ),
        (
            {"clip": "cispo", "ratio": "turn", "ratio_gradient": "true"},
            "clip=cispo takes the ratio as a constant weight; ratio_gradient=true would have no effect",
        ),
        (
            {"clip": "cispo", "dual_clip": 3.0},
            "clip=cispo bounds the weight by 1 + clip_high on its own; set dual_clip to None",
        ),
        ({"ratio": "step"}, "ratio must be 'token', 'turn' or 'sequence', found 'step'"),
        (
            {"clip_low": True},
            "clip_low=True, clip_high=0.2: expected 0 <= clip_low <= 1 (no ratio is below 0) and clip_high >= 0",
        ),
        (
            {"by_turns": [{"max_turns": 1, "clip_high": -0.1}]},
            "by_turns[0].clip_low=0.2, by_turns[0].clip_high=-0.1: expected 0 <= clip_low <= 1 (no ratio is below 0) "
            "and clip_high >= 0",
        ),
        ({"by_turns": [{"max_turns": True}]}, "by_turns[0].max_turns=True: expected a whole number of at least 1"),
    ],
)
def test_refusals_say_why(wrong: dict[str, Any], message: str) -> None:
    occ = occurrences(0)
    with pytest.raises(ConfigError) as refusal:
        policy_loss(occ, denominators(occ), **wrong)
    assert str(refusal.value) == message


def test_ranges_at_their_ends_are_taken() -> None:
    occ = occurrences(0)
    for low, high in ((0, 0), (1, 0.0), (1.0, 7)):
        assert torch.isfinite(policy_loss(occ, denominators(occ), clip_low=low, clip_high=high).loss)
    assert torch.isfinite(policy_loss(occ, denominators(occ), dual_clip=1.0000001).loss)
    (band,) = make_bands([{"max_turns": 1, "clip_low": 1, "clip_high": 0}], ratio="turn", clip_low=0.1, clip_high=0.2)
    assert (band.max_turns, band.ratio, band.clip_low, band.clip_high) == (1, "turn", 1.0, 0.0)
    assert isinstance(band.clip_low, float)
    assert isinstance(band.clip_high, float)


SPELLED: list[tuple[Callable[..., PolicyLoss | ValueLoss], dict[str, Any]]] = [
    (
        policy_loss,
        {
            "ratio": "token",
            "turn_ratio": "geometric",
            "ratio_gradient": "straight_through",
            "clip": "hard",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": None,
            "by_turns": (),
            "aggregation": "token-mean",
        },
    ),
    (nll, {"aggregation": "token-mean"}),
    (value_loss, {"clip": 0.5}),
]


@pytest.mark.parametrize(("loss", "options"), SPELLED)
def test_losses_default_to_ppos_options(loss: Callable[..., Any], options: dict[str, Any]) -> None:
    occ = occurrences(3, leaves=12, noise=3.0)
    plain, spelled = numbers(loss(occ, denominators(occ))), numbers(loss(occ, denominators(occ), **options))
    assert plain.keys() == spelled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(value, spelled[name], rtol=0, atol=0)
    if loss is not nll:
        assert 0 < float(plain["clip_fraction"]) < 1


def test_functions_below_default_to_the_plain_forms() -> None:
    occ = occurrences(3, leaves=12, noise=3.0)
    geometric = importance_ratio(occ, level="turn", turn_ratio="geometric", gradient="straight_through", by_turns=())
    assert importance_ratio(occ, level="turn").equal(geometric)
    ratio = importance_ratio(occ, level="token")
    spelled = clipped_surrogate(ratio, occ.advantage, clip_low=0.2, clip_high=0.2, dual_clip=None, clip="hard")
    for ours, theirs in zip(clipped_surrogate(ratio, occ.advantage, clip_low=0.2, clip_high=0.2), spelled, strict=True):
        assert ours.equal(theirs)
    plain = ratio_metrics(occ, denominators(occ), level="turn")
    options: dict[str, Any] = {"turn_ratio": "geometric", "clip": "hard", "clip_low": 0.2, "clip_high": 0.2}
    for name, value in ratio_metrics(occ, denominators(occ), level="turn", by_turns=(), **options).items():
        assert plain[name].equal(value)
    assert float(plain["clip_fraction_turn"]) > 0
    assert kl_rewards(occ.logp, occ.old_logp).equal(kl_rewards(occ.logp, occ.old_logp, kind="k1"))
    entropy = torch.arange(len(occ.weight), dtype=torch.float64)
    balanced = entropy_balanced(occ.advantage, entropy, occ.weight)
    assert balanced.equal(entropy_balanced(occ.advantage, entropy, occ.weight, coef=0.2))
    total = Denominators(0.0, 0.0, 0.0, pairs=5.0)
    assert step_dpo(pairs(1), total).loss.equal(step_dpo(pairs(1), total, beta=0.1).loss)


def test_words_of_losses_are_checked_where_they_are_used() -> None:
    occ = occurrences(0)
    wrong: Any = "odd"
    with pytest.raises(ConfigError, match=r"^ratio_gradient must be 'straight_through' or 'true', found 'odd'$"):
        importance_ratio(occ, level="turn", gradient=wrong)
    with pytest.raises(ConfigError, match=r"^turn_ratio must be 'geometric' or 'product', found 'odd'$"):
        importance_ratio(occ, level="turn", turn_ratio=wrong)
    with pytest.raises(ConfigError, match=r"^ratio must be 'token', 'turn' or 'sequence', found 'odd'$"):
        importance_ratio(occ, level=wrong)
    with pytest.raises(ConfigError, match=r"^aggregation must be one of token-mean, .*, found 'odd'$"):
        aggregate(occ.logp, occ, denominators(occ), how=wrong)
    with pytest.raises(ConfigError, match=r"^a clipped surrogate is 'hard', 'soft' or 'soft_upper', found 'odd'$"):
        clipped_surrogate(occ.logp, occ.advantage, clip_low=0.1, clip_high=0.1, clip=wrong)
    with pytest.raises(ConfigError, match=r"^dual_clip must be above 1 or None, found 1\.0$"):
        clipped_surrogate(occ.logp, occ.advantage, clip_low=0.1, clip_high=0.1, dual_clip=1.0)
    with pytest.raises(ConfigError) as refusal:
        value_loss(replace(occ, value=None), denominators(occ))
    said = "the value loss needs values and returns; train with a value head and a rule that gives returns"
    assert str(refusal.value) == said


@pytest.mark.parametrize("kind", ["k1", "k2", "mse", "k3", "low_var_kl", "abs"])
def test_kl_estimates_by_hand(kind: str) -> None:
    logp = torch.tensor([-1.0, -2.0, -1.0, -30.0], dtype=torch.float64)
    ref = torch.tensor([-1.5, -1.0, -1.0, -1.0], dtype=torch.float64)
    gap = [0.5, -1.0, 0.0, -29.0]
    wanted = {
        "k1": gap,
        "k2": [0.125, 0.5, 0.0, 420.5],
        "k3": [math.exp(-0.5) + 0.5 - 1, math.e - 2, 0.0, 10.0],
        "abs": [0.5, 1.0, 0.0, 29.0],
    }[{"mse": "k2", "low_var_kl": "k3"}.get(kind, kind)]
    torch.testing.assert_close(kl_estimate(logp, ref, kind=kind), torch.tensor(wanted, dtype=torch.float64))


def test_denominators_by_hand() -> None:
    weight = torch.tensor([1.0, 0.5, 0.0, 0.0, 0.25])
    leaf, turn = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 1, 2, 3])
    found = Denominators.of_occurrences(weight, leaf, n_leaves=4, turn=turn)
    # Two leaves have weight, the longest two such tokens; the turns' means are 0.75, 0, 0 and 0.25.
    assert found == Denominators(weight=1.75, rows=2.0, width=2.0, turns=1.0, pairs=0.0)
    assert Denominators.of_occurrences(weight, leaf, n_leaves=4).turns == 0.0
    assert Denominators.of([]) == Denominators(0.0, 0.0, 0.0, 0.0, 0.0)
    assert Denominators.of([], width=7.0).width == 7.0


def test_entropy_balanced_by_hand() -> None:
    advantage, entropy = torch.tensor([1.0, -2.0, 3.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 9.0])
    weight = torch.tensor([1.0, 0.5, 1.0, 0.0])
    torch.testing.assert_close(
        entropy_balanced(advantage, entropy, weight, coef=0.5), torch.tensor([0.5, -2.0, 4.5, 1.0])
    )
