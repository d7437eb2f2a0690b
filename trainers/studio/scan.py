"""Looking through a whole run, newest step first, in slices of time so that the page shows what was found so far."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from turntree.errors import DataError
from turntree.trainers.studio.data import Run, StepData, node_name

__all__ = ["occurrences", "search"]

SLICE_SECONDS = 0.5
"""A request looks at steps for about so long, and says where the next one goes on."""
_CONTEXT = 60
_IN_TREE = 4
"""Places shown of one tree; siblings often say the same."""
_FIELDS = ("text", "observation")


def _steps(run: Run, before: int | None) -> list[int]:
    return [step for step in reversed(run.store.steps()) if before is None or step < before]


def search(run: Run, query: str, *, before: int | None = None, limit: int = 60) -> dict[str, Any]:
    """Places where ``query`` occurs, in any case, in questions, accepted answers, turns and observations.

    Returns ``hits``, the ``steps`` looked at, and ``next``: pass it as ``before`` to go on, None at the end. Of a tree
    the first few hits are named, the last of them with how many ``more`` there are; of a step at most ``limit``.
    """
    wanted = re.compile(re.escape(query), re.IGNORECASE)
    # What JSON writes as it is need not be parsed to be ruled out.
    plain = query.isascii() and query.isprintable() and not set(query) & set('"\\')
    needle = query.lower().encode() if plain else b""
    hits: list[dict[str, Any]] = []
    skipped: list[int] = []
    looked, started = 0, time.monotonic()
    for step in _steps(run, before):
        try:
            data = run.step(step)
        except DataError:  # thinned out meanwhile, or damaged: the list of steps says so
            skipped.append(step)
            continue
        looked += 1
        for hit in _matches(data, wanted, needle):
            hits.append(hit)
            if len(hits) >= limit:
                return {"hits": hits, "steps": looked, "next": step, "skipped": skipped, "full": True}
        if time.monotonic() - started > SLICE_SECONDS:
            return {"hits": hits, "steps": looked, "next": step, "skipped": skipped, "full": False}
    return {"hits": hits, "steps": looked, "next": None, "skipped": skipped, "full": False}


def _matches(data: StepData, wanted: re.Pattern[str], needle: bytes) -> Iterator[dict[str, Any]]:
    for index, line in enumerate(data.lines):
        if needle not in line.lower():
            continue
        places = [
            (node, field, text, found)
            for node, field, text in _texts(data.row(index))
            if (found := wanted.search(text)) is not None
        ]
        for i, (node, field, text, found) in enumerate(places[:_IN_TREE], start=1):
            more = len(places) - i if i == _IN_TREE else 0
            where = {"step": data.step, "index": index, "node": node, "field": field, "more": more}
            yield {**where, **_snippet(text, found)}


def _texts(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    task = row["task"]
    if task is not None:
        yield "root", "question", task["question"]
        for answer in task["golden_answers"]:
            yield "root", "accepted answer", answer
    for cell in row["nodes"]:
        root = not cell["path"]
        for field in _FIELDS:
            if cell[field] and not (root and task is not None and cell[field] == task["question"]):
                yield node_name(cell["path"]), "prompt" if root else {"text": "turn"}.get(field, field), cell[field]


def _snippet(text: str, found: re.Match[str]) -> dict[str, str]:
    start, end = max(0, found.start() - _CONTEXT), found.end() + _CONTEXT
    return {
        "before": ("…" if start else "") + text[start : found.start()],
        "match": found[0],
        "after": text[found.end() : end] + ("…" if end < len(text) else ""),
    }


def occurrences(run: Run, key: str, *, before: int | None = None) -> dict[str, Any]:
    """Where the same task was rolled out, newest first: ``trees``, each with its ``step``; ``next`` as in `search`."""
    found: list[dict[str, Any]] = []
    started = time.monotonic()
    for step in _steps(run, before):
        try:
            trees = run.summaries(step)
        except DataError:
            continue
        found += [{"step": step, **asdict(tree)} for tree in trees if tree.key == key]
        if time.monotonic() - started > SLICE_SECONDS:
            return {"trees": found, "next": step}
    return {"trees": found, "next": None}
