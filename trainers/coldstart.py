"""The cold start as one job: teacher trajectories from gold steps, then supervised training on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turntree.agents.models import save_model
from turntree.agents.teacher import Demonstration, Teacher, trajectories
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.trainers.atomic import atomic_file
from turntree.trainers.build import build_bench, build_task, run_path
from turntree.trainers.config import RunConfig
from turntree.trainers.run_folder import MetricsLog, RunFolder
from turntree.trainers.seeds import derive_seed
from turntree.trainers.sft import SftResult, demonstration_group, train_sft

__all__ = ["ColdStart", "cold_start", "teach"]


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Where the cold start ended. ``teacher_em``: mean exact match of the demonstrations themselves."""

    folder: Path
    model: Path
    result: SftResult
    teacher_em: float
    demonstrations: int


def teach(core: SearchQACore, questions: Sequence[Question], config: RunConfig) -> list[Demonstration]:
    """The configured teacher's trajectories for ``questions``."""
    teacher = Teacher(laziness=config.sft.laziness, error=config.sft.error)
    return trajectories(core, questions, teacher=teacher, seed=derive_seed(config.seed, "teacher"))


def cold_start(
    config: RunConfig,
    *,
    on_step: Callable[[int, float], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ColdStart:
    """Run it as configured (``sft.*``, ``model.path``, ``env.questions``) and write a Hugging Face folder.

    The run folder holds the demonstrations, the losses, a resumable checkpoint and ``model/``.
    """
    bench = build_bench(config)
    task = build_task(
        config, bench.tokenizer, questions=config.env.questions, corpus=config.search.corpus, option="env.questions"
    )
    folder = RunFolder.create(run_path(config, "sft"), config, resume=config.resume)
    demos = teach(task.core, task.questions[: config.sft.demonstrations], config)
    _save_demonstrations(folder.path / "demonstrations.jsonl", demos)
    groups = [
        demonstration_group(demo, bench.dialogue, uid=str(i), max_tokens=config.sampling.max_context_tokens)
        for i, demo in enumerate(demos)
    ]
    result = train_sft(
        bench.model,
        groups,
        config=config.sft,
        seed=config.seed,
        max_pack_tokens=config.trainer.max_pack_tokens,
        max_grad_norm=config.trainer.max_grad_norm,
        checkpoints=folder.checkpoints,
        resume=config.resume,
        on_step=on_step,
        should_stop=should_stop,
    )
    folder.metrics_file.unlink(missing_ok=True)
    with MetricsLog(folder.metrics_file) as log:
        for step, loss in enumerate(result.losses, start=1):
            log.write(step, {"loss": loss})
    model = folder.path / "model"
    save_model(bench.model, bench.tokenizer, model)
    teacher_em = float(np.mean([demo.em for demo in demos]))
    folder.write_summary(
        {
            "steps": result.steps,
            "seconds": result.seconds,
            "loss_first": result.losses[0] if result.losses else None,
            "loss_last": result.losses[-1] if result.losses else None,
            "demonstrations": len(demos),
            "teacher_em": teacher_em,
            "seed": config.seed,
        }
    )
    return ColdStart(folder.path, model, result, teacher_em, len(demos))


def _save_demonstrations(path: Path, demos: Sequence[Demonstration]) -> None:
    with atomic_file(path) as handle:
        for demo in demos:
            row: dict[str, Any] = asdict(demo)
            handle.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
