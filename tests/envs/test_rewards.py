"""Rule rewards against the published numbers, and where they deliberately differ."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turntree.envs import Outcome, TagGrammar
from turntree.envs.rewards import REWARDS, Reward, atpo, em, evaluate_reward, f1, load_reward, reward_name, tree_grpo
from turntree.errors import ConfigError


def outcome(answer: str | None, golds: Sequence[str] = ("Paris",), *, valid: bool = True, **more: Any) -> Outcome:
    return Outcome(answer=answer, golden_answers=tuple(golds), format_valid=valid, **more)


def fixture(golden_dir: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((golden_dir / "qa_em.json").read_text(encoding="utf-8"))
    return data


def test_golden_tree_grpo_table(golden_dir: Path) -> None:
    data = fixture(golden_dir)
    params = data["tree_grpo_score_params"]
    for case in data["format_scores"]:
        blocks = tuple(re.findall(r"<information>(.*?)</information>", case["body"], re.DOTALL))
        end = outcome(case["extracted"], valid=case["valid"], observations=blocks)
        rule = functools.partial(
            tree_grpo, structure=params["structure_format_score"], final=params["final_format_score"]
        )
        assert rule(end, retrieval=params["retrieval_score"]) == pytest.approx(case["score"]), case
        assert rule(end, retrieval=0.1) == pytest.approx(case["score_with_retrieval_0p1"]), case


def test_golden_atpo_scores(golden_dir: Path) -> None:
    for case in fixture(golden_dir)["atpo_scores"]:
        boxed = re.search(r"\\boxed\{(.*?)\}", case["body"])
        tools = frozenset(tool for tool in ("search", "python") if f"</{tool}>" in case["body"])
        end = outcome(boxed[1] if boxed else None, valid="bad format" not in case["reason"], tools_used=tools)
        assert atpo(end) == pytest.approx(case["score"]), case


def test_golden_web_f1_scores_are_raised_to_their_floor(golden_dir: Path) -> None:
    for case in fixture(golden_dir)["web_f1_scores"]["cases"]:
        grammar = TagGrammar()
        valid = grammar.validity_of_text(case["body"]).valid
        action = grammar.parse(case["body"].rpartition("</information>")[2]).action
        end = outcome(action.argument if action.kind == "answer" else None, [case["gold"]], valid=valid)
        if end.answer is None:
            assert tree_grpo(end, metric="f1") == (0.2 if valid else 0), case
            continue
        published = (end.f1 - (0 if valid else 0.2)) if end.f1 else (0.2 if valid else 0)
        assert published == pytest.approx(case["score"]), case
        assert tree_grpo(end, metric="f1") == pytest.approx(max(published, 0.2 if valid else 0.1)), case


@pytest.mark.parametrize("valid", [True, False])
def test_tree_grpo_f1_never_falls_below_a_wrong_answer(valid: bool) -> None:
    golds = [" ".join(f"w{i}" for i in range(40))]
    wrong = tree_grpo(outcome("x", golds, valid=valid), metric="f1")
    scores = [
        tree_grpo(outcome(" ".join(f"w{i}" for i in range(n)), golds, valid=valid), metric="f1") for n in range(1, 41)
    ]
    assert scores == sorted(scores)
    assert scores[0] >= wrong
    assert scores[-1] == (1.0 if valid else 0.8)


def test_a_gold_that_normalises_to_nothing_is_not_retrieved_everywhere() -> None:
    assert tree_grpo(outcome("zzz", ["A"], observations=("some text",)), retrieval=0.1) == 0.2


def test_atpo_levels() -> None:
    assert [atpo(outcome(a)) for a in (None, "Rome", "Paris", "Paris, France")] == [-1, 0, 1, 0]
    assert atpo(outcome("Paris", valid=False)) == -1
    both = frozenset({"search", "python"})
    assert atpo(outcome("Paris", tools_used=both)) == pytest.approx(1.1)


def test_em_and_f1_follow_the_normaliser() -> None:
    assert em(outcome("3.5", ["35"])) == 1
    assert em(outcome("3.5", ["35"], normalizer="unicode")) == 0
    assert f1(outcome("北京市", ["北京"], normalizer="unicode")) == pytest.approx(0.8)
    assert f1(outcome(None)) == em(outcome(None)) == 0


def test_rewards_are_given_by_name_callable_or_import_path() -> None:
    assert load_reward("tree_grpo") is tree_grpo
    assert load_reward("turntree.envs.rewards:f1") is f1
    assert load_reward(em) is em
    with pytest.raises(ConfigError, match=r"unknown reward 'tree_gpo' \(did you mean 'tree_grpo'\?\)"):
        load_reward("tree_gpo")
    with pytest.raises(ConfigError, match="no 'f2'"):
        load_reward("turntree.envs.rewards:f2")
    with pytest.raises(ConfigError, match="cannot import module 'no_such_package'"):
        load_reward("no_such_package:f")
    with pytest.raises(ConfigError, match="expected a function"):
        load_reward("turntree.envs.rewards:REWARDS")


def test_names_tell_parameters_apart() -> None:
    half = functools.partial(tree_grpo, structure=0.5)
    assert reward_name(half) == "turntree.envs.rewards:tree_grpo(structure=0.5)"
    rules: list[Reward] = [*REWARDS.values(), half]
    assert len({reward_name(rule) for rule in rules}) == 5

    class Judge:
        def __call__(self, end: Outcome) -> float:
            return 0.0

    assert "0x" not in reward_name(Judge())


def test_a_reward_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="gave nan"):
        evaluate_reward(lambda end: float("nan"), outcome("x"))
