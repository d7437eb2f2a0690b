"""Who plays: the oracle (gold steps, or a task's own solutions), or an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.endpoint import Usage
from turntree.agents.engines.protocol import Engine, SamplingParams
from turntree.agents.engines.transcript import TextTokenizer
from turntree.agents.models import load_tokenizer
from turntree.agents.scorer import Failed, Finished, Finisher, close_all, env_reward
from turntree.agents.solutions import finish_solutions
from turntree.agents.teacher import Teacher, play
from turntree.agents.tokenizer import Tokenizer, encode
from turntree.envs.core import TurnCore
from turntree.envs.search_qa import SearchQACore
from turntree.errors import ConfigError, CostLimitError, EngineError
from turntree.trainers.build import build_bench, finisher, limits
from turntree.trainers.coldstart.criteria import reads_answers
from turntree.trainers.coldstart.played import Key, Played, Slot, played_tree, vocabulary
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import resolve_engine
from turntree.trainers.remote import remote_bench
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, RolloutStats, grow
from turntree.trainers.seeds import derive_seed
from turntree.trainers.task import rollout_sampling
from turntree.trainers.tree import Tree

__all__ = [
    "Outcome",
    "Seat",
    "facts",
    "open_seat",
    "play_engine",
    "play_oracle",
    "seated",
    "student_tokenizer",
    "uid",
]

_log = logging.getLogger(__name__)

CHUNK = 512
"""Trajectories of the oracle that are played at once."""
WAVE = 16
"""Trajectories handed to a rollout, in multiples of those in flight: their trees are kept until it ends."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the slots that were to be played: those that failed, and why it ended before all were ('').

    ``stats``: of the last rollout; None where there was none.
    """

    failures: Mapping[Key, Failed]
    stopped: str = ""
    stats: RolloutStats | None = None


# -- the oracle -------------------------------------------------------------------------------------------------------


def play_oracle(
    asked: Sequence[Slot], core: TurnCore[Any], config: RunConfig, tokenizer: Tokenizer
) -> Iterator[Played]:
    """The oracle's trajectories, in order; its turns are counted in tokens of ``tokenizer``.

    Sample 0 is drawn as it always was; the others have seeds of their own.
    """
    solves = not isinstance(core, SearchQACore)
    if solves and config.coldstart.samples > 1:
        raise ConfigError(
            f"coldstart.samples={config.coldstart.samples}: {config.env.id} has one solution a task, so all samples of "
            "the oracle would be the same; play one, or let an engine play (coldstart.teacher=engine)"
        )
    for start in range(0, len(asked), CHUNK):
        chunk = asked[start : start + CHUNK]
        by_sample = sorted(range(len(chunk)), key=lambda i: chunk[i].key.sample)
        found: dict[int, Finished] = {}
        for sample, places in groupby(by_sample, key=lambda i: chunk[i].key.sample):
            own = list(places)
            tasks = [chunk[i].task for i in own]
            seed = derive_seed(config.seed, "teacher", *([sample] if sample else []))
            found.update(zip(own, oracle_episodes(core, tasks, config, seed=seed), strict=True))
        for i, slot in enumerate(chunk):
            tokens = sum(len(encode(tokenizer, turn.text)) for turn in found[i].turns)
            yield Played(slot.key, found[i], tokens)


def oracle_episodes(core: TurnCore[Any], tasks: Sequence[Any], config: RunConfig, *, seed: int) -> list[Finished]:
    """One episode a task: gold steps with ``sft.laziness`` and ``sft.error``, or the task's own solution."""
    if not isinstance(core, SearchQACore):
        return finish_solutions(core, tasks, seed=seed)
    return play(core, tasks, teacher=Teacher(laziness=config.sft.laziness, error=config.sft.error), seed=seed)


# -- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine with all that lets it play. ``vocabulary`` '' : its ids are no tokens."""

    engine: Engine
    dialogue: Dialogue
    sampling: SamplingParams
    limits: Limits
    seed: int
    vocabulary: str = ""
    finisher: Finisher | None = None


def uid(key: Key) -> str:
    """The name of a trajectory in a rollout; with the run's seed, all that its draws depend on."""
    return f"coldstart/{key.question}/{key.sample}"


