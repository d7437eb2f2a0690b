"""What the studio shows: runs, steps, trees. Read from run folders, kept in memory in small pieces, never written."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from turntree.errors import CheckpointError, DataError
from turntree.trainers.report.reading import read_turn
from turntree.trainers.run_folder import RunFolder, read_metrics
from turntree.trainers.store import SCHEMA, StoredTree, TreeStore, decode_line, read_lines

__all__ = ["Library", "Run", "StepData", "TreeSummary", "node_name", "tree_view"]

_DEPTH = 3
"""How far below a folder runs are looked for."""
_KEPT_BYTES = 256_000_000
"""Bound on the text of steps that is kept in memory."""
_LIVE_SECONDS = 120.0
"""A run that wrote nothing for so long and for three of its steps, or has its summary, is not shown as training."""
_METRICS = (
    "critic/rewards/mean",
    "critic/score/mean",
    "tree/reward/em",
    "tree/entropy",
    "num_turns/mean",
    "total/generated_tokens",
    "tree/mixed_groups",
)


@dataclass(frozen=True, slots=True)
class TreeSummary:
    """A tree in the list of its step. ``index`` counts the step's stored trees, as ``turntree view --list`` does.

    ``spread`` is the population standard deviation of the leaves' rewards: 0 where all trajectories agree.
    """

    index: int
    uid: str
    tree: int
    key: str
    question: str
    leaves: int
    turns: int
    depth: int
    tokens: int
    mean: float | None
    best: float | None
    spread: float
    failed: int
    truncated: int
    rewards: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class StepData:
    """One step as it was read: the line of each tree, and what the list shows of it."""

    step: int
    path: Path
    lines: tuple[bytes, ...]
    trees: tuple[TreeSummary, ...]

    def row(self, index: int) -> dict[str, Any]:
        """The stored JSON object of a tree. Raises ``DataError`` for an index beyond the step's trees."""
        if not 0 <= index < len(self.lines):
            raise DataError(f"step {self.step} holds trees 0 to {len(self.lines) - 1}, found {index}")
        row: dict[str, Any] = json.loads(self.lines[index])
        return row

    def stored(self, index: int) -> StoredTree:
        """A tree as credit rules and exports take it. Raises as :meth:`row`."""
        self.row(index)
        return decode_line(self.lines[index], self.path, number=index + 1)

    def group(self, index: int) -> tuple[list[StoredTree], int]:
        """The trees of the same prompt, and the place of tree ``index`` among them."""
        uid = self.trees[index].uid
        members = [tree.index for tree in self.trees if tree.uid == uid]
        return [self.stored(member) for member in members], members.index(index)


