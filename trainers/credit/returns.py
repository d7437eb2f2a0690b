"""Credit of single tokens: discounted returns and generalised advantages along each trajectory, whitened.

The steps of a trajectory are its sampled tokens. Observations are no steps: rewards, values and discounts pass over
them. Whitening is over all (scored leaf, sampled token) pairs of the rollout, so a token that leaves share counts once
in each of them. It is not relative to a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from turntree.errors import ConfigError, DataError
from turntree.trainers.credit.base import (
    Advantages,
    FloatArray,
    Singleton,
    TokenTable,
    all_equal,
    check,
    count_leaves,
    explained,
    normalise,
    rewards_of,
)
from turntree.trainers.credit.text import names, num, nums
from turntree.trainers.tree import Group, Node

WHITEN_EPS = 1e-8

Rows = tuple[tuple[FloatArray, ...], ...]


def whiten(rows: Sequence[Sequence[FloatArray]]) -> Rows:
    """(x - mean) / sqrt(unbiased variance + 1e-8) over all numbers of all ``rows[g][l]``; 0 where they are equal."""
    flat = np.concatenate([np.zeros(0), *(row for group in rows for row in group)])
    if all_equal(flat):
        return tuple(tuple(np.zeros_like(row) for row in group) for group in rows)
    mean, scale = flat.mean(), 1.0 / np.sqrt(flat.var(ddof=1) + WHITEN_EPS)
    return tuple(tuple((row - mean) * scale for row in group) for group in rows)


def discounted_sums(terms: FloatArray, factor: float) -> FloatArray:
    """s_t = x_t + factor * s_{t+1}, ``[T]`` from ``[T]``."""
    sums = list(accumulate(terms[::-1].tolist(), lambda s, x: x + factor * s))
    return np.array(sums[::-1], dtype=np.float64)


def _check_factor(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"credit: {name} must be from 0 to 1, found {value!r}")


def _along(leaf: Node, table: TokenTable | None, what: str) -> FloatArray:
    """One number for each sampled token of the leaf's trajectory; 0 without a table."""
    parts = [np.zeros(0)]
    for node in leaf.trajectory():
        if table is None:
            parts.append(np.zeros(len(node.turn_ids)))
            continue
        part = np.asarray(table[node] if node in table else np.zeros(0), dtype=np.float64)
        if part.shape != (len(node.turn_ids),) or not np.isfinite(part).all():
            raise DataError(
                f"credit: node {node.path} has {len(node.turn_ids)} sampled tokens and needs as many finite {what}, "
                f"found {part.tolist() if node in table else 'none'}"
            )
        parts.append(part)
    return np.concatenate(parts)


def _token_rewards(leaf: Node, token_rewards: TokenTable | None) -> FloatArray:
    """The tokens' own rewards, and the leaf's at the last token."""
    rewards = _along(leaf, token_rewards, "token rewards")
    if rewards.size:
        rewards[-1] += rewards_of([leaf])[0]
    return rewards


def _turns(leaf: Node, row: FloatArray) -> list[FloatArray]:
    """``row`` ``[sampled tokens]`` cut into the trajectory's turns."""
    return np.split(row, np.cumsum([len(n.turn_ids) for n in leaf.trajectory()])[:-1])


def _by_turn(leaf: Node, row: FloatArray) -> str:
    return " | ".join(nums(part) for part in _turns(leaf, row))


def _spread(rows: Sequence[FloatArray], what: str) -> str:
    flat = np.concatenate([np.zeros(0), *rows])
    if all_equal(flat):
        return f"  whitened: {what} of all {flat.size} tokens are equal, so 0"
    std = np.sqrt(flat.var(ddof=1) + WHITEN_EPS)
    return f"  whitened over {flat.size} tokens: ({what} - {num(flat.mean())}) / {num(std)} (unbiased)"


# REINFORCE++


def _returns_to_go(group: Group, *, gamma: float, token_rewards: TokenTable | None) -> list[FloatArray]:
    return [discounted_sums(_token_rewards(leaf, token_rewards), gamma) for leaf in group.scored_leaves()]


def _explain_reinforce_pp(group: Group, *, token_rewards: TokenTable | None = None, gamma: float = 1.0) -> list[str]:
    name, rows = names(group), _returns_to_go(group, gamma=gamma, token_rewards=token_rewards)
    (white,) = whiten([rows])
    lines = [f"A_t = whitened G_t, G_t = r_t + gamma G_(t+1) over sampled tokens, gamma {gamma:g}; turns between |"]
    for leaf, row, a in zip(group.scored_leaves(), rows, white, strict=True):
        lines += [f"  G({name[leaf]}) = {_by_turn(leaf, row)}", f"    A = {_by_turn(leaf, a)}"]
    return [*lines, _spread(rows, "G")]


@explained(_explain_reinforce_pp, needs=("token_rewards",))
def reinforce_pp(groups: Sequence[Group], *, token_rewards: TokenTable | None = None, gamma: float = 1.0) -> Advantages:
    """REINFORCE++ (arXiv 2501.03262): whitened discounted returns, A_t = (G_t - mean) / sqrt(var + 1e-8).

    G_t = r_t + gamma G_{t+1} over the sampled tokens of a trajectory, the leaf's reward falling on the last one. The
    return goes through observations (published code resets it there, so that all turns but the last got 0).

    Raises ``ConfigError`` for a gamma outside 0 .. 1, ``DataError`` for token rewards that do not fit a turn.
    """
    _check_factor("gamma", gamma)
    return Advantages("token", whiten([_returns_to_go(g, gamma=gamma, token_rewards=token_rewards) for g in groups]))


