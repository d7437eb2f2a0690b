"""What a snapshot, a restore and a fork cost after 1, 10 and 100 turns of an episode: the same."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run

from turntree.envs import Limits, Question, SearchQACore, SearchQAState, TurnEnv
from turntree.search_backend import Passage

TURNS = (1, 10, 100)


class OnePassage:
    """A search whose every result is one passage of ordinary length."""

    fingerprint = "one-passage"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[Passage("p", "A title", "A sentence of a passage. " * 25)] for _ in queries]


def measure(args: argparse.Namespace) -> list[Figure]:
    rounds, calls = (20, 200) if args.quick else (100, 500)
    operations = {turns: _operations(_played(turns)) for turns in TURNS}
    best: dict[tuple[str, int], float] = {}
    # Interleaved, so that a slow moment of the machine hits all lengths alike.
    for _ in range(rounds):
        for turns, named in operations.items():
            for name, operation in named.items():
                seconds = _seconds(operation, calls)
                best[name, turns] = min(seconds, best.get((name, turns), seconds))
    return [figure for name in operations[1] for figure in _figures(name, best)]


def _played(turns: int) -> TurnEnv[SearchQAState]:
    core = SearchQACore(OnePassage(), limits=Limits(max_turns=max(TURNS) + 2))
    env = TurnEnv(core, [Question("q", "Where is it?", ("here",))])
    env.reset(seed=0)
    for turn in range(turns):
        env.step(f"<think>A thought of ordinary length.</think><search>query {turn}</search>")
    return env


def _operations(env: TurnEnv[SearchQAState]) -> dict[str, Callable[[], object]]:
    snapshot = env.snapshot()
    return {"snapshot": env.snapshot, "restore": lambda: env.restore(snapshot), "fork": env.fork}


def _seconds(operation: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - start) / calls


def _figures(name: str, best: dict[tuple[str, int], float]) -> list[Figure]:
    times = [Figure(f"{name} at turn {turns}", best[name, turns] * 1e6, "\u00b5s", "lower") for turns in TURNS]
    ratios = [
        Figure(f"{name}, turn {turns} against turn 1", best[name, turns] / best[name, 1], "x", "lower", 1.5)
        for turns in TURNS[1:]
    ]
    return times + ratios


if __name__ == "__main__":
    run(measure, description="Cost of snapshot, restore and fork by length of the episode")
