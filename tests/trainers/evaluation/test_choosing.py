"""pass@k is the unbiased estimator; choices look at no gold answer and depend on nothing but the rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.errors import ConfigError, DataError
from turntree.trainers.evaluation.choosing import choose, majority, pass_at_k, powers, within_tokens
from turntree.trainers.evaluation.rows import EvalRow
from turntree.trainers.evaluation.sampled import sample_summary, tree_summary


def row(prediction: str | None = "x", em: float = 0.0, *, id: str = "q", **facts: Any) -> EvalRow:
    values: dict[str, Any] = {
        "id": id, "question": "?", "golden_answers": ["y"], "prediction": prediction, "em": em, "f1": em, "sub_em": em,
        "reward": em, "success": None, "score": em, "status": "answered", "stop_reason": "answer",
        "format_valid": True, "turns": 1, "searches": 0, "generated_tokens": 10, "supporting_found": None,
        "hops": None, "type": None,
    }  # fmt: skip
    return EvalRow(**{**values, **facts})


@given(right=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_equals_all_subsets(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    subsets = list(itertools.combinations(right, k))
    brute = sum(any(s) for s in subsets) / len(subsets)
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(brute)


@pytest.mark.parametrize("bad", [(3, 4, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses_what_cannot_be(bad: tuple[int, int, int]) -> None:
    with pytest.raises(DataError, match="pass@k"):
        pass_at_k(*bad)


def test_powers() -> None:
    assert [powers(n) for n in (0, 1, 6, 8)] == [[], [1], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_majority_is_of_normalised_answers() -> None:
    rows = [row("Paris"), row("Rome"), row("the paris."), row(None), row("rome", status="failed")]
    assert majority(rows) == 0
    tied = [
        row("Rome", logprob=-3.0),
        row("Paris", logprob=-0.5),
        row("paris", logprob=-0.4),
        row("rome", logprob=-2.0),
    ]
    assert majority(tied) == 2, "of equal counts the likelier answer, by its likeliest row"
    assert majority([row(None)]) is None


@given(st.lists(st.tuples(st.sampled_from([None, "a1", "b1", "c1"]), st.floats(-5, 0)), min_size=1, max_size=8))
def test_the_majority_has_the_most_votes_in_any_order(answers: list[tuple[str | None, float]]) -> None:
    rows = [row(answer, logprob=logprob) for answer, logprob in answers]
    place = majority(rows)
    given_answers = [answer for answer, _ in answers if answer]
    if place is None:
        assert not given_answers
        return
    most = max(map(given_answers.count, given_answers))
    assert given_answers.count(str(rows[place].prediction)) == most


def test_choices() -> None:
    rows = [
        row("a", logprob=-2.0, value=0.9, reward=0.1),
        row("b", logprob=-1.0, value=0.1, reward=0.2),
        row(None, logprob=-0.1, value=1.0, reward=0.9),
        row("c", status="failed", logprob=0.0, value=2.0, reward=None),
    ]
    assert [choose(rows, how) for how in ("logprob", "value", "scorer", "majority")] == [1, 0, 1, 1]
    assert choose(rows[3:], "logprob") is None
    assert choose(rows[2:3], "majority") == 0, "nothing else is there"
    with pytest.raises(ConfigError, match=r"eval\.value_head"):
        choose([row("a")], "value")


def test_samples_within_the_tokens_of_a_tree() -> None:
    rows = [row(str(i)) for i in range(4)]
    assert [len(within_tokens(rows, tokens)) for tokens in (5, 10, 29, 30, 400)] == [1, 1, 2, 3, 4]


def test_sample_summary() -> None:
    questions = [
        [row("y", 1.0), row("x"), row("y", 1.0), row("x")],
        [row("x"), row("x"), row("z"), row("y", 1.0)],
        [row("y", 1.0, status="failed"), row("y", 1.0), row("y", 1.0), row("y", 1.0)],
    ]
    found = sample_summary(questions, metric="em")
    assert found["avg@4"]["mean"] == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert found["pass@1"]["mean"] == pytest.approx(found["avg@4"]["mean"])
    assert found["pass@2"]["mean"] == pytest.approx((5 / 6 + 0.5 + 1.0) / 3)
    assert (found["pass@4"]["mean"], found["pass@4"]["n"]) == (1.0, 2), "a failed sample leaves three"
    assert (found["maj@4"]["mean"], found["maj@4"]["n"]) == (0.5, 2)
    assert found["failed"] == 1
    assert found["pass@2"]["low"] <= found["pass@2"]["mean"] <= found["pass@2"]["high"]


def test_trees_beside_samples_at_equal_leaves_and_tokens() -> None:
    """The tree took 25 tokens for three leaves, in which two samples of ten fit."""
    tree = [
        row("y", 1.0, logprob=-0.1, spent_tokens=25),
        row("x", logprob=-1.0, spent_tokens=25),
        row("x", logprob=-2.0),
    ]
    flat = [row("x", logprob=-1.0), row("x", logprob=-2.0), row("y", 1.0, logprob=-0.5), row("y", 1.0, logprob=-9.0)]
    found = tree_summary([tree], [flat], how=["logprob", "majority"], metric="em")
    assert [found[name]["leaves"] for name in ("tree", "best_of_leaves", "best_of_tokens")] == [3, 3, 2]
    assert [found[name]["generated_tokens"] for name in ("tree", "best_of_leaves", "best_of_tokens")] == [25, 30, 20]
    chosen = {name: found[name]["logprob"]["em"]["mean"] for name in ("tree", "best_of_leaves", "best_of_tokens")}
    assert chosen == {"tree": 1.0, "best_of_leaves": 1.0, "best_of_tokens": 0.0}
    assert found["tree"]["majority"]["em"]["mean"] == 0.0
    assert found["tree_minus_tokens"]["logprob"]["wins"] == 1
    assert found["best_of_tokens"]["any"]["mean"] == 0.0
    assert not math.isnan(found["tree"]["logprob"]["em"]["mean"])
