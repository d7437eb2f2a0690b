"""Which of a run's stored trees a command is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from turntree.errors import ConfigError, DataError
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import StoredTree, TreeStore, read_trees
from turntree.trainers.tree import Node

__all__ = ["interest", "step_trees", "tree_at"]


def step_trees(path: Path, step: int | None) -> list[StoredTree]:
    """The trees of one step, at least one: of a run folder, by default its newest step, or of one file of a store.

    Raises:
        ConfigError: the file is of another kind, or ``step`` was given for a file, which holds one.
        DataError: there are no such trees, or they cannot be read.
    """
    if path.is_file():
        if not path.name.endswith(".jsonl.zst"):
            raise ConfigError(f"{path} is no file of a rollout store; pass trees/step-*.jsonl.zst or a run folder")
        if step is not None:
            raise ConfigError(f"{path} holds one step; leave --step={step} out, or pass the run folder")
        trees = list(read_trees(path))
        if not trees:
            raise DataError(f"{path} holds no trees; pass another step of the run")
        return trees
    store = TreeStore(RunFolder.open(path).trees)
    steps = store.steps()
    if not steps:
        raise DataError(f"{store.folder} holds no trees; train with trainer.store_sample above 0")
    return list(store.read(steps[-1] if step is None else step))


def tree_at(trees: Sequence[StoredTree], index: int) -> StoredTree:
    """One of a step's trees. Raises ``DataError`` for an index beyond them."""
    if 0 <= index < len(trees):
        return trees[index]
    raise DataError(
        f"step {trees[0].step} holds trees 0 to {len(trees) - 1}, found --prompt {index}; see `turntree view --list`"
    )


def interest(scored: Iterable[Node]) -> tuple[bool, int]:
    """How much some leaves say: rewards that differ, then how many there are."""
    rewards = [leaf.reward for leaf in scored]
    return len(set(rewards)) > 1, len(rewards)
