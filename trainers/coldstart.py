"""The cold start as one job: teacher trajectories from gold steps, then supervised training on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turntree.agents.dialogue import Dialogue
from turntree.agents.models import save_model
from turntree.agents.solutions import solutions
from turntree.agents.teacher import Demonstration, Teacher, trajectories
from turntree.envs.core import TurnCore
from turntree.envs.search_qa import SearchQACore
from turntree.trainers.atomic import atomic_file
from turntree.trainers.build import build_bench, run_path
from turntree.trainers.checkpoint import config_fingerprint
from turntree.trainers.config import RunConfig
from turntree.trainers.interrupt import stop_on_interrupt
from turntree.trainers.rollout import Prompt, Rollout, RolloutStats
from turntree.trainers.run_folder import MetricsLog, RunFolder
from turntree.trainers.seeds import derive_seed
from turntree.trainers.sft import SftResult, demonstration_group, train_sft
from turntree.trainers.task import build_task, first

#: Options that a resumed cold start must share with the one it continues; how often it saves may change.
RESUME_KEYS = (
    "seed",
    "model",
    "env.id",
    "env.args",
    "env.questions",
    "env.max_turns",
    "env.max_searches",
    "env.max_observation_tokens",
    "env.grammar",
    "env.grammar_args",
    "env.prompt",
    "env.tools",
    "search",
    "sft.steps",
    "sft.demonstrations",
    "sft.batch_size",
    "sft.learning_rate",
    "sft.warmup_steps",
    "sft.weight_decay",
    "sft.adam_beta2",
    "sft.laziness",
    "sft.error",
    "trainer.max_grad_norm",
)

__all__ = ["ColdStart", "cold_start", "demonstrations", "teach"]


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Where the cold start ended. ``teacher_em``: mean exact match of the demonstrations themselves.

    For tasks that are no questions it is the mean of their metric, whose name is ``metric``.
    """

    folder: Path
    model: Path
    result: SftResult
    teacher_em: float
    demonstrations: int
    metric: str = "em"


def teach(core: TurnCore[Any], questions: Sequence[Any], config: RunConfig) -> list[Demonstration]:
    """The configured teacher's trajectories for ``questions``; of other tasks, their own solutions."""
    if not isinstance(core, SearchQACore):
        return solutions(core, questions, seed=derive_seed(config.seed, "teacher"))
    teacher = Teacher(laziness=config.sft.laziness, error=config.sft.error)
    return trajectories(core, questions, teacher=teacher, seed=derive_seed(config.seed, "teacher"))


def demonstrations(prompts: Sequence[Prompt], core: TurnCore[Any], dialogue: Dialogue, config: RunConfig) -> Rollout:
    """The teacher's trajectories as a rollout of one leaf a prompt, for supervised training in the policy's trainer.

    Nothing was sampled, so no token or tool call is counted.
    """
    demos, room = teach(core, [prompt.task for prompt in prompts], config), config.sampling.max_context_tokens
    groups = [
        demonstration_group(demo, dialogue, uid=prompt.uid, max_tokens=room, stops=core.stop)
        for prompt, demo in zip(prompts, demos, strict=True)
    ]
    count = len(groups)
    return Rollout(tuple(groups), RolloutStats(prompts=count, trees=count, trajectories=count))


def cold_start(config: RunConfig, *, on_step: Callable[[int, float], None] | None = None) -> ColdStart:
    """Run it as configured (``sft.*``, ``model.path``, ``env.questions``) and write a Hugging Face folder.

    The run folder holds the demonstrations, the losses, a resumable checkpoint and, once it is done, ``model/`` and
    ``summary.json``. The first Ctrl-C finishes the optimiser step and saves before ``KeyboardInterrupt`` is raised;
    the second one stops at once.

    Raises:
        ConfigError: an option does not fit.
        DataError: the questions have no gold steps, or a demonstration is longer than ``sampling.max_context_tokens``.
        CheckpointError: the run folder is in use (without ``resume``) or belongs to another configuration (with it).
    """
    bench = build_bench(config)
    task = build_task(config, bench.tokenizer)
    demos = teach(task.core, first(task.questions, config.sft.demonstrations), config)
    room, stops = config.sampling.max_context_tokens, task.core.stop
    groups = [
        demonstration_group(demo, bench.dialogue, uid=demo.question_id, max_tokens=room, stops=stops) for demo in demos
    ]
    # Only now, so that a run which is refused leaves no folder behind.
    folder = RunFolder.create(run_path(config, "sft"), config, resume=config.resume)
    with stop_on_interrupt("optimiser step") as interrupted:
        result = train_sft(
            bench.model,
            groups,
            config=config.sft,
            seed=config.seed,
            max_pack_tokens=config.trainer.max_pack_tokens,
            max_grad_norm=config.trainer.max_grad_norm,
            checkpoints=folder.checkpoints,
            resume=config.resume,
            fingerprint=config_fingerprint(asdict(config), RESUME_KEYS),
            on_step=on_step,
            should_stop=interrupted.is_set,
        )
        if interrupted.is_set() and result.steps < config.sft.steps:
            raise KeyboardInterrupt
        folder.save_config(config)
        _save_demonstrations(folder.path / "demonstrations.jsonl", demos)
        _save_losses(folder, result)
        model = save_model(bench.model, bench.tokenizer, folder.path / "model")
        score = float(np.mean([demo.em for demo in demos]))
        done = ColdStart(folder.path, model, result, score, len(demos), task.core.metric)
        folder.write_summary(_summary(done, seed=config.seed))
    return done


def _summary(done: ColdStart, *, seed: int) -> dict[str, Any]:
    losses = done.result.losses
    return {
        "steps": done.result.steps,
        "skipped": done.result.skipped,
        "seconds": done.result.seconds,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "demonstrations": done.demonstrations,
        "teacher_em": done.teacher_em,
        "seed": seed,
    }


def _save_losses(folder: RunFolder, result: SftResult) -> None:
    with MetricsLog(folder.metrics_file, tensorboard=folder.tensorboard, resume_step=0) as log:
        for step, loss in enumerate(result.losses, start=1):
            log.write(step, {"loss": loss})


def _save_demonstrations(path: Path, demos: Sequence[Demonstration]) -> None:
    with atomic_file(path) as handle:
        for demo in demos:
            row: dict[str, Any] = asdict(demo)
            handle.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