class Run:
    """One run folder, for reading; safe to use from several threads."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.folder = folder
        self.name = name
        self.store = TreeStore(folder.trees)
        self._lock = threading.Lock()
        self._steps: OrderedDict[tuple[int, int, int], StepData] = OrderedDict()
        self._summaries: dict[tuple[int, int, int], tuple[TreeSummary, ...]] = {}
        self._config: tuple[float, dict[str, Any]] | None = None
        self._metrics: tuple[tuple[int, int], dict[int, dict[str, Any]]] | None = None

    def step(self, step: int) -> StepData:
        """A step's trees. Raises ``DataError`` when it is not there (any more) or cannot be read."""
        path = self.store.file(step)
        key = self._key(step)
        with self._lock:
            if (found := self._steps.get(key)) is not None:
                self._steps.move_to_end(key)
                return found
        lines = tuple(read_lines(path))
        found = StepData(step, path, lines, tuple(_summary(line, path, i) for i, line in enumerate(lines)))
        with self._lock:
            self._steps[key] = found
            self._summaries[key] = found.trees
            while len(self._steps) > 1 and sum(map(_size, self._steps.values())) > _KEPT_BYTES:
                self._steps.popitem(last=False)
        return found

    def summaries(self, step: int) -> tuple[TreeSummary, ...]:
        """The list of a step's trees; once read it stays in memory. Raises as :meth:`step`."""
        key = self._key(step)
        with self._lock:
            found = self._summaries.get(key)
        return found if found is not None else self.step(step).trees

    def _key(self, step: int) -> tuple[int, int, int]:
        """Names the file as it is now: a resumed run writes steps again."""
        try:
            stat = self.store.file(step).stat()
        except OSError:
            steps = self.store.steps()
            held = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
            raise DataError(
                f"step {step} of {self.name} is not stored (steps: {held}); older steps are thinned out to keep the "
                "store below trainer.store_max_mb"
            ) from None
        return step, stat.st_mtime_ns, stat.st_size

    def steps(self) -> list[dict[str, Any]]:
        """What is known of each stored step without reading its trees: counts and metrics, ascending."""
        records = {record.step: record for record in self._records()}
        metrics = self._metric_rows()
        rows = []
        for step in self.store.steps():
            row = metrics.get(step, {})
            validation = {k: row[k] for k in row if k.startswith("validation/") and isinstance(row[k], (int, float))}
            record = records.get(step)
            rows.append(
                {
                    "step": step,
                    "trees": record.stored if record else None,
                    "sampled_out": record.sampled_out + record.over_cap if record else 0,
                    "metrics": {name: row[name] for name in _METRICS if row.get(name) is not None} | validation,
                }
            )
        return rows

    def _records(self) -> Sequence[Any]:
        try:
            return self.store.records()
        except DataError:  # only counts are lost
            return ()

    def _metric_rows(self) -> dict[int, dict[str, Any]]:
        try:
            stat = self.folder.metrics_file.stat()
        except OSError:
            return {}
        key = stat.st_mtime_ns, stat.st_size
        if self._metrics is None or self._metrics[0] != key:
            try:
                rows = {row["step"]: row for row in read_metrics(self.folder.metrics_file)}
            except DataError:
                rows = {}
            self._metrics = key, rows
        return self._metrics[1]

    def live(self, now: float) -> bool:
        """Whether the run seems to be training: it wrote lately, and no summary since."""
        places = (self.folder.metrics_file, self.folder.trees, self.folder.path)
        newest = max((_mtime(place) for place in places), default=0.0)
        last = [_mtime(self.store.file(step)) for step in self.store.steps()[-2:]]
        patience = max(_LIVE_SECONDS, 3 * (last[-1] - last[0]) if last else 0.0)
        return now - newest < patience and _mtime(self.folder.summary_file) < _mtime(self.folder.metrics_file)

    def config(self) -> dict[str, Any]:
        """The run's configuration; empty where it cannot be read, since trees can be shown without."""
        written = _mtime(self.folder.config_file)
        if self._config is None or self._config[0] != written:
            try:
                self._config = written, self.folder.load_config()
            except (CheckpointError, OSError, ValueError):
                self._config = written, {}
        return self._config[1]

    def about(self, now: float) -> dict[str, Any]:
        """The run in a list of runs."""
        config = self.config()
        steps = self.store.steps()
        return {
            "id": self.name,
            "steps": len(steps),
            "last": steps[-1] if steps else None,
            "live": self.live(now),
            "algorithm": _at(config, "algorithm", "name"),
            "model": Path(str(_at(config, "model", "path") or "")).name,
            "env": _at(config, "env", "id"),
            "seed": config.get("seed"),
            "credit": _at(config, "algorithm", "credit"),
        }


