"""What is added to the reward of a trajectory before credit, and which groups are worth training on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from turntree.envs.task import FrozenDict
from turntree.errors import ConfigError
from turntree.trainers.losses import kl_rewards
from turntree.trainers.packing import Pack, turn_columns
from turntree.trainers.tree import Group, Node

__all__ = ["Overlong", "add_part", "charge", "has_signal", "kl_token_rewards"]


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), in sampled tokens of a trajectory.

    Nothing up to ``tokens - buffer``; from there it falls linearly to ``-factor`` at ``tokens`` and stays there. Tool
    output does not count.
    """

    tokens: int
    buffer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.buffer <= self.tokens:
            raise ConfigError(
                f"overlong penalty: expected 1 <= buffer <= tokens, found buffer={self.buffer}, tokens={self.tokens}"
            )

    def penalty(self, length: int) -> float:
        """The penalty of a trajectory of ``length`` sampled tokens, in [-factor, 0]."""
        excess = (length - (self.tokens - self.buffer)) / self.buffer
        return -min(max(excess, 0.0), 1.0) * self.factor

    def apply(self, groups: Sequence[Group]) -> None:
        """Add it to the rewards of all scored leaves, as the part ``overlong``."""
        for group in groups:
            for leaf in group.scored_leaves():
                add_part(leaf, "overlong", self.penalty(sum(len(n.turn_ids) for n in leaf.trajectory())))


def add_part(leaf: Node, name: str, value: float, *, by_token: bool = False) -> None:
    """Add ``value`` to a scored leaf's reward; with ``by_token`` only note it, since its tokens carry it.

    ``info["task_reward"]`` keeps what the task gave, ``info["shaping"]`` what was added to it by name.
    """
    if leaf.reward is None:
        raise ValueError(f"leaf {leaf.path} has no reward to add to")
    shaping = FrozenDict({**leaf.info.get("shaping", {}), name: value})
    leaf.info = FrozenDict({"task_reward": leaf.reward, **leaf.info, "shaping": shaping})
    if not by_token:
        leaf.reward += value


def kl_token_rewards(
    packs: Sequence[Pack], groups: Sequence[Group], *, coef: float, kind: str
) -> dict[Node, npt.NDArray[np.float64]]:
    """-coef x KL estimate of every sampled token against the reference, per node (PPO with a KL penalty in the reward).

    The packs need ``old_logp`` and ``ref_logp``.
    """
    old, reference = (turn_columns(packs, groups, key) for key in ("old_logp", "ref_logp"))

    def penalty(node: Node) -> npt.NDArray[np.float64]:
        kl: npt.NDArray[np.float64] = kl_rewards(
            torch.from_numpy(old[node]), torch.from_numpy(reference[node]), kind=kind
        ).numpy()
        return -coef * kl

    return {node: penalty(node) for node in old}


def charge(
    groups: Sequence[Group], token_rewards: Mapping[Node, npt.NDArray[np.float64]], *, by_token: bool = False
) -> None:
    """Add the KL of a trajectory's tokens to its leaf's reward, for rules that see leaves only (:func:`add_part`)."""
    for group in groups:
        for leaf in group.scored_leaves():
            total = float(sum(token_rewards[node].sum() for node in leaf.trajectory()))
            add_part(leaf, "kl", total, by_token=by_token)


def has_signal(group: Group) -> bool:
    """DAPO's dynamic sampling: whether the rewards of a group differ, or there is only one."""
    rewards = [leaf.reward for leaf in group.scored_leaves()]
    return len(rewards) == 1 or len(set(rewards)) > 1
