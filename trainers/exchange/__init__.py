"""Trajectories and trees for other tools, and back: JSON Lines, preference pairs, messages, tokens, verl parquet."""

from __future__ import annotations

from turntree.trainers.exchange.export import Export, Exported, Format, export_run
from turntree.trainers.exchange.rows import IGNORED, PairForm, Selection
from turntree.trainers.exchange.trees import import_trees, read_tree_lines, tree_schema, validate_line

__all__ = [
    "IGNORED",
    "Export",
    "Exported",
    "Format",
    "PairForm",
    "Selection",
    "export_run",
    "import_trees",
    "read_tree_lines",
    "tree_schema",
    "validate_line",
]
