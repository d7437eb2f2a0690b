"""Numbers that a run shows of a rollout and its packs; each is explained in docs/running.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from turntree.trainers.packing import Pack
from turntree.trainers.rollout import Rollout

__all__ = ["mismatch", "rollout_metrics"]


def mismatch(packs: Sequence[Pack]) -> dict[str, float]:
    """Engine against trainer: mean and largest \\|sampler - old\\| log-prob over model tokens, in nats."""
    gaps = [
        (pack["tokens", "sampler_logp"] - pack["tokens", "old_logp"])[pack["tokens", "loss_mask"]].abs()
        for pack in packs
    ]
    if not gaps or not sum(gap.numel() for gap in gaps):
        return {"mismatch/mean": 0.0, "mismatch/max": 0.0}
    joined = torch.cat(gaps)
    return {"mismatch/mean": float(joined.mean()), "mismatch/max": float(joined.max())}


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Means over the scored leaves of ``rollout`` (NaN without any) and what growing it took.

    ``rollout/mixed_groups`` is the share of groups whose rewards differ: only these teach a group-relative rule.
    ``actions/unparsed_frac`` is the share of turns that look like a call in another dialect than the grammar's.
    """
    rewards = [[float(leaf.reward or 0.0) for leaf in group.scored_leaves()] for group in rollout.groups]
    leaves = [leaf for group in rollout.groups for leaf in group.scored_leaves()]
    turns = [n for group in rollout.groups for tree in group.trees for n in tree.nodes() if n.turn_ids]
    return {
        "reward/mean": _mean(reward for group in rewards for reward in group),
        "rollout/em": _mean(float(leaf.info.get("em", 0.0)) for leaf in leaves),
        "rollout/turns": _mean(float(leaf.depth) for leaf in leaves),
        "rollout/format_valid": _mean(float(bool(leaf.info.get("format_valid"))) for leaf in leaves),
        "rollout/answered": _mean(float(leaf.status == "answered") for leaf in leaves),
        "rollout/mixed_groups": _mean(float(max(group) > min(group)) for group in rewards if group),
        "rollout/entropy": _mean(node.entropy for node in turns),
        "actions/unparsed_frac": _mean(float(bool(node.info.get("other_dialect"))) for node in turns),
        **{f"budget/{key}": float(value) for key, value in rollout.stats.as_dict().items()},
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else float("nan")
