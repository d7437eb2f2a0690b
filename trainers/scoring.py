"""Evaluation as configured: the model, the questions and the folder of ``turntree evaluate`` and of the quickstart."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turntree.agents.engines.endpoint import Usage
from turntree.agents.scorer import close_all
from turntree.errors import CheckpointError, ConfigError
from turntree.trainers.agent import summarizer_usage
from turntree.trainers.build import Bench, build_bench, finisher, limits, scorer
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import resolve_engine
from turntree.trainers.evaluate import EvalRow, evaluate, read_rows
from turntree.trainers.remote import RemoteBench, remote_bench
from turntree.trainers.task import build_task, eval_sampling, provenance

__all__ = ["score"]

_log = logging.getLogger(__name__)


def score(
    config: RunConfig,
    folder: Path,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
    keep_partial: bool = False,
) -> dict[str, Any]:
    """Score the model on the test tasks (else the dev ones), write ``folder`` and return the summary.

    ``report(done, total)`` is called after each batch of questions. With ``keep_partial``, what was played before a
    cost limit, an engine that died or Ctrl-C is written too, and ``stopped`` says why. With ``config.resume`` only what
    is missing in ``folder``, or failed, is played. Raises ``CheckpointError`` when the results there were made in
    another way.
    """
    config, why = resolve_engine(config, trains=False)
    saved = _saved(folder) if config.resume else {}
    bench = _bench(config, Usage(**saved.get("usage", {})))
    with closing(bench), ExitStack() as parts:
        task = build_task(config, bench.tokenizer, split="test")
        sampling = eval_sampling(config, task.core)
        facts = {**provenance(config, task), "protocol": "tokens", "dialogue": bench.dialogue.report.text()}
        facts["engine"] = config.engine.name
        if isinstance(bench, RemoteBench):
            facts |= bench.provenance(config)
        elif config.engine.name == "vllm_server":
            facts["weights"] = _hand_over(bench)
        writer = finisher(config, bench, evaluating=True)
        parts.callback(close_all, writer)
        judge = scorer(config, task.core) if config.reward.in_evaluation or not config.reward.scorer else None
        parts.callback(close_all, judge)
        result = evaluate(
            task.questions,
            core=task.core,
            engine=bench.engine,
            dialogue=bench.dialogue,
            sampling=sampling,
            limits=limits(config),
            seed=config.seed,
            finisher=writer,
            scorer=judge,
            on_batch=lambda done: report(done, len(task.questions)),
            done=_rows(folder, saved, {**facts, "sampling": asdict(sampling), "seed": config.seed}),
            keep_partial=keep_partial,
        )
        if used := summarizer_usage(writer):
            earlier = saved.get("summarizer_usage", {})
            facts["summarizer_usage"] = {key: value + earlier.get(key, 0.0) for key, value in used.items()}
        if isinstance(bench, RemoteBench):
            facts["usage"] = asdict(bench.engine.usage)
    if why:
        facts["engine_reason"] = why
    result.save(folder, extra=facts)
    return result.summary()


def _bench(config: RunConfig, spent: Usage) -> Bench | RemoteBench:
    return remote_bench(config, spent=spent) if config.engine.name == "openai" else build_bench(config)


def _hand_over(bench: Bench) -> str:
    """Give a server the weights that are to be scored; whose are, where it takes none."""
    try:
        bench.engine.update_weights(0)
    except ConfigError as error:
        _log.warning("the server is scored with its own weights, be they those of model.path or not: %s", error)
        return "the server's own"
    return "model.path"


def _saved(folder: Path) -> dict[str, Any]:
    """The document of an evaluation that stopped, or finished; empty where there is none."""
    path = folder / "evaluation.json"
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); choose another out, or leave resume out") from None
    return dict(document)


def _rows(folder: Path, saved: dict[str, Any], facts: dict[str, Any]) -> dict[str, EvalRow]:
    """The rows to go on from, if they were made just as they would be made now."""
    if not saved:
        return {}
    now = json.loads(json.dumps(facts))
    other = [
        f"{key} ({saved.get(key)!r:.60}, now {value!r:.60})" for key, value in now.items() if saved.get(key) != value
    ]
    if other:
        raise CheckpointError(
            f"the results in {folder} were made with other options: {'; '.join(other)}; give the same ones, or another "
            "out"
        )
    return read_rows(folder / "evaluation.jsonl")