class Library:
    """The runs below a folder (or the one that it is), by name. Names come from this list only, never from a path."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self._runs: dict[str, Run] = {}
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()
        if not self.runs():
            raise CheckpointError(
                next(iter(self._refused.values()), "")
                or f"{root} is not a run folder and holds none: expected run.json in it or up to {_DEPTH} folders below"
            )

    def runs(self) -> list[Run]:
        """All runs, by name; those that were started since the last call included."""
        found = {_run_name(self.root, path): path for path in _run_folders(self.root)}
        with self._lock:
            self._refused = {}
            for name, path in found.items():
                if name not in self._runs:
                    try:
                        self._runs[name] = Run(RunFolder.open(path), name)
                    except CheckpointError as error:
                        if path == self.root:
                            raise
                        self._refused[name] = str(error)
            return [self._runs[name] for name in sorted(found) if name in self._runs]

    def unreadable(self) -> list[dict[str, str]]:
        """Folders that hold a run of another version or a damaged one, by name, as of the last list of runs."""
        with self._lock:
            return [{"id": name, "message": message} for name, message in sorted(self._refused.items())]

    def run(self, name: str) -> Run:
        """A run by its name in the list. Raises ``DataError`` for any other text."""
        with self._lock:
            found = self._runs.get(name)
        if found is None:
            found = next((run for run in self.runs() if run.name == name), None)
        if found is None:
            raise DataError(f"there is no run {name!r} here; the list of runs names them")
        return found


def _run_folders(root: Path) -> Iterator[Path]:
    if (root / "run.json").is_file():
        yield root
        return
    for folder, inner, files in os.walk(root):
        if "run.json" in files:
            yield Path(folder)
            inner.clear()
            continue
        depth = len(Path(folder).relative_to(root).parts)
        inner[:] = sorted(name for name in inner if not name.startswith(".")) if depth < _DEPTH else []


def _run_name(root: Path, path: Path) -> str:
    return root.name or str(root) if path == root else path.relative_to(root).as_posix()


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(data: StepData) -> int:
    return sum(map(len, data.lines))


def _at(config: Mapping[str, Any], section: str, name: str) -> Any:
    part = config.get(section)
    return part.get(name) if isinstance(part, Mapping) else None


# Trees ----------------------------------------------------------------------------------------------------------------


def node_name(path: Sequence[int]) -> str:
    """A node's path as links and lists write it: ``0.1.2``; the root's is ``root``."""
    return ".".join(map(str, path)) or "root"


def _summary(line: bytes, path: Path, index: int) -> TreeSummary:
    try:
        row = json.loads(line)
        if row["schema"] != SCHEMA:
            raise DataError(f"{path} has schema {row['schema']}, this version reads {SCHEMA}")
        nodes = row["nodes"]
        leaves = [node for node in nodes if node["status"] != "open"]
        rewards = tuple(_finite(node["reward"]) if node["status"] != "failed" else None for node in leaves)
        scored = [r for r, node in zip(rewards, leaves) if r is not None and not node["pruned"]]
        question, key = _question(row)
        return TreeSummary(
            index=index,
            uid=row["uid"],
            tree=row["tree"],
            key=key,
            question=question,
            leaves=len(leaves),
            turns=len(nodes) - 1,
            depth=max((len(node["path"]) for node in nodes), default=0),
            tokens=sum(len(node["turn_ids"]) for node in nodes),
            mean=fmean(scored) if scored else None,
            best=max(scored, default=None),
            spread=pstdev(scored) if len(scored) > 1 else 0.0,
            failed=sum(node["status"] == "failed" for node in leaves),
            truncated=sum(node["status"] == "truncated" for node in leaves),
            rewards=rewards,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}, line {index + 1} is not a stored tree ({type(error).__name__}: {error}); the file is damaged: "
            "delete it, the other steps stay readable"
        ) from error


def _question(row: Mapping[str, Any]) -> tuple[str, str]:
    """What the tree is about, and a key by which the same task is found at other steps."""
    task = row["task"]
    if task is not None:
        return task["question"], f"{task['id']}\n{task['question']}"
    prompt = row["nodes"][0]["observation"]
    first = next(iter(prompt.strip().splitlines()), "")
    return first[:200], prompt


def _finite(value: Any) -> float | None:
    """A stored number; what is no finite one (JSON holds words for those) is left out."""
    number = None if value is None else float(value)
    return number if number is not None and math.isfinite(number) else None


_SHOWN = ("status", "reason", "version", "branchable", "pruned", "observation", "text")


def tree_view(data: StepData, index: int) -> dict[str, Any]:
    """A tree as the page draws it: everything but the numbers of single tokens. Raises as :meth:`StepData.row`."""
    row = data.row(index)
    task = row["task"] or {}
    return {
        "step": data.step,
        "summary": asdict(data.trees[index]),
        "answers": task.get("golden_answers", []),
        "metadata": task.get("metadata", {}),
        "siblings": [tree.index for tree in data.trees if tree.uid == row["uid"]],
        "rounds": row["rounds"],
        "nodes": [_node_view(cell) for cell in row["nodes"]],
    }


def _node_view(cell: Mapping[str, Any]) -> dict[str, Any]:
    path, info = cell["path"], cell["info"]
    turn = read_turn(cell["text"], cell["action"])
    given = info.get("argument")
    picked = cell["picked"]
    return {
        **{name: cell[name] for name in _SHOWN},
        "id": node_name(path),
        "parent": node_name(path[:-1]) if path else None,
        "kind": turn.kind,
        "argument": given if isinstance(given, str) else turn.argument,
        "thought": turn.thought,
        "reward": _finite(cell["reward"]),
        "step_reward": _finite(cell["step_reward"]),
        "entropy": _finite(cell["entropy"]),
        "advantage": _finite(cell["advantage"]),
        "advantages": [[node_name(leaf), _finite(value)] for leaf, value in cell["advantages"]],
        "score": _finite(cell["score"]),
        "picked": None if picked is None else node_name(picked),
        "tokens": len(cell["turn_ids"]),
        "context": len(cell["observation_ids"]),
        "retrieved": _retrieved(info),
        "info": {k: v for k, v in info.items() if k not in ("retrieved", "argument", "action")},
    }


def _retrieved(info: Mapping[str, Any]) -> list[dict[str, str]]:
    found = info.get("retrieved") or ()
    return [
        {"id": str(item.get("id") or ""), "title": str(item.get("title") or "")}
        for item in found
        if isinstance(item, Mapping)
    ]
