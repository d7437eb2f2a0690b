"""Rollouts on the workers, as the collector calls them: synchronous, or one step ahead of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from turntree.errors import EngineError
from turntree.trainers.cluster.flight import Flight, Landed
from turntree.trainers.cluster.pool import WorkerPool
from turntree.trainers.cluster.wire import oldest_version
from turntree.trainers.plan import Allowance, GrowthPlan, Prompt
from turntree.trainers.rollout import Rollout
from turntree.trainers.tally import RolloutStats, Tally
from turntree.trainers.tree import Group, Tree

__all__ = ["ClusterRollout", "joined_metrics"]

_log = logging.getLogger(__name__)


class ClusterRollout:
    """Grows the trees of some prompts on a pool's workers: the same trees that one process would grow.

    Args:
        pool: the workers; its version is the trainer's.
        plan: shape and budget of a prompt's trees.
        upcoming: the prompts of the batch after some batches, for ``cluster.mode=one_step_off``; None where there is
            no other batch.
        batches: how many batches of prompts the run used before.

    In ``one_step_off`` the next batch is sent off as soon as one has landed, with the weights before the update that
    follows. A tree whose oldest turn lies more updates behind the trainer than ``cluster.staleness`` is dropped and
    counted; so is a group that has none left.
    """

    def __init__(
        self,
        pool: WorkerPool,
        plan: GrowthPlan,
        *,
        upcoming: Callable[[int], Sequence[Prompt] | None] = lambda batch: None,
        batches: int = 0,
    ) -> None:
        self.pool = pool
        self.plan = plan
        self.upcoming = upcoming
        self.batches = batches
        self.ahead: tuple[tuple[Prompt, ...], Flight] | None = None
        self.metrics: dict[str, float] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> Rollout:
        flight = self._flight(prompts)
        landed = flight.land()
        self.batches += 1
        if self.pool.cluster.mode == "one_step_off":
            following = self.upcoming(self.batches)
            if following is not None:
                self.ahead = (tuple(following), Flight(self.pool, following, trees=self.plan.trees))
        return self._rollout(prompts, landed)

    def _flight(self, prompts: Sequence[Prompt]) -> Flight:
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return Flight(self.pool, prompts, trees=self.plan.trees)
        if ahead[0] != tuple(prompts):
            ahead[1].cancel()
            raise EngineError("the batch that was sent off ahead is not the one that is asked for")
        return ahead[1]

    def _rollout(self, prompts: Sequence[Prompt], landed: Landed) -> Rollout:
        trees = {(p.uid, i): landed.trees[p.uid, i] for p in prompts for i in range(self.plan.trees)}
        ages = {name: self._age(tree) for name, (tree, _) in trees.items()}
        stale = {name for name, age in ages.items() if age > self.pool.cluster.bound}
        fresh = [
            Group(p.uid, [trees[p.uid, i][0] for i in range(self.plan.trees) if (p.uid, i) not in stale])
            for p in prompts
        ]
        stats = self._stats(prompts, landed)
        _warn(stats, stale=len(stale), bound=self.pool.cluster.bound)
        self._note(landed, list(ages.values()), stale=len(stale))
        return Rollout(tuple(group for group in fresh if group.trees), stats)

    def _age(self, tree: Tree) -> int:
        oldest = oldest_version(tree)
        return 0 if oldest is None else self.pool.version - oldest

    def _stats(self, prompts: Sequence[Prompt], landed: Landed) -> RolloutStats:
        """What all trees used that arrived, stale ones too; what a lost worker's other trees used nobody knows."""
        per_prompt: list[tuple[Tally, Allowance]] = []
        for prompt in prompts:
            total = Tally()
            for index in range(self.plan.trees):
                total.add(landed.trees[prompt.uid, index][1])
            per_prompt.append((total, Allowance()))
        return RolloutStats.of(
            per_prompt,
            trees=len(landed.trees),
            tool_attempts=landed.tool_attempts,
            budget=self.plan.budget,
            settled=0,
            moved=Allowance(),
            moved_used=0,
        )

    def _note(self, landed: Landed, ages: Sequence[int], *, stale: int) -> None:
        seconds = landed.worker_seconds
        found = {
            "cluster/workers": float(sum(seat.started for seat in self.pool.seats)),
            "cluster/restarts": float(self.pool.restarts),
            "cluster/requeued_trees": float(landed.requeued),
            "cluster/doubled_trees": float(landed.doubled),
            "cluster/stale_trees": float(stale),
            "cluster/age/mean": float(np.mean(ages)) if ages else np.nan,
            "cluster/age/max": float(max(ages)) if ages else np.nan,
            "timing_s/worker_gen/mean": float(np.mean(seconds)) if seconds else np.nan,
            "timing_s/worker_gen/max": float(max(seconds)) if seconds else np.nan,
            **{f"summarizer/{key}": value for key, value in landed.usage.items()},
        }
        # Of several rollouts of a step (dynamic sampling), counts add up; the rest is that of the last one.
        for key in ("cluster/requeued_trees", "cluster/doubled_trees", "cluster/stale_trees"):
            found[key] += self.metrics.get(key, 0.0)
        self.metrics.update(found)

    def take_metrics(self) -> dict[str, float]:
        """What the rollouts since the last call took: workers, ages, lost trees, seconds of each stage."""
        taken, self.metrics = self.metrics, {}
        return {**taken, **self.pool.take_times()} if taken else {}

    def close(self) -> None:
        """Drop the batch that is under way, if there is one."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead[1].cancel()
            left = len(ahead[1].wanted)
            _log.info("%d trees that were under way are dropped; a resumed run grows their batch anew", left)


def joined_metrics(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of all training ranks' workers: counts add up, means are averaged, seconds are the slowest rank's."""
    joined: dict[str, float] = {}
    for key in dict.fromkeys(key for rank in ranks for key in rank):
        values = [rank[key] for rank in ranks if key in rank]
        how = (
            np.mean if key.endswith("/mean") else np.max if key.startswith("timing_s/") or key.endswith("/max") else sum
        )
        joined[key] = float(how(values))
    return joined


def _warn(stats: RolloutStats, *, stale: int, bound: int) -> None:
    if stats.failed:
        kinds = ", ".join(f"{kind} x {n}" for kind, n in sorted(stats.errors.items()))
        _log.warning("%d of %d trajectories failed on the workers (%s)", stats.failed, stats.trajectories, kinds)
    if stale:
        _log.warning("%d trees were more than cluster.staleness=%d updates old and are dropped", stale, bound)
