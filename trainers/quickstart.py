"""The main job in one call: a generated world, a tiny decoder, cold start, tree rollouts, updates, evaluation.

Training and test worlds share no name and no question template; only questions of the test world are scored.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from turntree.agents.models import save_model
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.envs.worlds import generate_world, lexicon, name_words
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.envs.worlds.names import Split
from turntree.envs.worlds.speech import Language
from turntree.envs.worlds.styles import StyleName
from turntree.trainers.build import run_path
from turntree.trainers.coldstart import cold_start
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import resolve_engine
from turntree.trainers.learner import TrainResult, train
from turntree.trainers.remote import refuse_training
from turntree.trainers.report.run import write_report
from turntree.trainers.report.run_page import write_page
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.scoring import score

__all__ = ["Stages", "quickstart", "score_once", "write_tiny_model"]

_log = logging.getLogger(__name__)

#: (entities, questions) of the worlds. Training needs so many names that copying pays and memorising does not.
SIZES: dict[Split, tuple[int, int]] = {"train": (2500, 8000), "dev": (180, 200), "test": (180, 400)}

Report = Callable[[str, int, int, str], None]
"""``report(stage, done, total, note)``: how far a stage has come."""

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class Stages:
    """Where each stage of a quickstart lies below its run folder."""

    root: Path

    @property
    def worlds(self) -> Path:
        return self.root / "worlds"

    @property
    def initial(self) -> Path:
        return self.root / "initial-model"

    @property
    def cold_start(self) -> Path:
        return self.root / "cold-start"

    @property
    def before(self) -> Path:
        return self.root / "evaluation-before"

    @property
    def after(self) -> Path:
        return self.root / "evaluation-after"

    def configure(self, config: RunConfig, model: Path) -> RunConfig:
        """``config`` on the generated worlds, with the model in ``model``."""
        files = {split: str(self.worlds / split / "questions.jsonl") for split in SIZES}
        env = replace(config.env, questions=files["train"], dev_questions=files["dev"], test_questions=files["test"])
        return replace(config, env=env, model=replace(config.model, path=str(model)))


def write_tiny_model(
    out: Path,
    *,
    seed: int,
    head_dim: int | None = None,
    style: StyleName = "short",
    language: Language = "en",
    tokens: Sequence[str] = (),
) -> Path:
    """Write the tiny decoder with random weights and its tokenizer as a Hugging Face folder.

    The tokenizer knows the words of worlds of ``style`` in ``language``; ``tokens`` are texts that are one token each.
    """
    words, syllables = lexicon(style, language)
    said = WorldGrammar(language=language).words()
    tokenizer = build_tokenizer([*words, *said, *name_words(language)], syllables, tokens)
    save_model(build_tiny_model(tokenizer, seed=seed, head_dim=head_dim), tokenizer, out)
    return out


def quickstart(
    config: RunConfig, *, report: Report = lambda *_: None, on_step: OnStep = lambda *_: None
) -> dict[str, Any]:
    """Run all stages in ``config.out`` and return ``summary.json``; ``on_step`` hears of each training step.

    The model that is scored at the end is the one with the best exact match on the dev world during training.

    With ``resume=true`` finished stages are kept and the first unfinished one goes on from its newest checkpoint.
    """
    # Once for all stages, before there is a model: each by itself might choose another one.
    config, reason = resolve_engine(config, trains=True)
    if reason:
        _log.info("engine=auto is %s: %s", config.engine.name, reason)
    refuse_training(config)
    started = time.monotonic()
    stages = Stages(run_path(config, "quickstart"))
    RunFolder.create(stages.root, config, resume=config.resume)
    _worlds(stages, config)
    if not (stages.initial / "config.json").is_file():
        # vLLM has no attention of 24 dimensions on CPU.
        head_dim = 32 if config.engine.name.startswith("vllm") else None
        language = cast("Language", config.env.language)
        write_tiny_model(stages.initial, seed=config.seed, head_dim=head_dim, language=language)
    start_model, cold_seconds = _cold_start(stages, config, report)
    before = score_once(stages.configure(config, start_model), stages.before, stage="evaluate before", report=report)
    result = _train(stages, config, start_model, report, on_step)
    if result.interrupted:
        return {"interrupted": True, "step": result.progress.step}
    progress = result.progress
    chosen = "model" if progress.best_step is None else "best-model"
    trained = stages.configure(config, result.folder / chosen)
    after = score_once(trained, stages.after, stage="evaluate after", report=report)
    summary = {
        "em_before": before["em"],
        "em_after": after["em"],
        "f1_before": before["f1"],
        "f1_after": after["f1"],
        "em_before_interval": [before["em_low"], before["em_high"]],
        "em_after_interval": [after["em_low"], after["em_high"]],
        "n_questions": after["n"],
        "generated_tokens": progress.generated_tokens,
        "tool_calls": progress.tool_calls,
        "trajectories": progress.trajectories,
        "seconds_total": time.monotonic() - started,
        "seconds_cold_start": cold_seconds,
        "seconds_rl": progress.seconds,
        "best_step": progress.best_step,
        "seed": config.seed,
        "algorithm": config.algorithm.name,
        "passport": json.loads((result.folder / "passport.json").read_text(encoding="utf-8")),
    }
    RunFolder.open(result.folder).write_summary(summary)
    write_report(result.folder)
    write_page(result.folder)
    return summary


def _worlds(stages: Stages, config: RunConfig) -> None:
    for split, (entities, questions) in SIZES.items():
        folder = stages.worlds / split
        if not (folder / "meta.json").is_file():
            language = cast("Language", config.env.language)
            world = generate_world(
                "quickstart",
                seed=config.seed,
                split=split,
                entities=entities,
                questions=questions,
                language=language,
            )
            world.save(folder)


def _cold_start(stages: Stages, config: RunConfig, report: Report) -> tuple[Path, float]:
    """The model that RL starts from and the seconds that its training took."""
    model, summary = stages.cold_start / "model", stages.cold_start / "summary.json"
    if not summary.is_file():
        cold_start(
            replace(stages.configure(config, stages.initial), out=str(stages.cold_start), resume=True),
            on_step=lambda step, loss: report("cold start", step, config.sft.steps, f"loss {loss:.3f}"),
        )
    return model, float(json.loads(summary.read_text(encoding="utf-8"))["seconds"])


def _train(stages: Stages, config: RunConfig, model: Path, report: Report, on_step: OnStep) -> TrainResult:
    run = replace(stages.configure(config, model), out=str(stages.root), resume=True)

    def show(step: int, metrics: dict[str, float]) -> None:
        on_step(step, metrics)
        report("rl", step, config.trainer.steps, f"reward {metrics['critic/rewards/mean']:.3f}")

    return train(run, on_step=show)


def score_once(
    config: RunConfig, folder: Path, *, stage: str = "evaluate", report: Report = lambda *_: None
) -> dict[str, Any]:
    """Score ``config.model`` on ``env.test_questions`` into ``folder``; a finished evaluation is read back."""
    document = folder / "evaluation.json"
    if not document.is_file():
        score(config, folder, report=lambda done, total: report(stage, done, total, ""))
    summary: dict[str, Any] = json.loads(document.read_text(encoding="utf-8"))
    return summary
