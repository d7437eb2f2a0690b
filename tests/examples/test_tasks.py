"""The example package of tasks: short, installed by itself, lawful, solvable, and trained from the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from turntree.commands import run_evaluate, run_sft
from turntree.envs import TurnEnv
from turntree.envs.check import check_fork
from turntree.envs.registry import load_plugins, turn_env
from turntree.trainers.run_folder import read_metrics

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "tasks"
IDS = ["turntree_tasks/Calculator-v0", "turntree_tasks/Cave-v0", "turntree_tasks/Database-v0"]
ATTACKS = [
    "ATTACH '{file}' AS x",
    "VACUUM INTO '{file}'",
    "PRAGMA journal_mode = WAL",
    "SELECT load_extension('x')",
    "CREATE TABLE t (a)",
    "BEGIN",
    "SELECT random()",
    "INSERT INTO staff VALUES (90, CURRENT_TIMESTAMP, 'ops', 1)",
    "SELECT 1; SELECT 2",
    "UPDATE staff SET pay = -1",
    "DELETE FROM sqlite_master",
    "SELECT count(*) FROM staff a, staff b, staff c, staff d, staff e, staff f, staff g, staff h",
    "INSERT OR FAIL INTO staff SELECT id + 7, name, team, pay FROM staff",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed from a copy of its sources into a folder of its own, without an index."""
    folder = tmp_path_factory.mktemp("tasks")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", folder / "site", folder / "source"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module", autouse=True)
def on_path(installed: Path) -> Iterator[None]:
    sys.path.insert(0, str(installed))
    load_plugins.cache_clear()
    yield
    sys.path.remove(str(installed))
    load_plugins.cache_clear()
    for name in IDS:
        gymnasium.registry.pop(name, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "turntree_tasks"]:
        del sys.modules[name]


def solve(env: TurnEnv[Any], index: int) -> tuple[float, dict[str, Any]]:
    env.reset(seed=0, options={"index": index})
    rules: Any = env.core
    total, info, over = 0.0, dict[str, Any](), False
    for turn in rules.rules.solution(env.tasks[index]):
        assert not over
        _, reward, terminated, truncated, info = env.step(turn)
        total, over = total + reward, terminated or truncated
    assert over
    return total, info


@pytest.mark.parametrize("name", ["calculator", "cave", "database"])
def test_each_task_is_about_a_hundred_lines(name: str) -> None:
    text = (SOURCE / "turntree_tasks" / f"{name}.py").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) <= 115


@pytest.mark.parametrize("name", IDS)
def test_it_is_found_by_its_entry_point_and_keeps_every_law(name: str) -> None:
    env = turn_env(name, {"max_turns": 30})
    check_env(env, skip_render_check=True)
    laws = set(check_fork(env, process=name == IDS[2]))
    assert {"determinism", "restore", "isolation", "pickle", "json"} <= laws


@pytest.mark.parametrize("name", IDS)
def test_the_scripted_solution_gets_reward_1(name: str) -> None:
    for split in ("train", "dev"):
        env = turn_env(name, {"split": split, "size": 8})
        for index in range(len(env.tasks)):
            reward, info = solve(env, index)
            assert (reward, info["success"], info["format_valid"]) == (1.0, True, True)
    assert turn_env(name, {}).tasks != turn_env(name, {"split": "dev"}).tasks


def test_wrong_answers_get_no_reward() -> None:
    for name, turn in zip(IDS, ("<answer> 1 </answer>", "<leave></leave>", "<done></done>"), strict=True):
        env = turn_env(name, {"max_turns": 2})
        env.reset(seed=0, options={"index": 0})
        _, reward, _, _, _ = env.step(turn)
        assert reward == 0.0


def test_what_the_calculator_cannot_read_is_said_and_costs_nothing() -> None:
    env = turn_env(IDS[0], {"max_turns": 9})
    env.reset(seed=0)
    for text in ("2 **", "__import__('os')", "9 ** 9 ** 9", "1.5", "(" * 150, "x" * 300):
        observation, *_, done, _ = env.step(f"<calculate> {text} </calculate>")
        assert "Error: " in observation
        assert not done


