"""The update loop: a TorchRL ``Trainer`` with our own stepper, fed by :class:`TreeCollector`.

``train(config)`` is the whole of ``turntree train``: trees, scores, credit, updates, validation, checkpoints, resume.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import Trainer

from turntree.agents.lora import trained_part
from turntree.agents.models import save_model
from turntree.agents.scorer import close_all
from turntree.trainers.agent import summarizer_usage
from turntree.trainers.atomic import write_json, written
from turntree.trainers.build import (
    Bench,
    build_bench,
    credit_rule,
    finisher,
    growth_plan,
    limits,
    loss_function,
    run_path,
    scorer,
)
from turntree.trainers.build_training import (
    build_objective,
    build_optimizer,
    build_preparation,
    build_reference,
    build_validation,
)
from turntree.trainers.checkpoint import config_fingerprint, latest_checkpoint
from turntree.trainers.cluster.engine import ClusterEngine
from turntree.trainers.cluster.rollout import ClusterRollout, joined_metrics
from turntree.trainers.coldstart import demonstrations
from turntree.trainers.collector import Collected, PromptStream, TreeCollector, by_node, token_columns
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.credit import credit_needs
from turntree.trainers.diagnosis import Skipped, stop_diverged
from turntree.trainers.distributed.setup import join_run
from turntree.trainers.distributed.share import share_rollout
from turntree.trainers.evaluate import Evaluation, shown
from turntree.trainers.evaluation.passport import Passport, check_same_data, run_passport
from turntree.trainers.forward import check_packed
from turntree.trainers.interrupt import stop_on_interrupt
from turntree.trainers.loggers import check_packages, open_trackers
from turntree.trainers.metrics import step_metrics, update_metrics
from turntree.trainers.packing import Pack
from turntree.trainers.progress import RESUME_KEYS, Progress
from turntree.trainers.report.run_page import write_page
from turntree.trainers.rollout import Prompt, Rollout, grow
from turntree.trainers.run_checkpoints import RunCheckpoints
from turntree.trainers.run_folder import MetricsLog, RunFolder, SilentLog
from turntree.trainers.run_lock import only_writer
from turntree.trainers.seeds import derive_seed
from turntree.trainers.stepper import PolicyStepper
from turntree.trainers.store import TreeStore
from turntree.trainers.task import (
    Task,
    build_task,
    rollout_sampling,
)
from turntree.trainers.validation import Validation, drop_validations_after
from turntree.trainers.value_head import ValueHead
from turntree.trainers.watch import turn_metrics, watch

_log = logging.getLogger(__name__)

__all__ = ["PolicyStepper", "TrainResult", "train"]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run ended.

    ``interrupted``: Ctrl-C stopped it before its end. ``evaluation``: the last validation of this call, None if there
    was none.
    """

    folder: Path
    progress: Progress
    interrupted: bool
    evaluation: Evaluation | None


