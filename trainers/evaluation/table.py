"""Tables of an evaluation: the papers' layout, all numbers as CSV, and what the episodes took."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.trainers.report.tables import markdown_table

__all__ = ["Line", "csv_text", "lines", "markdown", "paper_table"]

_TITLES = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
    "chinese_simpleqa": "ChineseSimpleQA",
}
_SINGLE = ("nq", "triviaqa", "popqa")
_MULTI = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

Cell = Mapping[str, Any]
"""``mean``, ``low``, ``high`` and ``n`` of one number; null where they do not exist."""


@dataclass(frozen=True, slots=True)
class Line:
    """One way of answering, in one set: its numbers by metric."""

    title: str
    cells: Mapping[str, Cell]


def lines(document: Mapping[str, Any]) -> list[Line]:
    """All ways in which a set was answered, from the document of its evaluation."""
    metric = str(document["metric"])
    names = ("em", "f1", "sub_em") if metric == "em" else (metric,)
    found = [Line("evaluated", {name: _top(document, name) for name in names if name in document})]
    if sampled := document.get("sampled"):
        found += _sampled(sampled, metric)
    if tree := document.get("tree"):
        found += _tree(tree)
    if closed := document.get("closed_book"):
        found.append(Line("closed book", {name: _top(closed, name) for name in names if name in closed}))
    for constant in document.get("constants") or ():
        what = "most frequent answer" if constant.get("most_frequent") else f"always {constant['answer']}"
        found.append(Line(what, {name: constant[name] for name in ("em", "f1")}))
    return found


def paper_table(documents: Mapping[str, Mapping[str, Any]], metric: str) -> str:
    """Sets as columns in the papers' order, with the averages of single-hop and multi-hop sets; ways as rows.

    Values are percent, with 95 % intervals. An average is over the sets that ran; below all of
    its group its heading says how many. Its interval takes the sets as independent.
    """
    by_set = {name: {line.title: line.cells.get(metric) for line in lines(doc)} for name, doc in documents.items()}
    titles = list(dict.fromkeys(title for cells in by_set.values() for title, cell in cells.items() if cell))
    columns: list[tuple[str, tuple[str, ...]]] = []
    for group, heading in ((_SINGLE, "single-hop"), (_MULTI, "multi-hop")):
        there = tuple(name for name in group if name in documents)
        columns += [(_TITLES[name], (name,)) for name in there]
        if there:
            share = "" if len(there) == len(group) else f" ({len(there)} of {len(group)})"
            columns.append((f"avg {heading}{share}", there))
    columns += [(_TITLES.get(n, n or "all"), (n,)) for n in documents if n not in (*_SINGLE, *_MULTI)]
    seven = tuple(name for name in (*_SINGLE, *_MULTI) if name in documents)
    if any(n in _SINGLE for n in seven) and any(n in _MULTI for n in seven):
        columns.append(("avg" if len(seven) == 7 else f"avg ({len(seven)} of 7)", seven))
    rows = [
        [_short(title), *(_percent([by_set[name].get(title) for name in names], metric) for _, names in columns)]
        for title in titles
    ]
    return markdown_table([metric.upper() if metric in ("em", "f1") else metric, *(h for h, _ in columns)], rows)


def markdown(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Everything of some sets on one page: scores, what episodes took, kinds of questions."""
    metrics = list(dict.fromkeys(m for doc in documents.values() for m in _shown(doc)))
    parts = ["# Evaluation", *(paper_table(documents, metric) for metric in metrics)]
    parts += ["Percent, with 95 % intervals.", "## Episodes", _episodes(documents)]
    for name, document in documents.items():
        if kinds := _kinds(document):
            parts += [f"## Kinds of questions: {name}" if name else "## Kinds of questions", kinds]
    return "\n\n".join(parts) + "\n"


