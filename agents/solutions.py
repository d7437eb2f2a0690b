"""Demonstrations of tasks that know their own solutions: scripted turns, played through the real environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turntree.agents.teacher import Demonstration, DemonstrationTurn
from turntree.envs.agent_task import TaskCore
from turntree.envs.core import Pending, Step, ToolFailure, ToolResult, TurnCore
from turntree.envs.task import FrozenDict
from turntree.envs.tools import execute
from turntree.errors import ConfigError, DataError, ToolError

__all__ = ["play_solution", "solutions"]


def solutions(core: TurnCore[Any], tasks: Sequence[Any], *, seed: int) -> list[Demonstration]:
    """One demonstration for each task, in order; ``em`` holds the number that the task is judged by.

    Raises ``ConfigError`` for a core that is no :class:`TaskCore`, ``DataError`` for a task without a solution and for
    one whose solution does not end the episode, ``ToolError`` for a tool that fails.
    """
    if not isinstance(core, TaskCore):
        raise ConfigError(
            f"{type(core).__name__} knows no solutions to learn from; expected an AgentTask with solution(), or "
            "questions with gold steps"
        )
    return [play_solution(core, task, name=str(getattr(task, "id", i)), seed=seed) for i, task in enumerate(tasks)]


def play_solution(core: TaskCore[Any], task: Any, *, name: str, seed: int) -> Demonstration:
    """Play ``core.rules.solution(task)``; see :func:`solutions`."""
    texts = core.rules.solution(task)
    if not texts:
        raise DataError(f"task {name}: solution() of {type(core.rules).__name__} gives no turns")
    state, prompt = core.initial(task, seed=seed)
    turns: list[DemonstrationTurn] = []
    reward, info = 0.0, FrozenDict()
    for number, text in enumerate(texts, 1):
        step = _turn(core, state, text)
        state, reward, info = step.state, reward + step.reward, step.info
        turns.append(DemonstrationTurn(text, "" if step.done else step.observation))
        if step.info.get("action") == "invalid" or step.done != (number == len(texts)):
            raise DataError(
                f"task {name}: expected the solution to be readable and to end with its last turn, found turn {number} "
                f"of {len(texts)} ({text!r:.80}) with {step.info.get('action')!r}, episode over: {step.done}"
            )
    found = reward if core.metric == "reward" else float(info.get(core.metric, 0.0))
    return Demonstration(name, prompt, tuple(turns), reward, found)


def _turn(core: TurnCore[Any], state: Any, text: str) -> Step[Any]:
    outcome = core.act(state, text)
    if not isinstance(outcome, Pending):
        return outcome
    return core.resolve(state, outcome, [_require(result) for result in execute(core.tools, outcome.calls)])


def _require(outcome: ToolResult | ToolFailure) -> ToolResult:
    if isinstance(outcome, ToolFailure):
        raise ToolError(f"a call of the solution failed ({outcome.kind}: {outcome.message}); see to the tool")
    return outcome
