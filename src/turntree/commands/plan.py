"""``turntree plan``: whether a run fits a machine, before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from turntree.commands.console import say, say_json
from turntree.errors import CapacityError, ConfigError
from turntree.trainers.compose import compose

if TYPE_CHECKING:
    from turntree.trainers.planning.machine import Machine
    from turntree.trainers.planning.plan import RunPlan

__all__ = ["run_plan"]


def run_plan(
    overrides: Sequence[str],
    *,
    model: str | None,
    gpus: int | None,
    gpu: str | None,
    memory: str | None,
    cores: int | None,
    machines: int,
    ranks: int | None,
    turns: float | None,
    turn_tokens: float | None,
    observation_tokens: float | None,
    prompt_tokens: float | None,
    as_json: bool,
) -> None:
    """``turntree plan``. Raises ``CapacityError`` for a run that does not fit."""
    from turntree.trainers.planning.models import model_shape
    from turntree.trainers.planning.plan import plan_run
    from turntree.trainers.planning.tokens import play_of

    config = compose(overrides)
    name = model or config.model.path
    if not name:
        raise ConfigError("say which model: --model NAME (such as Qwen3-4B), or model.path=DIR")
    play = play_of(
        config,
        turns=turns,
        turn_tokens=turn_tokens,
        observation_tokens=observation_tokens,
        prompt_tokens=prompt_tokens,
    )
    machine = _machine(gpus=gpus, gpu=gpu, memory=memory, cores=cores, count=machines)
    plan = plan_run(config, model_shape(name), machine, play, ranks=ranks)
    if as_json:
        say_json(_as_json(plan, play))
    else:
        for line in _lines(plan, asdict(play), machine):
            say(line)
    if not plan.fits:
        raise CapacityError("the run does not fit this machine")


def _machine(*, gpus: int | None, gpu: str | None, memory: str | None, cores: int | None, count: int) -> Machine:
    """This machine, or the one that is described; what is not said of a machine with GPUs is taken as ample."""
    from turntree.search_backend.machine import parse_bytes
    from turntree.trainers.planning.machine import Machine, gpu_memory, this_machine

    try:
        given = None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from None
    if gpus is None and gpu is None:
        here = this_machine()
        return replace(here, memory=given or here.memory, cores=cores or here.cores, count=count)
    number = 1 if gpus is None else gpus
    size = gpu_memory(gpu) if gpu is not None else 0
    if number == 0:
        here = this_machine()
        return Machine(given or here.memory, cores or here.cores, count=count)
    return Machine(given or max(64 * 10**9, number * 200 * 10**9), cores or 16 * number, number, size, count)


def _lines(plan: RunPlan, play: dict[str, float], machine: Machine) -> Iterator[str]:
    shape, tokens = plan.shape, plan.tokens
    yield (
        f"model: {shape.name}, {shape.parameters / 1e9:.3g}B weights, {shape.layers} layers of {shape.hidden}, "
        f"{shape.kv_heads} key-value heads of {shape.head_dim}"
    )
    yield "an episode: " + ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in play.items())
    yield (
        f"a step: {tokens.trajectories} trajectories in {tokens.trees} trees; {_count(tokens.generated)} generated "
        f"tokens; {_count(tokens.unique)} packed tokens instead of {_count(tokens.rows)} in rows "
        f"({tokens.saving:.2f} times fewer); the longest trajectory has {tokens.longest:.0f}"
    )
    several = "s" * (machine.gpus > 1)
    gpus = f", {machine.gpus} GPU{several} of {machine.gpu_memory / 1e9:.0f} GB" if machine.gpus else ""
    each = f"{machine.count} machines of " if machine.count > 1 else ""
    yield f"machine: {each}{machine.cores} cores, {machine.memory / 1e9:.0f} GB{gpus}"
    for place in plan.places:
        yield f"{place.name}: {place.needed / 1e9:.2f} of {place.capacity / 1e9:.2f} GB"
        for item in sorted(place.items, key=lambda item: -item.size):
            yield f"  {item.size / 1e9:8.2f} GB  {item.name}"
    for problem in plan.problems:
        yield f"does not fit: {problem}"
    if plan.problems and plan.smaller:
        yield f"no setting makes {shape.name} fit; {plan.smaller} does, with: {' '.join(plan.changes)}".rstrip(" :")
    elif plan.problems and plan.changes:
        yield f"it fits with: {' '.join(plan.changes)}"
    elif plan.problems:
        yield "no setting of one run makes it fit; take a smaller model, or more memory"
    else:
        yield "it fits"


def _count(tokens: float) -> str:
    return f"{tokens / 1e6:.2f}M" if tokens >= 1e6 else f"{tokens / 1e3:.1f}k" if tokens >= 1e3 else f"{tokens:.0f}"


def _as_json(plan: RunPlan, play: Any) -> dict[str, Any]:
    return {
        **asdict(plan),
        "parameters": plan.shape.parameters,
        "fits": plan.fits,
        "episode": asdict(play),
        "places": [
            {"name": p.name, "needed": p.needed, "capacity": p.capacity, "items": {i.name: i.size for i in p.items}}
            for p in plan.places
        ],
    }
