"""The rollout store gives back what it was given, whole or not at all."""

from __future__ import annotations

import enum
import io
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError, DataError
from turntree.trainers.store import LeafAdvantages, StoredTree, TreeStore, decode_line, encode_line, mean_advantages
from turntree.trainers.tree import Group, Node, Status, Tree

# Trees ----------------------------------------------------------------------------------------------------------------

numbers = st.floats(allow_nan=True, allow_infinity=True)
texts = st.text(st.characters(), max_size=20)  # lone surrogates included
infos = st.dictionaries(texts, st.recursive(st.none() | st.booleans() | st.integers() | texts, st.lists, max_leaves=4))
statuses: st.SearchStrategy[Status] = st.sampled_from(["answered", "truncated", "failed"])


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    length = draw(st.integers(0, 4))
    ids = st.lists(st.integers(0, 2**40), min_size=length, max_size=length).map(tuple)
    floats = st.lists(numbers, min_size=length, max_size=length).map(tuple)
    return Node(
        turn_ids=draw(ids),
        logprobs=draw(floats),
        entropies=draw(floats | st.just(())),
        observation_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
        entropy=draw(numbers),
        text=draw(texts),
        action=draw(texts),
        observation=draw(texts),
        reward=draw(st.none() | numbers),
        step_reward=draw(numbers),
        branchable=draw(st.booleans()),
        pruned=draw(st.booleans()),
        version=draw(st.integers(0, 9)),
        score=draw(st.none() | numbers),
        reason=draw(texts),
        info=FrozenDict(draw(infos)),
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tree, LeafAdvantages]:
    root = draw(nodes())
    grown = [root]
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from(grown))
        child = draw(nodes())
        # Ordinals have gaps where a sibling was lost.
        child.ordinal = max((c.ordinal for c in parent.children), default=-1) + draw(st.integers(1, 2))
        child.picked = draw(st.none() | st.sampled_from(grown))
        grown.append(parent.add_child(child))
    for node in grown:
        node.status = "open" if node.children else draw(statuses)
    question = Question("q", draw(texts), tuple(draw(st.lists(texts, max_size=2))), FrozenDict({"hops": 2}))
    tree = Tree(
        root, draw(texts), draw(st.integers(0, 3)), draw(st.none() | st.just(question)), draw(st.integers(0, 3))
    )
    return tree, {(leaf, n): draw(numbers) for leaf in tree.leaves() for n in leaf.trajectory()}


def facts(tree: Tree, advantages: LeafAdvantages) -> str:
    """Everything that the store keeps, as text (so that NaN equals NaN)."""
    fields = [f for f in Node.__slots__ if f not in ("parent", "children", "state", "prefix", "picked")]
    rows = [(n.path, n.picked and n.picked.path, *(f"{f}={getattr(n, f)!r}" for f in fields)) for n in tree.nodes()]
    pairs = sorted((leaf.path, node.path, repr(value)) for (leaf, node), value in advantages.items())
    return repr((tree.prompt_uid, tree.index, tree.task, tree.rounds, rows, pairs))


def plain_group(uid: str, *, tokens: int = 3, trees: int = 1) -> Group:
    """A prompt of one-turn trees, whose random log-probs hardly compress."""
    rng = random.Random(uid)
    made = []
    for index in range(trees):
        root = Node(observation="问题？")
        logprobs = tuple(rng.random() for _ in range(tokens))
        root.add_child(Node(turn_ids=tuple(range(tokens)), logprobs=logprobs, status="answered", reward=1.0))
        made.append(Tree(root, uid, index))
    return Group(uid, made)


def uids(store: TreeStore, step: int) -> list[str]:
    return [stored.tree.prompt_uid for stored in store.read(step)]


# Round trips ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(trees(), max_size=3))
def test_reading_gives_what_was_written(tmp_path_factory: pytest.TempPathFactory, made: list[Any]) -> None:
    store = TreeStore(tmp_path_factory.mktemp("trees"))
    advantages = {pair: value for _, per_leaf in made for pair, value in per_leaf.items()}
    store.write(7, [Group(tree.prompt_uid, [tree]) for tree, _ in made], advantages)
    back = list(store.read())
    assert [s.step for s in back] == [7] * len(made)
    assert [facts(s.tree, s.advantages) for s in back] == [facts(*one) for one in made]


def test_a_line_a_tree_readable_by_other_tools(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    group = plain_group("甲", trees=2)
    leaf = group.trees[0].root.children[0]
    store.write(3, [group], {(leaf, leaf): 0.5})
    raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(store.file(3).read_bytes())).read()
    rows = [json.loads(line) for line in raw.decode().splitlines()]
    assert [(row["schema"], row["uid"], row["tree"]) for row in rows] == [(1, "甲", 0), (1, "甲", 1)]
    assert rows[0]["nodes"][1]["advantage"] == 0.5
    assert rows[0]["nodes"][1]["advantages"] == [[[0], 0.5]]
    assert rows[1]["nodes"][1]["advantage"] is None
    assert "问题" in raw.decode()


