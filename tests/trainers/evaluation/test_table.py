"""The papers' layout from whatever sets ran."""

from __future__ import annotations

import csv
import io
from typing import Any

from turntree.trainers.evaluation.table import csv_text, markdown, paper_table


def cell(mean: float, half: float = 0.1) -> dict[str, Any]:
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": 9}


def document(em: float, **more: Any) -> dict[str, Any]:
    spread = {"em_low": em - 0.1, "em_high": em + 0.1, "f1": em, "f1_low": em, "f1_high": em}
    return {"metric": "em", "n": 9, "failed": 0, "em": em, **spread, **more}


def cells(table: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("| ").split("|")] for line in table.splitlines()]


def test_columns_are_in_the_papers_order_with_averages() -> None:
    scores = {"musique": 0.1, "nq": 0.4, "own": 0.9, "hotpotqa": 0.3, "popqa": 0.5}
    head, _, line = cells(paper_table({name: document(em) for name, em in scores.items()}, "em"))
    assert head == [
        "EM", "NQ", "PopQA", "avg single-hop (2 of 3)", "HotpotQA", "MuSiQue", "avg multi-hop (2 of 4)", "own",
        "avg (4 of 7)",
    ]  # fmt: skip
    assert line[:3] == ["evaluated", "40.0 [30.0, 50.0]", "50.0 [40.0, 60.0]"]
    assert line[3] == "45.0 [37.9, 52.1]", "0.1 / sqrt 2 for two independent sets"
    assert (line[6].split()[0], line[7].split()[0], line[8].split()[0]) == ("20.0", "90.0", "32.5")


def test_every_way_is_a_row_and_a_missing_one_a_dash() -> None:
    tree = {"logprob": {"em": cell(0.5), "f1": cell(0.6)}}
    more = {
        "sampled": {"samples": 2, "avg@2": cell(0.2), "avg@2_f1": cell(0.3), "pass@2": cell(0.6), "pass@1": cell(0.2),
                    "maj@2": cell(0.4)},
        "tree": {"tree": tree, "best_of_leaves": tree, "best_of_tokens": tree, "tree_minus_tokens": {"logprob": {}}},
        "closed_book": document(0.05),
        "constants": [{"answer": "yes", "most_frequent": True, "em": cell(0.1), "f1": cell(0.1)}],
    }  # fmt: skip
    documents = {"nq": document(0.4, **more), "popqa": document(0.5)}
    found = {line[0]: line[1:] for line in cells(paper_table(documents, "em"))[2:]}
    assert list(found) == [
        "evaluated", "avg@2", "pass@2", "maj@2", "best leaf of a tree, by logprob",
        "best of as many samples, by logprob", "best of samples, tokens of the tree, by logprob", "closed book",
        "most frequent answer",
    ]  # fmt: skip
    assert found["pass@2"] == ["60.0 [50.0, 70.0]", "-", "-"]
    rows = list(csv.DictReader(io.StringIO(csv_text(documents))))
    assert {"set": "nq", "way": "closed book", "metric": "em", "mean": "0.05", "low": "-0.05",
            "high": "0.15000000000000002", "n": "9"} in rows  # fmt: skip
    assert "## Episodes" in markdown(documents)


def test_numbers_that_do_not_exist() -> None:
    empty = {"metric": "em", "n": 0, "failed": 3, "em": None, "em_low": None, "em_high": None, "f1": None}
    assert cells(paper_table({"nq": empty}, "em"))[2][1:] == ["-", "-"]
    assert csv_text({"nq": empty}).splitlines()[1] == "nq,evaluated,em,,,,0"
