"""The names and definitions of the numbers that a run shows; each is explained in docs/running.md.

Names are verl's where it has one (``critic/rewards/mean``, ``actor/pg_clipfrac``, ``timing_s/gen``), ``tree/...`` where
it has none, ``budget/...`` for exact counts. Means, extremes and shares of nothing are NaN.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from turntree.trainers.credit import Advantages
from turntree.trainers.packing import Pack, column, table
from turntree.trainers.rollout import Rollout
from turntree.trainers.tree import Group, Node, Tree

__all__ = [
    "NAMES",
    "TIMING",
    "advantage_metrics",
    "collected_metrics",
    "mismatch_metrics",
    "reward_metrics",
    "rollout_metrics",
    "step_metrics",
    "tree_metrics",
    "update_metrics",
    "value_metrics",
]

NAMES = {
    "loss_objective": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_lower": "actor/pg_clipfrac_lower",
    "approx_kl": "actor/ppo_kl",
    "kl_reference": "actor/kl_loss",
    "sampler_mismatch": "tree/sampler_mismatch",
    "value_loss": "critic/vf_loss",
    "value_clip_fraction": "critic/vf_clipfrac",
    "value_mean": "critic/vpred_mean",
    "value_explained_variance": "critic/vpred_explained_var",
}
"""verl's word for what an objective reports. Numbers of one ratio level are ``tree/...``, all others ``actor/...``."""

TIMING = ("timing_s/", "perf/", "total/seconds")
"""What the keys of wall-clock numbers start with; all others are equal in two runs with the same seed."""

_LEVEL = re.compile(r".+_(?:token|turn|sequence)")


def collected_metrics(rollout: Rollout, packs: Sequence[Pack], advantages: Advantages) -> dict[str, float]:
    """Everything that is known of a step before its first update.

    Args:
        rollout: its groups are those that are trained on, in the order of ``advantages``.
        packs: of all its mini-batches, with ``old_logp`` and advantages written.
    """
    return {
        **rollout_metrics(rollout),
        **advantage_metrics(rollout.groups, advantages),
        **value_metrics(packs),
        **mismatch_metrics(packs),
    }


def update_metrics(taken: Mapping[str, float]) -> dict[str, float]:
    """The public names of what the updates of a step report (``PolicyStepper.take_metrics``).

    ``actor/loss`` is the sum of the parts ``loss_*`` that were minimised.
    """
    named = {_public(key): value for key, value in taken.items()}
    parts = [value for key, value in taken.items() if key.startswith("loss_")]
    return {**named, "actor/loss": sum(parts)} if parts else named


def _public(key: str) -> str:
    prefix = "tree/" if _LEVEL.fullmatch(key) else "actor/"
    return NAMES.get(key, f"{prefix}{key}")


