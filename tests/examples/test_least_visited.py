"""The example package: small, installed by itself, and its rules keep the laws and train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turntree.trainers.probe import probe_credit, probe_expansion
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.tree import Group, Node, Tree

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "least_visited"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed from a copy of its sources into a folder of its own, without an index."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", folder / "site", folder / "source"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def rules(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(installed)
    import least_visited  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]

    yield least_visited
    sys.modules.pop("least_visited", None)


def test_it_has_at_most_60_lines() -> None:
    files = [file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {file.name for file in files} == {"pyproject.toml", "least_visited.py"}
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 60


def hand() -> Tree:
    """Two first turns, a with three leaves below and b with one."""
    root = Node()
    for ordinal, rewards in enumerate(((1.0, 0.0, 0.0), (1.0,))):
        turn = root.add_child(Node(ordinal=ordinal))
        for number, reward in enumerate(rewards):
            turn.add_child(Node(ordinal=number, status="answered", reward=reward))
    return Tree(root)


def test_it_grows_where_the_fewest_trajectories_passed(rules: Any) -> None:
    tree = hand()
    picks = rules.least_visited(tree, 4, np.random.default_rng(0))
    a, b = tree.root.children
    assert [pick.parent for pick in picks[:2]] == [b, b]
    assert {pick.parent for pick in picks} <= {a, b, tree.root}
    assert [pick.score for pick in picks] == [1.0, 2.0, 3.0, 3.0]
    a.branchable = b.branchable = tree.root.branchable = False
    assert rules.least_visited(tree, 2, np.random.default_rng(0)) == []


def test_shared_turns_get_less_and_equal_rewards_nothing(rules: Any) -> None:
    tree = hand()
    (rows,) = rules.rarity([Group("g", [tree])], power=1.0).values
    assert [row.tolist() for row in rows] == [[0.5 / 3, 0.5], [-0.5 / 3, -0.5], [-0.5 / 3, -0.5], [0.5, 0.5]]
    for leaf in tree.leaves():
        leaf.reward = 0.1
    (rows,) = rules.rarity([Group("g", [tree])]).values
    assert not any(row.any() for row in rows)
    assert rules.rarity([Group("empty", [Tree(Node())])]).values == ((),)


def test_its_rules_pass_the_trials_of_a_run(rules: Any) -> None:
    probe_expansion(rules.least_visited, option="least_visited")
    probe_credit(rules.rarity, option="rarity")


def test_it_trains_from_the_command_line(bed: Any, installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed), str(bed.rules)])
    run = tmp_path / "run"
    own = [
        "algorithm.expansion=least_visited:least_visited",
        "algorithm.credit=least_visited:rarity",
        "algorithm.credit_args.power=0.25",
    ]
    command = [Path(sys.executable).with_name("turntree"), "train", *bed.args, *own, f"out={run}"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["budget/trajectories"] == 4 * 2 * 3 for row in metrics)
    assert any(row["actor/grad_norm"] > 0 for row in metrics)
    assert "least_visited:rarity" in (run / "config.yaml").read_text(encoding="utf-8")
