"""Playing questions, one or many trajectories each, into rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Engine, SamplingParams
from turntree.agents.scorer import Failed, Finished, Finisher, Judged, Scorer, score
from turntree.envs.core import TurnCore
from turntree.envs.metrics import Normalizer
from turntree.envs.scorers import AnswerMetrics
from turntree.errors import CostLimitError, EngineError
from turntree.trainers.distributed.ranks import ALONE, Ranks
from turntree.trainers.distributed.share import share_groups
from turntree.trainers.evaluation.rows import UNSCORED, EvalRow, make_row
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.tree import Group, Node

__all__ = ["INTERRUPTED", "Lenient", "Played", "Players", "Valuer", "play", "question_names"]

_log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
"""Why playing stopped, after Ctrl-C."""

Rows: TypeAlias = tuple[EvalRow, ...]

Valuer: TypeAlias = Callable[[Sequence[Node]], Sequence[float]]
"""What a value function says of finished trajectories, one number each."""


@dataclass(frozen=True, slots=True)
class Players:
    """Who plays, under which rules, and who judges; ``ranks`` share the prompts."""

    core: TurnCore[Any]
    engine: Engine
    dialogue: Dialogue
    sampling: SamplingParams
    limits: Limits
    seed: int = 0
    finisher: Finisher | None = None
    scorer: Scorer | None = None
    scorers: Mapping[str, AnswerMetrics] = field(default_factory=dict)
    ranks: Ranks = ALONE


@dataclass(frozen=True, slots=True)
class Played:
    """The rows of each question, in order; ``unplayed`` questions have none, ``stopped`` says why ('' : all were)."""

    rows: tuple[Rows, ...]
    unplayed: int = 0
    stopped: str = ""


def play(
    questions: Sequence[Any],
    players: Players,
    *,
    plan: GrowthPlan | None = None,
    batch: int = 64,
    valuer: Valuer | None = None,
    done: Mapping[str, Rows] | None = None,
    on_rows: Callable[[int, Sequence[Rows]], None] = lambda played, rows: None,
    keep_partial: bool = False,
) -> Played:
    """Play the questions in order, ``batch`` of them at a time, and make rows of their trajectories.

    Without ``plan`` each has one trajectory; with one, rows say which, how likely it was and what all took.
    ``done`` holds rows by question name that are taken as they are; the others are drawn as if all were played.
    ``on_rows`` gets the number of questions that have rows, and the rows of those of the last batch. With
    ``keep_partial``, what was played before a cost limit, a dead engine or Ctrl-C is returned, and says so.
    """
    names = question_names(questions)
    rows = {i: found for i, name in enumerate(names) if (found := (done or {}).get(name)) is not None}
    left = [i for i in range(len(questions)) if i not in rows]
    stopped = ""
    for start in range(0, len(left), batch):
        chunk = left[start : start + batch]
        try:
            groups = _grow([Prompt(f"eval/{i}", questions[i]) for i in chunk], players, plan or GrowthPlan())
        except (EngineError, KeyboardInterrupt) as error:
            if not keep_partial or (not rows and not isinstance(error, KeyboardInterrupt)):
                raise
            stopped = str(error) if isinstance(error, EngineError) else INTERRUPTED
            break
        played = [(i, group) for i, group in zip(chunk, groups, strict=True) if not _unpaid(group)]
        fresh = {i: _rows(questions[i], names[i], g, players, plan, valuer) for i, g in played}
        rows |= fresh
        on_rows(len(rows), list(fresh.values()))
        if len(played) < len(chunk):
            stopped = next(message for group in groups if (message := _unpaid(group)))
            break
    return Played(tuple(rows[i] for i in sorted(rows)), len(questions) - len(rows), stopped)


def question_names(questions: Sequence[Any]) -> list[str]:
    """Ids; tasks of other kinds are named by their ``id`` if they have one, else by their place from 0."""
    return [str(getattr(question, "id", index)) for index, question in enumerate(questions)]


def _grow(prompts: Sequence[Prompt], players: Players, plan: GrowthPlan) -> tuple[Group, ...]:
    return share_groups(prompts, lambda mine: _grow_all(mine, players, plan), ranks=players.ranks)


def _grow_all(prompts: Sequence[Prompt], players: Players, plan: GrowthPlan) -> tuple[Group, ...]:
    return grow(
        prompts,
        core=players.core,
        engine=players.engine,
        dialogue=players.dialogue,
        plan=plan,
        sampling=players.sampling,
        limits=players.limits,
        run_seed=players.seed,
        scorer=None if players.scorer is None else Lenient(players.scorer),
        finisher=players.finisher,
        answers="always",
    ).groups


def _rows(
    question: Any, name: str, group: Group, players: Players, plan: GrowthPlan | None, valuer: Valuer | None
) -> Rows:
    core = players.core
    normalizer: Normalizer = getattr(core, "normalizer", "squad")
    leaves = [leaf for tree in group.trees for leaf in tree.leaves()]
    rows = [
        make_row(question, leaf, name=name, metric=core.metric, normalizer=normalizer, scorers=players.scorers)
        for leaf in leaves
    ]
    if plan is None:
        return (rows[0],)
    spent = sum(tree.generated_tokens for tree in group.trees)
    live = [leaf for leaf in leaves if leaf.status != "failed"]
    values = dict(zip(live, valuer(live), strict=True)) if valuer is not None and live else {}
    return tuple(
        replace(row, sample=i, logprob=_logprob(leaf), value=values.get(leaf), spent_tokens=spent)
        for i, (row, leaf) in enumerate(zip(rows, leaves, strict=True))
    )


def _logprob(leaf: Node) -> float | None:
    """Mean log-prob of the trajectory's sampled tokens; None where the engine reported none (a chat endpoint: NaN)."""
    logprobs = [value for node in leaf.trajectory() for value in node.logprobs]
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else math.nan
    return None if math.isnan(mean) else mean


def _unpaid(group: Group) -> str:
    """The message of an episode that broke off because the endpoint's cost was reached: neither scored nor failed."""
    for leaf in (leaf for tree in group.trees for leaf in tree.leaves()):
        if leaf.status == "failed" and leaf.info.get("error") == CostLimitError.__name__:
            return str(leaf.info["message"])
    return ""


@dataclass(frozen=True, slots=True)
class Lenient:
    """A scorer whose failures fail no question: they are named by a part that ``make_row`` takes out again."""

    scorer: Scorer

    def __call__(self, finished: Sequence[Finished]) -> list[float | Judged]:
        outcomes = score(finished, scorer=self.scorer)  # checks the contract: one each, finite
        failures = [o.reward for o in outcomes if isinstance(o.reward, Failed)]
        if failures:
            said = (failures[0].kind, failures[0].message)
            _log.warning("%d of %d were not scored; the first: %s: %s", len(failures), len(outcomes), *said)
        return [
            Judged(0.0, {UNSCORED + o.reward.kind: 1.0}) if isinstance(o.reward, Failed) else Judged(o.reward, o.parts)
            for o in outcomes
        ]
