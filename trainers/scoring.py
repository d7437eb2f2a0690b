"""Evaluation as configured: the model, the questions and the folder of ``turntree evaluate`` and of the quickstart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from turntree.trainers.build import build_bench, build_task, eval_sampling, finisher, limits, provenance
from turntree.trainers.config import RunConfig
from turntree.trainers.evaluate import evaluate

__all__ = ["score"]


def score(
    config: RunConfig, folder: Path, *, report: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Score ``config.model`` on ``env.test_questions`` (else the dev ones), write ``folder`` and return the summary.

    ``report(done, total)`` is called after each batch of questions.
    """
    bench = build_bench(config)
    name = config.env.test_questions or config.env.dev_questions
    corpus = config.search.corpus or ("" if config.env.test_questions else config.env.dev_corpus)
    task = build_task(config, bench.tokenizer, questions=name, corpus=corpus, option="env.test_questions")
    result = evaluate(
        task.questions,
        core=task.core,
        engine=bench.engine,
        dialogue=bench.dialogue,
        sampling=eval_sampling(config, task.core),
        limits=limits(config),
        seed=config.seed,
        finisher=finisher(config),
        on_batch=lambda done: report(done, len(task.questions)),
    )
    result.save(folder, extra={**provenance(config, task, questions=name), "dialogue": bench.dialogue.report.text()})
    return result.summary()
