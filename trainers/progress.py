"""How far a training run has come, and what a run that goes on from there must share with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from turntree.trainers.tally import RolloutStats

__all__ = ["RESUME_KEYS", "Progress"]

#: Options that a resumed run must share with the one it continues; the others (steps, intervals, threads) may change.
RESUME_KEYS = (
    "seed",
    "model",
    "agent.name",
    "agent.language",
    "agent.summarizer",
    "agent.summarizer_args",
    "env.id",
    "env.args",
    "env.questions",
    "env.max_turns",
    "env.max_searches",
    "env.max_observation_tokens",
    "env.on_length",
    "env.grammar",
    "env.grammar_args",
    "env.prompt",
    "env.language",
    "env.normalizer",
    "env.tools",
    "search",
    "reward",
    "sampling",
    "algorithm",
    "coldstart",
    "sft.data",
    "sft.unfit",
    "sft.laziness",
    "sft.error",
    "trainer.prompts_per_step",
    "trainer.prompts_per_update",
    "trainer.epochs",
    "trainer.learning_rate",
    "trainer.warmup_steps",
    "trainer.weight_decay",
    "trainer.adam_beta2",
    "trainer.max_grad_norm",
    "trainer.importance_cap",
)


@dataclass(slots=True)
class Progress:
    """What a checkpoint carries besides weights and moments; all of it plain JSON."""

    step: int = 0
    prompt_batches: int = 0
    updates: int = 0
    skipped: int = 0
    generated_tokens: int = 0
    tool_calls: int = 0
    trajectories: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_step: int | None = None
    skipped_in_a_row: int = 0
    watched: dict[str, float] = field(default_factory=dict)

    def add(self, stats: RolloutStats) -> None:
        """Count what a rollout used."""
        self.generated_tokens += stats.generated_tokens
        self.tool_calls += stats.tool_calls
        self.trajectories += stats.trajectories

    def totals(self) -> dict[str, float]:
        """The counts since the start of the run, as metrics."""
        return {
            "total/generated_tokens": float(self.generated_tokens),
            "total/tool_calls": float(self.tool_calls),
            "total/trajectories": float(self.trajectories),
            "total/updates": float(self.updates),
            "total/skipped_updates": float(self.skipped),
            "total/seconds": self.seconds,
        }
