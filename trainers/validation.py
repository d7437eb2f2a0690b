"""Scoring the validation questions while a run trains, and the folder that keeps what they scored."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from turntree.agents.scorer import Finisher, Scorer
from turntree.trainers.build import Bench, limits
from turntree.trainers.config import RunConfig
from turntree.trainers.distributed.ranks import Ranks
from turntree.trainers.evaluate import Evaluation, evaluate
from turntree.trainers.evaluation.passport import run_passport
from turntree.trainers.task import Task, eval_sampling, first, provenance

__all__ = ["Validation", "drop_validations_after"]


@dataclass(frozen=True, slots=True)
class Validation:
    """How a run validates: ``task`` has the questions, ``finisher`` and ``scorer`` judge, ``folder`` keeps results."""

    config: RunConfig
    task: Task
    bench: Bench
    finisher: Finisher | None
    scorer: Scorer | None
    ranks: Ranks
    folder: Path

    def score(self, step: int, *, generated_tokens: int) -> Evaluation:
        """Score the first ``trainer.eval_questions`` questions with the engine's weights, and keep the result.

        ``generated_tokens``: what the run has used so far, for curves over the budget.
        """
        config, task = self.config, self.task
        questions = first(task.questions, config.trainer.eval_questions)
        sampling = eval_sampling(config, task.core)
        found = evaluate(
            questions,
            core=task.core,
            engine=self.bench.engine,
            dialogue=self.bench.dialogue,
            sampling=sampling,
            limits=limits(config),
            seed=config.seed,
            finisher=self.finisher,
            scorer=self.scorer if config.reward.in_evaluation or config.agent.splits else None,
            ranks=self.ranks,
        )
        passport = run_passport(
            config,
            task,
            split="dev",
            sampling=sampling,
            dialogue=self.bench.dialogue.report.text(),
            questions=questions,
            weights=f"step {step}",
        )
        extra = {**provenance(config, task), "step": step, "generated_tokens": generated_tokens}
        if self.ranks.is_main:
            found.save(self.folder / f"step-{step:06d}", extra={**extra, "passport": passport.to_json()})
        return found


def drop_validations_after(folder: Path, step: int) -> None:
    """Delete the results of later steps: a run that goes on from ``step`` writes them again."""
    for place in folder.glob("step-*"):
        found = re.fullmatch(r"step-(\d+)", place.name)
        if found is not None and int(found[1]) > step:
            shutil.rmtree(place)
