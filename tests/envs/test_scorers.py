"""Published scorers by name give what their own code gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs.metrics import exact_match, f1_score
from turntree.envs.scorers import SCORERS, cover, hotpotqa, load_scorer, search_r1, squad
from turntree.errors import ConfigError


def pairs(golden_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((golden_dir / "qa_em.json").read_text(encoding="utf-8"))["pairs"]
    return found


def test_search_r1_on_the_golden_pairs(golden_dir: Path) -> None:
    for pair in pairs(golden_dir):
        found = search_r1(pair["pred"], pair["golds"])
        assert (found["em"], found["sub_em"]) == (pair["em"], pair["sub_em"]), pair


def test_hotpotqa_and_cover_on_the_golden_pairs(golden_dir: Path) -> None:
    for pair in pairs(golden_dir):
        facts = pair["transcribed"]
        for gold, three, covered in zip(pair["golds"], facts["hotpot_f1_p_r"], facts["cover_em_1"], strict=True):
            found = hotpotqa(pair["pred"], [gold])
            assert [found["f1"], found["precision"], found["recall"]] == pytest.approx(three, abs=1e-9), pair
            assert cover(pair["pred"], [gold])["em"] == covered, pair
        found = hotpotqa(pair["pred"], pair["golds"])
        assert (found["em"], found["f1"]) == pytest.approx((pair["em"], pair["f1"])), pair


def test_squad_has_no_rule_for_yes_and_no() -> None:
    assert squad("yes it is", ["yes"]) == {"em": 0.0, "f1": pytest.approx(0.5)}
    assert hotpotqa("yes it is", ["yes"])["f1"] == 0.0
    assert squad("the", ["a"]) == {"em": 1.0, "f1": 0.0}, "as evaluate-v1.1.py has it"


def test_numbers_that_the_official_normaliser_confuses() -> None:
    assert search_r1("3.5", ["35"])["em"] == squad("-5", ["5"])["em"] == 1.0
    assert SCORERS["unicode"]("3.5", ["35"])["em"] == SCORERS["unicode"]("-5", ["5"])["em"] == 0.0


def test_an_empty_gold_is_in_everything_for_search_r1_only() -> None:
    assert search_r1("zzz", ["The"])["sub_em"] == 1.0
    assert SCORERS["unicode"]("zzz", ["The"])["sub_em"] == 0.0


words = st.lists(st.sampled_from(["yes", "no", "the", "Paris", "3.5", "U.S.", "北京", "a b"]), min_size=1, max_size=4)


@given(prediction=words.map(" ".join), golds=st.lists(words.map(" ".join), min_size=1, max_size=3))
def test_scores_are_shares_and_more_golds_never_hurt(prediction: str, golds: list[str]) -> None:
    for name, scorer in SCORERS.items():
        found, fewer = scorer(prediction, golds), scorer(prediction, golds[:1])
        assert all(0.0 <= value <= 1.0 for value in found.values()), name
        assert all(found[key] >= fewer[key] for key in ("em", "f1", "sub_em") if key in found), name
    assert hotpotqa(prediction, golds)["em"] == exact_match(prediction, golds)
    assert hotpotqa(prediction, golds)["f1"] == pytest.approx(f1_score(prediction, golds)) or "the" in prediction


def test_unknown_scorers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.scorers.*hotpotqa"):
        load_scorer("hotpot_qa", what="eval.scorers")