def play_engine(
    asked: Sequence[Slot],
    core: TurnCore[Any],
    seat: Seat,
    *,
    on_played: Callable[[Played], None],
    wave: int | None = None,
) -> Outcome:
    """Play the slots, many at once; ``on_played`` gets each trajectory when it has ended, in any order.

    A trajectory that fails for outside reasons is in the outcome and in no count of trajectories. A cost limit that
    is reached, or an engine that dies, ends it all; ``stopped`` says so. ``wave``: trajectories of a rollout.
    """
    failures: dict[Key, Failed] = {}
    unpaid: list[str] = []
    stats: RolloutStats | None = None
    by_name = {uid(slot.key): slot for slot in asked}

    def take(tree: Tree) -> None:
        slot, leaf = by_name[tree.prompt_uid], tree.leaves()[0]
        if leaf.status != "failed":
            on_played(played_tree(tree, slot, vocabulary=seat.vocabulary))
        elif leaf.info["error"] == CostLimitError.__name__:
            unpaid.append(str(leaf.info["message"]))
        else:
            failures[slot.key] = Failed(str(leaf.info["error"]), str(leaf.info["message"]))

    size = wave or WAVE * (seat.limits.max_concurrent_trees or len(asked) or 1)
    for start in range(0, len(asked), size):
        try:
            rollout = grow(
                [Prompt(uid(slot.key), slot.task) for slot in asked[start : start + size]],
                core=core,
                engine=seat.engine,
                dialogue=seat.dialogue,
                plan=GrowthPlan(),
                sampling=seat.sampling,
                limits=seat.limits,
                run_seed=seat.seed,
                scorer=env_reward,  # what is best is judged afterwards
                finisher=seat.finisher,
                on_tree=take,
            )
        except EngineError as error:
            return Outcome(failures, str(error), stats)
        stats = rollout.stats
        if unpaid:
            return Outcome(failures, unpaid[0], stats)
    return Outcome(failures, stats=stats)


def seated(config: RunConfig) -> RunConfig:
    """The configuration that the teacher plays under: its own model, dialogue and temperature."""
    own = config.coldstart
    model = replace(config.model, path=own.model or config.model.path, dialogue=own.dialogue or config.model.dialogue)
    return resolve_engine(replace(config, model=model), trains=False)[0]


def facts(config: RunConfig, core: TurnCore[Any], source: str) -> dict[str, Any]:
    """All that trajectories depend on besides question and sample; a journal goes on only under the same."""
    about: dict[str, Any] = {
        "seed": config.seed,
        "env.id": config.env.id,
        "questions": source,
        "environment": core.fingerprint,
        "coldstart.teacher": config.coldstart.teacher,
    }
    if config.coldstart.teacher == "oracle":
        return about | {"sft.laziness": config.sft.laziness, "sft.error": config.sft.error}
    playing = seated(config)
    about |= {
        "coldstart.temperature": teacher_sampling(config, core).temperature,
        "sampling.max_turn_tokens": config.sampling.max_turn_tokens,
        "sampling.max_context_tokens": config.sampling.max_context_tokens,
        "answers written by": _writer(config),
    }
    chat = playing.engine.name == "openai" and playing.openai.protocol == "chat"
    if playing.engine.name == "openai":
        about |= {
            "engine.base_url": playing.engine.base_url,
            "engine.model": playing.engine.model,
            "openai.protocol": playing.openai.protocol,
            "openai.sampling": dict(playing.openai.sampling),
        }
    return about if chat else about | {"teacher": playing.model.path, "model.dialogue": playing.model.dialogue}


def _writer(config: RunConfig) -> Any:
    """Who writes the answers that the criterion reads; empty where the teacher does, or where none are read."""
    if not reads_answers(config):
        return ""
    return list(config.agent.writer(evaluating=False)) if config.agent.splits else config.reward.finisher


def teacher_sampling(config: RunConfig, core: TurnCore[Any]) -> SamplingParams:
    """How the teacher's turns are sampled."""
    sampling = rollout_sampling(config, core)
    own = config.coldstart.temperature
    return sampling if own is None else replace(sampling, temperature=own)


@contextmanager
def open_seat(config: RunConfig, core: TurnCore[Any], *, spent: Usage) -> Iterator[Seat]:
    """Load the teacher, or connect to it; ``spent`` counts against ``openai.max_cost`` already.

    Raises ``ConfigError`` for what is missing.
    """
    playing = seated(config)
    bench = remote_bench(playing, spent=spent) if playing.engine.name == "openai" else build_bench(playing)
    with closing(bench), ExitStack() as parts:
        if playing.engine.name == "vllm_server":
            _hand_over(bench.engine, config)
        tokenizer: Any = bench.tokenizer
        tokens = not isinstance(tokenizer, TextTokenizer)
        writer = finisher(playing, bench) if reads_answers(config) else None
        parts.callback(close_all, writer)
        yield Seat(
            bench.engine,
            bench.dialogue,
            teacher_sampling(config, core),
            in_flight(playing),
            config.seed,
            vocabulary(tokenizer) if tokens else "",
            writer,
        )


def in_flight(config: RunConfig) -> Limits:
    """The limits of a rollout, with as many trajectories at once as the engine takes."""
    rows = config.engine.max_batch_rows if config.engine.name == "hf" else config.engine.max_concurrent_requests
    return replace(limits(config), max_concurrent_trees=config.trainer.max_concurrent_trees or rows)


def _hand_over(engine: Engine, config: RunConfig) -> None:
    """A server plays with the policy's weights; with its own where it is another model, or takes none."""
    if config.coldstart.model:
        return
    try:
        engine.update_weights(0)
    except ConfigError as error:
        _log.warning("the server plays with its own weights, be they those of model.path or not: %s", error)


def student_tokenizer(config: RunConfig) -> Tokenizer:
    """What observations are cut by: the student's tokenizer, or an estimate where no student is named."""
    found: Tokenizer = load_tokenizer(Path(config.model.path)) if config.model.path else TextTokenizer()
    return found
