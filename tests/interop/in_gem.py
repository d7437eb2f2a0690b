# mypy: ignore-errors
# pyright: reportMissingImports=false
# What this imports is installed where it runs, not here.
"""Run in an environment that has gem-llm: real games keep the laws of forking and grow into a tree."""

from __future__ import annotations

import random
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gem  # noqa: F401 - what it imports draws from the global generator, once
from growing import check_tree, grow_tree

from turntree.envs import TurnEnv
from turntree.envs.check import check_fork
from turntree.envs.interop.gem import GemTask

GAMES = {
    "game:GuessTheNumber-v0-easy": ["3", "7", "5", "2", "9"],
    "game:Game2048-v0-easy": ["up", "left", "down", "right"],
    "game:Mastermind-v0-easy": ["1 2", "3 4", "5 6"],
    "game:Minesweeper-v0-easy": ["reveal 1 1", "reveal 3 3", "flag 0 4"],
}


def main() -> None:
    before = random.getstate()
    for game, moves in GAMES.items():
        turns = [rf"\boxed{{{move}}}" for move in moves]
        env = TurnEnv(GemTask(game), [{"seed": 4}, {}], action_examples=turns)
        laws = check_fork(env, actions=turns)
        assert {"restore", "isolation", "json", "process", "reseed"} <= set(laws), laws
        print(game, len(laws), "laws")
    assert random.getstate() == before, "the global generator is the user's"
    env: TurnEnv[Any] = TurnEnv(GemTask("game:GuessTheNumber-v0-easy"), [{"seed": 4}])
    turns = [rf"I guess \boxed{{{move}}}." for move in GAMES["game:GuessTheNumber-v0-easy"]]
    print(check_tree(grow_tree(env, {"seed": 4}, turns, stop=["."]), env))
    print("gem-llm", version("gem-llm"), "ok")


if __name__ == "__main__":
    main()
