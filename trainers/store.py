"""The rollout store: what was rolled out at each step, for looking at it later.

One file a step, ``step-00000012.jsonl.zst``: zstandard-compressed JSON lines, one line a tree, so that
``zstdcat step-00000012.jsonl.zst | jq`` reads it too. A line holds everything but environment states and caches.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import orjson
import zstandard

from turntree.envs.history import History
from turntree.envs.task import FrozenDict, Question, thaw
from turntree.errors import ConfigError, DataError
from turntree.trainers.atomic import atomic_file, sync_folder, write_json, written
from turntree.trainers.lines import LongLineError, zstd_lines
from turntree.trainers.tree import Group, Node, Tree

__all__ = [
    "SCHEMA",
    "LeafAdvantages",
    "StepRecord",
    "StoredTree",
    "TokenColumns",
    "TreeStore",
    "decode_line",
    "encode_line",
    "group_trees",
    "mean_advantages",
    "read_lines",
    "read_trees",
]

SCHEMA = 1
"""Version of the line format. It grows when an old reader would misread a new line."""

LeafAdvantages: TypeAlias = Mapping[tuple[Node, Node], float]
"""Advantage of each (leaf, node) pair; pairs of failed leaves are absent."""

TokenColumns: TypeAlias = Mapping[str, Mapping[Node, Sequence[float]]]
"""Further numbers of sampled tokens by name, one for each token of a node's turn: ``value`` (V of the state before the
token), ``advantage`` (of rules that credit tokens, the mean over the node's leaves)."""

NodePath: TypeAlias = tuple[int, ...]

_FILE = re.compile(r"step-(\d{8,})\.jsonl\.zst")


@dataclass(frozen=True, slots=True)
class StoredTree:
    """A tree as it was read back. Its nodes have no environment state and no engine prefix."""

    step: int
    tree: Tree
    advantages: LeafAdvantages
    tokens: TokenColumns = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What became of one step's trees: ``trees`` were given, ``stored`` of them kept in ``bytes`` bytes.

    ``sampled_out`` were left out by sampling, ``over_cap`` because the step alone would exceed ``max_bytes``.
    ``thinned``: the file was removed later to make room; ``stored`` and ``bytes`` are then 0.
    """

    step: int
    trees: int
    stored: int
    sampled_out: int
    over_cap: int
    bytes: int
    thinned: bool = False


class TreeStore:
    """A folder of rollouts, written by one process and read by any.

    ``sample``: share of the prompts kept each step, whole groups; a function of (``seed``, step, prompt) only, and at
    least one group a step unless it is 0. ``max_bytes``: cap on all files together. Past it, steps are thinned so
    that those that stay are spread evenly over the run; the newest always stays. ``records()`` tells what was
    left out.
    """

    def __init__(
        self, folder: str | Path, *, sample: float = 1.0, max_bytes: int = 2_000_000_000, seed: int = 0
    ) -> None:
        if not 0.0 <= sample <= 1.0:
            raise ConfigError(f"sample must be a share from 0 to 1, found {sample}")
        if max_bytes <= 0:
            raise ConfigError(f"max_bytes must be positive, found {max_bytes}; sample=0 stores nothing")
        self.folder = Path(folder)
        self.sample = sample
        self.max_bytes = max_bytes
        self.seed = seed

    def steps(self) -> list[int]:
        """The steps that can be read, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for entry in self.folder.iterdir() if (m := _FILE.fullmatch(entry.name)))

    def file(self, step: int) -> Path:
        """Where a step's trees lie, whether or not they do."""
        return self.folder / f"step-{step:08d}.jsonl.zst"

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: LeafAdvantages | None = None,
        tokens: TokenColumns | None = None,
    ) -> StepRecord:
        """Store one step's trees, all or nothing; what the step held before is replaced."""
        kept = self._sampled(step, groups)
        by_node = _by_node(advantages or {})
        with written(self.file(step)), atomic_file(self.file(step)) as handle:
            lines = (_encode_tree(step, tree, by_node, tokens or {}) for group in kept for tree in group.trees)
            stored, size = _write_lines(handle, lines, self.max_bytes)
        given = sum(len(group.trees) for group in groups)
        sampled = sum(len(group.trees) for group in kept)
        record = StepRecord(step, given, stored, given - sampled, sampled - stored, size)
        records = {**self._load_records(), step: record}
        for removed in self._thin():
            if removed in records:
                records[removed] = replace(records[removed], stored=0, bytes=0, thinned=True)
        self._save_records(records)
        return record

    def read(self, step: int | None = None) -> Iterator[StoredTree]:
        """The trees of one step, or of all steps in order, lazily.

        Raises :class:`DataError` when the step is not there, or when a file is truncated, corrupt or of another
        schema; the message names the file.
        """
        if step is None:
            steps = self.steps()
        elif self.file(step).is_file():
            steps = [step]
        else:
            raise DataError(f"no trees of step {step} in {self.folder}; found {_span(self.steps())}")
        return (tree for s in steps for tree in read_trees(self.file(s)))

    def groups(self, step: int) -> list[Group]:
        """The stored trees of one step by prompt, as credit rules take them. Raises as :meth:`read`."""
        return group_trees(self.read(step))

    def drop_after(self, step: int) -> None:
        """Forget every step later than ``step``: a run that resumes from it writes them again."""
        for later in [s for s in self.steps() if s > step]:
            self.file(later).unlink()
        if self.folder.is_dir():
            self._save_records({s: r for s, r in self._load_records().items() if s <= step})

    def records(self) -> list[StepRecord]:
        """What was stored, left out and thinned, step by step."""
        return [record for _, record in sorted(self._load_records().items())]

    def _sampled(self, step: int, groups: Sequence[Group]) -> list[Group]:
        if self.sample == 0.0 or not groups:
            return []
        draws = [_uniform(self.seed, step, group.uid) for group in groups]
        bound = max(self.sample, min(draws))
        return [group for group, draw in zip(groups, draws) if draw <= bound]

    def _load_records(self) -> dict[int, StepRecord]:
        path = self.folder / "store.json"
        if not path.is_file():
            return {}
        try:
            data = json.loads(path.read_bytes())
            found = data["schema"]
            rows = [StepRecord(*row) for row in data["steps"]] if found == SCHEMA else None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not the record of a rollout store ({error}); delete it to go on") from error
        if rows is None:
            raise DataError(f"{path} has schema {found}, this version reads {SCHEMA}; use the turntree that wrote it")
        return {row.step: row for row in rows}

    def _save_records(self, records: Mapping[int, StepRecord]) -> None:
        columns = [field.name for field in fields(StepRecord)]
        rows = [list(astuple(record)) for _, record in sorted(records.items())]
        path = self.folder / "store.json"
        with written(path):
            write_json(path, {"schema": SCHEMA, "columns": columns, "steps": rows})

    def _thin(self) -> list[int]:
        """Remove files until the rest fits; returns the steps removed."""
        sizes = {step: self.file(step).stat().st_size for step in self.steps()}
        removed: list[int] = []
        while sum(sizes.values()) > self.max_bytes and len(sizes) > 1:
            step = _least_missed(sorted(sizes))
            self.file(step).unlink()
            removed.append(step)
            del sizes[step]
        if removed:
            sync_folder(self.folder)
        return removed


