"""Comparisons: symmetric, paired by question, honest about what was made differently."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.commands import run_compare
from turntree.errors import ConfigError, DataError
from turntree.trainers.evaluate import write_rows
from turntree.trainers.evaluation.compare import Result, Side, compare, permutation_test, read_side
from turntree.trainers.evaluation.compare_text import csv_text, markdown, to_json
from turntree.trainers.evaluation.passport import Passport
from turntree.trainers.evaluation.rows import EvalRow


def row(id: str, em: float, **facts: Any) -> EvalRow:
    values: dict[str, Any] = {
        "id": id, "question": f"question {id} ?", "golden_answers": ["y"], "prediction": "y" if em else "n", "em": em,
        "f1": em, "sub_em": em, "reward": em, "success": None, "score": em, "status": "answered",
        "stop_reason": "answer", "format_valid": True, "turns": 2, "searches": 1, "generated_tokens": 10,
        "supporting_found": None, "hops": None, "type": None, "trajectory": [["<answer> n </answer>", "seen"]],
    }  # fmt: skip
    return EvalRow(**{**values, **facts})


def side(name: str, *scores: Sequence[float], passport: Passport | None = None) -> Side:
    """One result for each list of scores, a question each."""
    about = {"": passport or Passport(data={"ids": "i"})}
    results = [
        Result(Path(f"{name}-{i}"), {("", f"q{j}"): row(f"q{j}", s) for j, s in enumerate(one)}, {"": "em"}, about)
        for i, one in enumerate(scores)
    ]
    return Side(name, tuple(results))


scores = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=12
)


@settings(max_examples=30, deadline=None)
@given(scores)
def test_compare_turned_round_is_its_negative(pairs: list[tuple[float, float]]) -> None:
    one, two = side("a", [a for a, _ in pairs]), side("b", [b for _, b in pairs])
    (there, *_), (back, *_) = (
        compare(x, y, metrics=["em"], resamples=300).measured[""] for x, y in ((one, two), (two, one))
    )
    assert there.difference.mean == -back.difference.mean
    assert (there.difference.low, there.difference.high) == pytest.approx((-back.difference.high, -back.difference.low))
    assert there.p == back.p
    assert (there.wins, there.losses, there.ties) == (back.losses, back.wins, back.ties)
    assert there.difference.low <= there.difference.mean + 1e-12
    assert there.difference.mean <= there.difference.high + 1e-12


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), max_size=8))
def test_the_permutation_test_is_exact_for_few(differences: list[float]) -> None:
    data = np.asarray(differences)
    sums = [abs(float(np.dot(signs, data))) for signs in itertools.product((1, -1), repeat=len(data))]
    brute = np.mean([s >= abs(data.sum()) - 1e-9 for s in sums]) if len(data) else 1.0
    assert permutation_test(differences) == pytest.approx(float(brute))


def test_the_permutation_test_of_many() -> None:
    rng = np.random.default_rng(0)
    null = rng.choice([-1.0, 1.0], size=200).tolist()
    assert permutation_test(null) > 0.05
    assert permutation_test([1.0] * 60 + [-1.0] * 10) == pytest.approx(1 / 10_001)
    assert permutation_test(null, seed=3) == permutation_test([-x for x in null], seed=3)
    assert permutation_test([0.0] * 30) == 1.0


def test_seeds_of_a_side_are_averaged_question_by_question() -> None:
    found = compare(side("a", [0, 0, 1], [0, 1, 1]), side("b", [1, 1, 1], [1, 1, 1], [0, 1, 1]), metrics=["em"])
    (measured,) = found.measured[""]
    assert (measured.a, measured.b) == pytest.approx((0.5, 8 / 9))
    assert (measured.wins, measured.losses, measured.ties) == (2, 0, 1)
    assert [flip.key[1] for flip in found.flips] == ["q0", "q1"], "the largest difference first"
    assert measured.difference.low < measured.difference.mean < measured.difference.high


def test_only_common_questions_count() -> None:
    one, two = side("a", [0, 1, 0, 1]), side("b", [1, 1])
    found = compare(one, two)
    assert (found.common, found.only_a, found.only_b) == (2, 2, 0)
    assert any("2 scored questions" in warning for warning in found.warnings)
    lost = Result(Path("x"), {("", "other"): row("other", 1.0)}, {"": "em"}, {})
    with pytest.raises(DataError, match="no scored question in common"):
        compare(one, Side("c", (lost,)))


def test_failed_questions_are_compared_nowhere() -> None:
    one, two = side("a", [0, 1]), side("b", [1, 1])
    broken = {key: row(key[1], 0.0, status="failed") if key[1] == "q0" else r for key, r in two.results[0].rows.items()}
    assert compare(one, Side("b", (Result(Path("b"), broken, {"": "em"}, {}),))).common == 1


def test_warnings_say_what_was_made_differently() -> None:
    a = Passport(data={"ids": "i"}, scoring={"normalizer": "squad/1"}, search={"top_k": 3}, model={"weights": "w"})
    b = Passport(data={"ids": "i"}, scoring={"normalizer": "unicode/1"}, search={"top_k": 5}, model={"weights": "v"})
    found = compare(side("a", [0, 1], passport=a), side("b", [1, 1], passport=b))
    assert found.warnings == (
        "not comparable as they are: scoring.normalizer: 'squad/1' | 'unicode/1'",
        "made differently: search.top_k: 3 | 5",
    )
    assert "Also different: model.weights" in markdown(found)
    alike = compare(side("a", [0, 1], passport=a), side("b", [1, 1], passport=a))
    assert alike.warnings == ()
    seeds = Side("a", (*side("a", [0, 1], passport=a).results, *side("a", [0, 1], passport=b).results))
    assert any("no other seed of the first" in w for w in compare(seeds, side("b", [1, 1], passport=a)).warnings)


def test_results_without_a_passport_are_compared_with_a_warning() -> None:
    found = compare(side("a", [0, 1], passport=Passport()), side("b", [1, 1]))
    assert [w for w in found.warnings if "no passport" in w] == list(found.warnings) != []


def test_texts_hold_both_trajectories() -> None:
    two = side("b", [1, 1])
    rows = dict(two.results[0].rows)
    rows["", "q0"] = row("q0", 1.0, trajectory=[["<answer> y ``` </answer>", ""]])
    found = compare(side("a", [0, 1]), Side("b", (Result(Path("b"), rows, {"": "em"}, two.results[0].passports),)))
    text = markdown(found)
    assert "### B wins: q0" in text
    assert "question q0 ?" in text
    assert "<answer> n </answer>\nseen" in text
    assert "````text\n<answer> y ``` </answer>\n````" in text
    assert "1 questions flipped: B wins 1, B loses 0" in text
    table = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert (table[0]["metric"], float(table[0]["difference"])) == ("em", 0.5)
    assert to_json(found)["wins"] == [["", "q0"]]
    json.dumps(to_json(found))


def test_a_small_p_is_never_told_as_nothing() -> None:
    found = compare(side("a", [0] * 60), side("b", [1] * 60))
    assert "| <0.001 |" in markdown(found)
    assert 0 < float(next(csv.DictReader(io.StringIO(csv_text(found))))["p"]) < 0.001


def write_result(folder: Path, scores: Mapping[str, float], passport: Passport) -> Path:
    write_rows(folder / "evaluation.jsonl", [row(id, score) for id, score in scores.items()])
    document = {"metric": "em", "n": len(scores), "passport": passport.to_json()}
    (folder / "evaluation.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several sets in a folder, several seeds a side, all files."""
    for seed, last in ((0, 0.0), (1, 1.0)):
        for name in ("nq", "popqa"):
            about = Passport(data={"dataset": name, "ids": "i"}, seed=seed)
            write_result(tmp_path / f"a-seed{seed}" / name, {"1": 0.0, "2": last}, about)
            write_result(tmp_path / f"b-seed{seed}" / name, {"1": 1.0, "2": 1.0}, about)
    sides = [str(tmp_path / "a-seed*"), f"{tmp_path / 'b-seed0'},{tmp_path / 'b-seed1'}"]
    options: dict[str, Any] = {"metrics": (), "flips": 1, "seed": 0, "resamples": 200}
    run_compare(sides, **options, out=tmp_path / "out", as_json=False)
    text = capsys.readouterr().out
    assert "## nq" in text
    assert "## popqa" in text
    assert "4 questions in common" in text
    assert (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8").startswith("A: ")
    (document,) = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert document["measured"]["nq"]["em"]["difference"]["mean"] == 0.75
    flips = [json.loads(line) for line in (tmp_path / "out" / "flips.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(flip["set"], flip["id"]) for flip in flips] == [("nq", "1"), ("popqa", "1"), ("nq", "2"), ("popqa", "2")]
    run_compare(sides, **options, out=None, as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["common"] == 4
    with pytest.raises(ConfigError, match="at least two"):
        run_compare(sides[:1], **options, out=None, as_json=False)
    with pytest.raises(ConfigError, match="expected a folder"):
        run_compare([sides[0], str(tmp_path / "nothing*")], **options, out=None, as_json=False)
    with pytest.raises(DataError, match=r"evaluation\.json"):
        read_side("x", [tmp_path / "a-seed0" / "nothing"])
