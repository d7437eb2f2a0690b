"""Demonstrations of tasks that know their own solutions: scripted turns, played through the real environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from turntree.agents.scorer import Finished, FinishedTurn
from turntree.agents.teacher import Demonstration, DemonstrationTurn
from turntree.envs.agent_task import TaskCore
from turntree.envs.core import Pending, Step, ToolFailure, ToolResult, TurnCore
from turntree.envs.task import FrozenDict
from turntree.envs.tools import execute
from turntree.errors import ConfigError, DataError, ToolError

__all__ = ["finish_solution", "finish_solutions", "play_solution", "solutions"]


def solutions(core: TurnCore[Any], tasks: Sequence[Any], *, seed: int) -> list[Demonstration]:
    """One demonstration for each task, in order; ``em`` holds the number that the task is judged by.

    Raises ``ConfigError`` for a core that is no :class:`TaskCore`, ``DataError`` for a task without a solution and for
    one whose solution does not end the episode, ``ToolError`` for a tool that fails.
    """
    return [play_solution(_task_core(core), task, name=_name(task, i), seed=seed) for i, task in enumerate(tasks)]


def finish_solutions(core: TurnCore[Any], tasks: Sequence[Any], *, seed: int) -> list[Finished]:
    """The same episodes as :func:`solutions` plays, with what the environment said of each turn."""
    return [finish_solution(_task_core(core), task, name=_name(task, i), seed=seed) for i, task in enumerate(tasks)]


def _task_core(core: TurnCore[Any]) -> TaskCore[Any]:
    if not isinstance(core, TaskCore):
        raise ConfigError(
            f"{type(core).__name__} knows no solutions to learn from; expected an AgentTask with solution(), or "
            "questions with gold steps"
        )
    return core


def _name(task: Any, index: int) -> str:
    return str(getattr(task, "id", index))


def play_solution(core: TaskCore[Any], task: Any, *, name: str, seed: int) -> Demonstration:
    """Play ``core.rules.solution(task)``; see :func:`solutions`."""
    finished = finish_solution(core, task, name=name, seed=seed)
    found = finished.reward if core.metric == "reward" else float(finished.info.get(core.metric, 0.0))
    turns = tuple(DemonstrationTurn(turn.text, turn.observation) for turn in finished.turns)
    return Demonstration(name, finished.prompt, turns, finished.reward, found)


def finish_solution(core: TaskCore[Any], task: Any, *, name: str, seed: int) -> Finished:
    """Play ``core.rules.solution(task)``; see :func:`solutions`."""
    texts = core.rules.solution(task)
    if not texts:
        raise DataError(f"task {name}: solution() of {type(core.rules).__name__} gives no turns")
    state, prompt = core.initial(task, seed=seed)
    turns: list[FinishedTurn] = []
    reward, info, answered = 0.0, FrozenDict(), True
    for number, text in enumerate(texts, 1):
        step = _turn(core, state, text)
        state, reward, info, answered = step.state, reward + step.reward, step.info, not step.truncated
        action = str(step.info.get("action", ""))
        turns.append(FinishedTurn(text, action, "" if step.done else step.observation, step.info))
        if action == "invalid" or step.done != (number == len(texts)):
            raise DataError(
                f"task {name}: expected the solution to be readable and to end with its last turn, found turn {number} "
                f"of {len(texts)} ({text!r:.80}) with {step.info.get('action')!r}, episode over: {step.done}"
            )
    status: Literal["answered", "truncated"] = "answered" if answered else "truncated"
    return Finished(task, prompt, tuple(turns), status, info.get("answer"), reward, state, info)


def _turn(core: TurnCore[Any], state: Any, text: str) -> Step[Any]:
    outcome = core.act(state, text)
    if not isinstance(outcome, Pending):
        return outcome
    return core.resolve(state, outcome, [_require(result) for result in execute(core.tools, outcome.calls)])


def _require(outcome: ToolResult | ToolFailure) -> ToolResult:
    if isinstance(outcome, ToolFailure):
        raise ToolError(f"a call of the solution failed ({outcome.kind}: {outcome.message}); see to the tool")
    return outcome
