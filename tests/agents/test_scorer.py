"""What a scorer may return: a number, a number with its parts, or a failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from turntree.agents.scorer import AnswerScorer, Failed, Finished, Judged, score
from turntree.envs import Question
from turntree.errors import ConfigError

ONE = Finished(Question("q", "?", ("x",)), "?", (), "answered", "x", 0.5)


def scored(*outcomes: float | Judged | Failed) -> list[tuple[float | str, dict[str, float]]]:
    def scorer(finished: Sequence[Finished]) -> list[float | Judged | Failed]:
        assert len(finished) == len(outcomes)
        return list(outcomes)

    found = score([ONE] * len(outcomes), scorer=scorer)
    return [(s.reward.kind if isinstance(s.reward, Failed) else s.reward, dict(s.parts)) for s in found]


def test_plain_rewards_and_parts_and_failures_keep_their_order() -> None:
    outcomes = (1.0, Judged(0.5, {"a": 0.7, "b": -0.2}), Failed("lost"), Judged(-1))
    assert scored(*outcomes) == [(1.0, {}), (0.5, {"a": 0.7, "b": -0.2}), ("lost", {}), (-1.0, {})]


@pytest.mark.parametrize("outcome", [math.nan, Judged(math.inf), Judged(0.0, {"a": math.nan})])
def test_what_is_not_finite_is_a_failure(outcome: float | Judged) -> None:
    assert scored(outcome)[0][0] == "non_finite_reward"


def test_without_a_scorer_the_environment_decides() -> None:
    (found,) = score([ONE], scorer=None)
    assert (found.reward, dict(found.parts)) == (0.5, {})


def test_a_scorer_that_loses_one_is_named() -> None:
    with pytest.raises(ConfigError, match="was given 2 trajectories and returned 1"):
        score([ONE, ONE], scorer=lambda finished: [1.0])


ODD: list[Any] = [None, "good", [1.0]]


@pytest.mark.parametrize("outcome", [*ODD, *(Judged(odd) for odd in ODD), Judged(1.0, {"a": ODD[0]})])
def test_a_scorer_that_returns_no_number_is_told(outcome: Any) -> None:
    with pytest.raises(ConfigError, match=r"the scorer returned .*expected a number"):
        score([ONE], scorer=lambda finished: [outcome])


@pytest.mark.parametrize("written", [[None, ONE], [ONE, "Bo"], ["Bo", "Bo"]])
def test_a_finisher_that_returns_no_trajectory_is_told(written: Any) -> None:
    """Rewards would go to the wrong trajectories."""
    with pytest.raises(ConfigError, match=r"the finisher returned .*expected a Finished or Failed"):
        score([ONE, ONE], scorer=None, finisher=lambda finished: written)


def test_answers_are_compared_in_the_language_of_the_question() -> None:
    chinese = Finished(Question("q", "谁写的？", ("《红楼梦》",)), "?", (), "answered", "红楼梦。", 0.0)
    assert AnswerScorer()([chinese, ONE]) == [1.0, 1.0]
    assert AnswerScorer(lambda answer, golds: float(answer in golds))([chinese, ONE]) == [0.0, 1.0]