def train(
    config: RunConfig | Sequence[str],
    *,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> TrainResult:
    """Train as configured and return where the run ended.

    Args:
        config: a :class:`RunConfig`, or Hydra overrides such as ``["algorithm=at2po", "trainer.steps=20"]``.
        on_step: called after each step with its metrics.

    With ``resume`` the run goes on from its newest whole checkpoint, or starts over where there is none yet. The first
    Ctrl-C finishes the step, saves and returns; the second one raises ``KeyboardInterrupt``.

    Raises:
        ConfigError: an option is unknown or does not fit.
        CheckpointError: the run folder is in use (without ``resume``) or belongs to another configuration (with it).
    """
    if not isinstance(config, RunConfig):
        config = compose(config)
    return _Run(config, on_step=on_step).train()


class _Run:
    """All parts of one training run. Each method is one stage; ``train`` puts them in order."""

    def __init__(self, config: RunConfig, *, on_step: Callable[[int, dict[str, float]], None] | None) -> None:
        self.config, self.ranks = config, ranks = join_run(config)
        check_packages(config.trainer.loggers)
        self.on_step = on_step if ranks.is_main else None
        self.clock = time.monotonic()
        self.progress = Progress()
        self.interrupted = threading.Event()
        self.bench: Bench = build_bench(config)
        self.task: Task = build_task(config, self.bench.tokenizer)
        dev = build_validation(config, self.bench)
        self.plan = growth_plan(config.algorithm, vocab_size=self.bench.model.config.vocab_size)
        self.credit = credit_rule(config.algorithm)
        self.scorer = scorer(config, self.task.core)
        self.finisher = finisher(config, self.bench)
        other = bool(config.agent.eval_summarizer)
        dev_finisher = finisher(config, self.bench, evaluating=True) if other else self.finisher
        self.written = summarizer_usage(self.finisher)
        self.loss = loss_function(config.algorithm)
        self.reference = build_reference(config, self.bench, self.loss)
        self.value_head = ValueHead.of(self.bench.model) if "values" in credit_needs(self.credit) else None
        self.preparation = build_preparation(
            config,
            self.bench,
            credit=self.credit,
            loss=self.loss,
            reference=self.reference,
            value_head=self.value_head,
            ranks=ranks,
        )
        self.strategy = build_optimizer(config, self.bench, value_head=self.value_head, ranks=ranks)
        self.objective = build_objective(
            config, self.bench, loss=self.loss, value_head=self.value_head, strategy=self.strategy
        )
        self.stepper = PolicyStepper(
            self.objective, self.strategy, warmup_steps=config.trainer.warmup_steps, on_skip=self._skipped
        )
        with ExitStack() as refused:  # an engine may hold processes by now
            refused.callback(self.bench.close)
            # A server may hold anything, or take no weights at all.
            self.bench.engine.update_weights(0)
            # Only now, so that a run which is refused leaves no folder behind.
            self.folder = ranks.main(lambda: RunFolder.create(run_path(config, "train"), config, resume=config.resume))
            refused.pop_all()
        self.store = TreeStore(
            self.folder.trees,
            sample=config.trainer.store_sample,
            max_bytes=config.trainer.store_max_mb * 1_000_000,
            seed=config.seed,
        )
        results = self.folder.path / "validation"
        self.validation = (
            None if dev is None else Validation(config, dev, self.bench, dev_finisher, self.scorer, ranks, results)
        )
        self.checkpoints = RunCheckpoints(
            self.folder.checkpoints,
            policy=trained_part(self.bench.model),
            strategy=self.strategy,
            modules=self._moving(),
            fingerprint=config_fingerprint(asdict(config), RESUME_KEYS),
            keep=config.trainer.keep_checkpoints,
            metric=None if dev is None else dev.core.metric,
        )
        self.evaluation: Evaluation | None = None
        self.collected: Collected | None = None
        self.cluster: ClusterRollout | None = None
        self.minibatches: Iterator[list[Pack]] = iter(())
        self.epoch = 0
        self.update_start = self.clock
        self.packed_checked = not config.trainer.check_packed

    # -- parts --------------------------------------------------------------------------------------------------------

    def _collector(self) -> TreeCollector:
        config = self.config
        stream = PromptStream(self.task.questions, config.trainer.prompts_per_step, config.seed)
        self.cluster = self._cluster(stream)
        return TreeCollector(
            stream=stream,
            rollout=self._rollout,
            preparation=self.preparation,
            first_step=self.progress.step,
            last_step=config.trainer.steps,
            first_batch=self.progress.prompt_batches,
            dynamic_sampling=config.algorithm.dynamic_sampling,
            should_stop=self._should_stop,
            rest=self.bench.rest,
        )

    def _cluster(self, stream: PromptStream) -> ClusterRollout | None:
        """The workers that grow this rank's trees; None where it grows them itself."""
        engine, ranks = self.bench.engine, self.ranks
        if not isinstance(engine, ClusterEngine):
            return None
        last = self.progress.prompt_batches + self.config.trainer.steps - self.progress.step

        def upcoming(batch: int) -> Sequence[Prompt] | None:
            known = not self.config.algorithm.dynamic_sampling and batch >= last
            ends = known or self.interrupted.is_set() or self._complete()
            return None if ends else stream.step(batch)[ranks.rank :: ranks.size]

        return ClusterRollout(engine.pool, self.plan, upcoming=upcoming, batches=self.progress.prompt_batches)

    def _trainer(self) -> Trainer:
        trainer = Trainer(
            collector=self._collector(),
            total_frames=np.iinfo(np.int64).max,
            frame_skip=1,
            optim_steps_per_batch=cast("int", None),  # as many as there are mini-batches
            num_epochs=self.config.trainer.epochs,
            loss_module=self.objective,
            optimization_stepper=self.stepper,
            progress_bar=False,
            auto_log_optim_steps=False,
        )
        trainer.register_op("batch_process", self._take)
        trainer.register_op("pre_epoch", self._start_epoch)
        trainer.register_op("process_optim_batch", self._next_minibatch)
        trainer.register_op("post_steps", self._end_step)
        return trainer

    # -- stages -------------------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        judges = ExitStack()
        judges.callback(close_all, self.scorer, self.finisher, self.validation and self.validation.finisher)
        if self.ranks.is_main:  # also of a run that fails
            judges.callback(write_page, self.folder.path)
        with (
            closing(self.bench),
            judges,
            stop_on_interrupt("training step") as self.interrupted,
            self.ranks.naming_losses(),
            only_writer(self.folder.path, ranks=self.ranks),
            self._resume_or_start() as self.metrics,
        ):
            if self.progress.step == 0 and self.config.trainer.eval_every:
                self._validate(0)
            self._trainer().train()
            if self.cluster is not None:
                self.cluster.close()
            if self.progress.step > self.checkpoints.saved_step:  # Ctrl-C between two checkpoints
                self.checkpoints.save(self.progress)
            if self.ranks.is_main:
                self._export()
        return TrainResult(
            folder=self.folder.path,
            progress=self.progress,
            interrupted=self.interrupted.is_set() and not self._complete(),
            evaluation=self.evaluation,
        )

    def _export(self) -> None:
        """Write ``model`` (the weights at the end) and, where the run validated, ``best-model``."""
        save_model(self.bench.model, self.bench.tokenizer, self.folder.path / "model")
        if self.checkpoints.load_best():
            save_model(self.bench.model, self.bench.tokenizer, self.folder.path / "best-model")

    def _resume_or_start(self) -> MetricsLog | SilentLog:
        found = self.checkpoints.newest() if self.config.resume else None
        record, passport = self.folder.path / "passport.json", self._passport()
        if found is not None:
            self.progress = self.checkpoints.load(found)
            self.ranks.main(lambda: check_same_data(record, passport))
            self.stepper.updates, self.stepper.skipped = self.progress.updates, self.progress.skipped
            self.stepper.in_a_row = self.progress.skipped_in_a_row
            self.bench.engine.update_weights(self.progress.step)
        if not self.ranks.is_main:
            return SilentLog()
        # Without a checkpoint a resumed run starts over: what an interrupted first step left behind is dropped.
        self.folder.save_config(self.config)
        with written(record):
            write_json(record, passport.to_json())
        self.store.drop_after(self.progress.step)
        drop_validations_after(self.folder.path / "validation", self.progress.step)
        options, at = self.config.trainer, self.progress.step
        trackers = open_trackers(
            options.loggers, self.folder.path, arguments=options.logger_args, config=asdict(self.config), resume_step=at
        )
        return MetricsLog(self.folder.metrics_file, trackers=trackers, resume_step=at)

    def _passport(self) -> Passport:
        """What the run depends on; the first rank alone writes it, and an empty one does for the others."""
        if not self.ranks.is_main:
            return Passport()
        sampling = rollout_sampling(self.config, self.task.core)
        return run_passport(
            self.config, self.task, split="train", sampling=sampling, dialogue=self.bench.dialogue.report.text()
        )

    def _moving(self) -> dict[str, torch.nn.Module]:
        """What a checkpoint holds besides the policy: a frozen reference is the initial model, and needs no copy."""
        moving = self.reference if self.config.algorithm.reference_every is not None else None
        modules = {"reference": moving, "value_head": self.value_head}
        return {name: module for name, module in modules.items() if module is not None}

    def _complete(self) -> bool:
        limit = self.config.trainer.max_generated_tokens
        return self.progress.step >= self.config.trainer.steps or (
            limit is not None and self.progress.generated_tokens >= limit
        )

    def _should_stop(self) -> bool:
        return self.ranks.any(self.interrupted.is_set()) or self._complete()

    def _rollout(self, prompts: Sequence[Prompt]) -> Rollout:
        return share_rollout(prompts, self._grow, ranks=self.ranks)

    def _grow(self, prompts: Sequence[Prompt]) -> Rollout:
        if self.cluster is not None:
            return self.cluster(prompts)
        if self.config.algorithm.source == "teacher":
            bench, writer = self.bench, self.finisher
            return demonstrations(
                prompts, self.task.core, bench.dialogue, self.config, engine=bench.engine, finisher=writer
            )
        return grow(
            prompts,
            core=self.task.core,
            engine=self.bench.engine,
            dialogue=self.bench.dialogue,
            plan=self.plan,
            sampling=rollout_sampling(self.config, self.task.core),
            limits=limits(self.config),
            run_seed=self.config.seed,
            scorer=self.scorer,
            finisher=self.finisher,
        )

    # -- hooks of the Trainer, in the order in which it calls them ----------------------------------------------------

    def _take(self, batch: TensorDictBase) -> TensorDictBase:
        """Start the updates on a batch. The model stays in eval mode: dropout would move the ratio off 1 by itself."""
        collected = cast("Collected", batch.get_non_tensor("collected"))
        self.collected = collected
        self.epoch = 0
        self.update_start = time.monotonic()
        packs = [pack for minibatch in collected.minibatches for pack in minibatch]
        if packs and not self.packed_checked:
            check_packed(self.bench.model, packs[0])
            self.packed_checked = True
        return batch

    def _start_epoch(self, batch: TensorDictBase) -> TensorDictBase:
        collected = self._current()
        rng = np.random.default_rng(derive_seed(self.config.seed, "minibatches", collected.step, self.epoch))
        order = rng.permutation(len(collected.minibatches))
        self.minibatches = iter([collected.minibatches[i] for i in order if collected.minibatches[i]])
        self.epoch += 1
        return batch

    def _next_minibatch(self, batch: TensorDictBase) -> TensorDictBase:
        del batch
        # StopIteration of next() ends the epoch: the Trainer waits for exactly that.
        packs = next(self.minibatches)
        sub_batch = TensorDict({}, batch_size=[])
        sub_batch.set_non_tensor("packs", packs)
        return sub_batch

    def _end_step(self) -> None:
        collected = self._current()
        step = collected.step + 1
        self.strategy.sync()
        self.bench.engine.update_weights(step)
        self._refresh_reference(step)
        self._count(collected, step)
        collected.metrics["timing_s/update_actor"] = time.monotonic() - self.update_start
        collected.metrics.update(update_metrics(self.stepper.take_metrics()) | step_metrics(collected.metrics))
        collected.metrics.update(self._watch(collected))
        if self.ranks.is_main:
            advantages = by_node(collected.groups, collected.advantages)
            self.store.write(step, collected.rollout.groups, advantages, token_columns(collected))
        collected.metrics.update(self._written())
        if self.cluster is not None:
            collected.metrics.update(joined_metrics(self.ranks.gather(self.cluster.take_metrics())))
        every = self.config.trainer.eval_every
        if self._complete() or (every and step % every == 0):
            collected.metrics.update(self._validate(step))
        rate = self.stepper.optimizer.param_groups[0]["lr"]
        metrics = {**collected.metrics, **self.progress.totals(), "actor/lr": rate}
        # Metrics go before the checkpoint: a run that is killed between the two writes them again.
        self.metrics.write(step, metrics)
        if self._complete() or step % self.config.trainer.save_every == 0 or self.progress.best_step == step:
            self.checkpoints.save(self.progress)
        if self.on_step is not None:
            self.on_step(step, metrics)

    def _refresh_reference(self, step: int) -> None:
        every = self.config.algorithm.reference_every
        if self.reference is not None and every is not None and step % every == 0:
            self.reference.load_state_dict(self.bench.model.state_dict())

    def _current(self) -> Collected:
        if self.collected is None:
            raise RuntimeError("the trainer called an update hook before any batch was collected")
        return self.collected

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _count(self, collected: Collected, step: int) -> None:
        progress = self.progress
        progress.step, progress.prompt_batches = step, collected.prompt_batches
        progress.updates, progress.skipped = self.stepper.updates, self.stepper.skipped
        progress.skipped_in_a_row = self.stepper.in_a_row
        progress.add(collected.rollout.stats)
        now = time.monotonic()
        progress.seconds += now - self.clock
        self.clock = now

    def _watch(self, collected: Collected) -> dict[str, float]:
        """Numbers and alarms of the collapse watch; all ranks have the same trees and metrics."""
        options = self.config.watch
        trees = [tree for group in collected.groups for tree in group.trees]
        measured = turn_metrics(trees, ngram=options.ngram)
        found = watch({**collected.metrics, **measured}, self.progress.watched, options)
        self.progress.watched = found.memory
        for message in found.messages if self.ranks.is_main else ():
            _log.warning("step %d: %s", self.progress.step, message)
        return {**measured, **found.alarms}

    def _skipped(self, skipped: Skipped) -> None:
        """Stop the run, with the batch saved, where too many updates in a row were skipped."""
        limit = self.config.trainer.max_skipped_updates
        if limit is None or self.stepper.in_a_row < limit:
            return
        step = self._current().step + 1
        self.ranks.main(
            lambda: stop_diverged(
                self.folder.path / "diagnosis" / f"step-{step:06d}",
                skipped,
                self.objective,
                step=step,
                in_a_row=self.stepper.in_a_row,
                newest=latest_checkpoint(self.folder.checkpoints),
            )
        )

    def _written(self) -> dict[str, float]:
        """What the summariser of the rollouts used since the last step, apart from the policy."""
        used, self.written = summarizer_usage(self.finisher, self.written), summarizer_usage(self.finisher)
        every = self.ranks.gather(used)
        return {f"summarizer/{key}": sum(rank[key] for rank in every) for key in used}

    def _validate(self, step: int) -> dict[str, float]:
        """Score the validation questions; empty without any."""
        if self.validation is None:
            return {}
        self.evaluation = self.validation.score(step, generated_tokens=self.progress.generated_tokens)
        self.written = summarizer_usage(self.finisher)  # a step counts its rollout only
        summary = self.evaluation.summary()
        best, score = self.progress.best_score, float(summary[self.validation.task.core.metric])
        # Without a scored question the score is NaN, which is better than nothing of the kind.
        if step and (not math.isnan(score) if best is None else score > best):
            self.progress.best_score, self.progress.best_step = score, step
        return {f"validation/{key}": float(summary[key]) for key in (*shown(summary), "n")}
