"""The commands that bring things in and out, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from turntree.cli import cli
from turntree.envs.datasets import DATASETS, load_questions
from turntree.errors import ConfigError, DataError
from turntree.search_backend import load_corpus
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Tree


def call(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_data_list_names_every_set() -> None:
    found = call("data", "list")
    assert found.exit_code == 0
    rows = json.loads(call("data", "list", "--json").output)
    assert [row["name"] for row in rows] == list(DATASETS)


def test_data_show_a_file_and_a_set(tmp_path: Path) -> None:
    path = write(tmp_path / "nq" / "test.jsonl", {"question": "Q", "answer": ["a", "b"]}, {"question": "R"})
    with pytest.raises(DataError, match="line 2"):
        call("data", "show", path)
    shown = json.loads(call("data", "show", path, "--unanswerable", "skip", "--json").output)
    assert (shown["questions"], shown["skipped"], shown["first"][0]["golden_answers"]) == (1, 1, ["a", "b"])
    named = json.loads(call("data", "show", "nq", "--source", tmp_path, "--unanswerable", "skip", "--json").output)
    assert (named["dataset"], named["sha256"], named["expected"]) == ("nq", shown["sha256"], 3610)
    with pytest.raises(ConfigError, match="Did you mean 'popqa'"):
        call("data", "show", "popq")


HOTPOT = {
    "_id": "1",
    "question": "Q",
    "answer": "A",
    "supporting_facts": [["T", 0]],
    "context": [["T", ["x"]], ["U", ["y"]]],
}


def test_data_convert_writes_questions_and_corpus(tmp_path: Path) -> None:
    path = write(tmp_path / "h.json", HOTPOT)
    assert "1 questions, 2 passages" in call("data", "convert", path, "--out", tmp_path / "with").output
    (question,) = load_questions(tmp_path / "with" / "questions.jsonl")
    assert question.metadata["supporting_ids"] == (load_corpus(tmp_path / "with" / "corpus.jsonl")[0].id,)
    call("data", "convert", path, "--no-corpus", "--out", tmp_path / "without")
    assert not (tmp_path / "without" / "corpus.jsonl").exists()
    with pytest.raises(ConfigError, match="already holds"):
        call("data", "convert", path, "--out", tmp_path / "with")
    with pytest.raises(ConfigError, match="leave --limit out"):
        call("data", "convert", path, "--corpus", "--limit", 1, "--out", tmp_path / "more")


def test_data_convert_joins_files(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "test.jsonl", {"id": "x", "question": "Q", "answer": "1"})
    two = write(tmp_path / "b" / "test.jsonl", {"id": "x", "question": "R", "answer": "2"})
    call("data", "convert", one, two, "--out", tmp_path / "out")
    assert [q.id for q in load_questions(tmp_path / "out" / "questions.jsonl")] == ["a-test:x", "b-test:x"]


def test_export_and_import_trees(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    root = Node(observation="Q", observation_ids=(1,))
    for i, reward in enumerate((1.0, 0.0)):
        root.add_child(Node(text=f"t{i}", turn_ids=(i,), logprobs=(0.0,), ordinal=i, status="answered", reward=reward))
    TreeStore(run.trees).write(3, [Group("p", [Tree(root, "p")])])
    for name in ("pairs", "messages", "tokens"):
        assert (
            "rows of 1 trees" in call("export", run.path, "--format", name, "--out", tmp_path / f"{name}.jsonl").output
        )
    call("export", run.path, "--format", "trees-jsonl", "--step", 3, "--out", tmp_path / "t.jsonl.zst")
    assert "1 trees" in call("import-trees", tmp_path / "t.jsonl.zst", "--out", tmp_path / "copy").output
    assert "step" in call("view", tmp_path / "copy", "--list").output
    assert "A(tree 0, 0)" in call("explain", tmp_path / "copy", "--credit", "grpo").output
    with pytest.raises(ConfigError, match=r"imported trees come without one\); name a rule with --credit"):
        call("explain", tmp_path / "copy")
    pytest.importorskip("pyarrow")
    out = tmp_path / "v.parquet"
    assert "2 rows" in call("export", run.path, "--format", "verl-parquet", "--min-reward", 0, "--out", out).output


def test_import_config_prints_a_command_and_fails_where_options_clash(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    found = call("import-config", good, "--out", tmp_path / "mine.yaml")
    assert found.exit_code == 0
    assert "algorithm.chains=4" in found.output
    assert "chains: 4" in (tmp_path / "mine.yaml").read_text()
    assert json.loads(call("import-config", good, "--json").output)["flavour"] == "verl"
    bad = tmp_path / "bad.yaml"
    bad.write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 1}}\n")
    failed = call("import-config", bad)
    assert failed.exit_code == 1
    assert "these options do not go together" in failed.output


def test_a_world_is_written_over_nothing_else(tmp_path: Path) -> None:
    small = ("--profile", "quickstart", "--entities", 80, "--questions", 5)
    for _ in range(2):  # the same one again is no loss
        assert call("world", "--out", tmp_path / "w", "--seed", 1, *small).exit_code == 0
    written = (tmp_path / "w" / "questions.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"found corpus\.jsonl and questions\.jsonl and meta\.json of something"):
        call("world", "--out", tmp_path / "w", "--seed", 2, *small)
    assert (tmp_path / "w" / "questions.jsonl").read_bytes() == written
    write(tmp_path / "mine" / "questions.jsonl", {"question": "Q", "answer": "A"})
    with pytest.raises(ConfigError, match="choose another --out, or remove them"):
        call("world", "--out", tmp_path / "mine", "--seed", 1, *small)
