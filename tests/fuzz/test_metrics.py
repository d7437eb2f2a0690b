"""Any two texts are scored: within bounds, the same from both sides, and by forms that are forms of themselves."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any, Literal, get_args

import pytest

from tests.fuzz.material import Tape, fuzz, json_like, seconds, text_of
from turntree.envs.language import normalizer_for
from turntree.envs.metrics import Normalizer, exact_match, f1_score, normalize_answer, sub_exact_match
from turntree.envs.numerals import arabic
from turntree.envs.rewards import REWARDS, Outcome, evaluate_reward
from turntree.envs.scorers import SCORERS
from turntree.envs.task import Question
from turntree.errors import TurnTreeError

NORMALIZERS: tuple[Normalizer, ...] = get_args(Normalizer)
OWN: tuple[Normalizer, ...] = tuple(
    name for name in NORMALIZERS if name != "cmrc"
)  # that scorer strips white space before it deletes signs
PIECES = (
    "a", "an", "the", "The", "A.n", " ", "yes", "no", "noanswer", "是", "否", "1", "12", "234", ",", ".", "-",
    "−", "$", "%", "3.5",
    "１２", "一百二十", "二〇二〇", "年", "月", "日", "五", "十", "零", "万", "亿", "两", "Paris", "New York",
    "北京", "の", "ß", "İ", "ﬁ",
    "\u0301", "\u0338", "(", ")", "'s", "“", "”", "—", "½", "㍿", "①", "…", "\u00b4", "_", "^", "`",
)  # fmt: skip


@fuzz("metrics", share=20)
def test_a_normal_form_is_its_own(tape: Tape) -> None:
    normalizer, text = tape.pick(OWN), text_of(tape, PIECES)
    form = normalize_answer(text, normalizer=normalizer)
    assert normalize_answer(form, normalizer=normalizer) == form


@fuzz("metrics", share=10)
def test_the_same_text_in_other_unicode_forms_is_the_same_answer(tape: Tape) -> None:
    normalizer: Normalizer = tape.pick(("unicode", "zh"))
    form: Literal["NFC", "NFD", "NFKC", "NFKD"] = tape.pick(("NFC", "NFD", "NFKC", "NFKD"))
    text = text_of(tape, PIECES)
    assert normalize_answer(unicodedata.normalize(form, text), normalizer=normalizer) == normalize_answer(
        text, normalizer=normalizer
    )


@fuzz("metrics", share=20)
def test_scores_are_bounded_symmetric_and_in_order(tape: Tape) -> None:
    normalizer = tape.pick(NORMALIZERS)
    left, right = text_of(tape.some(20), PIECES), text_of(tape.some(20), PIECES)
    em, f1, sub = (rule(left, right, normalizer=normalizer) for rule in (exact_match, f1_score, sub_exact_match))
    assert em in (0.0, 1.0)
    assert sub in (0.0, 1.0)
    assert 0.0 <= f1 <= 1.0
    assert exact_match(right, left, normalizer=normalizer) == em
    assert math.isclose(f1_score(right, left, normalizer=normalizer), f1, abs_tol=1e-12)
    assert sub >= em
    if em and normalize_answer(left, normalizer=normalizer):
        assert f1 == 1.0 or normalizer == "cmrc"
    more = [right, text_of(tape.some(8), PIECES)]
    assert exact_match(left, more, normalizer=normalizer) >= em
    assert f1_score(left, more, normalizer=normalizer) >= f1
    assert f1_score(None, more, normalizer=normalizer) == exact_match(None, more, normalizer=normalizer) == 0.0


@fuzz("metrics", share=10)
def test_every_answer_equals_itself(tape: Tape) -> None:
    normalizer, text = tape.pick(NORMALIZERS), text_of(tape, PIECES)
    assert exact_match(text, text, normalizer=normalizer) == sub_exact_match(text, text, normalizer=normalizer) == 1.0


@fuzz("metrics", share=10)
def test_published_scorers_and_rewards_take_any_answer(tape: Tape) -> None:
    answer, golds = (
        text_of(tape.some(20), PIECES),
        tuple(text_of(tape.some(6), PIECES) for _ in range(1 + tape.byte() % 3)),
    )
    for numbers in (scorer(answer, golds) for scorer in SCORERS.values()):
        assert all(0.0 <= value <= 1.0 for value in numbers.values())
    outcome = Outcome(
        None if tape.byte() % 4 == 3 else answer,
        golds,
        bool(tape.byte() % 2),
        observations=(text_of(tape.some(12), PIECES),),
        tools_used=frozenset(("search", "python")[: tape.byte() % 3]),
        normalizer=tape.pick(NORMALIZERS),
    )
    for reward in REWARDS.values():
        assert -1.0 <= evaluate_reward(reward, outcome) <= 1.1


@fuzz("metrics", share=10)
def test_numerals_change_only_runs_of_numerals(tape: Tape) -> None:
    text = text_of(tape, PIECES)
    signs = "[〇零一二三四五六七八九两十百千万亿0-9]+"
    assert re.sub(signs, "", arabic(text)) == re.sub(signs, "", text)


@fuzz("metrics", share=3)
def test_anything_else_is_a_typed_error_or_a_score(tape: Tape) -> None:
    prediction, golds = json_like(tape, texts=PIECES), json_like(tape, texts=PIECES)
    for rule in (exact_match, f1_score, sub_exact_match):
        try:
            assert 0.0 <= rule(prediction, golds, normalizer=tape.pick(NORMALIZERS)) <= 1.0
        except TurnTreeError:
            continue


@fuzz("metrics", share=3)
def test_the_language_of_any_questions(tape: Tape) -> None:
    questions = [Question("q", text_of(tape.some(12), PIECES), (text_of(tape.some(6), PIECES),)) for _ in range(3)]
    assert normalizer_for(questions) in NORMALIZERS


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", ["a", "a ", "the ", "1,234", "1,", ".", "-", "e\u0301", "二〇", "一百", "五月", "中", "ß", "( ", "ab,"]
)
def test_answers_of_a_megabyte_take_linear_time(pattern: str) -> None:
    def scores(size: int) -> Any:
        text = pattern * (size // len(pattern))

        def run() -> None:
            for normalizer in NORMALIZERS:
                f1_score(text, "Paris 中", normalizer=normalizer)
                sub_exact_match(text, "Paris 中", normalizer=normalizer)
            for scorer in SCORERS.values():
                scorer(text, ["Paris 中"])

        return run

    bound = 9 * max(seconds(scores(250_000)), 0.02)
    assert seconds(scores(1_000_000), enough=bound) < bound
