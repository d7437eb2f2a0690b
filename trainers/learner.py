"""The update loop: a TorchRL ``Trainer`` with our own stepper, fed by :class:`TreeCollector`.

``train(config)`` is the whole of ``turntree train``: trees, scores, credit, updates, validation, checkpoints, resume.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper

from turntree.agents.lora import has_adapter, trained_part
from turntree.agents.models import save_model
from turntree.agents.scorer import close_all
from turntree.errors import ConfigError
from turntree.trainers.agent import summarizer_usage
from turntree.trainers.atomic import write_json
from turntree.trainers.build import (
    Bench,
    build_bench,
    credit_rule,
    finisher,
    growth_plan,
    kl_reward,
    limits,
    loss_function,
    overlong,
    pair_chooser,
    run_path,
    scorer,
)
from turntree.trainers.checkpoint import (
    best_checkpoint,
    config_fingerprint,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    mark_best,
    resumable_checkpoint,
    save_checkpoint,
)
from turntree.trainers.cluster.engine import ClusterEngine
from turntree.trainers.cluster.rollout import ClusterRollout, joined_metrics
from turntree.trainers.coldstart import demonstrations
from turntree.trainers.collector import Collected, PromptStream, TreeCollector, by_node, token_columns
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.credit import credit_needs
from turntree.trainers.diagnosis import Skipped, stop_diverged
from turntree.trainers.distributed.setup import AdamW, build_strategy, join_run
from turntree.trainers.distributed.share import fingerprint, share_rollout
from turntree.trainers.distributed.strategy import Gathered, Single, Strategy
from turntree.trainers.evaluate import Evaluation, evaluate, shown
from turntree.trainers.evaluation.passport import run_passport
from turntree.trainers.forward import check_packed
from turntree.trainers.interrupt import stop_on_interrupt
from turntree.trainers.loggers import check_packages, open_trackers
from turntree.trainers.losses import Aggregation, Clip, Denominators, RatioGradient, RatioLevel, TurnRatio
from turntree.trainers.metrics import step_metrics, update_metrics
from turntree.trainers.objectives import PolicyObjective, combine_metrics, loss_needs
from turntree.trainers.packing import Pack, SharedTurns
from turntree.trainers.preparation import Preparation
from turntree.trainers.report.run_page import write_page
from turntree.trainers.rollout import Prompt, Rollout, grow
from turntree.trainers.run_folder import MetricsLog, RunFolder, SilentLog
from turntree.trainers.seeds import derive_seed
from turntree.trainers.store import TreeStore
from turntree.trainers.task import (
    Task,
    build_task,
    eval_sampling,
    first,
    has_split,
    provenance,
    rollout_sampling,
)
from turntree.trainers.updates import update
from turntree.trainers.value_head import ValueHead
from turntree.trainers.watch import turn_metrics, watch

_log = logging.getLogger(__name__)

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

__all__ = ["PolicyStepper", "TrainResult", "train"]


class PolicyStepper(OptimizationStepper):  # type: ignore[misc]
    """One optimiser step over the packs of a mini-batch, with global denominators.

    ``optimizer`` is a torch optimiser of the objective's parameters, or the strategy of a run, which has one and clips.
    A step whose gradient is not finite is skipped and counted (``skipped``, ``in_a_row``); weights and moments stay as
    they were, and ``on_skip`` is told. ``updates`` counts every step, skipped ones too; the warm-up follows it.
    """

    def __init__(
        self,
        objective: PolicyObjective,
        optimizer: torch.optim.Optimizer | Strategy,
        *,
        max_grad_norm: float = 0.0,
        warmup_steps: int,
        on_skip: Callable[[Skipped], None] | None = None,
    ) -> None:
        self.objective = objective
        self.on_skip = on_skip
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = Single(objective.network, optimizer, parameters=objective.parameters(), clip=max_grad_norm)
        self.optimizer: Strategy = optimizer
        self.warmup_steps = warmup_steps
        self.learning_rates = [group["lr"] for group in optimizer.param_groups]
        self.updates = 0
        self.skipped = 0
        self.in_a_row = 0
        self.history: list[dict[str, float]] = []

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDict:
        del trainer
        packs: list[Pack] = sub_batch.get_non_tensor("packs")
        self._set_learning_rate()
        if self.optimizer.ranks.size > 1:
            self.optimizer.ranks.agree("the packs of a mini-batch", fingerprint(packs))
        # Every rank knows all packs of the mini-batch: what it divides by is global.
        denominators = Denominators.of(packs)

        def loss(pack: Pack) -> tuple[torch.Tensor, TensorDictBase]:
            out = self.objective(pack, denominators)
            total = functools.reduce(torch.add, (out[name] for name in self.objective.out_keys))
            return total, out.detach().cpu()

        outputs, norm = update(self.optimizer, packs, loss)
        self.updates += 1
        self.in_a_row = 0 if math.isfinite(norm) else self.in_a_row + 1
        if self.in_a_row:
            self.skipped += 1
            _log.warning("update %d was skipped: the norm of its gradient is %s", self.updates, norm)
            if self.on_skip is not None:
                self.on_skip(Skipped(packs, outputs, norm))
        metrics = {**combine_metrics(outputs), "grad_norm": norm}
        self.history.append(metrics)
        return TensorDict({k: torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()}, batch_size=[])

    def take_metrics(self) -> dict[str, float]:
        """Means over the updates since the last call; empty without any."""
        taken, self.history = self.history, []
        return {key: math.fsum(m[key] for m in taken) / len(taken) for key in (taken[0] if taken else ())}

    def _set_learning_rate(self) -> None:
        factor = min(1.0, (self.updates + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates):
            group["lr"] = rate * factor


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
        self.dev = self._dev_task()
        self.plan = growth_plan(config.algorithm, vocab_size=self.bench.model.config.vocab_size)
        self.credit = credit_rule(config.algorithm)
        self.scorer = scorer(config, self.task.core)
        self.finisher = finisher(config, self.bench)
        other = bool(config.agent.eval_summarizer)
        self.dev_finisher = finisher(config, self.bench, evaluating=True) if other else self.finisher
        self.written = summarizer_usage(self.finisher)
        self.loss = loss_function(config.algorithm)
        self.reference = self._reference()
        self.value_head = ValueHead.of(self.bench.model) if "values" in credit_needs(self.credit) else None
        self.preparation = self._preparation()
        self.strategy = self._strategy()
        self.objective = self._objective()
        self.stepper = PolicyStepper(
            self.objective, self.strategy, warmup_steps=config.trainer.warmup_steps, on_skip=self._skipped
        )
        self.fingerprint = config_fingerprint(asdict(config), RESUME_KEYS)
        # A server may hold anything, or take no weights at all.
        self.bench.engine.update_weights(0)
        # Only now, so that a run which is refused leaves no folder behind.
        self.folder = ranks.main(lambda: RunFolder.create(run_path(config, "train"), config, resume=config.resume))
        self.store = TreeStore(
            self.folder.trees,
            sample=config.trainer.store_sample,
            max_bytes=config.trainer.store_max_mb * 1_000_000,
            seed=config.seed,
        )
        self.saved_step = 0
        self.evaluation: Evaluation | None = None
        self.collected: Collected | None = None
        self.cluster: ClusterRollout | None = None
        self.minibatches: Iterator[list[Pack]] = iter(())
        self.epoch = 0
        self.update_start = self.clock
        self.packed_checked = not config.trainer.check_packed

    # -- parts --------------------------------------------------------------------------------------------------------

    def _dev_task(self) -> Task | None:
        if has_split(self.config, "dev"):
            return build_task(self.config, self.bench.tokenizer, split="dev")
        if self.config.trainer.eval_every:
            raise ConfigError(
                "trainer.eval_every is set but there is nothing to validate on: name a file in env.dev_questions, or "
                "arguments of another environment in env.dev_args"
            )
        return None

    def _reference(self) -> torch.nn.Module | None:
        """The frozen initial policy, also when a run goes on from a checkpoint; none where nothing compares with it."""
        pairs = self.loss is not None and loss_needs(self.loss) == "pairs"
        if self.config.algorithm.kl_coef == 0 and not pairs:
            return None
        if has_adapter(self.bench.model) and self.config.algorithm.reference_every is None:
            return cast("torch.nn.Module", self.bench.model)  # with the adapter off
        reference = cast("torch.nn.Module", copy.deepcopy(self.bench.model))
        return reference.eval().requires_grad_(False)

    def _objective(self) -> PolicyObjective:
        algorithm = self.config.algorithm
        in_loss = algorithm.kl_in == "loss"
        return PolicyObjective(
            self.bench.model,
            ratio=cast("RatioLevel", algorithm.ratio),
            turn_ratio=cast("TurnRatio", algorithm.turn_ratio),
            ratio_gradient=cast("RatioGradient", algorithm.ratio_gradient),
            clip=cast("Clip", algorithm.clip),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            by_turns=algorithm.by_turns,
            aggregation=cast("Aggregation", algorithm.aggregation),
            sum_norm=algorithm.sum_norm,
            kl_coef=algorithm.kl_coef if in_loss else 0.0,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
            value_head=self.value_head,
            value_coef=algorithm.value_coef,
            value_clip=algorithm.value_clip,
            temperature=self.config.sampling.temperature,
            importance_cap=self.config.trainer.importance_cap,
            loss=self.loss,
            forward=self.strategy.forward,
        )

    def _strategy(self) -> Strategy:
        options = self.config.trainer
        adamw = AdamW(options.learning_rate, options.adam_beta2, options.weight_decay, clip=options.max_grad_norm)
        return build_strategy(self.config, self.ranks, self.bench.model, self.value_head, adamw=adamw)

    def _preparation(self) -> Preparation:
        algorithm, trainer = self.config.algorithm, self.config.trainer
        return Preparation(
            credit=self.credit,
            model=self.bench.model,
            reference=self.reference,
            value_head=self.value_head,
            max_pack_tokens=trainer.max_pack_tokens,
            groups_per_update=trainer.prompts_per_update or trainer.prompts_per_step,
            shared_turns=cast("SharedTurns", algorithm.shared_turns),
            min_scored_leaves=algorithm.min_scored_leaves,
            temperature=self.config.sampling.temperature,
            overlong=overlong(algorithm),
            kl_reward=kl_reward(algorithm),
            entropy_balance=algorithm.entropy_balance,
            pairs=pair_chooser(algorithm, self.loss, self.credit),
            ranks=self.ranks,
        )

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
        judges.callback(close_all, self.scorer, self.finisher, self.dev_finisher)
        if self.ranks.is_main:  # also of a run that fails
            judges.callback(write_page, self.folder.path)
        with (
            closing(self.bench),
            judges,
            stop_on_interrupt("training step") as self.interrupted,
            self.ranks.naming_losses(),
            self._resume_or_start() as self.metrics,
        ):
            if self.progress.step == 0 and self.config.trainer.eval_every:
                self._validate(0)
            self._trainer().train()
            if self.cluster is not None:
                self.cluster.close()
            if self.progress.step > self.saved_step:  # Ctrl-C between two checkpoints
                self._save(self.progress.step)
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
        best = best_checkpoint(self.folder.checkpoints)
        if best is not None:
            load_weights(best, trained_part(self.bench.model))
            save_model(self.bench.model, self.bench.tokenizer, self.folder.path / "best-model")

    def _resume_or_start(self) -> MetricsLog | SilentLog:
        found = self.ranks.main(lambda: resumable_checkpoint(self.folder.checkpoints) if self.config.resume else None)
        if found is not None:
            state = load_checkpoint(
                found,
                model=trained_part(self.bench.model),
                optimizer=self.stepper.optimizer,
                fingerprint=self.fingerprint,
            ).state
            self.progress = Progress(**state["progress"])
            for name, module in self._extra_modules().items():
                module.load_state_dict(state[name])
            self.strategy.adopt()
            self.saved_step = self.progress.step
            self.ranks.main(lambda: self._mark_best(found))  # killed between a checkpoint and its mark
            self.stepper.updates, self.stepper.skipped = self.progress.updates, self.progress.skipped
            self.stepper.in_a_row = self.progress.skipped_in_a_row
            self.bench.engine.update_weights(self.progress.step)
        if not self.ranks.is_main:
            return SilentLog()
        # Without a checkpoint a resumed run starts over: what an interrupted first step left behind is dropped.
        self.folder.save_config(self.config)
        sampling = rollout_sampling(self.config, self.task.core)
        said = self.bench.dialogue.report.text()
        passport = run_passport(self.config, self.task, split="train", sampling=sampling, dialogue=said)
        write_json(self.folder.path / "passport.json", passport.to_json())
        self.store.drop_after(self.progress.step)
        self._drop_validations_after(self.progress.step)
        options, at = self.config.trainer, self.progress.step
        trackers = open_trackers(
            options.loggers, self.folder.path, arguments=options.logger_args, config=asdict(self.config), resume_step=at
        )
        return MetricsLog(self.folder.metrics_file, trackers=trackers, resume_step=at)

    def _extra_modules(self) -> dict[str, torch.nn.Module]:
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
        metrics = {**collected.metrics, **self._totals()}
        # Metrics go before the checkpoint: a run that is killed between the two writes them again.
        self.metrics.write(step, metrics)
        if self._complete() or step % self.config.trainer.save_every == 0 or self.progress.best_step == step:
            self._save(step)
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
        stats = collected.rollout.stats
        progress = self.progress
        progress.step, progress.prompt_batches = step, collected.prompt_batches
        progress.updates, progress.skipped = self.stepper.updates, self.stepper.skipped
        progress.skipped_in_a_row = self.stepper.in_a_row
        progress.generated_tokens += stats.generated_tokens
        progress.tool_calls += stats.tool_calls
        progress.trajectories += stats.trajectories
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

    def _totals(self) -> dict[str, float]:
        progress = self.progress
        return {
            "total/generated_tokens": float(progress.generated_tokens),
            "total/tool_calls": float(progress.tool_calls),
            "total/trajectories": float(progress.trajectories),
            "total/updates": float(progress.updates),
            "total/skipped_updates": float(progress.skipped),
            "total/seconds": progress.seconds,
            "actor/lr": self.stepper.optimizer.param_groups[0]["lr"],
        }

    def _validate(self, step: int) -> dict[str, float]:
        """Score the validation questions; empty without any."""
        if self.dev is None:
            return {}
        questions = first(self.dev.questions, self.config.trainer.eval_questions)
        self.evaluation = evaluate(
            questions,
            core=self.dev.core,
            engine=self.bench.engine,
            dialogue=self.bench.dialogue,
            sampling=eval_sampling(self.config, self.dev.core),
            limits=limits(self.config),
            seed=self.config.seed,
            finisher=self.dev_finisher,
            scorer=self.scorer if self.config.reward.in_evaluation or self.config.agent.splits else None,
            ranks=self.ranks,
        )
        self.written = summarizer_usage(self.finisher)  # a step counts its rollout only
        where = self.folder.path / "validation" / f"step-{step:06d}"
        about = provenance(self.config, self.dev)
        passport = run_passport(
            self.config, self.dev, split="dev", sampling=eval_sampling(self.config, self.dev.core),
            dialogue=self.bench.dialogue.report.text(), questions=questions, weights=f"step {step}",
        )  # fmt: skip
        extra = {**about, "step": step, "generated_tokens": self.progress.generated_tokens}
        extra["passport"] = passport.to_json()
        if self.ranks.is_main:
            self.evaluation.save(where, extra=extra)
        summary = self.evaluation.summary()
        best, score = self.progress.best_score, float(summary[self.dev.core.metric])
        # Without a scored question the score is NaN, which is better than nothing of the kind.
        if step and (not math.isnan(score) if best is None else score > best):
            self.progress.best_score, self.progress.best_step = score, step
        return {f"validation/{key}": float(summary[key]) for key in (*shown(summary), "n")}

    def _drop_validations_after(self, step: int) -> None:
        for folder in (self.folder.path / "validation").glob("step-*"):
            found = re.fullmatch(r"step-(\d+)", folder.name)
            if found is not None and int(found[1]) > step:
                shutil.rmtree(folder)

    def _save(self, step: int) -> None:
        moments = Gathered(self.strategy.state_dict())
        self.saved_step = step
        self.ranks.main(lambda: self._write_checkpoint(step, moments))

    def _write_checkpoint(self, step: int, moments: Gathered) -> None:
        folder = save_checkpoint(
            self.folder.checkpoints,
            step,
            model=trained_part(self.bench.model),
            optimizer=moments,
            state={
                "progress": asdict(self.progress),
                **{name: dict(module.state_dict()) for name, module in self._extra_modules().items()},
            },
            fingerprint=self.fingerprint,
            keep=self.config.trainer.keep_checkpoints,
        )
        self._mark_best(folder)

    def _mark_best(self, folder: Path) -> None:
        """Mark the checkpoint of the step that was just saved or loaded, if it is the best one so far."""
        progress = self.progress
        if progress.best_step == progress.step and progress.best_score is not None and self.dev is not None:
            mark_best(folder, metric=self.dev.core.metric, value=progress.best_score)