def csv_text(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Every number in long form: set, way, metric, mean, low, high, n."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["set", "way", "metric", "mean", "low", "high", "n"])
    for name, document in documents.items():
        for line in lines(document):
            for metric, cell in line.cells.items():
                writer.writerow([name, line.title, metric, *(cell.get(key) for key in ("mean", "low", "high", "n"))])
        for measure in _MEASURES:
            cell = _top(document, f"{measure}_mean" if f"{measure}_mean" in document else measure, measure)
            writer.writerow([name, "evaluated", measure, *(cell.get(key) for key in ("mean", "low", "high", "n"))])
    return out.getvalue()


_MEASURES = (
    "searches", "turns", "generated_tokens", "observation_tokens", "finished", "format_valid", "supporting_found",
    "supporting_all",
)  # fmt: skip


def _shown(document: Mapping[str, Any]) -> tuple[str, ...]:
    return ("em", "f1") if document["metric"] == "em" else (str(document["metric"]),)


def _top(document: Mapping[str, Any], name: str, bounds: str = "") -> dict[str, Any]:
    key = bounds or name
    cell = {"mean": document.get(name), "low": document.get(f"{key}_low"), "high": document.get(f"{key}_high")}
    return {**cell, "n": document.get("n")}


def _sampled(sampled: Mapping[str, Any], metric: str) -> list[Line]:
    n = sampled["samples"]
    mean = {metric: sampled[f"avg@{n}"]}
    if f"avg@{n}_f1" in sampled:
        mean["f1"] = sampled[f"avg@{n}_f1"]
    votes = sorted(int(key[4:]) for key in sampled if key.startswith("maj@"))
    passes = sorted(int(key[5:]) for key in sampled if key.startswith("pass@"))
    found = [Line(f"avg@{n}", mean)]
    found += [Line(f"pass@{k}", {metric: sampled[f"pass@{k}"]}) for k in passes if k > 1]
    return found + [Line(f"maj@{k}", {metric: sampled[f"maj@{k}"]}) for k in votes]


def _tree(tree: Mapping[str, Any]) -> list[Line]:
    names = {
        "tree": "best leaf of a tree",
        "best_of_leaves": "best of as many samples",
        "best_of_tokens": "best of samples, tokens of the tree",
    }
    return [
        Line(f"{title}, by {choice}", cells)
        for choice in tree["tree_minus_tokens"]
        for key, title in names.items()
        for cells in [tree[key][choice]]
    ]


def _percent(cells: Sequence[Cell | None], metric: str) -> str:
    """Mean of some cells and its interval; a dash where one is missing."""
    if not cells or any(cell is None or cell.get("mean") is None for cell in cells):
        return "-"
    known = [cell for cell in cells if cell is not None]
    mean = sum(cell["mean"] for cell in known) / len(known)
    factor, spec = (100.0, ".1f") if metric in ("em", "f1", "sub_em", "success") else (1.0, ".3f")
    if any(cell.get("low") is None for cell in known):
        return format(factor * mean, spec)
    # Of a mean of independent numbers: the distances to the bounds add up as squares (Zou and Donner 2008, MOVER).
    low = mean - math.sqrt(sum((cell["mean"] - cell["low"]) ** 2 for cell in known)) / len(known)
    high = mean + math.sqrt(sum((cell["high"] - cell["mean"]) ** 2 for cell in known)) / len(known)
    return f"{factor * mean:{spec}} [{factor * low:{spec}}, {factor * high:{spec}}]"


def _short(title: str) -> str:
    return title if len(title) <= 60 else f"{title[:59]}…"


def _episodes(documents: Mapping[str, Mapping[str, Any]]) -> str:
    keys = ["searches_mean", "turns_mean", "generated_tokens_mean", "observation_tokens_mean", "finished"]
    keys += ["format_valid_mean", "supporting_found", "supporting_all"]
    heads = ["set", "n", "failed", "searches", "turns", "tokens", "observed", "finished", "format", "support", "all"]
    return markdown_table(heads, [[n or "all", d["n"], d["failed"], *map(d.get, keys)] for n, d in documents.items()])


def _kinds(document: Mapping[str, Any]) -> str:
    heads = ["kind", "n", *_shown(document), "supporting_found"]
    rows = [
        [f"{title.removeprefix('by_')} {kind}", found["n"]]
        + [(found.get(key) or {}).get("mean") for key in (*_shown(document), "supporting_found")]
        for title in ("by_hops", "by_type")
        for kind, found in (document.get("breakdown") or {}).get(title, {}).items()
    ]
    return markdown_table(heads, rows) if rows else ""
