"""Answers are scored like the official scorers, and numbers, signs and scripts survive the other normaliser."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs.datasets import load_questions
from turntree.envs.metrics import Normalizer, exact_match, f1_score, normalize_answer, sub_exact_match
from turntree.errors import ConfigError, DataError

NORMALIZERS: list[Normalizer] = ["squad", "unicode", "zh"]


def golden_pairs(golden_dir: Path) -> list[dict[str, Any]]:
    pairs: list[dict[str, Any]] = json.loads((golden_dir / "qa_em.json").read_text(encoding="utf-8"))["pairs"]
    return pairs


def test_golden_pairs_match_the_official_scorers(golden_dir: Path) -> None:
    for pair in golden_pairs(golden_dir):
        pred, golds = pair["pred"], pair["golds"]
        assert normalize_answer(pred) == pair["normalized_pred"], pair
        assert [normalize_answer(gold) for gold in golds] == pair["normalized_golds"], pair
        assert exact_match(pred, golds) == pair["em"], pair
        assert sub_exact_match(pred, golds) == pair["sub_em"], pair
        assert f1_score(pred, golds) == pytest.approx(pair["f1"], abs=1e-9), pair


def test_golden_pairs_f1_of_each_gold(golden_dir: Path) -> None:
    for pair in golden_pairs(golden_dir):
        for gold, (f1, _, _) in zip(pair["golds"], pair["transcribed"]["hotpot_f1_p_r"], strict=True):
            assert f1_score(pair["pred"], gold) == pytest.approx(f1, abs=1e-9), pair


@pytest.mark.parametrize("gold", ["A", "The The", "the"])
def test_a_gold_of_articles_only_does_not_match_everything(gold: str) -> None:
    for normalizer in NORMALIZERS:
        for score in (exact_match, sub_exact_match, f1_score):
            assert score("zzz", [gold], normalizer=normalizer) == 0
            assert score("banana", [gold], normalizer=normalizer) == 0
            assert score(gold, [gold], normalizer=normalizer) == 1


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("3.5", "35", False),
        ("-5", "5", False),
        ("−5", "-5", True),
        ("-5", "－5", True),
        ("1.0", "1.0", True),
        ("1,234,567", "1234567", True),
        ("1,5", "15", False),
        (".5", "0.5", True),
        (".5", "5", False),
        ("5.", "5", True),
        ("+5", "5", True),
        ("$-5", "5", False),
        ("-$5", "-$5", True),
        ("2012–13", "2012-13", True),
        ("2012-13", "201213", False),
        ("3:30", "330", False),
        ("１９８４", "1984", True),
        ("ＡＢＣ", "abc", True),
        ("straße", "STRASSE", True),
        ("红楼梦。", "《红楼梦》", True),
        ("红 楼 梦", "红楼梦", True),
        ("北京市", "北京", False),
        ("约-5度", "约5度", False),
        ("the Eiffel Tower!", "Eiffel tower", True),
        ("well-known", "wellknown", True),
        ("!!!", "!!!", True),
        ("!!!", "zzz", False),
        ("", "the", False),
    ],
)
def test_unicode_keeps_what_differs_apart(prediction: str, gold: str, equal: bool) -> None:
    assert exact_match(prediction, gold, normalizer="unicode") == equal


def test_unicode_scores_chinese_by_character() -> None:
    assert f1_score("北京市", "北京", normalizer="unicode") == pytest.approx(0.8)
    assert sub_exact_match("北京市", "北京", normalizer="unicode") == 1
    assert sub_exact_match("3.5", "5", normalizer="unicode") == 0


def test_numbers_as_golds_and_missing_answers() -> None:
    golds: Any = [1.0]
    assert exact_match("1.0", golds) == 1
    assert exact_match("1.0", golds, normalizer="unicode") == 1
    assert exact_match(None, ["x"]) == f1_score(None, ["x"]) == sub_exact_match(None, ["x"]) == 0


@pytest.mark.parametrize("metric", [exact_match, f1_score, sub_exact_match])
@pytest.mark.parametrize(
    ("prediction", "golds", "words"),
    [
        ("x", None, "expected gold answers.*None"),
        ("x", 5, "expected gold answers.*5"),
        ("x", {"target": "x"}, "expected gold answers.*target"),
        ("x", [], "at least one gold answer"),
        ("x", ["x", None], "at least one gold answer"),
        (None, [], "at least one gold answer"),
        (5, ["5"], "expected a text as prediction.*5"),
        (["x"], ["x"], "expected a text as prediction"),
    ],
)
def test_what_cannot_be_compared_is_refused(metric: Any, prediction: Any, golds: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        metric(prediction, golds)


def test_an_unknown_normalizer_is_named() -> None:
    wrong: Any = "sqad"
    with pytest.raises(ConfigError, match="did you mean 'squad'"):
        exact_match("x", "x", normalizer=wrong)


@given(text=st.text(), normalizer=st.sampled_from(get_args(Normalizer)))
def test_law_9_a_text_equals_itself_and_scores_are_bounded(text: str, normalizer: Normalizer) -> None:
    once = normalize_answer(text, normalizer=normalizer)
    if normalizer in ("unicode", "zh"):
        assert exact_match(text, unicodedata.normalize("NFD", text), normalizer=normalizer) == 1
    assert exact_match(text, text, normalizer=normalizer) == 1
    assert 0 <= f1_score(text, once, normalizer=normalizer) <= 1


@given(left=st.decimals(allow_nan=False, allow_infinity=False, places=2), right=st.integers(-(10**6), 10**6))
def test_law_9_different_numbers_stay_different(left: Any, right: int) -> None:
    equal = exact_match(f"{left:f}", str(right), normalizer="unicode")
    assert equal == (f"{left:f}" == str(right))
    assert exact_match(f"{right}", f"{right:,}", normalizer="unicode") == 1


@given(text=st.text(alphabet=st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=1))
def test_law_9_chinese_is_not_destroyed(text: str) -> None:
    assert normalize_answer(text, normalizer="unicode").replace(" ", "") == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize(
    ("text", "squad", "unicode", "zh", "cmrc"),
    [
        ("1,.5", "15", "1 0.5", "1 0.5", "1,.5"),
        ("1,-1", "11", "1 -1", "1 -1", "1,1"),
        ("--5", "5", "-5", "-5", "5"),
        ("-.5", "5", "-0.5", "-0.5", ".5"),
        ("$.5", "5", "0.5", "0.5", "$.5"),
        ("-$5", "5", "-5", "-5", "$5"),
        ("a.5", "a5", "a5", "a5", "a.5"),
        ("x−5", "x−5", "x5", "x5", "x−5"),
        ("约-5", "约5", "约 -5", "约 -5", "约5"),
        ("- 5", "5", "5", "5", " 5"),
        ("5-", "5", "5", "5", "5"),
        ("5–6", "5–6", "5 6", "5 6", "5–6"),
        ("5.5.5", "555", "5.5.5", "5.5.5", "5.5.5"),
        ("1,234,567.5", "12345675", "1234567.5", "1234567.5", "1,234,567.5"),
        ("12,34", "1234", "12 34", "12 34", "12,34"),
        ("１，２３４", "１，２３４", "1234", "1234", "１２３４"),
        ("The  U.S.A.", "usa", "usa", "the usa", "the  u.s.a."),
        ("the an a", "", "the an a", "the an a", "the an a"),
        (" Ab，C ", "ab，c", "abc", "abc", "abc"),
        ("五月 - 5", "五月 5", "五 月 5", "五 月 5", "五月  5"),
    ],
)
def test_the_form_that_each_normalizer_compares(text: str, squad: str, unicode: str, zh: str, cmrc: str) -> None:
    wanted = {"squad": squad, "unicode": unicode, "zh": zh, "cmrc": cmrc}
    assert {name: normalize_answer(text, normalizer=name) for name in get_args(Normalizer)} == wanted
    assert normalize_answer(text) == squad


@pytest.mark.parametrize("metric", [exact_match, sub_exact_match, f1_score])
def test_metrics_take_the_squad_forms_unless_told_otherwise(metric: Any) -> None:
    assert metric("3.5", "35") == 1
    assert metric("3.5", "35", normalizer="unicode") == 0
    assert metric("a", ["b", "c", "A."], normalizer="cmrc") < 1  # an English full stop is none of its signs
    assert metric("a", ["b", "c", "A。"], normalizer="cmrc") == 1


def test_refusals_say_what_was_found() -> None:
    wrong: list[tuple[Any, Any, str]] = [
        (5, ["5"], "expected a text as prediction (None: no answer), found 5"),
        ("x", b"x", "expected gold answers as a text or a list of texts, found b'x'"),
        ("x", [], "expected at least one gold answer, each a text or a number, found []"),
    ]
    for prediction, golds, message in wrong:
        with pytest.raises(DataError) as refusal:
            f1_score(prediction, golds)
        assert str(refusal.value) == message
    long: Any = {"target": "x" * 200}
    with pytest.raises(DataError) as refusal:
        exact_match("x", long)
    assert len(str(refusal.value)) < 170


def test_f1_by_hand() -> None:
    assert f1_score("the cat sat", "cat sat down") == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert f1_score("x x y", "x y y") == pytest.approx(2 / 3)
    assert f1_score("x", ["y", "x z", "x"]) == 1.0
    assert f1_score("yes", "yes please") == f1_score("noanswer", "no answer") == 0.0
    assert f1_score("a", "the") == 0.0
    assert f1_score("the", "the") == 1.0
    assert sub_exact_match("the year 1984, they say", "1984") == 1.0
    assert sub_exact_match("", "1984") == 0.0


# -- Chinese -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("《红楼梦》。", "红楼梦", True),
        ("「红楼梦」", "『红楼梦』！", True),
        ("红　楼 梦", "红楼梦", True),
        ("A股", "股", False),
        ("Ａ股", "a股", True),
        ("一百二十", "120", True),
        ("一百二十", "１２０", True),
        ("120年", "一百二十年", True),
        ("二〇二〇年", "2020年", True),
        ("二〇二〇年五月三日", "2020年5月3日", True),
        ("2020 年 5 月", "2020年5月", True),
        ("2020年5月", "2020年", False),
        ("一", "1", False),
        ("三四", "34", False),
        ("1,234,567", "1234567", True),
        ("3.5", "35", False),
        ("-5", "5", False),
        ("卡洛·贝里", "卡洛贝里", True),
        ("OpenAI公司", "openai 公司", True),
        ("中國", "中国", False),
        ("the", "a", False),
    ],
)
def test_zh_equalities(prediction: str, gold: str, equal: bool) -> None:
    assert exact_match(prediction, gold, normalizer="zh") == equal
    assert exact_match(gold, prediction, normalizer="zh") == equal


def test_zh_scores_by_character_and_by_latin_word_and_number() -> None:
    assert normalize_answer("iPhone 15手机，2020年5月", normalizer="zh") == "iphone 15 手 机 2020 年 5 月"
    assert f1_score("北京市", "北京", normalizer="zh") == pytest.approx(0.8)
    assert f1_score("OpenAI公司", "Open公司", normalizer="zh") == pytest.approx(2 / 3)
    assert f1_score("一百二十五年", "125年", normalizer="zh") == 1
    assert sub_exact_match("答案是一百二十五人。", "125人", normalizer="zh") == 1
    assert sub_exact_match("3.5", "5", normalizer="zh") == 0


@pytest.mark.parametrize(("prediction", "gold"), [("是否", "是"), ("不是", "是"), ("否定", "否"), ("是", "否")])
def test_zh_yes_and_no_are_all_or_nothing(prediction: str, gold: str) -> None:
    assert f1_score(prediction, gold, normalizer="zh") == 0


@given(text=st.text(alphabet=st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=1))
def test_law_9_zh_destroys_no_chinese(text: str) -> None:
    """Every character stays, in order, but for those of numbers."""
    numerals = "〇零一二两三四五六七八九十百千万亿"
    kept = [c for c in normalize_answer(text, normalizer="zh") if not c.isspace() and not c.isascii()]
    folded = unicodedata.normalize("NFKC", text)
    assert [c for c in kept if c not in numerals] == [c for c in folded if c not in numerals]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["年", "人", "", "%"]))
def test_law_9_zh_keeps_numbers_apart(left: int, right: int, unit: str) -> None:
    assert exact_match(f"{left}{unit}", f"{right}{unit}", normalizer="zh") == (left == right)


# Worked out by hand from data/cmrc2018_evaluate.py (v5): (prediction, gold, EM, F1).
CMRC = [
    ("《红楼梦》", "红楼梦", 1, 1.0),
    ("北京市", "北京", 0, 0.8),
    ("光荣和ω-force", "光荣和ω-force", 1, 1.0),
    ("京北", "北京", 0, 0.5),
    ("张三、李四", "张三李四", 1, 1.0),
    ("张三和李四", "张三李四", 0, 4 / 9),
    ("ABC公司", "abc公司", 1, 1.0),
    ("120", "一百二十", 0, 0.0),
    ("他（张三）", "他张三", 1, 1.0),
    ("他(张三)", "他张三", 0, 4 / 8),
    ("1984", "1984年", 0, 2 / 3),
]


@pytest.mark.parametrize(("prediction", "gold", "em", "f1"), CMRC)
def test_cmrc_scores_as_the_official_script(prediction: str, gold: str, em: int, f1: float) -> None:
    assert exact_match(prediction, gold, normalizer="cmrc") == em
    assert f1_score(prediction, gold, normalizer="cmrc") == pytest.approx(f1)


@pytest.mark.parametrize("normalizer", ["zh", "unicode"])
def test_chinese_simpleqa_answers_equal_themselves_with_punctuation(shared_data: Path, normalizer: Normalizer) -> None:
    for question in load_questions(shared_data / "real" / "chinese_simpleqa" / "chinese_simpleqa.jsonl")[:500]:
        gold = question.golden_answers[0]
        assert exact_match(f"“{gold}”。", question.golden_answers, normalizer=normalizer) == 1, gold
        assert f1_score(f"答案：{gold}", question.golden_answers, normalizer=normalizer) > 0
