"""Episodes as records that can be played again, each step compared with what came of it the first time."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from turntree.envs import values
from turntree.envs.capture import Capture
from turntree.envs.snapshot import History
from turntree.errors import EpisodeReplayError

__all__ = ["Played", "Record", "Reseeded", "decode_record", "encode_record", "probe", "replay", "reseed"]

Env: TypeAlias = gymnasium.Env[Any, Any]

_PROBE_SEED = 20160427


@dataclass(frozen=True, slots=True)
class Played:
    """One recorded step: the action, and what came of it (the observation as a digest)."""

    action: Any
    reward: float
    terminated: bool
    truncated: bool
    observation: bytes

    @property
    def outcome(self) -> tuple[float, bool, bool, bytes]:
        return self.reward, self.terminated, self.truncated, self.observation


@dataclass(frozen=True, slots=True)
class Reseeded:
    """The random streams were derived anew from a seed at this point of the record."""

    seed: int


@dataclass(frozen=True, slots=True)
class Record:
    """An episode as it can be played again: how it began, and every step since, shared with its forks."""

    seed: int
    options: Any
    wrappers: Capture
    observation: bytes
    steps: History[Played | Reseeded] = field(default_factory=History[Any])

    def append(self, step: Played | Reseeded) -> Record:
        """A record with one more step; this one is unchanged."""
        return replace(self, steps=self.steps.append(step))


def reseed(layers: Sequence[Any], seed: int) -> None:
    """Derive every random generator that is an attribute of a layer anew, in place: others may hold it too."""
    seen: set[int] = set()
    for layer in layers:
        for name in sorted(vars(layer)):
            generator = vars(layer)[name]
            if id(generator) in seen:
                continue
            seen.add(id(generator))
            if isinstance(generator, np.random.Generator):
                bits: Any = generator.bit_generator
                bits.state = type(bits)(np.random.SeedSequence([seed, len(seen)])).state
            elif isinstance(generator, np.random.RandomState):
                generator.seed([seed % 2**32, len(seen)])
            elif isinstance(generator, random.Random):
                generator.seed(seed * 2**16 + len(seen))


def replay(env: Env, layers: Sequence[Any], record: Record) -> None:
    """Play a recorded episode; raises :class:`EpisodeReplayError` at the first step that comes out differently."""
    record.wrappers.restore(layers)
    observation, _ = env.reset(seed=record.seed, options=copy.deepcopy(record.options))
    if values.digest(observation) != record.observation:
        raise EpisodeReplayError(_message(env, f"reset(seed={record.seed})", "observation"))
    for turn, step in enumerate(record.steps, start=1):
        if isinstance(step, Reseeded):
            reseed(layers, step.seed)
            continue
        observation, reward, terminated, truncated, _ = env.step(copy.deepcopy(step.action))
        found = (float(reward), bool(terminated), bool(truncated), values.digest(observation))
        if found != step.outcome:
            names = ("reward", "terminated", "truncated", "observation")
            wrong = next(name for name, a, b in zip(names, step.outcome, found) if a != b)
            raise EpisodeReplayError(_message(env, f"step {turn}", wrong))


def _message(env: Env, where: str, what: str) -> str:
    return (
        f"{type(env.unwrapped).__name__} did not repeat itself: the {what} of {where} differs from the record. "
        "Something outside of the seed and the actions decides (global randomness, the clock, state that reset() "
        "keeps); use Forkable(env, how='deepcopy') or give the environment get_state() and set_state(state)"
    )


def encode_record(record: Record, depth: int) -> dict[str, Any]:
    """A record as JSON."""
    rows = [
        step.seed
        if isinstance(step, Reseeded)
        else values.encode((step.action, *step.outcome), where="a recorded action")
        for step in record.steps
    ]
    return {
        "seed": record.seed,
        "options": values.encode(record.options, where="the reset options"),
        "wrappers": record.wrappers.to_json(depth),
        "observation": values.encode(record.observation),
        "steps": rows,
    }


def decode_record(data: Mapping[str, Any]) -> Record:
    """The record that :func:`encode_record` wrote."""
    steps: list[Played | Reseeded] = [
        Reseeded(row) if isinstance(row, int) else Played(*values.decode(row)) for row in data["steps"]
    ]
    return Record(
        seed=int(data["seed"]),
        options=values.decode(data["options"]),
        wrappers=Capture.from_json(data["wrappers"]),
        observation=values.decode(data["observation"]),
        steps=History(steps),
    )


def probe(env: Env, steps: int) -> str | None:
    """Play the same short random episode twice; says what differs, or None."""
    space = copy.deepcopy(env.action_space)
    space.seed(_PROBE_SEED)
    actions = [space.sample() for _ in range(steps)]
    first, second = (_outcomes(env, actions) for _ in range(2))
    for turn, (left, right) in enumerate(zip(first, second)):
        if left != right:
            return f"turn {turn} came out differently the second time"
    return None


def _outcomes(env: Env, actions: Sequence[Any]) -> list[Any]:
    observation, _ = env.reset(seed=_PROBE_SEED)
    found: list[Any] = [values.digest(observation)]
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        found.append((values.digest(observation), float(reward), terminated, truncated))
        if terminated or truncated:
            break
    return found
