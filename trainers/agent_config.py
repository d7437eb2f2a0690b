"""Options of the agent: one model that answers by itself, or a planner and a summariser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turntree.errors import ConfigError
from turntree.trainers.options import one_of, opt

__all__ = ["AgentConfig"]


@dataclass(frozen=True)
class AgentConfig:
    """Who calls tools and who answers."""

    name: str = opt("react", "react (one model does both), or planner_summarizer (a planner calls, another answers).")
    language: str = opt("", "en or zh: of the packaged prompts of planner and summariser ('' : env.language).")
    summarizer: str = opt(
        "planner", "planner (its own engine, current weights), llm (endpoint or folder), rule, or an import path."
    )
    summarizer_args: dict[str, Any] = opt(
        {}, "its arguments (llm: model, base_url, temperature, prompt, thoughts, ...)."
    )
    eval_summarizer: str = opt("", "the one of validation and evaluation ('' : summarizer).")
    eval_summarizer_args: dict[str, Any] = opt({}, "its arguments.")

    def __post_init__(self) -> None:
        one_of("agent.name", self.name, ("react", "planner_summarizer"))
        one_of("agent.language", self.language, ("", "en", "zh"))
        if self.name == "react":
            given = [n for n in ("summarizer_args", "eval_summarizer", "eval_summarizer_args") if getattr(self, n)]
            given += ["summarizer"] if self.summarizer != type(self).summarizer else []
            if given:
                raise ConfigError(
                    f"agent.{given[0]} is an option of agent=planner_summarizer, but agent=react; choose the former, "
                    "or leave it out"
                )
        elif self.eval_summarizer_args and not self.eval_summarizer:
            raise ConfigError("agent.eval_summarizer_args is given but agent.eval_summarizer is empty; name it")

    @property
    def splits(self) -> bool:
        """Whether a planner calls tools and somebody else answers."""
        return self.name == "planner_summarizer"

    def writer(self, *, evaluating: bool) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the summariser of a rollout, or of validation and evaluation."""
        if evaluating and self.eval_summarizer:
            return self.eval_summarizer, self.eval_summarizer_args
        return self.summarizer, self.summarizer_args
