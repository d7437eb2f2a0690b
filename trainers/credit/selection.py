"""Which trajectories to imitate: credit for objectives of the negative log-likelihood."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turntree.errors import ConfigError
from turntree.trainers.credit.base import Advantages, FloatArray, explained, per_leaf, rewards_of
from turntree.trainers.credit.text import names
from turntree.trainers.tree import Group


def _accepted(group: Group, *, threshold: float, best: int | None) -> FloatArray:
    """1 for each accepted leaf, 0 for the others, ``[leaves]``."""
    rewards = rewards_of(group.scored_leaves())
    chosen = rewards >= threshold
    if best is not None:
        ranked = np.argsort(-rewards, kind="stable")
        chosen &= np.isin(np.arange(rewards.size), ranked[:best])
    return chosen.astype(np.float64)


def _explain_rejection_sampling(group: Group, *, threshold: float = 1.0, best: int | None = None) -> list[str]:
    name, leaves = names(group), group.scored_leaves()
    among = "" if best is None else f" and among the {best} best of the group"
    lines = [f"accepted: r >= {threshold:g}{among}; advantage and weight 1, of the others 0"]
    for leaf, a in zip(leaves, _accepted(group, threshold=threshold, best=best), strict=True):
        lines.append(f"  {name[leaf]}: r {leaf.reward:g}, {'accepted' if a else 'rejected'}, A = {a:.4f}")
    return lines


@explained(_explain_rejection_sampling)
def rejection_sampling(groups: Sequence[Group], *, threshold: float = 1.0, best: int | None = None) -> Advantages:
    """Advantage and weight 1 for accepted trajectories, 0 for the others: they leave the batch and its denominators.

    Accepted: reward >= ``threshold`` and, with ``best``, among that many highest rewards of the group (of equal
    rewards the first leaves). For rejection-sampling fine-tuning, with the negative log-likelihood as objective. A
    group without an accepted leaf has weight 0 everywhere; a rollout without one has nothing to learn from.

    Raises ``ConfigError`` for a ``best`` below 1.
    """
    if best is not None and best < 1:
        raise ConfigError(f"credit: best must be at least 1 or null, found {best!r}")
    accepted = per_leaf(groups, lambda g: _accepted(g, threshold=threshold, best=best)).values
    return Advantages("turn", accepted, weights=accepted)
