# mypy: ignore-errors
# pyright: reportMissingImports=false
# What this imports is installed where it runs, not here.
"""Run in an environment that has verifiers: a task with tools, state and rewards forks and grows into a tree."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf

sys.path.insert(0, str(Path(__file__).parent))

from growing import check_tree, grow_tree

from turntree.envs import TurnEnv
from turntree.envs.check import check_fork
from turntree.envs.interop.verifiers import VerifiersTask
from turntree.errors import ConfigError, ToolError

ADD = '<adder_add>{"n": %d}</adder_add>'


class SumData(vf.TaskData):
    target: int = 0


class Total(vf.State):
    total: int = 0


class Adder(vf.Toolset[vf.ToolsetConfig, Total]):
    @vf.tool
    async def add(self, n: int) -> str:
        """Add n to the total."""
        if n > 100:
            raise ValueError("too much")
        self.state.total += n
        return f"The total is {self.state.total}."


class SumTask(vf.Task[SumData, Total, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def said(self, trace: Any) -> float:
        return float(trace.last_reply == str(self.data.target))

    @vf.reward(weight=0.5)
    async def reached(self, trace: Any) -> float:
        return float(trace.state.total == self.data.target)

    @vf.metric
    async def calls(self, trace: Any) -> float:
        return float(len(trace.tool_messages))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Any]:
        for target in range(4, 100):
            yield SumTask(SumData(prompt=f"Reach {target}, then say it.", target=target), self.config.task)


class Broken(SumTask):
    @vf.reward
    async def said(self, trace: Any) -> float:
        raise RuntimeError("judge down")


class Prepared(SumTask):
    async def setup(self, trace: Any, runtime: Any) -> None:
        return None


def make(**options: Any) -> TurnEnv[Any]:
    return TurnEnv(VerifiersTask(Sums(vf.TasksetConfig()), most=3, **options), [0, 1, 2])


def test_scores() -> None:
    env = make()
    observation, _ = env.reset(options={"index": 2})
    assert observation.startswith("Reach 6, then say it.")
    assert "The total is 2." in env.step(ADD % 2)[0]
    kept = env.snapshot()
    assert "The total is 6." in env.step(ADD % 4)[0]
    assert env.step("<answer>6</answer>")[1:3] == (1.5, True)
    env.restore(kept)
    assert "too much" in env.step(ADD % 101)[0]
    assert "Error" in env.step('<adder_add>{"m": 1}</adder_add>')[0]
    assert "The total is 3." in env.step(ADD % 1)[0]
    *_, info = env.step("<answer>6</answer>")
    assert (info["rewards"], info["metrics"]) == ({"said": 1.0, "reached": 0.0}, {"calls": 4.0})


def test_a_truncated_rollout_is_scored_by_the_task() -> None:
    env = make(max_turns=2)
    env.reset(options={"index": 0})
    env.step(ADD % 1)
    _, reward, terminated, truncated, _ = env.step(ADD % 3)
    assert (reward, terminated, truncated) == (0.5, False, True)


def test_inside_an_event_loop() -> None:
    async def play() -> float:
        env = make()
        env.reset(options={"index": 0})
        return float(env.step("<answer>4</answer>")[1])

    assert asyncio.run(play()) == 1.0


def test_refusals() -> None:
    for tasks, message in (([Prepared(SumData(prompt="p"))], "needs setup"), ([], "at least one task")):
        with pytest.raises(ConfigError, match=message):
            VerifiersTask(tasks)
    env: TurnEnv[Any] = TurnEnv(VerifiersTask([Broken(SumData(prompt="p", target=1))]), [0])
    env.reset()
    with pytest.raises(ToolError, match="judge down"):
        env.step("<answer>1</answer>")


def main() -> None:
    for test in (test_scores, test_a_truncated_rollout_is_scored_by_the_task, test_inside_an_event_loop, test_refusals):
        test()
    turns = [ADD % 2, ADD % 3, "<answer>6</answer>", "nothing"]
    laws = check_fork(make(), actions=turns, process=False)  # the task is defined in this script
    assert {"restore", "isolation", "json", "pickle"} <= set(laws), laws
    env = make()
    print(check_tree(grow_tree(env, 2, turns[:3], stop=["</adder_add>", "</answer>"]), env))
    print("verifiers", version("verifiers"), "ok")


if __name__ == "__main__":
    main()
