"""From a run folder to a file in one of the exchange formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from turntree.errors import CheckpointError, ConfigError, DataError
from turntree.trainers.exchange.files import json_line, write_lines
from turntree.trainers.exchange.parquet import write_verl_parquet
from turntree.trainers.exchange.rows import (
    PairForm,
    Selection,
    message_rows,
    pair_rows,
    prompt_rows,
    token_rows,
    verl_rows,
)
from turntree.trainers.exchange.trees import export_trees
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import StoredTree, TreeStore

__all__ = ["Export", "Exported", "Format", "export_run"]

Format = Literal["trees-jsonl", "pairs", "messages", "tokens", "verl-parquet"]
"""What ``turntree export`` writes."""


@dataclass(frozen=True, slots=True)
class Export:
    """What to write. ``steps``: training steps, all stored ones by default.

    ``form``, ``min_margin``, ``max_pairs_per_parent`` and ``tokenizer`` (a folder; by default the run's model) concern
    pairs; ``prompts_only``, ``data_source`` and ``ability`` verl's rows; ``selection`` the trajectories.
    """

    format: Format
    steps: Sequence[int] = ()
    selection: Selection = field(default_factory=Selection)
    form: PairForm = "messages"
    min_margin: float = 0.0
    max_pairs_per_parent: int | None = None
    tokenizer: str = ""
    prompts_only: bool = False
    data_source: str = "turntree"
    ability: str = "fact-reasoning"

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ConfigError(f"format {self.format!r} is not known; expected one of {list(get_args(Format))}")


@dataclass(frozen=True, slots=True)
class Exported:
    """``rows`` came of ``trees`` stored trees; ``changed`` texts had characters that the format cannot hold."""

    rows: int
    trees: int
    changed: int = 0


def export_run(run: str | Path, out: str | Path, export: Export) -> Exported:
    """Write the stored trees of a run folder to ``out``; JSON Lines are compressed for names in ``.gz`` or ``.zst``.

    Raises:
        CheckpointError: ``run`` is not a run folder.
        DataError: it stored no such trees, or no row comes of them (say all rewards are equal, so there is no pair).
    """
    folder = RunFolder.open(run)
    counted = _Counted(TreeStore(folder.trees), export.steps)
    path = Path(out)
    changed = 0
    if export.format == "trees-jsonl":
        rows = export_trees(counted.trees(), path)
    elif export.format == "verl-parquet":
        made = (
            prompt_rows(counted.trees(), data_source=export.data_source, ability=export.ability)
            if export.prompts_only
            else verl_rows(counted.trees(), export.selection, data_source=export.data_source, ability=export.ability)
        )
        rows, changed = write_verl_parquet(path, made, tokens=not export.prompts_only)
    else:
        rows = write_lines(path, map(json_line, _json_rows(folder, counted, export)))
    if rows == 0:
        raise DataError(
            f"{folder.path}: expected rows for {export.format}, found none in {counted.count} trees; "
            "lower min_reward or min_margin, or take other steps"
        )
    return Exported(rows, counted.count, changed)


class _Counted:
    """The trees to export, read once, lazily, and counted."""

    def __init__(self, store: TreeStore, steps: Sequence[int]) -> None:
        stored = store.steps()
        missing = sorted(set(steps) - set(stored))
        if missing or not stored:
            raise DataError(
                f"{store.folder}: expected stored trees of steps {missing or 'of any number'}, "
                f"found steps {stored[:20]}; trainer.store_sample decides what is kept"
            )
        self.store = store
        self.steps = sorted(set(steps)) or stored
        self.count = 0

    def trees(self) -> Iterator[StoredTree]:
        for step in self.steps:
            yield from self.step(step)

    def step(self, step: int) -> Iterator[StoredTree]:
        for stored in self.store.read(step):
            self.count += 1
            yield stored


def _json_rows(folder: RunFolder, counted: _Counted, export: Export) -> Iterator[dict[str, Any]]:
    if export.format == "messages":
        yield from message_rows(counted.trees(), export.selection)
    elif export.format == "tokens":
        yield from token_rows(counted.trees(), export.selection)
    else:
        decode = _decoder(folder, export.tokenizer) if export.form == "text" else None
        for step in counted.steps:
            yield from pair_rows(
                list(counted.step(step)),
                form=export.form,
                role=export.selection.role,
                min_margin=export.min_margin,
                max_pairs_per_parent=export.max_pairs_per_parent,
                decode=decode,
            )


def _decoder(folder: RunFolder, tokenizer: str) -> Callable[[Sequence[int]], str]:
    """How the run's tokens read as text, special tokens included."""
    path = tokenizer
    if not path:
        try:
            path = str(folder.load_config().get("model", {}).get("path", ""))
        except CheckpointError:
            path = ""
    if not path or not Path(path).is_dir():
        raise ConfigError(
            f"form='text' needs the tokenizer of the run, found no folder at {path!r}; pass --tokenizer DIR"
        )
    from transformers import AutoTokenizer

    from turntree.agents.tokenizer import decode

    loaded: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return lambda ids: decode(loaded, ids)