def step_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The time of a whole step, in seconds, and what it came to: tokens of one row a leaf, a second."""
    seconds = sum(metrics[f"timing_s/{stage}"] for stage in ("gen", "score", "update_actor"))
    return {"timing_s/step": seconds, "perf/throughput": metrics["tree/row_tokens"] / seconds if seconds else np.nan}


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """What was grown and what it earned, over the scored leaves of ``rollout``, and what growing it took."""
    leaves = [leaf for group in rollout.groups for leaf in group.scored_leaves()]
    scores = [[_score(leaf) for leaf in group.scored_leaves()] for group in rollout.groups]
    return {
        **reward_metrics(leaves),
        **_summary("num_turns", [leaf.depth for leaf in leaves]),
        **_length_metrics(leaves),
        "tree/answered": _mean(leaf.status == "answered" for leaf in leaves),
        "tree/mixed_groups": _mean(len(set(group)) > 1 for group in scores if group),
        **tree_metrics([tree for group in rollout.groups for tree in group.trees]),
        **{f"budget/{key}": float(value) for key, value in rollout.stats.as_dict().items()},
    }


def reward_metrics(leaves: Sequence[Node]) -> dict[str, float]:
    """Scores, rewards and their parts over scored leaves.

    The score is what the task gave, the reward that and what shaping added (:mod:`turntree.trainers.shaping`), at the
    leaf or token by token. A part is an entry of ``info["reward_parts"]`` or ``info["shaping"]``, or the environment's
    ``em``, ``f1``, ``success`` and ``format_valid``; its mean is over the leaves that have it.
    """
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for leaf in leaves:
        for name, value in _parts(leaf).items():
            parts[name].append(float(value))
    return {
        **_summary("critic/score", map(_score, leaves)),
        **_summary("critic/rewards", (_score(leaf) + sum(leaf.info.get("shaping", {}).values()) for leaf in leaves)),
        **{f"tree/reward/{name}": _mean(values) for name, values in sorted(parts.items())},
    }


def _score(leaf: Node) -> float:
    return float(leaf.info.get("task_reward", leaf.reward or 0.0))


def _parts(leaf: Node) -> dict[str, float]:
    names = {"em": "em", "f1": "f1", "success": "success", "format_valid": "format"}
    return {
        **{name: leaf.info[key] for key, name in names.items() if leaf.info.get(key) is not None},
        **leaf.info.get("reward_parts", {}),
        **leaf.info.get("shaping", {}),
    }


def _length_metrics(leaves: Sequence[Node]) -> dict[str, float]:
    """Tokens of prompts and of what follows them, observations included (as verl counts responses)."""
    root = [len(leaf.root.observation_ids) for leaf in leaves]
    cut = [leaf.status == "truncated" and leaf.info.get("stop_reason") in ("length", "context") for leaf in leaves]
    return {
        **_summary("response_length", [_row_tokens(leaf) - prompt for leaf, prompt in zip(leaves, root)]),
        "response_length/clip_ratio": _mean(cut),
        **_summary("prompt_length", root),
    }


def tree_metrics(trees: Sequence[Tree]) -> dict[str, float]:
    """The shape of trees, and what their nodes say about exploration.

    Branchings are counted by the depth of the node that got more children than one; the variance among siblings is
    the mean, over nodes with at least two children that lead to a scored leaf, of the population variance of the
    children's mean rewards.
    """
    depths = {node: depth for tree in trees for node, depth in _depths(tree)}
    nodes = list(depths)
    turns = [node for node in nodes if node.turn_ids]
    leaves = [leaf for tree in trees for leaf in tree.scored_leaves()]
    below: defaultdict[Node, list[float]] = defaultdict(list)
    for leaf in leaves:
        for node in _path(leaf):
            below[node].append(float(leaf.reward or 0.0))
    branchings: defaultdict[int, int] = defaultdict(int)
    entropies: defaultdict[int, list[float]] = defaultdict(list)
    for node in nodes:
        if node.children:
            branchings[depths[node]] += len(node.children) - 1
    for node in turns:
        entropies[depths[node]].append(node.entropy)
    return {
        "tree/unique_tokens": float(sum(len(node.turn_ids) + len(node.observation_ids) for node in below)),
        "tree/row_tokens": float(sum(_row_tokens(leaf) for leaf in leaves)),
        "tree/sibling_reward_variance": _mean(_sibling_variances(below)),
        "tree/entropy": _mean(node.entropy for node in turns),
        **{f"tree/entropy_depth/{depth}": _mean(values) for depth, values in sorted(entropies.items())},
        **{f"tree/branch_depth/{depth}": float(count) for depth, count in sorted(branchings.items())},
        "actions/unparsed_frac": _mean(bool(node.info.get("other_dialect")) for node in turns),
    }


def _depths(tree: Tree) -> Iterator[tuple[Node, int]]:
    """All nodes breadth first, each with its depth."""
    level, depth = [tree.root], 0
    while level:
        yield from ((node, depth) for node in level)
        level, depth = [child for node in level for child in node.children], depth + 1


def _sibling_variances(below: Mapping[Node, Sequence[float]]) -> Iterator[float]:
    """Of each node with at least two children that lead to a scored leaf; ``below``: the rewards below each node."""
    for node in below:
        means = [sum(below[child]) / len(below[child]) for child in node.children if child in below]
        if len(means) > 1:
            center = sum(means) / len(means)
            yield sum((mean - center) ** 2 for mean in means) / len(means)


def advantage_metrics(groups: Sequence[Group], advantages: Advantages) -> dict[str, float]:
    """Advantages over the (leaf, model token) pairs of a batch, and the share of (leaf, turn) pairs with exactly 0.

    Turns without a token, or of weight 0, are no part of the batch. A turn of token-wise advantages counts as 0 where
    all of them are.
    """
    leaves = [leaf for group in groups for leaf in group.scored_leaves()]
    lengths = np.array([len(node.turn_ids) for leaf in leaves for node in leaf.trajectory()], dtype=np.int64)
    values = _joined(advantages.values)
    weights = np.ones(len(lengths)) if advantages.weights is None else _joined(advantages.weights)
    tokens = np.repeat(values, lengths) if advantages.per == "turn" else values
    turn = np.repeat(np.arange(len(lengths)), lengths)
    kept = (lengths > 0) & (weights != 0)
    alive = np.bincount(turn, weights=tokens != 0, minlength=len(lengths)) > 0
    return {
        **_summary("critic/advantages", tokens[kept[turn]]),
        "tree/zero_advantage_turns": _mean(~alive[kept]),
    }


def _joined(rows: Iterable[Iterable[npt.NDArray[np.float64]]]) -> npt.NDArray[np.float64]:
    """The rows of all leaves of all groups behind each other."""
    listed = [row for group in rows for row in group]
    return np.concatenate(listed) if listed else np.zeros(0)


def value_metrics(packs: Sequence[Pack]) -> dict[str, float]:
    """Values and returns over (leaf, model token) pairs, where the packs have values; else nothing."""
    valued = [pack for pack in packs if table(pack, "tokens").get("value", None) is not None]
    if not valued:
        return {}
    values = torch.cat([column(p, "tokens", "value")[column(p, "occurrences", "token")] for p in valued]).tolist()
    returns = torch.cat([column(p, "occurrences", "ret") for p in valued]).tolist()
    unexplained = np.var(np.subtract(returns, values), ddof=1) / (np.var(returns, ddof=1) + 1e-5)
    return {
        **_summary("critic/values", values),
        **_summary("critic/returns", returns),
        "critic/vf_explained_var": float(1.0 - unexplained),
    }


def mismatch_metrics(packs: Sequence[Pack]) -> dict[str, float]:
    """Engine against trainer over model tokens: differences of probabilities, and of log-probs in nats."""
    masks = [column(pack, "tokens", "loss_mask") for pack in packs]
    sampler, old = (
        torch.cat([column(pack, "tokens", key)[mask] for pack, mask in zip(packs, masks)]).double().cpu().numpy()
        if packs
        else np.zeros(0)
        for key in ("sampler_logp", "old_logp")
    )
    gaps = np.abs(np.exp(sampler) - np.exp(old))
    return {
        "training/rollout_probs_diff_mean": _mean(gaps),
        "training/rollout_probs_diff_max": float(gaps.max()) if gaps.size else np.nan,
        "training/rollout_probs_diff_std": float(gaps.std(ddof=1)) if gaps.size > 1 else np.nan,
        "rollout_corr/kl": _mean(sampler - old),
        "mismatch/mean": _mean(np.abs(sampler - old)),
        "mismatch/max": float(np.abs(sampler - old).max()) if sampler.size else np.nan,
    }


def _path(leaf: Node) -> list[Node]:
    """From the root to ``leaf``, both included."""
    path, node = [leaf], leaf.parent
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _row_tokens(leaf: Node) -> int:
    """Tokens from the first of the prompt to the last that follows ``leaf``."""
    tokens, node = 0, leaf
    while True:
        tokens += len(node.turn_ids) + len(node.observation_ids)
        if node.parent is None:
            return tokens
        node = node.parent


def _summary(name: str, values: Iterable[float]) -> dict[str, float]:
    data = np.fromiter(values, dtype=np.float64)
    found = (data.mean(), data.max(), data.min()) if data.size else (np.nan,) * 3
    return {f"{name}/{key}": float(value) for key, value in zip(("mean", "max", "min"), found)}


def _mean(values: Iterable[float]) -> float:
    data = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)
    return float(data.mean()) if data.size else float("nan")
