"""A task with a tool: work out a sum that is too long to do in one's head."""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turntree.envs import Action, ActionTags, AgentTask, FrozenDict, Step, ToolCall, ToolResult, TurnEnv
from turntree.envs.core import Effects

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(text: str) -> int:
    """The value of an expression of whole numbers. Raises ``ValueError`` for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError("only whole numbers, + - * and brackets are known")

    if len(text) > 200:
        raise ValueError("the expression is too long")
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is not an expression") from None


class Calculator:
    """The tool. What the model gets wrong is a text; there is nothing here that the world could get wrong."""

    effects: Effects = "none"
    description = "works out an expression of whole numbers with + - * and brackets"
    fingerprint = "calculator-1"

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(self._answer(call.argument)) for call in calls]

    def _answer(self, expression: str) -> str:
        try:
            return str(evaluate(expression))
        except ValueError as error:
            return f"Error: {error}."


@dataclass(frozen=True)
class Sum:
    """The state: what is asked, and how often the calculator was used."""

    expression: str
    calls: int = 0
    solved: bool = False


@dataclass(frozen=True)
class Arithmetic(AgentTask[Sum]):
    """Reward 1 for the right number, less ``call_price`` for each call after the first."""

    max_turns: int = 4
    call_price: float = 0.1
    metric = "success"
    grammar = ActionTags({"answer": "the number, at the end"})
    tools = FrozenDict({"calculate": Calculator()})
    examples = ("<calculate> 2 * (3 + 4) </calculate>", "<calculate> two </calculate>", "<answer> 14 </answer>")

    def initial_state(self, task: str, rng: np.random.Generator) -> Sum:
        return Sum(task)

    def prompt(self, state: Sum) -> str:
        return f"What is {state.expression}?"

    def resolve(self, state: Sum, action: Action, results: Sequence[ToolResult], rng: np.random.Generator) -> Step[Sum]:
        return Step(replace(state, calls=state.calls + 1), results[0].value)

    def transition(self, state: Sum, action: Action, rng: np.random.Generator) -> Step[Sum]:
        solved = action.argument.replace(",", "") == str(evaluate(state.expression))
        reward = max(0.0, 1.0 - self.call_price * max(0, state.calls - 1)) if solved else 0.0
        return Step(replace(state, solved=solved), "", reward, terminated=True, info=FrozenDict({"calls": state.calls}))

    def success(self, state: Sum) -> bool:
        return state.solved

    def solution(self, task: str) -> list[str]:
        write = (ActionTags({"calculate": "", "answer": ""})).write
        return [write("", Action("calculate", task)), write("", Action("answer", str(evaluate(task))))]


def make(split: str = "train", size: int = 200, render_mode: str | None = None, **options: Any) -> TurnEnv[Sum]:
    """The environment; ``split`` (train, dev, test) draws other sums."""
    rng = np.random.default_rng([ord(letter) for letter in split])
    numbers = rng.integers(11, 100, size=(size, 3)).tolist()
    return TurnEnv(Arithmetic(**options), [f"{a} * {b} + {c}" for a, b, c in numbers], render_mode=render_mode)
