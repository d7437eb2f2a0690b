"""What makes one trajectory better than another: scorers by name, or by import path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from turntree.agents.completeness import CompletenessScorer
from turntree.agents.completeness.calls import is_legal
from turntree.agents.completeness.llm import check_llm_checker, llm_checker
from turntree.agents.scorer import Failed, Finished, Scorer, close_all
from turntree.envs.core import TurnCore
from turntree.envs.loading import check_arguments, construct, reject_unknown
from turntree.envs.metrics import Normalizer, exact_match, f1_score
from turntree.errors import ConfigError
from turntree.trainers.build import scorer as configured_scorer
from turntree.trainers.config import RunConfig
from turntree.trainers.plugins import load_batched

__all__ = ["CRITERIA", "LegalFormat", "check_criterion", "load_criterion", "reads_answers"]

CRITERIA = ("reward", "completeness", "em", "f1", "format")
"""Criteria by name; others are scorers given by import path."""

_OPTION = "coldstart.criterion"


def load_criterion(config: RunConfig, core: TurnCore[Any], *, votes: Path | None = None) -> Scorer | None:
    """The scorer that ``coldstart.criterion`` names; None for the environment's own reward.

    Em and f1 compare as ``core`` does, unless they are told otherwise. ``votes``: file that keeps what a completeness
    checker said, unless another one is given, or the checker is a rule. Raises ``ConfigError`` naming the option.
    """
    name, arguments = config.coldstart.criterion, dict(config.coldstart.criterion_args)
    if ":" in name:
        return cast("Scorer", load_batched(name, arguments, option=_OPTION))
    reject_unknown([name], CRITERIA, what=f"{_OPTION}, or import path,")
    if name == "reward":
        _take_nothing(name, arguments)
        return configured_scorer(config, core)
    if name == "completeness":
        if votes is not None and not _by_rule(arguments):
            arguments.setdefault("cache", str(votes))
        check_arguments(CompletenessScorer, arguments, what=f"{_OPTION}_args")
        return cast("Scorer", construct(CompletenessScorer, arguments, what=_OPTION))
    if name == "format":
        _take_nothing(name, arguments)
        return LegalFormat()
    reject_unknown(arguments, ("normalizer",), what=f"argument of {_OPTION}={name}")
    rule = arguments.get("normalizer", getattr(core, "normalizer", "squad"))
    reject_unknown([rule], get_args(Normalizer), what=f"{_OPTION}_args.normalizer")
    return functools.partial(answer_metric, metric=exact_match if name == "em" else f1_score, normalizer=rule)


def reads_answers(config: RunConfig) -> bool:
    """Whether the criterion looks at answers: where it does not, nobody need write any."""
    own = config.coldstart
    if own.criterion == "completeness":
        return own.criterion_args.get("checker", "rule") not in ("rule", "llm")
    return own.criterion != "format"


def check_criterion(config: RunConfig, core: TurnCore[Any]) -> None:
    """Find mistakes in the criterion's options before anything is played. A checker that is a model is not loaded."""
    own = config.coldstart
    if own.criterion == "completeness" and not _by_rule(own.criterion_args):
        arguments = {**own.criterion_args, "cache": ""}
        check_arguments(CompletenessScorer, arguments, what=f"{_OPTION}_args")
        if arguments.get("checker") == "llm":
            given = arguments.pop("checker_args", None) or {}
            check_arguments(llm_checker, given, what=f"{_OPTION}_args.checker_args")
            arguments["checker"] = construct(check_llm_checker, given, what=f"{_OPTION}_args.checker_args")
            construct(CompletenessScorer, arguments, what=_OPTION)
        return
    close_all(load_criterion(config, core))


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


class LegalFormat:
    """1 where the environment finds the format of the episode legal, else 0."""

    needs_answer = False

    def __call__(self, finished: Sequence[Finished]) -> list[float | Failed]:
        return [float(is_legal(one)) for one in finished]