def test_bats_tell_siblings_apart() -> None:
    env = turn_env(IDS[1], {"bats": 1.0, "cells": 30})
    env.reset(seed=0, options={"index": 0})
    snapshot = env.snapshot()
    way = env.snapshot().observation.partition("You can go ")[2].split()[0].rstrip(".")
    seen = set()
    for seed in range(8):
        env.restore(snapshot, seed)
        seen.add(env.step(f"<go> {way} </go>")[0])
    assert len(seen) > 1


def rows(env: TurnEnv[Any]) -> str:
    return env.step("<sql> SELECT * FROM staff </sql>")[0]


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_database_allows_reading_and_changing_rows_only(attack: str, tmp_path: Path) -> None:
    env = turn_env(IDS[2], {"max_turns": 20})
    env.reset(seed=0, options={"index": 0})
    before = rows(env)
    observation = env.step(f"<sql> {attack.format(file=tmp_path / 'x.db')} </sql>")[0]
    assert "Error: " in observation
    assert list(tmp_path.iterdir()) == []
    assert rows(env) == before
    assert len(env.snapshot().state.inner.log) == 0


def test_forks_of_a_database_never_see_each_other_and_hold_statements_alone() -> None:
    env = turn_env(IDS[2], {"max_turns": 200})
    env.reset(seed=0, options={"index": 0})
    start = rows(env)
    forks = [env.fork() for _ in range(40)]  # more than connections are kept
    for i, fork in enumerate(forks):
        fork.step(f"<sql> UPDATE staff SET pay = {1000 + i} WHERE id = 1 </sql>")
    for i, fork in enumerate(forks):
        assert f"| {1000 + i}" in rows(fork)
        assert fork.snapshot().state.inner.log.last == f"UPDATE staff SET pay = {1000 + i} WHERE id = 1"
    assert rows(env) == start
    twin = forks[0].fork()
    assert twin.snapshot().state.inner.log is forks[0].snapshot().state.inner.log


@pytest.mark.parametrize("name", IDS)
def test_it_trains_and_evaluates_from_the_command_line(name: str, bed: Any, installed: Path, tmp_path: Path) -> None:
    small = ["sampling.max_turn_tokens=12", "sampling.max_context_tokens=600", "trainer.threads=1"]
    own = [f"env={name}", f"model.path={bed.model}", "env.args.size=6", "env.args.max_turns=3", *small]
    loop = ["trainer.steps=2", "trainer.prompts_per_step=2", "trainer.eval_every=2", "env.dev_args.split=dev"]
    run(installed, "train", *own, *loop, "algorithm=tree_grpo", f"out={tmp_path / 'run'}")
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["budget/trajectories"] > 0 and row["total/generated_tokens"] > 0 for row in metrics)
    assert {"validation/success", "validation/reward", "validation/n"} <= metrics[-1].keys()
    assert not {key for row in metrics for key in row if "/em" in key or "/f1" in key}
    assert name in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert (tmp_path / "run" / "curve.png").is_file()
    assert (tmp_path / "run" / "tree.html").is_file()


def test_it_learns_its_solutions_and_evaluates(bed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [f"env.id={IDS[0]}", "env.args.size=6", "sampling.max_turn_tokens=12", "trainer.threads=1"]
    run_sft([*own, f"model.path={bed.model}", "sft.steps=2", "sft.demonstrations=4", f"out={tmp_path / 's'}"])
    assert "teacher success 1.000 on 4 demonstrations" in capsys.readouterr().out
    run_evaluate([*own, "env.test_args.split=test", f"model.path={tmp_path / 's' / 'model'}", f"out={tmp_path / 'e'}"])
    said = capsys.readouterr().out
    assert "success 0.000 [" in said
    assert "reward 0.000 [" in said
    saved = json.loads((tmp_path / "e" / "evaluation.json").read_text(encoding="utf-8"))
    assert (saved["metric"], saved["n"], saved["env_args"]) == ("success", 6, {"size": 6, "split": "test"})
    assert "em" not in saved


def run(installed: Path, command: str, *overrides: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    program = [str(Path(sys.executable).with_name("turntree")), command, *overrides]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment, cwd=installed)
    assert done.returncode == 0, done.stderr
    return done.stdout
