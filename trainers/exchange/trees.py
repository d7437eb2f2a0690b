"""Trees as JSON Lines: the rollout store's own lines, out of a run and into one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from turntree.errors import DataError
from turntree.trainers.exchange.files import read_lines, write_lines
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import SCHEMA, LeafAdvantages, StoredTree, TreeStore, decode_line, encode_line, group_trees

__all__ = ["export_trees", "import_trees", "read_tree_lines", "tree_schema", "validate_line"]

_ANY_SIZE = 1 << 62


@cache
def _schema_text() -> str:
    package = files("turntree.trainers.exchange")
    return package.joinpath(f"tree-{SCHEMA}.schema.json").read_text(encoding="utf-8")


def tree_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line."""
    schema: dict[str, Any] = json.loads(_schema_text())
    return schema


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(tree_schema())


def validate_line(row: Any, where: str) -> None:
    """Raises :class:`DataError` naming the place in the line that the schema does not allow."""
    error = next(iter(_validator().iter_errors(row)), None)
    if error is not None:
        raise DataError(
            f"{where}: expected a tree of schema {SCHEMA}, found at {error.json_path}: {error.message:.200}; "
            f"see tree-{SCHEMA}.schema.json"
        )


def export_trees(trees: Iterator[StoredTree], out: Path) -> int:
    """Write trees, one a line, the bytes that the store holds; returns how many."""
    return write_lines(out, map(encode_line, trees))


def read_tree_lines(path: Path, *, check: bool = True) -> Iterator[StoredTree]:
    """The trees of a JSON Lines file, lazily. ``check`` holds each line against the schema first, which takes longer.

    Raises :class:`DataError` naming file and line.
    """
    for number, line in read_lines(path):
        if check:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: expected JSON, found {line[:60]!r} ({error})") from error
            validate_line(row, f"{path}, line {number}")
        yield decode_line(line, path, number=number)


def import_trees(path: str | Path, out: str | Path, *, check: bool = True) -> int:
    """Make a run folder ``out`` of a file of trees, so that view, explain and export read it; returns the trees.

    Steps, prompts and trees keep their order. The folder's configuration names the file; there are no metrics and no
    weights in it. Raises :class:`DataError` for a file without trees, or as :func:`read_tree_lines`, and
    :class:`CheckpointError` where ``out`` holds something already.
    """
    source = Path(path)
    by_step: dict[int, list[StoredTree]] = {}
    for stored in read_tree_lines(source, check=check):
        by_step.setdefault(stored.step, []).append(stored)
    if not by_step:
        raise DataError(f"{source}: expected trees, found no line; export a run that stored some")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    run = RunFolder.create(out, {"imported": {"file": source.name, "sha256": digest}})
    store = TreeStore(run.trees, max_bytes=_ANY_SIZE)
    for step, trees in sorted(by_step.items()):
        store.write(step, group_trees(trees), _joined(trees))
    return sum(map(len, by_step.values()))


def _joined(trees: list[StoredTree]) -> LeafAdvantages:
    joined: dict[Any, float] = {}
    for stored in trees:
        advantages: Mapping[Any, float] = stored.advantages
        joined.update(advantages)
    return joined
