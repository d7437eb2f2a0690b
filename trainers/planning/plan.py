"""A run on a machine: what every place of it holds, what does not fit, and what would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from turntree.trainers.cluster_config import ClusterConfig
from turntree.trainers.config import RunConfig
from turntree.trainers.planning.machine import Machine
from turntree.trainers.planning.memory import Item, engine_items, taking_turns, trainer_items, value_size
from turntree.trainers.planning.models import KNOWN, ModelShape
from turntree.trainers.planning.tokens import Play, StepTokens, step_tokens

__all__ = ["Place", "RunPlan", "plan_run"]


@dataclass(frozen=True, slots=True)
class Place:
    """Something with a memory: a GPU or a machine. ``capacity`` in bytes."""

    name: str
    items: tuple[Item, ...]
    capacity: float

    @property
    def needed(self) -> float:
        return sum(item.size for item in self.items)

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run needs. ``problems`` are in words; ``changes`` are overrides that would make it fit.

    ``smaller``: the largest known model that fits with these changes, where nothing makes this one fit. With problems
    but without changes and ``smaller`` there is no advice.
    """

    shape: ModelShape
    tokens: StepTokens
    places: tuple[Place, ...]
    problems: tuple[str, ...]
    changes: tuple[str, ...] = ()
    smaller: str = ""

    @property
    def fits(self) -> bool:
        return not self.problems


def plan_run(
    config: RunConfig, shape: ModelShape, machine: Machine, play: Play, *, ranks: int | None = None
) -> RunPlan:
    """Compute the plan, and where it does not fit look for changes that do.

    ``ranks``: training processes, where torchrun starts them (None: ``trainer.ranks``).
    """
    plan = _check(config, shape, machine, play, ranks)
    if plan.fits:
        return plan
    changes = _search(config, shape, machine, play, ranks)
    if changes is not None:
        return replace(plan, changes=changes)
    for other in sorted((s for s in KNOWN.values() if s.parameters < shape.parameters), key=lambda s: -s.parameters):
        changes = _search(config, other, machine, play, ranks)
        if changes is not None:
            return replace(plan, changes=changes, smaller=other.name)
    return plan


def _check(config: RunConfig, shape: ModelShape, machine: Machine, play: Play, given: int | None) -> RunPlan:
    ranks = given or config.trainer.ranks or 1
    tokens = step_tokens(config, play)
    places = tuple(_places(config, shape, machine, tokens, ranks))
    problems = [*_limits(config, shape, tokens), *_counts(config, machine, ranks)]
    problems += [
        f"{place.name}: {place.needed / 1e9:.1f} GB are needed, {place.capacity / 1e9:.1f} GB are there"
        for place in places
        if not place.fits
    ]
    problems += _cache(config, shape, tokens, machine)
    return RunPlan(shape, tokens, places, tuple(problems))


def _places(config: RunConfig, shape: ModelShape, machine: Machine, tokens: StepTokens, ranks: int) -> Iterator[Place]:
    on_gpu = config.trainer.device.startswith("cuda")
    workers = config.cluster.workers * ranks if config.cluster.name == "ray" else 0
    worker_gpu = machine.gpu_memory if workers and config.cluster.gpus_per_worker else 0
    share = replace_tokens(tokens, workers or ranks)
    trainer = trainer_items(config, shape, tokens, ranks=ranks, gpu=on_gpu)
    if not workers:
        trainer += engine_items(config, shape, share, gpu=machine.gpu_memory if on_gpu else 0, own=False)
        if config.engine.sleep and on_gpu:
            trainer = taking_turns(trainer, shape.parameters * value_size(config))
    worker = engine_items(config, shape, share, gpu=worker_gpu, own=True) if workers else []
    shares_gpu = 0 < config.cluster.gpus_per_worker < 1
    host: list[Item] = []
    if on_gpu:
        beside = [i for i in worker if worker_gpu and not i.host] if shares_gpu else []
        yield Place(f"GPU of {_each('training rank', ranks)}", (*_on(trainer, host=False), *beside), machine.gpu_memory)
        host += _times(_on(trainer, host=True), ranks)
    else:
        host += _times(trainer, ranks)
    if worker_gpu:
        if not shares_gpu or not on_gpu:
            per = config.cluster.gpus_per_worker
            yield Place(f"GPU of {_each('rollout worker', workers)}", _on(worker, host=False), machine.gpu_memory * per)
        host += _times(_on(worker, host=True), workers)
    else:
        host += _times(worker, workers)
    host.append(Item("programs", 1.0e9 * (ranks + workers)))
    items = tuple(Item(i.name, i.size / machine.count, host=True) for i in host)
    yield Place("memory of the machine" if machine.count == 1 else "memory of each machine", items, machine.memory)


