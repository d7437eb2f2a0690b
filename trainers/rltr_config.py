"""Options of ``turntree rltr``, the comparison of ways to train."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.errors import ConfigError
from turntree.trainers.options import at_least, did_you_mean, one_of, opt

__all__ = ["ARMS", "RltrConfig"]

ARMS = ("direct", "sft", "rl", "planner_sft", "rltr")
"""No tools; end-to-end SFT; end-to-end RL after it; SFT of a planner; RL of the planner by completeness after it."""


@dataclass(frozen=True)
class RltrConfig:
    """What is compared, how often, and on which world where no questions are given."""

    arms: list[str] = opt(list(ARMS), "direct, sft, rl, planner_sft, rltr; what an arm starts from is trained anyway.")
    seeds: int = opt(1, "repetitions, with the seeds seed, seed + 1, ...")
    cold_start: bool = opt(True, "SFT before RL (false: RL starts from model.path, and the arms of SFT are left out).")
    profile: str = opt("quickstart", "profile of the generated worlds, in short sentences: quickstart, or code.")
    entities: int = opt(2500, "entities of the generated training world (where env.questions is empty).")
    train_questions: int = opt(8000, "questions of the generated training world.")
    test_questions: int = opt(400, "questions of the generated test world.")

    def __post_init__(self) -> None:
        unknown = next((arm for arm in self.arms if arm not in ARMS), None)
        if unknown is not None or not self.arms:
            hint = did_you_mean(unknown or "", ARMS)
            raise ConfigError(f"rltr.arms={self.arms}: expected some of {list(ARMS)}.{hint}")
        one_of("rltr.profile", self.profile, ("quickstart", "code"))
        for name in ("seeds", "train_questions", "test_questions"):
            at_least(f"rltr.{name}", getattr(self, name), 1)
        at_least("rltr.entities", self.entities, 60)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The arms in the order of the table, each once."""
        return tuple(a for a in ARMS if a in self.arms and (self.cold_start or a not in ("sft", "planner_sft")))
