"""Text games of GEM (``gem-llm``) as a task that branches.

A GEM environment has no state to save: it plays in place and draws from the global generators of Python and numpy. Here
its state is the record of its seed and moves, each move with the seed of its own randomness, so that any turn can be
played again. Games that were seen lately are kept as deep copies, so that a step from them costs one copy and one move.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from turntree.envs.agent_task import AgentTask, Rng
from turntree.envs.core import Action, Step
from turntree.envs.interop import library
from turntree.envs.snapshot import History
from turntree.errors import ConfigError

__all__ = ["GemTask", "Match", "Move"]

_GLOBAL_RANDOMNESS = threading.Lock()


@dataclass(frozen=True, slots=True)
class Move:
    """A turn, and the seed of what the game drew while it was played."""

    text: str
    seed: int


@dataclass(frozen=True, slots=True)
class Match:
    """A game as it can be played again."""

    seed: int
    moves: History[Move] = field(default_factory=lambda: History[Move]())


class GemTask(AgentTask[Match]):
    """``game``: a GEM id such as ``"game:Mastermind-v0-easy"``, or a function that makes a game, with a ``name``.

    The turn is given to the game as it is. A task is ``{"seed": n}``, or ``{}`` for a seed of the episode's own.
    ``max_turns`` bounds episodes whose game does not say how long it lasts; ``kept_games`` the deep copies.

    A game must draw from Python's and numpy's global generators or from nothing; these are put back afterwards.
    """

    metric: ClassVar[str] = "reward"

    def __init__(
        self, game: str | Callable[[], Any], *, name: str = "", max_turns: int | None = None, kept_games: int = 256
    ) -> None:
        if not isinstance(game, str) and not name:
            raise ConfigError("a game that is given as a function needs a name, which its snapshots are known by")
        self.name = name or str(game)
        self._make = game if callable(game) else _maker(game)
        self._kept: dict[Match, Any] = {}
        self._most = kept_games
        lasts = getattr(self._start(0)[0], "max_turns", None)
        self.max_turns = max_turns or (lasts if isinstance(lasts, int) else 64)

    def initial_state(self, task: Any, rng: Rng) -> Match:
        """The game before the first move. Raises ``ConfigError`` for a task that is no mapping with at most a seed."""
        if not isinstance(task, Mapping) or set(task) - {"seed"}:
            raise ConfigError(f"expected a task {{'seed': n}} or {{}}, found {task!r:.100}")
        return Match(int(task.get("seed", rng.integers(2**32))))

    def prompt(self, state: Match) -> str:
        return self._start(state.seed)[1]

    def transition(self, state: Match, action: Action, rng: Rng) -> Step[Match]:
        """One move of the game."""
        after = replace(state, moves=state.moves.append(Move(action.argument, int(rng.integers(2**32)))))
        game = self._at(state)
        observation, reward, terminated, truncated, info = _play(game, after.moves.last)
        self._keep(after, game)
        return Step(
            after,
            _text(observation, {} if terminated or truncated else info),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated and not terminated),
        )

    # -- games -----------------------------------------------------------------------------------------------

    def _start(self, seed: int) -> tuple[Any, str]:
        with _seeded(seed):
            game = self._make()
            observation, info = game.reset(seed=seed)
        return game, _text(observation, info)

    def _at(self, state: Match) -> Any:
        """A game of the caller's own that stands at ``state``."""
        kept = self._kept.get(state)
        if kept is not None:
            return copy.deepcopy(kept)
        game = self._start(state.seed)[0]
        for move in state.moves:
            _play(game, move)
        return game

    def _keep(self, state: Match, game: Any) -> None:
        self._kept[state] = game
        if len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)), None)


def _maker(name: str) -> Callable[[], Any]:
    gem = library("gem", install="gem-llm==0.1.0")

    def make() -> Any:
        return gem.make(name)

    return make


def _play(game: Any, move: Move) -> Any:
    with _seeded(move.seed):
        return game.step(move.text)


def _text(observation: Any, info: Mapping[str, Any]) -> str:
    """GEM hands what the agent must see in two parts; its own wrappers join them."""
    return "\n".join(part for part in (str(observation), str(info.get("suffix") or "")) if part)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, and put them back as they were."""
    with _GLOBAL_RANDOMNESS:
        before = random.getstate(), np.random.get_state()  # noqa: NPY002 - the games use them
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
