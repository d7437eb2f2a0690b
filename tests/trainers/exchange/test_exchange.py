"""What leaves a run: the same trees back, the tokens that the engine saw, pairs that agree with the trainer's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs.datasets import load_questions
from turntree.envs.task import FrozenDict, Question
from turntree.errors import CheckpointError, ConfigError, DataError
from turntree.trainers.exchange import (
    IGNORED,
    Export,
    Selection,
    export_run,
    import_trees,
    read_tree_lines,
    tree_schema,
    validate_line,
)
from turntree.trainers.pairs import sibling_pairs
from turntree.trainers.report.run import list_trees
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Tree

NASTY = 'nul \x00, half \ud83d, \u2028, 谁 👍, " \\ </answer>'


def turn(text: str, ids: Sequence[int], observation: str = "", after: Sequence[int] = (), **options: Any) -> Node:
    return Node(
        text=text, turn_ids=tuple(ids), logprobs=tuple(-0.5 * i for i in ids), observation=observation,
        observation_ids=tuple(after), **options,
    )  # fmt: skip


def small_tree(uid: str = "p0", index: int = 0) -> tuple[Tree, dict[tuple[Node, Node], float]]:
    """A search that two answers share, a third answer beside it, and a failed one."""
    root = Node(observation="Who? " + NASTY, observation_ids=(1, 2, 3))
    search = root.add_child(turn("<search>x</search>", (10, 11), "passages", (20, 21, 22), action="search"))
    right = search.add_child(turn("<answer>me</answer>", (12,), status="answered", reward=1.0, action="answer"))
    wrong = search.add_child(
        turn("<answer>you</answer>", (13, 14), "late", (9,), ordinal=1, status="answered", reward=0.0)
    )
    other = root.add_child(turn("<answer>no</answer>", (15,), ordinal=1, status="truncated", reward=0.0))
    root.add_child(turn("lost", (16,), ordinal=2, status="failed"))
    wrong.picked, wrong.score, wrong.reason = search, float("inf"), NASTY
    question = Question("q1", "Who?", ("me", "I", NASTY), FrozenDict({"hops": 2}))
    tree = Tree(root, uid, index, question, 1)
    advantages = {(leaf, node): 0.25 * len(leaf.path) for leaf in (right, wrong, other) for node in leaf.trajectory()}
    return tree, advantages


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run", {"model": {"path": ""}})
    store = TreeStore(folder.trees)
    for step in (1, 2):
        made = [small_tree("p0", 0), small_tree("p0", 1), small_tree("p1", 0)]
        joined = {pair: value for _, advantages in made for pair, value in advantages.items()}
        store.write(step, [Group("p0", [made[0][0], made[1][0]]), Group("p1", [made[2][0]])], joined)
    return folder.path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# Trees ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_trees_out_and_in_are_the_same_bytes(run: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"trees.jsonl{suffix}"
    assert export_run(run, out, Export("trees-jsonl")).rows == 6
    assert import_trees(out, tmp_path / "back") == 6
    for file in sorted((run / "trees").glob("*.zst")):
        assert (tmp_path / "back" / "trees" / file.name).read_bytes() == file.read_bytes()
    again = tmp_path / f"again.jsonl{suffix}"
    export_run(tmp_path / "back", again, Export("trees-jsonl"))
    assert again.read_bytes() == out.read_bytes()
    assert len(list(list_trees(tmp_path / "back"))) >= 6
    with pytest.raises(CheckpointError, match="already holds a run"):
        import_trees(out, tmp_path / "back")


def test_one_step_only(run: Path, tmp_path: Path) -> None:
    assert export_run(run, tmp_path / "t.jsonl", Export("trees-jsonl", steps=[2])).rows == 3
    assert {row["step"] for row in lines(tmp_path / "t.jsonl")} == {2}
    with pytest.raises(DataError, match=r"expected stored trees of steps \[7\], found steps \[1, 2\]"):
        export_run(run, tmp_path / "t.jsonl", Export("trees-jsonl", steps=[7]))


def test_every_line_keeps_the_published_schema(run: Path, tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(tree_schema())
    export_run(run, tmp_path / "t.jsonl", Export("trees-jsonl"))
    rows = lines(tmp_path / "t.jsonl")
    for row in rows:
        validate_line(row, "here")
    described = tree_schema()["$defs"]["node"]["properties"]
    assert set(rows[0]["nodes"][0]) == set(tree_schema()["$defs"]["node"]["required"]) == set(described) - {"tokens"}
    assert set(rows[0]) == set(tree_schema()["properties"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda row: row.update(schema=2), r"line 2: expected a tree of schema 1, found at \$\.schema"),
        (lambda row: row.pop("uid"), "'uid' is a required property"),
        (lambda row: row["nodes"][1].update(turn_ids=["a"]), r"found at \$\.nodes\[1\]\.turn_ids\[0\]"),
        (lambda row: row["nodes"][1].update(status="done"), "'done' is not one of"),
        (lambda row: row["nodes"].pop(1), "line 2 is not a stored tree"),
        (lambda row: row["nodes"][1].update(logprobs=[0.5]), "2 turn tokens but 1 log-probs"),
    ],
)
def test_other_lines_are_refused_by_place(run: Path, tmp_path: Path, spoil: Any, message: str) -> None:
    path = tmp_path / "t.jsonl"
    export_run(run, path, Export("trees-jsonl"))
    rows = lines(path)
    spoil(rows[1])
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=message):
        import_trees(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_files_that_are_cut_off_are_refused(run: Path, tmp_path: Path) -> None:
    for suffix in (".zst", ".gz", ""):
        path = tmp_path / f"t.jsonl{suffix}"
        export_run(run, path, Export("trees-jsonl"))
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match="expected"):
            list(read_tree_lines(path))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(DataError, match="found no line"):
        import_trees(tmp_path / "empty", tmp_path / "back")


texts = st.text(st.characters(), max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def random_trees(draw: st.DrawFn) -> Tree:
    root = Node(observation=draw(texts), observation_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))))
    grown = [root]
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from(grown))
        ids = draw(st.lists(st.integers(0, 99), max_size=3))
        child = turn(draw(texts), ids, draw(texts), draw(st.lists(st.integers(0, 9), max_size=3)))
        child.ordinal = len(parent.children)
        grown.append(parent.add_child(child))
    for node in grown[1:]:
        if not node.children:
            node.status = draw(st.sampled_from(["answered", "truncated", "failed"]))
            node.reward = None if node.status == "failed" else draw(finite)
            node.pruned = draw(st.booleans())
    question = Question("q", draw(texts) + "?", ("a", draw(texts)), FrozenDict({}))
    return Tree(root, "p", 0, question, 1)


@settings(max_examples=40, deadline=None)
@given(random_trees())
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> None:
    folder = tmp_path_factory.mktemp("x")
    run = RunFolder.create(folder / "run", {})
    TreeStore(run.trees).write(3, [Group("p", [tree])])
    export_run(run.path, folder / "t.jsonl", Export("trees-jsonl"))
    import_trees(folder / "t.jsonl", folder / "back")
    name = "step-00000003.jsonl.zst"
    assert (folder / "back" / "trees" / name).read_bytes() == (run.trees / name).read_bytes()


# Rows -----------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(random_trees())
def test_token_rows_are_what_the_engine_saw(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> None:
    folder = tmp_path_factory.mktemp("x")
    run = RunFolder.create(folder / "run", {})
    TreeStore(run.trees).write(1, [Group("p", [tree])])
    leaves = tree.scored_leaves()
    if not leaves:
        with pytest.raises(DataError, match="expected rows for tokens, found none"):
            export_run(run.path, folder / "t.jsonl", Export("tokens"))
        assert not (folder / "t.jsonl").exists()
        return
    export_run(run.path, folder / "t.jsonl", Export("tokens"))
    for row, leaf in zip(lines(folder / "t.jsonl"), leaves, strict=True):
        ids, mask = list(tree.root.observation_ids), [0] * len(tree.root.observation_ids)
        for node in leaf.trajectory():
            ids += node.turn_ids
            mask += [1] * len(node.turn_ids)
            if node is not leaf:
                ids += node.observation_ids
                mask += [0] * len(node.observation_ids)
        assert (row["input_ids"], row["assistant_masks"]) == (ids, mask)
        assert row["labels"] == [i if m else IGNORED for i, m in zip(ids, mask)]
    export_run(run.path, folder / "once.jsonl", Export("tokens", selection=Selection(shared_turns="once")))
    trained = sum(sum(row["assistant_masks"]) for row in lines(folder / "once.jsonl"))
    unique = {id(n): len(n.turn_ids) for leaf in leaves for n in leaf.trajectory()}
    assert trained == sum(unique.values())


def test_messages_and_their_train_flags(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.jsonl"
    export = Export("messages", steps=[1], selection=Selection(min_reward=1.0, role="tool"))
    assert export_run(run, out, export).rows == 3
    row = lines(out)[0]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][0]["content"] == "Who? " + NASTY
    assert [m["content"] for m in row["messages"][1:]] == ["<search>x</search>", "passages", "<answer>me</answer>"]
    assert row["train"] == [False, True, False, True]
    assert (row["reward"], row["question_id"], row["path"]) == (1.0, "q1", [0, 0])
    once = Export("messages", steps=[1], selection=Selection(shared_turns="once"))
    export_run(run, out, once)
    assert [r["train"] for r in lines(out)[:3]] == [
        [False, True, False, True],
        [False, False, False, True],
        [False, True],
    ]


@pytest.mark.parametrize("form", ["messages", "implicit"])
def test_pairs_are_those_of_the_trainer(run: Path, tmp_path: Path, form: Any) -> None:
    out = tmp_path / "p.jsonl"
    export_run(run, out, Export("pairs", steps=[1], form=form))
    rows = lines(out)
    store = TreeStore(run / "trees")
    pairs = [pair for group in store.groups(1) for pair in sibling_pairs(group)]
    assert [(r["chosen_path"], r["rejected_path"], r["margin"]) for r in rows] == [
        (list(p.winner.path), list(p.loser.path), p.margin) for p in pairs
    ]
    deep = next(r for r in rows if r["chosen_path"] == [0, 0])
    prompt = deep["prompt"] if form == "messages" else deep["chosen"][:-1]
    assert [m["role"] for m in prompt] == ["user", "assistant", "user"]
    assert deep["chosen"][-1] == {"role": "assistant", "content": "<answer>me</answer>"}
    assert deep["rejected"][-1] == {"role": "assistant", "content": "<answer>you</answer>"}
    if form == "implicit":
        assert "prompt" not in deep
        assert deep["chosen"][:-1] == deep["rejected"][:-1]


def test_pairs_as_text_hold_the_template_of_the_tokens(run: Path, tmp_path: Path, bed: Any) -> None:
    from transformers import AutoTokenizer

    export_run(run, tmp_path / "p.jsonl", Export("pairs", steps=[1], form="text", tokenizer=str(bed.model)))
    deep = next(r for r in lines(tmp_path / "p.jsonl") if r["chosen_path"] == [0, 0])
    loaded = AutoTokenizer.from_pretrained(bed.model)
    plain: Any = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    assert deep["prompt"] == loaded.decode([1, 2, 3, 10, 11, 20, 21, 22], **plain)
    assert deep["chosen"] == loaded.decode([12], **plain)
    with pytest.raises(ConfigError, match=re.escape("pass --tokenizer DIR")):
        export_run(run, tmp_path / "p.jsonl", Export("pairs", form="text"))


def test_equal_rewards_give_no_pairs_and_no_file(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected rows for pairs, found none in 6 trees"):
        export_run(run, tmp_path / "p.jsonl", Export("pairs", min_margin=5.0))
    assert not (tmp_path / "p.jsonl").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Export("xml"), "format 'xml' is not known"),  # type: ignore[arg-type]
        (lambda: Selection(role="system"), "expected 'user' or 'tool'"),  # type: ignore[arg-type]
        (lambda: Selection(shared_turns="no"), "expected 'per_leaf' or 'once'"),  # type: ignore[arg-type]
    ],
)
def test_unknown_words_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# verl -----------------------------------------------------------------------------------------------------------------


def test_verl_rows_hold_tokens_masks_and_questions(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "v.parquet"
    done = export_run(run, out, Export("verl-parquet", steps=[1], data_source="hotpotqa"))
    assert done.rows == 9
    assert done.changed > 0  # lone surrogates in prompt and answers
    rows = parquet.read_table(out).to_pylist()
    row = rows[0]
    assert row["prompts"] == [1, 2, 3]
    assert row["responses"] == [10, 11, 20, 21, 22, 12]
    assert row["response_mask"] == [1, 1, 0, 0, 0, 1]
    assert row["input_ids"] == row["prompts"] + row["responses"]
    assert row["loss_mask"] == [0, 0, 0, *row["response_mask"]]
    assert row["advantages"] == [0.5, 0.5, 0.0, 0.0, 0.0, 0.5]
    assert row["rollout_log_probs"] == [-5.0, -5.5, 0.0, 0.0, 0.0, -6.0]
    assert (row["data_source"], row["reward"], row["reward_model"]["style"]) == ("hotpotqa", 1.0, "rule")
    assert row["prompt"][0]["content"] == "Who? " + NASTY.replace("\ud83d", "\ufffd")
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [r["extra_info"]["index"] for r in rows] == list(range(9))


def test_prompts_for_verl_are_questions_again(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    done = export_run(run, tmp_path / "v.parquet", Export("verl-parquet", prompts_only=True))
    (question,) = load_questions(tmp_path / "v.parquet")
    assert done.rows == 1
    assert question.question == "Who?"
    assert question.golden_answers == ("me", "I", NASTY.replace("\ud83d", "\ufffd"))


@pytest.mark.parametrize(
    ("format", "name"), [("tokens", "t.jsonl"), ("pairs", "p.jsonl.zst"), ("verl-parquet", "v.parquet")]
)
def test_an_export_without_a_row_leaves_an_older_file_alone(run: Path, tmp_path: Path, format: Any, name: str) -> None:
    out = tmp_path / name
    out.write_bytes(b"mine")
    with pytest.raises(DataError, match="found none"):
        export_run(run, out, Export(format, selection=Selection(min_reward=2.0), min_margin=9.0))
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize("suffix", ["zst", "gz", "jsonl"])
def test_files_that_were_strung_together_are_read_whole(run: Path, tmp_path: Path, suffix: str) -> None:
    parts = [tmp_path / f"{step}.{suffix}" for step in (1, 2)]
    for step, part in enumerate(parts, 1):
        export_run(run, part, Export("trees-jsonl", steps=[step]))
    both = tmp_path / f"both.{suffix}"
    both.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert import_trees(both, tmp_path / "copy") == 6
    both.write_bytes(both.read_bytes()[:-10])
    with pytest.raises(DataError):
        list(read_tree_lines(both))
