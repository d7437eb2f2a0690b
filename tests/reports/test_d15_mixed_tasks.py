"""Report D15: in a mixture of environments every row carried the label of the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turntree.trainers.learner import train
from turntree.trainers.store import TreeStore


def test_d15_each_row_keeps_its_own_label(make_config: Any, bed: Any, tmp_path: Path) -> None:
    rows = [
        json.loads(line) for line in (bed.world / "questions.jsonl").read_text(encoding="utf-8").split("\n") if line
    ]
    labels = ("hotpotqa", "musique", "2wiki")
    for number, row in enumerate(rows):
        row["metadata"] = {**row.get("metadata", {}), "source": labels[number % 3]}
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = tmp_path / "run"
    train(make_config(f"env.questions={mixed}", f"search.corpus={bed.world / 'corpus.jsonl'}", f"out={run}"))
    expected = {row["id"]: row["metadata"]["source"] for row in rows}
    store = TreeStore(run / "trees")
    found = [stored.tree.task for step in store.steps() for stored in store.read(step)]
    assert {task.metadata["source"] for task in found if task is not None} == set(labels)
    assert all(task is not None and task.metadata["source"] == expected[task.id] for task in found)
