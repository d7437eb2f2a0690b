"""From prompts to ready-to-train packs: one rollout a batch, as a TorchRL collector.

The order of a step: rollout and scores, packs, score pass of the model (old and reference log-probs, values), credit. A
batch is one ``TensorDict``: ``("collector", "mask")`` has one entry per generated token (TorchRL counts frames by it),
ragged parts are non-tensor data.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector

from turntree.envs.task import Question
from turntree.trainers.credit import Advantages
from turntree.trainers.packing import Pack
from turntree.trainers.preparation import Preparation
from turntree.trainers.rollout import Prompt, Rollout, RolloutStats
from turntree.trainers.seeds import derive_seed
from turntree.trainers.shaping import has_signal
from turntree.trainers.tree import Group, Node

__all__ = ["Collected", "PromptStream", "TreeCollector", "by_node", "token_columns"]

_log = logging.getLogger(__name__)

UNPARSED_ALARM = 0.1
"""Share of turns in another dialect from which on prompt and grammar are taken not to fit."""


@dataclass(frozen=True, slots=True)
class PromptStream:
    """The prompts of every step: shuffled epochs that depend on (seed, epoch) only, so resuming needs no state.

    A prompt's uid names the *instance* (epoch and row), so equal ids or texts in a data set never share a group.
    """

    questions: Sequence[Question]
    per_step: int
    seed: int

    def step(self, step: int) -> list[Prompt]:
        """The prompts of step ``step`` (from 0)."""
        size = len(self.questions)
        orders: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        prompts: list[Prompt] = []
        for position in range(step * self.per_step, (step + 1) * self.per_step):
            epoch, index = divmod(position, size)
            if epoch not in orders:
                rng = np.random.default_rng(derive_seed(self.seed, "prompts", epoch))
                orders[epoch] = rng.permutation(size)
            row = int(orders[epoch][index])
            prompts.append(Prompt(uid=f"{epoch}/{row}", task=self.questions[row]))
        return prompts


@dataclass(slots=True)
class Collected:
    """One rollout, scored, credited and packed; what the learner trains on and the run folder records.

    ``groups`` are those of the rollout that have enough scored leaves; ``advantages`` and ``minibatches`` (none where
    every group was dropped) cover these only. ``prompt_batches``: batches of prompts that the run has used so far.
    """

    step: int
    prompt_batches: int
    rollout: Rollout
    groups: tuple[Group, ...]
    minibatches: list[list[Pack]]
    advantages: Advantages
    metrics: dict[str, float] = field(default_factory=dict)
    values: dict[Node, npt.NDArray[np.float64]] = field(default_factory=dict)


class TreeCollector(BaseCollector):  # type: ignore[misc]
    """Collects trees synchronously with the weights that the engine holds.

    Args:
        stream: prompts by batch.
        rollout: grows the trees of some prompts.
        preparation: from a rollout to mini-batches.
        first_step, last_step: half-open range of steps to collect.
        first_batch: batches of prompts that were used before.
        dynamic_sampling: DAPO: batches of prompts that a step may use to find groups whose rewards differ (0: off).
        should_stop: asked before each rollout.
        rest: called when the trees of a step are grown: the engine has nothing to do until the next step.
    """

    def __init__(
        self,
        *,
        stream: PromptStream,
        rollout: Callable[[Sequence[Prompt]], Rollout],
        preparation: Preparation,
        first_step: int,
        last_step: int,
        first_batch: int | None = None,
        dynamic_sampling: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.rollout = rollout
        self.preparation = preparation
        self.next_step = first_step
        self.last_step = last_step
        self.next_batch = first_step if first_batch is None else first_batch
        self.dynamic_sampling = dynamic_sampling
        self.should_stop = should_stop
        self.rest = rest
        self.init_random_frames = 0
        self.closed = False

    def __len__(self) -> int:
        """Steps that are left, unless ``should_stop`` ends them sooner."""
        return max(0, self.last_step - self.next_step)

    def iterator(self) -> Iterator[TensorDictBase]:
        while self.next_step < self.last_step and not self.closed and not self.should_stop():
            step, self.next_step = self.next_step, self.next_step + 1
            yield self.collect(step)

    def collect(self, step: int) -> TensorDictBase:
        """Rollout, score pass, credit and batch of one step."""
        start = time.monotonic()
        rollout, sampling = self._sample()
        self.rest()
        seconds = time.monotonic() - start
        collected = self.prepare(step, rollout)
        collected.metrics |= {**sampling, "timing_s/gen": seconds}
        tokens = rollout.stats.generated_tokens
        mask = TensorDict({"mask": torch.ones(tokens, dtype=torch.bool)}, batch_size=[tokens])
        batch = TensorDict({"collector": mask}, batch_size=[])
        batch.set_non_tensor("collected", collected)
        return batch

    def prepare(self, step: int, rollout: Rollout) -> Collected:
        """Everything between the rollout and the first update."""
        prepared = self.preparation.prepare(rollout)
        _warn_unparsed(step, prepared.metrics["actions/unparsed_frac"])
        return Collected(
            step=step,
            prompt_batches=self.next_batch,
            rollout=replace(rollout, stats=prepared.rollout.stats),
            groups=prepared.rollout.groups,
            minibatches=prepared.minibatches,
            advantages=prepared.advantages,
            metrics=prepared.metrics,
            values=prepared.values,
        )

    def _sample(self) -> tuple[Rollout, dict[str, float]]:
        """One batch of prompts; with dynamic sampling more, until there are enough groups whose rewards differ."""
        if not self.dynamic_sampling:
            return self._next_rollout(), {}
        rollouts: list[Rollout] = []
        groups: list[Group] = []
        while len(rollouts) < self.dynamic_sampling and sum(map(self._teaches, groups)) < self.stream.per_step:
            rollouts.append(self._next_rollout())
            groups += rollouts[-1].groups
        # Sorting keeps the order otherwise: groups without a signal only fill up what is missing.
        chosen = sorted(groups, key=lambda group: not self._teaches(group))[: self.stream.per_step]
        metrics = {
            "tree/sampling/batches": float(len(rollouts)),
            "tree/sampling/filtered_groups": float(len(groups) - sum(map(self._teaches, groups))),
        }
        return Rollout(tuple(chosen), RolloutStats.joined([rollout.stats for rollout in rollouts])), metrics

    def _teaches(self, group: Group) -> bool:
        """Whether a group has a signal, and enough scored leaves not to be dropped afterwards."""
        return has_signal(group) and len(group.scored_leaves()) >= self.preparation.min_scored_leaves

    def _next_rollout(self) -> Rollout:
        batch, self.next_batch = self.next_batch, self.next_batch + 1
        return self.rollout(self.stream.step(batch))

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        del timeout, close_env, raise_on_error
        self.closed = True

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds derive from the run's seed, the prompt and the node's path; there is no state to set."""
        del static_seed
        return seed

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(next_step=self.next_step, next_batch=self.next_batch)

    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        del kwargs
        self.next_step, self.next_batch = int(state_dict["next_step"]), int(state_dict["next_batch"])


