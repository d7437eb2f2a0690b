"""What ``turntree export``, ``import-trees`` and ``import-config`` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from turntree.commands.console import say, say_json
from turntree.trainers.atomic import atomic_file

__all__ = ["run_export", "run_import_config", "run_import_trees"]


def run_export(
    run: Path,
    *,
    format: Any,
    out: Path,
    steps: Sequence[int],
    min_reward: float | None,
    shared_turns: Literal["per_leaf", "once"],
    role: Literal["user", "tool"],
    max_pairs: int | None,
    **options: Any,
) -> None:
    """``turntree export``."""
    from turntree.trainers.exchange import Export, Selection, export_run

    selection = Selection(min_reward=min_reward, shared_turns=shared_turns, role=role)
    export = Export(format, steps=steps, selection=selection, max_pairs_per_parent=max_pairs, **options)
    done = export_run(run, out, export)
    changed = f", {done.changed} texts with characters that parquet cannot hold" if done.changed else ""
    say(f"{done.rows} rows of {done.trees} trees -> {out}{changed}")


def run_import_trees(file: Path, out: Path, *, check: bool) -> None:
    """``turntree import-trees``."""
    from turntree.trainers.exchange import import_trees

    say(f"{import_trees(file, out, check=check)} trees -> {out}")


def run_import_config(file: Path, *, base: Sequence[Path], out: Path | None, as_json: bool) -> None:
    """``turntree import-config``; ends the process with code 1 when the options do not go together."""
    from turntree.trainers.import_config import import_config

    found = import_config(file, base=base)
    if out is not None:
        with atomic_file(out) as handle:
            handle.write(found.yaml().encode())
    if as_json:
        say_json(asdict(found))
    else:
        for line in (*found.lines(), "", found.command()):
            say(line)
    if found.problem:
        raise SystemExit(1)
