"""The update loop: a TorchRL ``Trainer`` with our own stepper, fed by :class:`TreeCollector`.

``train(config)`` is the whole of ``turntree train``: trees, scores, credit, updates, validation, checkpoints, resume.
"""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper

from turntree.agents.models import save_model
from turntree.errors import ConfigError
from turntree.trainers.build import (
    Bench,
    Task,
    build_bench,
    build_task,
    credit_rule,
    eval_sampling,
    first,
    growth_plan,
    limits,
    rollout_sampling,
    run_path,
)
from turntree.trainers.checkpoint import (
    config_fingerprint,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    save_checkpoint,
)
from turntree.trainers.collector import Collected, PromptStream, TreeCollector, by_node
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.evaluate import Evaluation, evaluate
from turntree.trainers.forward import check_packed
from turntree.trainers.losses import Denominators
from turntree.trainers.objectives import PolicyObjective, combine_metrics
from turntree.trainers.packing import Pack
from turntree.trainers.rollout import Prompt, Rollout, grow
from turntree.trainers.run_folder import MetricsLog, RunFolder
from turntree.trainers.seeds import derive_seed
from turntree.trainers.store import TreeStore

#: Options that a resumed run must share with the one it continues; the others (steps, intervals, threads) may change.
RESUME_KEYS = (
    "seed",
    "model",
    "env.questions",
    "env.max_turns",
    "env.max_searches",
    "env.max_observation_tokens",
    "env.on_length",
    "env.grammar",
    "env.grammar_args",
    "search",
    "reward",
    "sampling",
    "algorithm",
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

    A step whose gradient is not finite is skipped and counted (``skipped``); weights and moments stay as they were.
    """

    def __init__(
        self,
        objective: PolicyObjective,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        warmup_steps: int,
    ) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.warmup_steps = warmup_steps
        self.learning_rates = [group["lr"] for group in optimizer.param_groups]
        self.updates = 0
        self.skipped = 0

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDict:
        del trainer
        packs: list[Pack] = sub_batch.get_non_tensor("packs")
        self._set_learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        denominators = Denominators.of(packs)
        outputs: list[TensorDictBase] = []
        for pack in packs:
            out = self.objective(pack, denominators)
            loss = out["loss_objective"] + out["loss_kl"] + out["loss_entropy"]
            loss.backward()
            outputs.append(out.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(), self.max_grad_norm or float("inf"))
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.skipped += 1
            self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        metrics = {**combine_metrics(outputs), "grad_norm": float(norm)}
        return TensorDict({k: torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()}, batch_size=[])

    def _set_learning_rate(self) -> None:
        factor = min(1.0, (self.updates + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates):
            group["lr"] = rate * factor


@dataclass(slots=True)
class Progress:
    """What a checkpoint carries besides weights and moments; all of it plain JSON."""

    step: int = 0
    updates: int = 0
    skipped: int = 0
    generated_tokens: int = 0
    tool_calls: int = 0
    trajectories: int = 0
    seconds: float = 0.0
    best_em: float | None = None
    best_step: int | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run ended. ``evaluation`` is None without validation questions."""

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

    Raises:
        ConfigError: an option is unknown or does not fit.
        CheckpointError: ``resume`` without a usable checkpoint, or the run folder belongs to another configuration.
    """
    if not isinstance(config, RunConfig):
        config = compose(config)
    return _Run(config, on_step=on_step).train()


class _Run:
    """All parts of one training run. Each method is one stage; ``train`` puts them in order."""

    def __init__(self, config: RunConfig, *, on_step: Callable[[int, dict[str, float]], None] | None) -> None:
        self.config = config
        self.on_step = on_step
        self.started = time.monotonic()
        self.progress = Progress()
        self.interrupted = threading.Event()
        self.bench: Bench = build_bench(config)
        self.task: Task = build_task(
            config,
            self.bench.tokenizer,
            questions=config.env.questions,
            corpus=config.search.corpus,
            option="env.questions",
        )
        self.dev: Task | None = None
        if config.env.dev_questions:
            self.dev = build_task(
                config,
                self.bench.tokenizer,
                questions=config.env.dev_questions,
                corpus=config.env.dev_corpus,
                option="env.dev_questions",
            )
        elif config.trainer.eval_every:
            raise ConfigError("trainer.eval_every is set but env.dev_questions is empty; name a validation file")
        self.fingerprint = config_fingerprint(asdict(config), RESUME_KEYS)
        self.folder = RunFolder.create(run_path(config, "train"), config, resume=config.resume)
        self.store = TreeStore(
            self.folder.trees,
            sample=config.trainer.store_sample,
            max_bytes=config.trainer.store_max_mb * 1_000_000,
            seed=config.seed,
        )
        self.reference = self._reference()
        algorithm = config.algorithm
        self.objective = PolicyObjective(
            self.bench.model,
            ratio=algorithm.ratio,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            aggregation=algorithm.aggregation,
            kl_coef=algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
            temperature=config.sampling.temperature,
            importance_cap=config.trainer.importance_cap,
        )
        optimizer = torch.optim.AdamW(
            self.bench.model.parameters(),
            lr=config.trainer.learning_rate,
            betas=(0.9, config.trainer.adam_beta2),
            weight_decay=config.trainer.weight_decay,
        )
        self.stepper = PolicyStepper(
            self.objective,
            optimizer,
            max_grad_norm=config.trainer.max_grad_norm,
            warmup_steps=config.trainer.warmup_steps,
        )

    def _reference(self) -> torch.nn.Module | None:
        """The frozen initial policy; none when the KL coefficient is 0."""
        if self.config.algorithm.kl_coef == 0:
            return None
        reference = copy.deepcopy(self.bench.model).eval()
        return reference.requires_grad_(False)

    # -- stages -----------------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        self._resume_or_start()
        self.collector = self._collector()
        self.minibatches: Iterator[list[Pack]] = iter(())
        self.collected: Collected | None = None
        self.update_seconds = 0.0
        trainer = Trainer(
            collector=self.collector,
            total_frames=np.iinfo(np.int64).max,
            frame_skip=1,
            optim_steps_per_batch=None,
            num_epochs=self.config.trainer.epochs,
            loss_module=self.objective,
            optimization_stepper=self.stepper,
            progress_bar=False,
        )
        trainer.register_op("batch_process", self._take)
        trainer.register_op("pre_epoch", self._start_epoch)
        trainer.register_op("process_optim_batch", self._next_minibatch)
        trainer.register_op("post_optim_complete_log", self._losses)
        trainer.register_op("post_steps", self._end_step)
        with self._interruptible():
            trainer.train()
        return self._finish()

    def _resume_or_start(self) -> None:
        found = latest_checkpoint(self.folder.checkpoints) if self.config.resume else None
        if found is not None:
            state = load_checkpoint(
                found, model=self.bench.model, optimizer=self.stepper.optimizer, fingerprint=self.fingerprint
            ).state
            self.progress = Progress(**state["progress"])
            self.stepper.updates, self.stepper.skipped = self.progress.updates, self.progress.skipped
            self.bench.engine.update_weights(self.progress.step)
        # Without a checkpoint a resumed run starts over: what an interrupted first step left behind is dropped.
        self.store.drop_after(self.progress.step)
        self.metrics = MetricsLog(
            self.folder.metrics_file, tensorboard=self.folder.tensorboard, resume_step=self.progress.step
        )
        if found is None and self.dev is not None and self.config.trainer.eval_every:
            self._validate(0)

    def _collector(self) -> TreeCollector:
        config = self.config
        return TreeCollector(
            stream=PromptStream(self.task.questions, config.trainer.prompts_per_step, config.seed),
            rollout=self._rollout,
            credit=credit_rule(config.algorithm),
            model=self.bench.model,
            reference=self.reference,
            first_step=self.progress.step,
            last_step=config.trainer.steps,
            prompts_per_update=config.trainer.prompts_per_update,
            max_pack_tokens=config.trainer.max_pack_tokens,
            shared_turns=config.algorithm.shared_turns,
            min_scored_leaves=config.algorithm.min_scored_leaves,
            temperature=config.sampling.temperature,
            should_stop=self._should_stop,
        )

    def _should_stop(self) -> bool:
        limit = self.config.trainer.max_generated_tokens
        return self.interrupted.is_set() or (limit is not None and self.progress.generated_tokens >= limit)

    def _rollout(self, prompts: Sequence[Prompt]) -> Rollout:
        return grow(
            prompts,
            core=self.task.core,
            engine=self.bench.engine,
            dialogue=self.bench.dialogue,
            plan=growth_plan(self.config.algorithm),
            sampling=rollout_sampling(self.config, self.task.core),
            limits=limits(self.config),
            run_seed=self.config.seed,
        )

    # -- hooks of the Trainer, in the order in which it calls them ----------------------------------------------------

    def _take(self, batch: TensorDictBase) -> TensorDictBase:
        collected: Collected = batch.get_non_tensor("collected")
        self.collected = collected
        self.update_start = time.monotonic()
        self.bench.model.train()
        packs = [pack for minibatch in collected.minibatches for pack in minibatch]
        if self.config.trainer.check_packed and packs and collected.step == 0:
            check_packed(self.bench.model, packs[0])
        self.epoch = 0
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

    def _losses(self, optim_steps: int, losses: TensorDictBase | None) -> None:
        del optim_steps
        if losses is not None:
            self._current().metrics.update({f"train/{key}": float(value) for key, value in losses.items()})

    def _end_step(self) -> None:
        collected = self._current()
        step = collected.step + 1
        self.bench.model.eval()
        collected.metrics["seconds/update"] = time.monotonic() - self.update_start
        self.bench.engine.update_weights(step)
        self._count(collected, step)
        self.store.write(step, collected.groups, by_node(collected.groups, collected.advantages))
        last = step >= self.config.trainer.steps or self._should_stop()
        every = self.config.trainer.eval_every
        if self.dev is not None and (last or (every and step % every == 0)):
            summary = self._validate(step).summary()
            collected.metrics.update({f"validation/{key}": summary[key] for key in ("em", "f1", "n")})
        self.metrics.write(step, self._metrics(collected))
        if last or step % self.config.trainer.save_every == 0:
            self._save(step)
        if self.on_step is not None:
            self.on_step(step, self._metrics(collected))

    def _current(self) -> Collected:
        if self.collected is None:
            raise RuntimeError("the trainer called an update hook before any batch was collected")
        return self.collected

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _count(self, collected: Collected, step: int) -> None:
        stats = collected.rollout.stats
        progress = self.progress
        progress.step = step
        progress.updates, progress.skipped = self.stepper.updates, self.stepper.skipped
        progress.generated_tokens += stats.generated_tokens
        progress.tool_calls += stats.tool_calls
        progress.trajectories += stats.trajectories
        now = time.monotonic()
        progress.seconds += now - self.started
        self.started = now

    def _metrics(self, collected: Collected) -> dict[str, float]:
        leaves = [leaf for group in collected.groups for leaf in group.scored_leaves()]
        rewards = [float(leaf.reward or 0.0) for leaf in leaves]
        progress = self.progress
        spread = [
            max(r) > min(r) for g in collected.groups if (r := [float(leaf.reward or 0) for leaf in g.scored_leaves()])
        ]
        return {
            "reward/mean": float(np.mean(rewards)) if rewards else float("nan"),
            "rollout/em": _mean(float(leaf.info.get("em", 0.0)) for leaf in leaves),
            "rollout/turns": _mean(float(leaf.depth) for leaf in leaves),
            "rollout/format_valid": _mean(float(bool(leaf.info.get("format_valid"))) for leaf in leaves),
            "rollout/answered": _mean(float(leaf.status == "answered") for leaf in leaves),
            "rollout/mixed_groups": _mean(float(s) for s in spread),
            "rollout/entropy": _mean(
                node.entropy for g in collected.groups for t in g.trees for node in t.nodes() if node.turn_ids
            ),
            "rollout/dropped_groups": float(collected.dropped),
            **{f"budget/{key}": float(value) for key, value in collected.rollout.stats.as_dict().items()},
            "total/generated_tokens": float(progress.generated_tokens),
            "total/tool_calls": float(progress.tool_calls),
            "total/trajectories": float(progress.trajectories),
            "total/skipped_updates": float(progress.skipped),
            "total/seconds": progress.seconds,
            "train/learning_rate": self.stepper.optimizer.param_groups[0]["lr"],
            **collected.metrics,
        }

    def _validate(self, step: int) -> Evaluation:
        if self.dev is None:
            raise ConfigError("validation needs env.dev_questions")
        result = evaluate(
            first(self.dev.questions, self.config.trainer.eval_questions),
            core=self.dev.core,
            engine=self.bench.engine,
            dialogue=self.bench.dialogue,
            sampling=eval_sampling(self.config, self.dev.core),
            limits=limits(self.config),
            seed=self.config.seed,
        )
        summary = result.summary()
        em = float(summary["em"])
        where = self.folder.path / "validation" / f"step-{step:06d}"
        result.save(where, extra={"step": step, "generated_tokens": self.progress.generated_tokens})
        if step and (self.progress.best_em is None or em > self.progress.best_em):
            self.progress.best_em, self.progress.best_step = em, step
        self.last_evaluation = result
        return result

    def _save(self, step: int) -> None:
        folder = save_checkpoint(
            self.folder.checkpoints,
            step,
            model=self.bench.model,
            optimizer=self.stepper.optimizer,
            state={"progress": asdict(self.progress)},
            fingerprint=self.fingerprint,
            keep=self.config.trainer.keep_checkpoints,
        )
        if self.progress.best_step == step and self.progress.best_em is not None:
            mark_best(folder, metric="em", value=self.progress.best_em)

    def _finish(self) -> TrainResult:
        self.metrics.close()
        save_model(self.bench.model, self.bench.tokenizer, self.folder.path / "model")
        return TrainResult(
            folder=self.folder.path,
            progress=self.progress,
            interrupted=self.interrupted.is_set(),
            evaluation=getattr(self, "last_evaluation", None),
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C finishes the step, saves and returns; the second one interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(signum: int, frame: FrameType | None) -> None:
            del frame
            if self.interrupted.is_set():
                raise KeyboardInterrupt
            self.interrupted.set()
            del signum

        previous = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def _mean(values: Iterator[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else float("nan")