def by_node(groups: Sequence[Group], advantages: Advantages) -> dict[tuple[Node, Node], float]:
    """Advantages keyed by (leaf, node), as the rollout store wants them; token-wise ones are averaged over a turn."""
    out: dict[tuple[Node, Node], float] = {}
    for group, rows in zip(groups, advantages.values, strict=True):
        for leaf, row in zip(group.scored_leaves(), rows, strict=True):
            path = leaf.trajectory()
            bounds = np.cumsum([0, *(len(node.turn_ids) for node in path)]) if advantages.per == "token" else None
            for i, node in enumerate(path):
                value = row[i] if bounds is None else row[bounds[i] : bounds[i + 1]].mean()
                out[leaf, node] = float(value)
    return out


def token_columns(collected: Collected) -> dict[str, dict[Node, list[float]]]:
    """What is known of single tokens beside log-probs, for the rollout store: values, and advantages of tokens.

    A token's advantage is the mean over the leaves that share it; rules that credit whole turns have none.
    """
    columns = {"value": collected.values} if collected.values else {}
    if collected.advantages.per == "token":
        columns["advantage"] = _token_advantages(collected.groups, collected.advantages)
    return {name: {node: column.tolist() for node, column in rows.items()} for name, rows in columns.items()}


def _token_advantages(groups: Sequence[Group], advantages: Advantages) -> dict[Node, npt.NDArray[np.float64]]:
    rows: dict[Node, list[npt.NDArray[np.float64]]] = {}
    for group, values in zip(groups, advantages.values, strict=True):
        for leaf, row in zip(group.scored_leaves(), values, strict=True):
            path = leaf.trajectory()
            parts = np.split(row, np.cumsum([len(node.turn_ids) for node in path])[:-1])
            for node, part in zip(path, parts, strict=True):
                rows.setdefault(node, []).append(part)
    return {node: np.mean(parts, axis=0) for node, parts in rows.items()}


def _warn_unparsed(step: int, share: float) -> None:
    if share > UNPARSED_ALARM:
        _log.warning(
            "step %d: %.0f %% of the turns look like calls in another dialect and were not executed; give the model a "
            "prompt that teaches the grammar, or set env.grammar to the one it speaks",
            step,
            100 * share,
        )
