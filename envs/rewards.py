"""Rule rewards: pure functions of how an episode ended.

A reward is any ``Callable[[Outcome], float]``: given by name (``em``, ``f1``, ``tree_grpo``, ``atpo``), as a callable,
or as an import path ``package.module:function``. Parameters are keyword arguments: in a configuration
``reward.args``, in Python ``functools.partial``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from turntree.envs import metrics
from turntree.envs.loading import reject_unknown, resolve
from turntree.envs.metrics import Normalizer
from turntree.errors import ConfigError

__all__ = [
    "REWARDS",
    "Outcome",
    "Reward",
    "atpo",
    "em",
    "evaluate_reward",
    "f1",
    "load_reward",
    "reward_name",
    "tree_grpo",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a rule may look at.

    ``answer`` was read from the model's own turns (None: it gave none); ``observations`` are the texts that searches
    and other tools returned; ``tools_used`` the names of the tools that were executed; ``stop_reason`` is ``answer``,
    ``turns``, ``length`` or ``context``; ``normalizer`` is the one that answers are compared with.
    """

    answer: str | None
    golden_answers: tuple[str, ...]
    format_valid: bool
    format_reason: str = ""
    observations: tuple[str, ...] = ()
    tools_used: frozenset[str] = frozenset()
    turns: int = 0
    stop_reason: str = "answer"
    normalizer: Normalizer = "squad"

    @property
    def em(self) -> float:
        return metrics.exact_match(self.answer, self.golden_answers, normalizer=self.normalizer)

    @property
    def f1(self) -> float:
        return metrics.f1_score(self.answer, self.golden_answers, normalizer=self.normalizer)

    @property
    def retrieved(self) -> bool:
        """Whether any gold answer is contained in any observation."""
        golds, rule = self.golden_answers, self.normalizer
        return any(metrics.sub_exact_match(text, golds, normalizer=rule) for text in self.observations)


Reward = Callable[[Outcome], float]
"""A reward: of an episode's outcome."""


def em(outcome: Outcome) -> float:
    """Exact match of the answer: 0 or 1."""
    return outcome.em


def f1(outcome: Outcome) -> float:
    """Token F1 of the answer, in [0, 1]."""
    return outcome.f1


def tree_grpo(
    outcome: Outcome,
    *,
    structure: float = 0.2,
    final: float = 0.1,
    retrieval: float = 0.0,
    metric: Literal["em", "f1"] = "em",
) -> float:
    """The graded table of Tree-GRPO (``qa_em_format.compute_score_em``).

    Right and valid 1; right and invalid ``1 - structure``; wrong and valid ``structure`` (``+ retrieval`` if a gold
    answer was retrieved); wrong and invalid ``final``; no answer: ``structure`` (``+ retrieval``) if valid, else 0.

    With ``metric="f1"`` the score in (0, 1] stands in for "right", and never falls below what a wrong answer of the
    same format gets. (The published ``qa_f1_format`` lets a valid answer with F1 0.1 score less than a wrong one.)
    """
    reject_unknown([metric], ("em", "f1"), what="metric of tree_grpo")
    floor = structure + (retrieval if retrieval and outcome.retrieved else 0.0)
    if outcome.answer is None:
        return floor if outcome.format_valid else 0.0
    score = outcome.em if metric == "em" else outcome.f1
    if outcome.format_valid:
        return score if score == 1 else max(score, floor)
    return max(score - structure, final) if score > 0 else final


def atpo(outcome: Outcome, *, multi_tool_bonus: float = 0.1) -> float:
    """AT2PO's rule (``deep_research_em.compute_score``), for the tag grammar: -1, 0 or exact match.

    A malformed episode or one without an answer -1; an answer that shares no token with a gold 0; otherwise exact
    match, or F1 + ``multi_tool_bonus`` when both ``search`` and ``python`` were used.
    """
    if not outcome.format_valid or outcome.answer is None:
        return -1.0
    if outcome.f1 == 0:
        return 0.0
    if {"search", "python"} <= outcome.tools_used:
        return outcome.f1 + multi_tool_bonus
    return outcome.em


REWARDS: dict[str, Reward] = {"em": em, "f1": f1, "tree_grpo": tree_grpo, "atpo": atpo}
"""Rewards by name; others are given by import path."""


def load_reward(reward: Reward | str, *, what: str = "reward") -> Reward:
    """A reward from its name, import path, or itself. Raises ``ConfigError``; ``what`` names the option."""
    found: Any = resolve(reward, REWARDS, what=what) if isinstance(reward, str) else reward
    if not callable(found):
        raise ConfigError(f"{what}: expected a function of an Outcome, found {found!r:.100}")
    return cast("Reward", found)


def reward_name(reward: Reward) -> str:
    """A stable name of a reward with its parameters, for fingerprints and result files."""
    if isinstance(reward, functools.partial):
        given = [*map(repr, reward.args), *(f"{k}={v!r}" for k, v in sorted(reward.keywords.items()))]
        return f"{reward_name(reward.func)}({', '.join(given)})"
    named = reward if hasattr(reward, "__qualname__") else type(reward)
    return f"{named.__module__}:{named.__qualname__}"


def evaluate_reward(reward: Reward, outcome: Outcome) -> float:
    """The reward as a finite float; ``ConfigError`` names a rule that gives anything else."""
    value = float(reward(outcome))
    if not math.isfinite(value):
        raise ConfigError(f"the reward {reward_name(reward)} gave {value}; expected a finite number")
    return value