def group_trees(stored: Iterable[StoredTree]) -> list[Group]:
    """Trees of one step as one group a prompt, prompts and trees in the order in which they come."""
    by_prompt: dict[str, list[Tree]] = {}
    for item in stored:
        by_prompt.setdefault(item.tree.prompt_uid, []).append(item.tree)
    return [Group(uid, trees) for uid, trees in by_prompt.items()]


def mean_advantages(advantages: LeafAdvantages) -> dict[Node, float]:
    """The mean over leaves of each node's advantages: one number a node, for showing it."""
    return {node: math.fsum(per_leaf.values()) / len(per_leaf) for node, per_leaf in _by_node(advantages).items()}


def _by_node(advantages: LeafAdvantages) -> dict[Node, dict[Node, float]]:
    by_node: defaultdict[Node, dict[Node, float]] = defaultdict(dict)
    for (leaf, node), value in advantages.items():
        by_node[node][leaf] = float(value)
    return by_node


def _uniform(seed: int, step: int, uid: str) -> float:
    key = json.dumps([seed, step, uid]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big") / (1 << 56)


def _least_missed(steps: list[int]) -> int:
    """The step whose neighbours are closest to each other; never the newest, the first only if nothing else is left."""
    if len(steps) == 2:
        return steps[0]
    inner = range(1, len(steps) - 1)
    return steps[min(inner, key=lambda i: (steps[i + 1] - steps[i - 1], i))]


def _span(steps: list[int]) -> str:
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no steps"


# Encoding -------------------------------------------------------------------------------------------------------------


def _write_lines(handle: BinaryIO, lines: Iterable[bytes], max_bytes: int) -> tuple[int, int]:
    """Compress lines until the file would pass about ``max_bytes``; returns the lines written and the size."""
    # Most bytes are digits of log-probs: level 6 takes five times as long to make them 2 % fewer.
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
    stored = raw = 0
    with compressor.stream_writer(handle, closefd=False) as writer:
        for line in lines:
            # The lines so far tell how well these compress; the first is always kept.
            if stored and raw + len(line) > max_bytes:
                writer.flush(zstandard.FLUSH_BLOCK)  # only now has the size to be known while writing
                if handle.tell() * (1 + len(line) / raw) > max_bytes:
                    break
            writer.write(line)
            stored, raw = stored + 1, raw + len(line)
    return stored, handle.tell()


def _encode_tree(step: int, tree: Tree, by_node: Mapping[Node, Mapping[Node, float]], tokens: TokenColumns) -> bytes:
    row = _row(step, tree, by_node, tokens)
    try:
        return orjson.dumps(row, default=_plain, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate (JSON can escape it, UTF-8 cannot hold it), a number of more than 64 bits
        return (json.dumps(row, allow_nan=False, separators=(",", ":"), default=_plain) + "\n").encode()


def _row(step: int, tree: Tree, by_node: Mapping[Node, Mapping[Node, float]], tokens: TokenColumns) -> dict[str, Any]:
    nodes = tree.nodes()
    paths = {tree.root: tree.root.path}
    for node in nodes:  # parents come first
        paths.update({child: (*paths[node], child.ordinal) for child in node.children})
    return {
        "schema": SCHEMA,
        "step": step,
        "uid": tree.prompt_uid,
        "tree": tree.index,
        "rounds": tree.rounds,
        "task": None if tree.task is None else _plain(tree.task.to_json()),
        "nodes": [_encode_node(node, paths, by_node.get(node, {}), tokens) for node in nodes],
    }


def _encode_node(
    node: Node, paths: Mapping[Node, NodePath], per_leaf: Mapping[Node, float], tokens: TokenColumns
) -> dict[str, Any]:
    columns = {name: _numbers(column[node]) for name, column in tokens.items() if node in column}
    return {
        "path": paths[node],
        "text": node.text,
        "action": node.action,
        "observation": node.observation,
        "status": node.status,
        "reward": _number(node.reward),
        "entropy": _number(node.entropy),
        "score": _number(node.score),
        "reason": node.reason,
        "picked": None if node.picked is None else paths[node.picked],
        "version": node.version,
        "branchable": node.branchable,
        "step_reward": _number(node.step_reward),
        "pruned": node.pruned,
        "turn_ids": node.turn_ids,
        "observation_ids": node.observation_ids,
        "logprobs": _numbers(node.logprobs),
        "entropies": _numbers(node.entropies),
        "advantage": _number(math.fsum(per_leaf.values()) / len(per_leaf)) if per_leaf else None,
        "advantages": [[paths[leaf], _number(value)] for leaf, value in per_leaf.items()],
        "info": _plain(node.info),
        # Only where there are some: lines without them stay what they were.
        **({"tokens": columns} if columns else {}),
    }


def _number(value: float | None) -> float | str | None:
    """Numbers as they are; ``nan``, ``inf`` and ``-inf`` as words, since JSON has none."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _numbers(values: Iterable[float]) -> Sequence[float | str | None]:
    numbers = list(map(float, values))
    # Nearly all are finite, and so is then their sum.
    return numbers if math.isfinite(sum(numbers)) else [_number(x) for x in numbers]


_AS_IT_IS = frozenset({str, int, bool, type(None)})


def _plain(value: Any) -> Any:
    """What environments and datasets put in, where anything may be, as JSON: numpy by value, the rest as text."""
    if type(value) in _AS_IT_IS:
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(k): v if type(v) in _AS_IT_IS else _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, History):
        return _plain(thaw(value))
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


# Decoding -------------------------------------------------------------------------------------------------------------


def read_trees(path: Path) -> Iterator[StoredTree]:
    """The trees of one file of a store, lazily. Raises as :meth:`TreeStore.read`."""
    for number, line in enumerate(read_lines(path), start=1):
        yield decode_line(line, path, number=number)


def encode_line(stored: StoredTree) -> bytes:
    """A tree as its line of the store, line end included; the same bytes that the store holds."""
    return _encode_tree(stored.step, stored.tree, _by_node(stored.advantages), stored.tokens)


def decode_line(line: bytes, path: Path, *, number: int) -> StoredTree:
    """The tree of one line. Raises :class:`DataError` naming ``path`` and ``number`` for anything else."""
    try:
        return _decode_tree(json.loads(line), path)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path}, line {number} is not a stored tree ({type(error).__name__}: {error}); "
            "the file is damaged: delete it, the other steps stay readable"
        ) from error


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of one file of a store, lazily, as bytes without their ends. Raises as :meth:`TreeStore.read`.

    A stream that ends before its frame does would pass as a shorter file: checked here.
    """
    try:
        for line in zstd_lines(path):
            if not line.endswith(b"\n"):
                raise EOFError
            yield line[:-1]
    except EOFError as error:
        raise DataError(f"{path} is truncated: its end is missing; delete it, the other steps stay readable") from error
    except (zstandard.ZstdError, LongLineError) as error:
        raise DataError(f"{path} is corrupt ({error}); delete it, the other steps stay readable") from error


def _decode_tree(row: Mapping[str, Any], path: Path) -> StoredTree:
    if row["schema"] != SCHEMA:
        raise DataError(
            f"{path} has schema {row['schema']}, this version reads {SCHEMA}; read it with the turntree that wrote it"
        )
    nodes = {tuple(cell["path"]): _decode_node(cell) for cell in row["nodes"]}
    advantages: dict[tuple[Node, Node], float] = {}
    tokens: defaultdict[str, dict[Node, tuple[float, ...]]] = defaultdict(dict)
    for cell in row["nodes"]:
        _link(nodes, cell, advantages)
        for name, column in cell.get("tokens", {}).items():
            tokens[name][nodes[tuple(cell["path"])]] = tuple(float(x) for x in column)
    task = None if row["task"] is None else Question.from_json(row["task"])
    tree = Tree(nodes[()], prompt_uid=row["uid"], index=row["tree"], task=task, rounds=row["rounds"])
    return StoredTree(step=row["step"], tree=tree, advantages=advantages, tokens=dict(tokens))


def _decode_node(cell: Mapping[str, Any]) -> Node:
    return Node(
        ordinal=cell["path"][-1] if cell["path"] else 0,
        turn_ids=tuple(cell["turn_ids"]),
        logprobs=tuple(float(x) for x in cell["logprobs"]),
        entropies=tuple(float(x) for x in cell["entropies"]),
        observation_ids=tuple(cell["observation_ids"]),
        entropy=float(cell["entropy"]),
        text=cell["text"],
        action=cell["action"],
        observation=cell["observation"],
        status=cell["status"],
        reward=_optional(cell["reward"]),
        branchable=cell["branchable"],
        step_reward=float(cell["step_reward"]),
        pruned=cell["pruned"],
        version=cell["version"],
        score=_optional(cell["score"]),
        reason=cell["reason"],
        info=FrozenDict(cell["info"]),
    )


def _link(nodes: Mapping[NodePath, Node], cell: Mapping[str, Any], advantages: dict[tuple[Node, Node], float]) -> None:
    path = tuple(cell["path"])
    node = nodes[path]
    if path:
        nodes[path[:-1]].add_child(node)
    if cell["picked"] is not None:
        node.picked = nodes[tuple(cell["picked"])]
    for leaf, value in cell["advantages"]:
        advantages[nodes[tuple(leaf)], node] = float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)
