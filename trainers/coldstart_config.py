"""The options of a cold start: who plays how often, and what of it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turntree.errors import ConfigError
from turntree.trainers.options import at_least, finite, one_of, opt

__all__ = ["ColdStartConfig"]


@dataclass(frozen=True)
class ColdStartConfig:
    """A teacher's trajectories by rejection sampling: played, judged, filtered, the best of each question kept."""

    teacher: str = opt("oracle", "oracle (gold steps, or the task's own solutions), or engine (engine.* plays).")
    model: str = opt("", "engine: Hugging Face folder of the teacher ('' : model.path, the policy itself).")
    dialogue: str = opt("", "engine: its style of dialogue ('' : model.dialogue).")
    questions: int | None = opt(None, "questions played, in file order (null: all; for sft, sft.demonstrations).")
    samples: int = opt(1, "trajectories of a question (N); may be raised when a run goes on.")
    temperature: float | None = opt(None, "engine: temperature of the teacher (null: sampling.temperature).")
    criterion: str = opt(
        "reward", "what is best: reward (of the run), completeness, em, f1, format, or the import path of a scorer."
    )
    criterion_args: dict[str, Any] = opt({}, "its arguments (completeness: those of CompletenessScorer).")
    keep: int = opt(1, "best trajectories of a question that are kept; of equal ones only the first.")
    min_score: float | None = opt(None, "score that a kept trajectory has at least (null: any).")
    filters: dict[str, Any] = opt(
        {}, "filters by name: language, length, duplicate_calls, format, answered, each true or its arguments; "
        "others: name -> import path, or {path, args}."
    )  # fmt: skip

    def __post_init__(self) -> None:
        finite("coldstart", self)
        one_of("coldstart.teacher", self.teacher, ("oracle", "engine"))
        one_of("coldstart.dialogue", self.dialogue, ("", "inline", "chat", "tools"))
        for name in ("questions", "samples", "keep"):
            at_least(f"coldstart.{name}", getattr(self, name), 1)
        at_least("coldstart.temperature", self.temperature, 0)
        if self.keep > self.samples:
            raise ConfigError(
                f"coldstart.keep={self.keep} of coldstart.samples={self.samples} trajectories; keep at most as many as "
                "are played"
            )
        if self.teacher == "engine" and self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"coldstart.temperature=0 with coldstart.samples={self.samples}: greedy trajectories of a question are "
                "all the same; raise the temperature, or play one"
            )
        if self.teacher == "oracle":
            self._refuse_engine_options()

    def _refuse_engine_options(self) -> None:
        """Options that only an engine follows must not be given as if they counted."""
        for name in ("model", "dialogue", "temperature"):
            if getattr(self, name) not in ("", None):
                raise ConfigError(
                    f"coldstart.{name}={getattr(self, name)} is for coldstart.teacher=engine, but the teacher is oracle"
                )
