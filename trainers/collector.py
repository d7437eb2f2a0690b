"""From prompts to ready-to-train packs: one rollout a batch, as a TorchRL collector.

The order of a step: rollout and scores, packs, score pass of the model (old and reference log-probs), credit. A batch
is one ``TensorDict``: ``("collector", "mask")`` has one entry per generated token (TorchRL counts frames by it), ragged
parts are non-tensor data.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector

from turntree.envs.task import Question
from turntree.trainers.credit import Advantages, CreditRule
from turntree.trainers.forward import score_packs
from turntree.trainers.metrics import collected_metrics
from turntree.trainers.packing import Pack, SharedTurns, pack_groups, write_advantages
from turntree.trainers.rollout import Prompt, Rollout
from turntree.trainers.seeds import derive_seed
from turntree.trainers.tree import Group, Node

__all__ = ["Collected", "PromptStream", "TreeCollector", "by_node"]

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
    every group was dropped) cover these only.
    """

    step: int
    rollout: Rollout
    groups: tuple[Group, ...]
    minibatches: list[list[Pack]]
    advantages: Advantages
    metrics: dict[str, float] = field(default_factory=dict)


class TreeCollector(BaseCollector):  # type: ignore[misc]
    """Collects trees synchronously with the weights that the engine holds.

    Args:
        stream: prompts by step.
        rollout: grows the trees of some prompts.
        credit: advantages of the kept groups.
        model, reference: networks of the score pass; ``reference`` is None without a KL term.
        first_step, last_step: half-open range of steps to collect.
        should_stop: asked before each rollout.
    """

    def __init__(
        self,
        *,
        stream: PromptStream,
        rollout: Callable[[Sequence[Prompt]], Rollout],
        credit: CreditRule,
        model: torch.nn.Module,
        reference: torch.nn.Module | None,
        first_step: int,
        last_step: int,
        prompts_per_update: int | None,
        max_pack_tokens: int,
        shared_turns: SharedTurns,
        min_scored_leaves: int,
        temperature: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.rollout = rollout
        self.credit = credit
        self.model = model
        self.reference = reference
        self.next_step = first_step
        self.last_step = last_step
        self.prompts_per_update = prompts_per_update or stream.per_step
        self.max_pack_tokens = max_pack_tokens
        self.shared_turns: SharedTurns = shared_turns
        self.min_scored_leaves = min_scored_leaves
        self.temperature = temperature
        self.should_stop = should_stop
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
        rollout = self.rollout(self.stream.step(step))
        rollout_seconds = time.monotonic() - start
        collected = self.prepare(step, rollout)
        collected.metrics["timing_s/gen"] = rollout_seconds
        tokens = rollout.stats.generated_tokens
        mask = TensorDict({"mask": torch.ones(tokens, dtype=torch.bool)}, batch_size=[tokens])
        batch = TensorDict({"collector": mask}, batch_size=[])
        batch.set_non_tensor("collected", collected)
        return batch

    def prepare(self, step: int, rollout: Rollout) -> Collected:
        """Everything between the rollout and the first update."""
        start = time.monotonic()
        kept = rollout.drop_small_groups(self.min_scored_leaves)
        size = self.prompts_per_update
        slices = [slice(first, first + size) for first in range(0, len(kept.groups), size)]
        minibatches = [
            pack_groups(kept.groups[rows], max_pack_tokens=self.max_pack_tokens, shared_turns=self.shared_turns)
            for rows in slices
        ]
        packs = [pack for minibatch in minibatches for pack in minibatch]
        score_packs(self.model, packs, key="old_logp", temperature=self.temperature)
        if self.reference is not None:
            score_packs(self.reference, packs, key="ref_logp", temperature=self.temperature)
        advantages = self.credit(kept.groups)
        for rows, minibatch in zip(slices, minibatches, strict=True):
            write_advantages(minibatch, replace(advantages, values=advantages.values[rows]))
        metrics = {**collected_metrics(kept, packs, advantages), "timing_s/score": time.monotonic() - start}
        _warn_unparsed(step, metrics["actions/unparsed_frac"])
        return Collected(step, replace(rollout, stats=kept.stats), kept.groups, minibatches, advantages, metrics)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        del timeout, close_env, raise_on_error
        self.closed = True

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds derive from the run's seed, the prompt and the node's path; there is no state to set."""
        del static_seed
        return seed

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(next_step=self.next_step)

    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        del kwargs
        self.next_step = int(state_dict["next_step"])


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


def _warn_unparsed(step: int, share: float) -> None:
    if share > UNPARSED_ALARM:
        _log.warning(
            "step %d: %.0f %% of the turns look like calls in another dialect and were not executed; give the model a "
            "prompt that teaches the grammar, or set env.grammar to the one it speaks",
            step,
            100 * share,
        )