def test_mean_over_leaves() -> None:
    root = Node()
    shared = root.add_child(Node())
    leaves = [shared.add_child(Node(ordinal=i, status="answered", reward=float(i))) for i in range(2)]
    pairs = {(leaf, node): leaf.reward or 0.0 for leaf in leaves for node in leaf.trajectory()}
    assert mean_advantages(pairs) == {shared: 0.5, leaves[0]: 0.0, leaves[1]: 1.0}


class _Mood(enum.StrEnum):
    WILLING = "willing"


class _Level(enum.IntEnum):
    HIGH = 3


def test_values_that_are_not_json_are_kept_as_text(tmp_path: Path) -> None:
    import numpy as np

    group = plain_group("a")
    odd = {"when": datetime(2026, 1, 2), "how": _Mood.WILLING, "level": _Level.HIGH, "many": 2**70, "set": {1}}
    plain = {"when": "2026-01-02 00:00:00", "how": "willing", "level": 3, "many": 2**70, "set": "{1}"}
    info = FrozenDict(
        {"f1": np.float32(0.5), "path": Path("x"), "nan": float("nan"), "row": np.array([1.0, np.inf])} | odd
    )
    group.trees[0].root.info = info
    store = TreeStore(tmp_path)
    store.write(1, [group])
    (back,) = store.read(1)
    assert back.tree.root.info == FrozenDict({"f1": 0.5, "path": "x", "nan": "nan", "row": [1.0, "inf"]} | plain)


# Writing again, sampling, size ----------------------------------------------------------------------------------------


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    store.write(1, [plain_group("a"), plain_group("b")])
    store.write(1, [plain_group("c")])
    assert uids(store, 1) == ["c"]
    assert [(r.step, r.trees) for r in store.records()] == [(1, 1)]