def replace_tokens(tokens: StepTokens, parts: int) -> StepTokens:
    """The part of a rollout that one of ``parts`` engines grows."""
    return replace(
        tokens,
        trajectories=-(-tokens.trajectories // parts),
        trees=-(-tokens.trees // parts),
        unique=tokens.unique / parts,
        generated=tokens.generated / parts,
        rows=tokens.rows / parts,
    )


def _each(name: str, count: int) -> str:
    return f"the {name}" if count == 1 else f"each of {count} {name}s"


def _on(items: list[Item], *, host: bool) -> tuple[Item, ...]:
    return tuple(item for item in items if item.host is host)


def _times(items: tuple[Item, ...] | list[Item], count: int) -> list[Item]:
    return [replace(item, size=item.size * count) for item in items]


# What is wrong besides memory ----------------------------------------------------------------------------------------


def _limits(config: RunConfig, shape: ModelShape, tokens: StepTokens) -> Iterator[str]:
    context = config.sampling.max_context_tokens
    if shape.positions is not None and context > shape.positions:
        yield f"sampling.max_context_tokens={context}, but {shape.name} has {shape.positions} positions"
    if tokens.longest > config.trainer.max_pack_tokens:
        yield (
            f"trainer.max_pack_tokens={config.trainer.max_pack_tokens} is shorter than a trajectory of "
            f"{tokens.longest:.0f} tokens, which cannot be cut; set it to at least {context}"
        )


def _counts(config: RunConfig, machine: Machine, ranks: int) -> Iterator[str]:
    on_gpu = config.trainer.device.startswith("cuda")
    workers = config.cluster.workers * ranks if config.cluster.name == "ray" else 0
    each = config.cluster.gpus_per_worker
    # A fraction shares the trainer's GPU.
    wanted = (ranks if on_gpu else 0) + (workers * each if each >= 1 or not on_gpu else 0)
    if wanted > machine.all_gpus:
        yield f"{wanted:g} GPUs are asked for ({ranks} ranks, {workers} workers), {machine.all_gpus} are there"
    cpus = workers * config.cluster.cpus_per_worker
    if cpus > machine.cores * machine.count:
        yield f"{cpus:g} CPUs are asked for by {workers} workers, {machine.cores * machine.count} are there"


def _cache(config: RunConfig, shape: ModelShape, tokens: StepTokens, machine: Machine) -> Iterator[str]:
    """vLLM on a GPU: whether its share holds the weights and the keys and values of one trajectory."""
    on_gpu = config.cluster.gpus_per_worker > 0 if config.cluster.name == "ray" else config.trainer.device != "cpu"
    if config.engine.name != "vllm" or not on_gpu or not machine.gpu_memory:
        return
    size = value_size(config)
    room = config.engine.gpu_memory_utilization * machine.gpu_memory - shape.parameters * size - 1e9
    holds = room / (shape.kv_values() * size)
    if holds < tokens.longest:
        yield (
            f"engine.gpu_memory_utilization={config.engine.gpu_memory_utilization:g} leaves room for "
            f"{max(0.0, holds):.0f} tokens of keys and values beside the weights, a trajectory has {tokens.longest:.0f}"
        )


# What to change ------------------------------------------------------------------------------------------------------

_Change = tuple[str, Callable[[RunConfig], RunConfig]]


def _search(
    config: RunConfig, shape: ModelShape, machine: Machine, play: Play, ranks: int | None
) -> tuple[str, ...] | None:
    """Take changes on, cheapest first, until the run fits; then leave out those that it fits without. None: no way."""
    taken: list[_Change] = []

    def check(changes: list[_Change]) -> bool:
        changed = config
        for _, change in changes:
            changed = change(changed)
        return _check(changed, shape, machine, play, ranks).fits

    if check(taken):
        return ()
    for change in _candidates(config, machine, play, ranks):
        taken.append(change)
        if check(taken):
            break
    else:
        return None
    for change in list(taken):
        rest = [c for c in taken if c is not change]
        if check(rest):
            taken = rest
    return tuple(name for name, _ in taken)


def _candidates(config: RunConfig, machine: Machine, play: Play, ranks: int | None) -> Iterator[_Change]:
    yield from _fewer(config, machine, ranks)
    longest = math.ceil(step_tokens(config, play).longest)
    trainer = config.trainer
    pack = max(longest, min(trainer.max_pack_tokens, 4096))
    if pack != trainer.max_pack_tokens:
        yield f"trainer.max_pack_tokens={pack}", _trainer(max_pack_tokens=pack)
    if trainer.activation_checkpointing != "full":
        yield "trainer.activation_checkpointing=full", _trainer(activation_checkpointing="full")
    if config.engine.name == "hf":
        rows = max(1, config.engine.max_batch_rows // 4)
        yield f"engine.max_batch_rows={rows}", _engine(max_batch_rows=rows)
        kept = min(config.engine.max_cached_tokens, 32 * longest)
        yield f"engine.max_cached_tokens={kept}", _engine(max_cached_tokens=kept)
    if config.engine.name == "vllm" and config.cluster.name == "local" and config.engine.gpu_memory_utilization > 0.3:
        yield "engine.gpu_memory_utilization=0.3", _engine(gpu_memory_utilization=0.3)
    sleeps = config.engine.name == "vllm" and config.cluster.name == "local" and trainer.device.startswith("cuda")
    if sleeps and not config.engine.sleep:
        yield "engine.sleep=true", _engine(sleep=True)
    if config.model.dtype != "bfloat16":
        yield "model.dtype=bfloat16", lambda c: replace(c, model=replace(c.model, dtype="bfloat16"))
    if trainer.device.startswith("cuda"):
        several = machine.gpus if config.cluster.name == "local" and machine.gpus > 1 and ranks is None else None
        if trainer.strategy != "deepspeed":
            words = f" trainer.ranks={several}" if several else ""
            yield f"trainer.strategy=deepspeed{words}", _trainer(strategy="deepspeed", ranks=several)
        if not config.deepspeed.offload_optimizer:
            yield (
                "deepspeed.offload_optimizer=true",
                lambda c: replace(c, deepspeed=replace(c.deepspeed, offload_optimizer=True)),
            )


def _fewer(config: RunConfig, machine: Machine, given: int | None) -> Iterator[_Change]:
    """As many ranks and workers as the machine has GPUs and cores for."""
    cluster, gpus = config.cluster, machine.all_gpus
    ranks = given or config.trainer.ranks or 1
    on_gpu, ray = config.trainer.device.startswith("cuda"), cluster.name == "ray"
    each = cluster.workers * cluster.gpus_per_worker if ray and cluster.gpus_per_worker >= 1 else 0.0
    if on_gpu and gpus and ranks * (1 + each) > gpus and given is None:
        few = int(gpus // (1 + each))
        if few:
            yield f"trainer.ranks={few}", _trainer(ranks=few)
        else:  # one GPU: the engine shares it with the trainer
            yield (
                f"cluster=local trainer.ranks={gpus} engine.gpu_memory_utilization=0.3",
                lambda c: replace(
                    c,
                    cluster=ClusterConfig(),
                    trainer=replace(c.trainer, ranks=gpus),
                    engine=replace(c.engine, gpu_memory_utilization=0.3),
                ),
            )
            ray = False
    if ray and cluster.workers * ranks * cluster.cpus_per_worker > machine.cores * machine.count:
        yield "cluster.cpus_per_worker=1", lambda c: replace(c, cluster=replace(c.cluster, cpus_per_worker=1.0))


def _trainer(**options: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda config: replace(config, trainer=replace(config.trainer, **options))


def _engine(**options: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda config: replace(config, engine=replace(config.engine, **options))
