"""Rejection sampling: laws of the selection, ties, and what speaks against a trajectory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.coldstart.conftest import trajectory
from turntree.agents.scorer import Failed
from turntree.trainers.coldstart import Key, Statistics, best_of, judge
from turntree.trainers.coldstart.select import Judged

SCORES = st.one_of(st.integers(-2, 2).map(float), st.just(Failed("verdict", "none")))


@st.composite
def judged_samples(draw: Any, size: int | None = None) -> list[Judged]:
    count = draw(st.integers(0, 7)) if size is None else size
    found = []
    for sample in range(count):
        text = draw(st.sampled_from("abc"))
        calls = [("search", f"{i}") for i in range(draw(st.integers(0, 2)))]
        played = trajectory(*[text] * (len(calls) + 1), sample=sample, calls=calls, tokens=draw(st.integers(1, 3)))
        objections = draw(st.sampled_from([(), (), (("length", "too long"),)]))
        found.append(Judged(played, draw(SCORES), {}, objections))
    return found


@given(judged_samples(), st.integers(1, 3), st.sampled_from([None, 0.0, 1.0]), st.integers(0, 2))
def test_kept_and_dropped_are_all_that_was_generated(
    judged: list[Judged], keep: int, min_score: float | None, failed: int
) -> None:
    failures = {Key("q", len(judged) + i): Failed("EngineError", "gone") for i in range(failed)}
    verdicts = best_of(judged, keep=keep, min_score=min_score, failures=failures)
    assert [v.key.sample for v in verdicts] == list(range(len(judged) + failed))
    assert all(v.reason for v in verdicts)
    kept = [v for v in verdicts if v.kept]
    assert len(kept) <= keep
    assert all(v.score is not None and (min_score is None or v.score >= min_score) for v in kept)
    assert all(not v.judged.objections for v in kept if v.judged)
    eligible = [v for v in verdicts if v.rank is not None]
    assert bool(kept) == bool(eligible)
    assert sorted(v.rank for v in eligible if v.rank) == list(range(1, len(eligible) + 1))
    texts = [tuple(t.text for t in v.judged.played.finished.turns) for v in kept if v.judged]
    assert len(set(texts)) == len(texts)
    statistics = Statistics("em", "em", len(judged))
    statistics.add("q", verdicts)
    assert statistics.generated == len(judged) + failed
    assert statistics.kept == len(kept)
    assert statistics.failed == failed
    assert statistics.lines()


@given(judged_samples(size=5), st.sampled_from([None, 0.0, 1.0]))
def test_the_best_of_more_samples_is_never_worse(judged: list[Judged], min_score: float | None) -> None:
    best = [-99.0]
    for n in range(1, len(judged) + 1):
        kept = [v.score for v in best_of(judged[:n], keep=1, min_score=min_score) if v.kept]
        best.append(kept[0] if kept and kept[0] is not None else -99.0)
    assert best == sorted(best)


@given(judged_samples(size=6), st.randoms(use_true_random=False))
def test_the_order_in_which_they_ended_does_not_matter(judged: list[Judged], random: Any) -> None:
    mixed = list(judged)
    random.shuffle(mixed)
    assert best_of(mixed, keep=2) == best_of(judged, keep=2)


def ranks(*judged: Judged) -> list[int]:
    verdicts = sorted(best_of(judged, keep=1), key=lambda v: v.rank or 0)
    return [v.key.sample for v in verdicts]


def test_ties_go_to_fewest_calls_then_fewest_tokens_then_the_first() -> None:
    one, two = [("search", "a")], [("search", "a"), ("search", "b")]
    made = [
        Judged(trajectory("a", "b", "c", sample=0, calls=two, tokens=5), 1.0),
        Judged(trajectory("a", "c", sample=1, calls=one, tokens=9), 1.0),
        Judged(trajectory("b", "c", sample=2, calls=one, tokens=8), 1.0),
        Judged(trajectory("c", "c", sample=3, calls=one, tokens=8), 1.0),
        Judged(trajectory("d", sample=4, tokens=99), 0.5),
    ]
    assert ranks(*made) == [2, 3, 1, 0, 4]


def test_the_first_reason_is_counted_and_all_are_told() -> None:
    one = Judged(trajectory("a"), 1.0, {}, (("language", "Russian"), ("length", "too long")))
    (verdict,) = best_of([one], keep=1, min_score=2.0)
    assert (verdict.reason, verdict.detail) == ("language", "language: Russian; length: too long")
    assert (verdict.score, verdict.rank) == (1.0, None), "the score is known all the same"


def test_a_criterion_that_fails_is_no_zero() -> None:
    played = [trajectory("a", sample=0, reward=1.0), trajectory("b", sample=1, reward=2.0)]

    def scorer(finished: Any) -> list[float | Failed]:
        return [Failed("verdict", "nothing said") if f.reward > 1 else f.reward for f in finished]

    judged = judge(played, criterion=scorer, filters={})
    verdicts = best_of(judged, keep=2, min_score=0.0)
    assert [(v.reason, v.score) for v in verdicts] == [("kept", 1.0), ("unscored", None)]
    assert verdicts[1].detail == "verdict: nothing said"
    assert judge(played, criterion=None, filters={})[1].score == pytest.approx(2.0), "the environment's own reward"