def test_resume_forgets_later_steps(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    for step in range(1, 6):
        store.write(step, [plain_group(f"p{step}")])
    store.drop_after(3)
    assert store.steps() == [1, 2, 3]
    assert [r.step for r in store.records()] == [1, 2, 3]
    TreeStore(tmp_path / "absent").drop_after(3)


def test_sampling_keeps_whole_groups_and_depends_on_nothing_but_its_key(tmp_path: Path) -> None:
    groups = [plain_group(f"p{i}", trees=2) for i in range(200)]
    first, second = TreeStore(tmp_path / "a", sample=0.25, seed=4), TreeStore(tmp_path / "b", sample=0.25, seed=4)
    record = first.write(1, groups)
    second.write(1, groups[::-1])
    kept = uids(first, 1)
    assert sorted(kept) == sorted(uids(second, 1))
    assert all(kept.count(uid) == 2 for uid in kept)
    assert 25 <= len(set(kept)) <= 75
    assert record.stored == len(kept)
    assert record.stored + record.sampled_out == record.trees == 400
    second.write(2, groups)
    assert set(uids(second, 2)) != set(kept)


def test_a_small_sample_still_shows_one_group_a_step_and_zero_shows_none(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "some", sample=1e-9)
    store.write(1, [plain_group("a"), plain_group("b")])
    assert len(uids(store, 1)) == 1
    nothing = TreeStore(tmp_path / "none", sample=0.0)
    assert nothing.write(1, [plain_group("a")]).sampled_out == 1
    assert uids(nothing, 1) == []


def test_past_the_cap_steps_are_thinned_evenly_and_counted(tmp_path: Path) -> None:
    cap = 40_000
    store = TreeStore(tmp_path, max_bytes=cap)
    for step in range(1, 41):
        store.write(step, [plain_group(f"p{step}", tokens=500)])
        assert sum(store.file(s).stat().st_size for s in store.steps()) <= cap
    steps = store.steps()
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert steps[0] == 1
    assert steps[-1] == 40
    assert len(steps) >= 5
    assert max(gaps) <= 4 * min(gaps)
    records = store.records()
    assert [r.step for r in records] == list(range(1, 41))
    assert [r.step for r in records if not r.thinned] == steps
    assert all(r.stored == 0 and r.bytes == 0 for r in records if r.thinned)


def test_one_step_larger_than_the_cap_is_cut_and_counted(tmp_path: Path) -> None:
    store = TreeStore(tmp_path, max_bytes=20_000)
    record = store.write(1, [plain_group(f"p{i}", tokens=500) for i in range(30)])
    assert 0 < record.stored < 30
    assert record.stored + record.over_cap == 30
    assert store.file(1).stat().st_size <= 20_000
    assert len(uids(store, 1)) == record.stored


@pytest.mark.parametrize(("sample", "max_bytes"), [(-0.1, 1), (1.1, 1), (float("nan"), 1), (1.0, 0)])
def test_options_out_of_range(tmp_path: Path, sample: float, max_bytes: int) -> None:
    with pytest.raises(ConfigError):
        TreeStore(tmp_path, sample=sample, max_bytes=max_bytes)


# Damage ---------------------------------------------------------------------------------------------------------------


def test_truncated_files_are_named_wherever_they_end(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    store.write(1, [plain_group("a"), plain_group("b", tokens=40)])
    whole = store.file(1).read_bytes()
    for size in range(len(whole)):
        store.file(1).write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"step-00000001\.jsonl\.zst"):
            list(store.read(1))


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    store.write(1, [plain_group("a", tokens=40)])
    whole = store.file(1).read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        store.file(1).write_bytes(damaged)
        with pytest.raises(DataError, match=r"step-00000001\.jsonl\.zst"):
            list(store.read(1))


def test_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    store.file(2).write_bytes(zstandard.compress(b'{"schema": 99}\n'))
    with pytest.raises(DataError, match="schema 99, this version reads 1"):
        list(store.read())


def test_lines_that_are_not_trees_are_numbered(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    store.file(2).write_bytes(zstandard.compress(b'{"schema": 1, "nodes": []}\n'))
    with pytest.raises(DataError, match="line 1 is not a stored tree"):
        list(store.read(2))


def test_a_missing_step_tells_which_there_are(tmp_path: Path) -> None:
    store = TreeStore(tmp_path)
    with pytest.raises(DataError, match="no steps"):
        store.read(5)
    assert list(store.read()) == []
    store.write(2, [plain_group("a")])
    store.write(9, [plain_group("a")])
    with pytest.raises(DataError, match="2 steps, 2 to 9"):
        store.read(5)


WRITER = """
import sys
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Tree

store = TreeStore(sys.argv[1])
root = Node()
for i in range(20):
    ids = tuple(range(2000))
    root.add_child(Node(ordinal=i, turn_ids=ids, logprobs=tuple((k * 0.37 + i) % 1 for k in ids), status="answered"))
for step in range(1, 10_000):
    store.write(step, [Group("a", [Tree(root, "a")])])
    print(step, flush=True)
"""


@pytest.mark.parametrize("moment", [0.003, 0.021, 0.047])
def test_a_killed_writer_leaves_whole_steps(tmp_path: Path, moment: float) -> None:
    """Kill -9 between and inside writes: every file that is there reads in full, none that was reported is lost."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    reported = int(writer.stdout.readline())
    time.sleep(moment)
    os.kill(writer.pid, signal.SIGKILL)
    reported = max([reported, *(int(line) for line in writer.communicate()[0].split())])
    store = TreeStore(tmp_path)
    assert set(range(1, reported + 1)) <= set(store.steps())
    assert all(len(stored.tree.root.children) == 20 for stored in store.read())
    store.write(reported + 1, [plain_group("again")])
    assert uids(store, reported + 1) == ["again"]


def test_values_and_advantages_of_tokens_come_back(tmp_path: Path) -> None:
    root = Node(observation="prompt")
    turn = root.add_child(Node(turn_ids=(5, 6), logprobs=(-0.5, -0.25), status="answered", reward=1.0))
    bare = root.add_child(Node(ordinal=1, status="failed"))
    columns = {"value": {turn: [0.25, math.inf]}, "advantage": {turn: [0.5, -1.0]}}
    store = TreeStore(tmp_path)
    store.write(1, [Group("q", [Tree(root, "q")])], {}, columns)
    back = next(store.read(1))
    node, other = back.tree.root.children
    assert {name: dict(rows) for name, rows in back.tokens.items()} == {
        "value": {node: (0.25, math.inf)},
        "advantage": {node: (0.5, -1.0)},
    }
    assert bare.status == other.status
    assert all(other not in rows for rows in back.tokens.values())
    assert decode_line(encode_line(back), tmp_path, number=1).tokens.keys() == columns.keys()


def test_a_part_of_a_tree_keeps_its_paths() -> None:
    top = plain_group("p", tokens=1).trees[0].root
    child = top.children[0]
    child.add_child(Node(ordinal=2, status="answered", reward=1.0))
    rows = json.loads(encode_line(StoredTree(1, Tree(child, "p"), {})))["nodes"]
    assert [row["path"] for row in rows] == [[child.ordinal], [child.ordinal, 2]]
