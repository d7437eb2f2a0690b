"""Scores of finished trajectories: the seam between a rollout and whatever judges it.

A rollout hands batches of :class:`Finished` to a :data:`Finisher` (optional; writes or rewrites the answer, for
example a summariser) and then to a :data:`Scorer`. Both are plain callables, given by import path in a
configuration. Without a scorer a trajectory is worth what its environment gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from turntree.envs.task import EMPTY, FrozenDict, Question
from turntree.errors import ConfigError

__all__ = [
    "AnswerScorer",
    "Answers",
    "Failed",
    "Finished",
    "FinishedTurn",
    "Finisher",
    "Judged",
    "Scored",
    "Scorer",
    "close_all",
    "env_reward",
    "needs_answer",
    "score",
]


@dataclass(frozen=True, slots=True)
class Failed:
    """Something that could not be done for reasons outside the episode. ``kind`` is a short word to count by."""

    kind: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """One turn of a finished trajectory, as text."""

    text: str
    action: str
    observation: str
    info: FrozenDict = EMPTY


@dataclass(frozen=True, slots=True)
class Finished:
    """A trajectory that ended by itself or was truncated; failed ones are never judged.

    ``answer`` is what the model answered, None if it did not. ``reward`` is the environment's, summed over the
    turns. ``state`` is the environment's last state, ``info`` that of the last turn.
    """

    task: Any
    prompt: str
    turns: tuple[FinishedTurn, ...]
    status: Literal["answered", "truncated"]
    answer: str | None
    reward: float
    state: Any = None
    info: FrozenDict = EMPTY


@dataclass(frozen=True, slots=True)
class Judged:
    """A reward with its parts by name, which join ``info["reward_parts"]`` and the metrics ``tree/reward/<part>``."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


Scorer: TypeAlias = Callable[[Sequence[Finished]], Sequence[float | Judged | Failed]]
"""Rewards of finished trajectories, one each, in order; ``Failed`` where judging was impossible (never a reward).

A scorer with an attribute ``needs_answer`` that is false never looks at the answer: none is then written for it.
A scorer or finisher with a method ``close`` is closed at the end of the run.
"""

Answers: TypeAlias = Literal["if_needed", "always"]
"""When a finisher writes the answers: where the scorer needs them (training), or in any case (evaluation)."""

Finisher: TypeAlias = Callable[[Sequence[Finished]], Sequence[Finished | Failed]]
"""The same trajectories with their ``answer`` written, one each, in order."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory as it was judged. ``finished`` is None where the finisher failed."""

    finished: Finished | None
    reward: float | Failed
    parts: Mapping[str, float] = field(default_factory=dict)


def env_reward(finished: Sequence[Finished]) -> list[float | Failed]:
    """The default scorer: what the environment gave."""
    return [f.reward for f in finished]


@dataclass(frozen=True, slots=True)
class AnswerScorer:
    """A rule scorer: ``metric(answer, golden_answers)`` of the task, and ``no_answer`` where there is no answer.

    ``metric=None`` is exact match, after the normaliser of the question's language.
    Made for finishers, whose answers the environment never saw.
    """

    metric: Callable[[str, Sequence[str]], float] | None = None
    no_answer: float = 0.0

    def __call__(self, finished: Sequence[Finished]) -> list[float | Failed]:
        return [self.no_answer if f.answer is None else self._measure(f.answer, f.task) for f in finished]

    def _measure(self, answer: str, task: Any) -> float:
        if self.metric is not None:
            return float(self.metric(answer, task.golden_answers))
        from turntree.envs.language import normalizer_for
        from turntree.envs.metrics import exact_match

        rule = normalizer_for([task]) if isinstance(task, Question) else "squad"
        return exact_match(answer, task.golden_answers, normalizer=rule)


def needs_answer(scorer: Scorer | None) -> bool:
    """Whether ``scorer`` looks at answers, as every one does that does not say otherwise."""
    return bool(getattr(scorer, "needs_answer", True))


def close_all(*parts: Any) -> None:
    """Close scorers and finishers that can be closed, each once, also where closing another one failed."""
    with ExitStack() as stack:
        for part in {id(part): part for part in parts if hasattr(part, "close")}.values():
            stack.callback(part.close)


def score(
    finished: Sequence[Finished],
    *,
    scorer: Scorer | None,
    finisher: Finisher | None = None,
    answers: Answers = "if_needed",
) -> list[Scored]:
    """Finish and judge a batch, one outcome each, in order.

    The finisher is left out where the scorer needs no answer, unless ``answers`` is ``always``. A reward that is not
    finite becomes ``Failed("non_finite_reward")``. Raises ``ConfigError`` when a callable
    returns another number of outcomes than it was given or something else, or when a task defers its reward and there
    is no scorer.
    """
    written: Sequence[Finished | Failed] = finished
    if finisher is not None and finished and (answers == "always" or needs_answer(scorer)):
        written = _one_each("finisher", finisher(finished), len(finished))
        stranger = next((w for w in written if not isinstance(w, (Finished, Failed))), None)
        if stranger is not None or None in written:
            raise ConfigError(
                f"the finisher returned {stranger!r:.100} for a trajectory; expected a Finished or Failed"
            )
    live = [w for w in written if isinstance(w, Finished)]
    if scorer is None:
        _refuse_deferred(live)
    judged = _one_each("scorer", (scorer or env_reward)(live), len(live)) if live else []
    rewards = iter(judged)
    return [Scored(None, w) if isinstance(w, Failed) else _scored(w, next(rewards)) for w in written]


def _one_each(name: str, outcomes: Any, n: int) -> Sequence[Any]:
    if not hasattr(outcomes, "__len__"):
        raise ConfigError(f"the {name} was given {n} trajectories and returned {outcomes!r:.100}; return a list of {n}")
    if len(outcomes) != n:
        raise ConfigError(f"the {name} was given {n} trajectories and returned {len(outcomes)}; return one each")
    listed: Sequence[Any] = outcomes
    return listed


def _refuse_deferred(finished: Sequence[Finished]) -> None:
    if any(f.info.get("reward_pending") for f in finished):
        raise ConfigError("the environment defers its reward (info['reward_pending']); give the rollout a scorer")


def _scored(finished: Finished, outcome: float | Judged | Failed) -> Scored:
    if not isinstance(outcome, Judged):
        return Scored(finished, _finite(outcome))
    parts = {name: _number(value) for name, value in outcome.parts.items()}
    broken = next((name for name, value in parts.items() if not math.isfinite(value)), None)
    if broken is not None:
        return Scored(finished, Failed("non_finite_reward", f"the scorer's part {broken!r} is {parts[broken]}"))
    return Scored(finished, _finite(outcome.reward), parts)


def _finite(reward: float | Failed) -> float | Failed:
    if isinstance(reward, Failed):
        return reward
    value = _number(reward)
    return value if math.isfinite(value) else Failed("non_finite_reward", f"the scorer returned {value}")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the scorer returned {value!r:.100} for a trajectory; expected a number, Judged (with numbers) or Failed"
        ) from None
