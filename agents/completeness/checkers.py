"""Checkers that need no model: gold steps, and the answer-based ones that completeness is compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

from turntree.agents.completeness.calls import CallTurn, call_turns, gold_steps
from turntree.agents.scorer import Failed, Finished
from turntree.envs import metrics
from turntree.envs.language import normalizer_for
from turntree.envs.loading import reject_unknown
from turntree.envs.metrics import Normalizer
from turntree.envs.task import Question
from turntree.errors import ConfigError

__all__ = ["NO_GOLD", "AnswerChecker", "Ballot", "Checker", "RuleChecker", "Spoilt", "Vote"]

NO_GOLD = "no_gold"
"""The kind of failure where the question's data do not say what a rule would compare with."""


_TAG = re.compile(r"</?[A-Za-z][\w-]*>")


@dataclass(frozen=True, slots=True)
class Ballot:
    """One vote that is asked for; ``seed`` is its own and depends on what is judged, not on when."""

    finished: Finished
    seed: int


@dataclass(frozen=True, slots=True)
class Vote:
    """Whether the calls are complete (gamma in {0, 1}), and what asking took in tokens."""

    complete: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Spoilt(Failed):
    """A reply without a verdict: a failure that took tokens all the same."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@runtime_checkable
class Checker(Protocol):
    """Judges trajectories.

    ``fingerprint`` changes with everything of the checker that changes a verdict. ``constant``: every vote on a
    trajectory is the same, so one is asked for, whatever N is. A checker that never looks at the answer may say so with
    an attribute ``needs_answer = False``: none is then written for it.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def constant(self) -> bool: ...

    def content(self, finished: Finished) -> str:
        """All that a verdict on ``finished`` depends on; votes are cached by it and the fingerprint."""
        ...

    def vote(self, ballots: Sequence[Ballot]) -> Sequence[Vote | Failed]:
        """One verdict a ballot, in order; ``Failed`` where there is none, which is never a 0."""
        ...


Gold = Literal["auto", "steps", "passages"]


@dataclass(frozen=True, slots=True)
class RuleChecker:
    """Complete where everything that the question needs was found, by its metadata.

    ``steps``: each gold step's passage (``supporting_id``) was retrieved; a step of another tool (``tool``, ``answer``)
    is covered by a result of that tool that holds its answer. ``passages``: all ``supporting_ids`` were retrieved.
    ``auto``: steps where there are some. A question without gold cannot be judged (``Failed("no_gold")``).
    """

    gold: Gold = "auto"
    constant: bool = True
    needs_answer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        reject_unknown([self.gold], get_args(Gold), what="gold of the rule checker")

    @property
    def fingerprint(self) -> str:
        return f"rule-{self.gold}-2"

    def content(self, finished: Finished) -> str:
        return repr((getattr(finished.task, "metadata", None), call_turns(finished)))

    def vote(self, ballots: Sequence[Ballot]) -> list[Vote | Failed]:
        return [self._judge(ballot.finished) for ballot in ballots]

    def _judge(self, finished: Finished) -> Vote | Failed:
        turns = call_turns(finished)
        found = {i for turn in turns for i in turn.retrieved}
        steps = gold_steps(finished)
        if self.gold == "steps" or (self.gold == "auto" and steps):
            covered = [_covers(step, turns, found) for step in steps]
            return _no_gold(finished) if not steps or None in covered else Vote(all(covered))
        wanted = (getattr(finished.task, "metadata", None) or {}).get("supporting_ids") or ()
        wanted = wanted if isinstance(wanted, (list, tuple)) else (wanted,)
        return Vote(set(map(str, wanted)) <= found) if wanted else _no_gold(finished)


def _covers(step: Mapping[str, object], turns: Sequence[CallTurn], found: set[str]) -> bool | None:
    """None where the step does not say what would cover it."""
    if step.get("supporting_id") is not None:
        return str(step["supporting_id"]) in found
    if "tool" not in step or not str(step.get("answer", "")):
        return None
    # A number that stands next to a tag of the observation would not be a token of its own.
    results = (_TAG.sub(" ", turn.result) for turn in turns if any(call.tool == step["tool"] for call in turn.calls))
    return any(metrics.sub_exact_match(r, str(step["answer"]), normalizer="unicode") for r in results)


def _no_gold(finished: Finished) -> Failed:
    name = getattr(finished.task, "id", "")
    return Failed(NO_GOLD, f"question {name!r} has no gold steps or supporting ids; use an LLM checker for it")


@dataclass(frozen=True, slots=True)
class AnswerChecker:
    """The reward that completeness replaces: whether the answer is right. No answer is a wrong one.

    ``metric``: ``em``, or ``f1`` of at least ``threshold``. ``normalizer``: how answers are compared; None: as fits the
    language of each question.
    """

    metric: Literal["em", "f1"] = "em"
    threshold: float = 0.5
    normalizer: Normalizer | None = None
    constant: bool = True

    def __post_init__(self) -> None:
        reject_unknown([self.metric], ("em", "f1"), what="metric of the answer checker")
        if self.normalizer is not None:
            reject_unknown([self.normalizer], get_args(Normalizer), what="normalizer")
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold}: expected an F1 above 0 and at most 1")

    @property
    def fingerprint(self) -> str:
        return f"answer-{self.metric}-{self.threshold:g}-{self.normalizer or 'language'}"

    def content(self, finished: Finished) -> str:
        return repr((finished.answer, getattr(finished.task, "golden_answers", ()), self._normalizer(finished)))

    def vote(self, ballots: Sequence[Ballot]) -> list[Vote | Failed]:
        return [self._judge(ballot.finished) for ballot in ballots]

    def _judge(self, finished: Finished) -> Vote | Failed:
        golds = getattr(finished.task, "golden_answers", ())
        if not golds:
            return Failed(NO_GOLD, f"question {getattr(finished.task, 'id', '')!r} has no gold answer")
        measure = metrics.exact_match if self.metric == "em" else metrics.f1_score
        right = measure(finished.answer, golds, normalizer=self._normalizer(finished))
        return Vote(right >= (1.0 if self.metric == "em" else self.threshold))

    def _normalizer(self, finished: Finished) -> Normalizer:
        task = finished.task
        return self.normalizer or (normalizer_for([task]) if isinstance(task, Question) else "squad")