def _centred(group: Group, *, singleton: Singleton) -> list[FloatArray]:
    leaves = group.scored_leaves()
    centred = normalise(rewards_of(leaves), std="none", singleton=singleton)
    return [np.full(_along(leaf, None, "").size, c) for leaf, c in zip(leaves, centred.tolist(), strict=True)]


def _explain_reinforce_pp_baseline(group: Group, *, singleton: Singleton = "zero") -> list[str]:
    name, leaves, rows = names(group), group.scored_leaves(), _centred(group, singleton=singleton)
    (white,) = whiten([rows])
    rewards = rewards_of(leaves)
    lines = ["A_t = whitened (r - mean of the group), the same at all tokens of a trajectory"]
    for leaf, row, a in zip(leaves, rows, white, strict=True):
        numbers = f"{num(row[0])}, A {num(a[0])}" if row.size else "no token"
        lines.append(f"  {name[leaf]}: {leaf.reward:g} - {num(rewards.mean())} = {numbers}")
    return [*lines, _spread(rows, "x")]


@explained(_explain_reinforce_pp_baseline)
def reinforce_pp_baseline(groups: Sequence[Group], *, singleton: Singleton = "zero") -> Advantages:
    """REINFORCE++ with a group baseline: r - mean of the group at every token, whitened over the rollout's tokens.

    A group of equal rewards is 0 before whitening; after it, it gets what the mean over all tokens leaves, unless
    the whole rollout is 0.
    """
    check("singleton", singleton, ("zero", "raw"))
    return Advantages("token", whiten([_centred(g, singleton=singleton) for g in groups]))


# PPO


def _deltas(leaf: Node, values: FloatArray, *, token_rewards: TokenTable | None, gamma: float) -> FloatArray:
    following = np.append(values[1:], 0.0)[: values.size]
    out: FloatArray = _token_rewards(leaf, token_rewards) + gamma * following - values
    return out


def _generalised(
    group: Group, values: TokenTable, *, token_rewards: TokenTable | None, gamma: float, lam: float
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Advantages before whitening, and returns, a row for each scored leaf."""
    raw, returns = [], []
    for leaf in group.scored_leaves():
        v = _along(leaf, values, "values")
        raw.append(discounted_sums(_deltas(leaf, v, token_rewards=token_rewards, gamma=gamma), gamma * lam))
        returns.append(raw[-1] + v)
    return raw, returns


def _averaged(group: Group, rows: Sequence[FloatArray]) -> list[FloatArray]:
    """``rows`` with every turn's numbers replaced by their mean over the scored leaves through the turn.

    The weight omega of a turn is the same in all its leaves, so this is the omega-mean for any choice of omega.
    """
    leaves = group.scored_leaves()
    sums: dict[Node, FloatArray] = {}
    for leaf, row in zip(leaves, rows, strict=True):
        for node, part in zip(leaf.trajectory(), _turns(leaf, row), strict=True):
            sums[node] = sums[node] + part if node in sums else part
    counts = count_leaves(leaves)
    return [np.concatenate([np.zeros(0), *(sums[n] / counts[n] for n in leaf.trajectory())]) for leaf in leaves]


def _explain_gae(
    group: Group,
    *,
    values: TokenTable,
    token_rewards: TokenTable | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> list[str]:
    name, leaves = names(group), group.scored_leaves()
    raw, returns = _generalised(group, values, token_rewards=token_rewards, gamma=gamma, lam=lam)
    targets, (white,) = _averaged(group, returns), whiten([raw])
    lines = [
        f"delta_t = r_t + gamma V_(t+1) - V_t, x_t = delta_t + gamma lambda x_(t+1), gamma {gamma:g}, lambda {lam:g}",
        "A = whitened x; R = x + V, of a shared turn the mean over its leaves; turns between |",
    ]
    for leaf, x, target, a in zip(leaves, raw, targets, white, strict=True):
        v = _along(leaf, values, "values")
        delta = _deltas(leaf, v, token_rewards=token_rewards, gamma=gamma)
        rows = {"V": v, "delta": delta, "x": x, "R": target, "A": a}
        lines += [f"  {name[leaf]}", *(f"    {key:5} = {_by_turn(leaf, row)}" for key, row in rows.items())]
    return [*lines, _spread(raw, "x")]


@explained(_explain_gae, needs=("values", "token_rewards"))
def gae(
    groups: Sequence[Group],
    *,
    values: TokenTable,
    token_rewards: TokenTable | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, Eq. 16) along each leaf's sampled tokens, whitened.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, the next token of a turn's last one
    being the first of the next turn, and V = 0 after the last. ``returns``: A_t (not whitened) + V_t; for a token that
    scored leaves share their mean, the one target that a single value can have.

    Raises ``ConfigError`` for a factor outside 0 .. 1, ``DataError`` for values or rewards that do not fit a turn.
    """
    _check_factor("gamma", gamma)
    _check_factor("lam", lam)
    parts = [_generalised(g, values, token_rewards=token_rewards, gamma=gamma, lam=lam) for g in groups]
    targets = tuple(tuple(_averaged(g, returns)) for g, (_, returns) in zip(groups, parts, strict=True))
    return Advantages("token", whiten([raw for raw, _ in parts]), returns=targets)
