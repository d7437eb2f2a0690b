"""Report D01: a gold answer of articles alone was normalised to nothing, and every prediction contains nothing."""

from __future__ import annotations

import pytest

from turntree.envs.metrics import Normalizer, exact_match, f1_score, sub_exact_match

SCORES = (exact_match, sub_exact_match, f1_score)


@pytest.mark.parametrize("normalizer", ["squad", "unicode", "zh", "cmrc"])
@pytest.mark.parametrize("gold", ["A", "The The", "an", "!!!", "...", "The"])
def test_d01_only_the_answer_itself_is_right(gold: str, normalizer: Normalizer) -> None:
    for score in SCORES:
        assert score("zzz", [gold], normalizer=normalizer) == 0.0, score
        if normalizer != "squad":  # whose published scripts give 0 for words that they cannot see
            assert score(gold, [gold], normalizer=normalizer) == 1.0, score
            assert score("", [gold], normalizer=normalizer) == 0.0, score
    assert exact_match(gold, [gold], normalizer=normalizer) == 1.0
