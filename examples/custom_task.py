"""A task of your own without tools: guess a number from hints that are sometimes wrong.

The state is a frozen value, so snapshots, forks, trees and the check suite come for free.
Run it: python examples/custom_task.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np

from turntree.envs import FrozenDict, RandomStream, Step, TurnCore, TurnEnv
from turntree.envs.check import check_fork
from turntree.errors import SnapshotError


@dataclass(frozen=True)
class Guessing:
    """An episode between two turns. The secret is drawn once; the stream decides which hints are wrong."""

    secret: int
    stream: RandomStream
    turns: int = 0


class GuessCore(TurnCore[Guessing]):
    """The rules as pure functions. A task is the highest number; a turn is a guess in digits."""

    def __init__(self, max_turns: int = 12, wrong_hints: float = 0.1) -> None:
        self.max_turns = max_turns
        self.wrong_hints = wrong_hints

    @property
    def fingerprint(self) -> str:
        return f"guess-{self.max_turns}-{self.wrong_hints}"

    def initial(self, task: int, *, seed: int) -> tuple[Guessing, str]:
        secret = int(np.random.default_rng(seed).integers(1, task + 1))
        return Guessing(secret, RandomStream(seed)), f"Guess a number from 1 to {task}."

    def transition(self, state: Guessing, text: str) -> Step[Guessing]:
        rng, stream = state.stream.draw()
        after = replace(state, stream=stream, turns=state.turns + 1)
        guess = int(text) if text.strip().isdecimal() else None
        if guess == state.secret:
            return Step(after, "", 1.0, terminated=True, info=_end("answer", answer=text.strip(), em=1.0))
        if after.turns >= self.max_turns:
            return self.truncate(after, "turns")
        if guess is None:
            return Step(after, "Write a number.", info=FrozenDict({"action": "invalid"}))
        higher = (state.secret > guess) != (rng.random() < self.wrong_hints)
        return Step(after, "Higher." if higher else "Lower.", info=FrozenDict({"action": "guess"}))

    def truncate(self, state: Guessing, reason: str) -> Step[Guessing]:
        return Step(state, "", truncated=True, info=_end(reason))

    def reseed(self, state: Guessing, seed: int) -> Guessing:
        return replace(state, stream=RandomStream(seed))  # siblings get other hints, never another secret

    def encode_state(self, state: Guessing) -> dict[str, Any]:
        return {"secret": state.secret, "stream": state.stream.to_json(), "turns": state.turns}

    def decode_state(self, data: Mapping[str, Any]) -> Guessing:
        try:
            return Guessing(int(data["secret"]), RandomStream.from_json(data["stream"]), int(data["turns"]))
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"expected the state of a guessing episode, found {data!r:.100}") from error


def _end(reason: str, **more: Any) -> FrozenDict:
    return FrozenDict({"action": "guess", "stop_reason": reason, **more})


class GuessEnv(TurnEnv[Guessing]):
    """The Gymnasium environment: the core, its tasks, and examples for random play."""

    def __init__(self, **options: Any) -> None:
        super().__init__(GuessCore(**options), [10, 20, 50], action_examples=[str(n) for n in range(1, 51)])


def main() -> None:
    gymnasium.register("examples/Guess-v0", entry_point=GuessEnv)
    env = gymnasium.make("examples/Guess-v0")
    print(env.reset(seed=1)[0])
    for guess in ("10", "5", "not a number"):
        print(guess, "->", env.step(guess)[0])
    print("laws that hold:", ", ".join(check_fork(env)))


if __name__ == "__main__":
    main()
