"""A turn environment as TRL's ``environment_factory``: its tools are methods, its reward is the environment's own.

    GRPOTrainer(model, environment_factory=SearchEnvironment.of(questions=..., corpus=...), ...)

TRL writes the calls in the model's own template and never shows the turn's text, so a call becomes a turn in the
environment's tags. An episode that a failing search spoiled has no reward (None), and TRL leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turntree.envs import Action, SearchQAEnv, TagGrammar
from turntree.errors import ToolError


class SearchEnvironment:
    """One rollout. Public methods are the tools that the model is shown, apart from ``reset`` and ``get_reward``."""

    def __init__(self, env: SearchQAEnv) -> None:
        self._env = env
        self._grammar = TagGrammar()
        self._reward = 0.0
        self._failed = False

    @classmethod
    def of(cls, **options: Any) -> Callable[[], SearchEnvironment]:
        """The factory: all rollouts share questions and corpus. ``options`` are those of ``SearchQAEnv``."""
        shared = SearchQAEnv(**options)
        return lambda: cls(shared.sibling())

    def reset(self, *, index: int | None = None, **row: Any) -> str:
        """Start an episode about question ``index`` of the environment (a column of the data set), or a drawn one."""
        del row
        self._env.reset(options={} if index is None else {"index": int(index)})
        self._reward, self._failed = 0.0, False
        return str(self._env.snapshot().state.task.question)

    def search(self, query: str) -> str:
        """
        Find passages about something.

        Args:
            query: What to look for.

        Returns:
            The passages that were found.
        """
        return self._play("search", query)

    def answer(self, text: str) -> str:
        """
        Give the final answer, as short as possible. This ends the task.

        Args:
            text: The answer.

        Returns:
            A note that the task is over.
        """
        return self._play("answer", text)

    def get_reward(self) -> float | None:
        """The episode's reward; an episode without an answer is scored as truncated, a spoiled one not at all."""
        if self._failed:
            return None
        if not self._env.done:
            self._reward += self._env.end(self._env.core.truncate(self._env.snapshot().state, "context"))[1]
        return self._reward

    def _play(self, kind: str, argument: str) -> str:
        if self._env.done:
            return "The task is over."
        try:
            observation, reward, *_ = self._env.step(self._grammar.write("", Action(kind, argument)))
        except ToolError:
            self._failed = True
            raise
        self._reward += reward
        return observation.strip() or "The task is over."
