"""What makes one trajectory better than another: scorers by name, or by import path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from turntree.agents.completeness import CompletenessScorer
from turntree.agents.completeness.calls import is_legal
from turntree.agents.scorer import Failed, Finished, Scorer
from turntree.envs.core import TurnCore
from turntree.envs.loading import check_arguments, construct, reject_unknown
from turntree.envs.metrics import Normalizer, exact_match, f1_score
from turntree.errors import ConfigError
from turntree.trainers.build import scorer as configured_scorer
from turntree.trainers.config import RunConfig
from turntree.trainers.plugins import load_batched

__all__ = ["CRITERIA", "check_criterion", "close_criterion", "load_criterion", "normalizer_of"]

CRITERIA = ("reward", "completeness", "em", "f1", "format")
"""Criteria by name; others are scorers given by import path."""

_OPTION = "coldstart.criterion"


def load_criterion(config: RunConfig, *, normalizer: Normalizer = "squad", votes: Path | None = None) -> Scorer | None:
    """The scorer that ``coldstart.criterion`` names; None for the environment's own reward.

    ``normalizer``: the default of em and f1. ``votes``: file that keeps what a completeness checker said, unless
    another one is given, or the checker is a rule. Raises ``ConfigError`` naming the option.
    """
    name, arguments = config.coldstart.criterion, dict(config.coldstart.criterion_args)
    if ":" in name:
        return cast("Scorer", load_batched(name, arguments, option=_OPTION))
    reject_unknown([name], CRITERIA, what=f"{_OPTION}, or import path,")
    if name == "reward":
        _take_nothing(name, arguments)
        return configured_scorer(config)
    if name == "completeness":
        if votes is not None and not _by_rule(arguments):
            arguments.setdefault("cache", str(votes))
        check_arguments(CompletenessScorer, arguments, what=f"{_OPTION}_args")
        return cast("Scorer", construct(CompletenessScorer, arguments, what=_OPTION))
    if name == "format":
        _take_nothing(name, arguments)
        return legal_format
    reject_unknown(arguments, ("normalizer",), what=f"argument of {_OPTION}={name}")
    rule = arguments.get("normalizer", normalizer)
    reject_unknown([rule], get_args(Normalizer), what=f"{_OPTION}_args.normalizer")
    return functools.partial(answer_metric, metric=exact_match if name == "em" else f1_score, normalizer=rule)


def check_criterion(config: RunConfig) -> None:
    """Find mistakes in the criterion's options before anything is played. A checker that is a model is not loaded."""
    own = config.coldstart
    if own.criterion == "completeness" and not _by_rule(own.criterion_args):
        check_arguments(CompletenessScorer, own.criterion_args, what=f"{_OPTION}_args")
        return
    close_criterion(load_criterion(config))


def close_criterion(criterion: Scorer | None) -> None:
    """Let go of what a scorer holds."""
    close = getattr(criterion, "close", None)
    if close is not None:
        close()


def _by_rule(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("checker", "rule") in ("rule", "em", "f1")


def _take_nothing(name: str, arguments: Mapping[str, Any]) -> None:
    if arguments:
        raise ConfigError(f"{_OPTION}={name} takes no arguments, found {_OPTION}_args={dict(arguments)}")


def answer_metric(
    finished: Sequence[Finished], *, metric: Callable[..., float], normalizer: Normalizer
) -> list[float | Failed]:
    """Exact match or F1 of the answers; no answer is 0, a question without gold answers cannot be judged."""
    scores: list[float | Failed] = []
    for one in finished:
        golds = getattr(one.task, "golden_answers", ())
        missing = Failed("no_gold", f"question {getattr(one.task, 'id', '')!r} has no gold answer to compare with")
        scores.append(metric(one.answer, golds, normalizer=normalizer) if golds else missing)
    return scores


def legal_format(finished: Sequence[Finished]) -> list[float | Failed]:
    """1 where the environment finds the format of the episode legal, else 0."""
    return [float(is_legal(one)) for one in finished]


def normalizer_of(core: TurnCore[Any]) -> Normalizer:
    """The normaliser that the environment compares answers with."""
    return cast("Normalizer", getattr(core, "normalizer", "squad"))
