"""Report D03: one text in two Unicode forms counted as two answers."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.metrics import exact_match, f1_score
from turntree.trainers.scoring import score


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        ("Café", unicodedata.normalize("NFD", "Café")),
        ("1984", "１９８４"),
        ("Straße", "STRASSE"),
        ("ﬁlm", "film"),
        ("Å", "Å"),
    ],
)
def test_d03_equal_under_the_unicode_normaliser(gold: str, said: str) -> None:
    assert exact_match(said, [gold], normalizer="unicode") == 1.0
    assert f1_score(said, [gold], normalizer="unicode") == 1.0
    assert exact_match(gold, [said], normalizer="unicode") == 1.0


def test_d03_the_official_normaliser_stays_as_published() -> None:
    assert exact_match(unicodedata.normalize("NFD", "Café"), ["Café"], normalizer="squad") == 0.0


def test_d03_the_choice_is_in_the_result(make_config: Any, bed: Any, tmp_path: Path) -> None:
    for normalizer in ("squad", "unicode"):
        config = make_config(f"env.test_questions={bed.world}", "eval.limit=1", f"env.normalizer={normalizer}")
        result = score(config, tmp_path / normalizer)
        assert result["passport"]["scoring"]["normalizer"].startswith(f"{normalizer}/")
