"""What a snapshot, a restore and a fork cost by length of the episode, beside copy.deepcopy of the same environment."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import gymnasium
from _common import Figure, run

from turntree.envs import Forkable, Limits, Question, SearchQACore, SearchQAEnv, SearchQAState, TurnEnv
from turntree.envs.spaces import UnicodeText
from turntree.search_backend import Passage

TURNS = (1, 10, 100, 1000)
TARGETS = {100: 50.0}
FORKS = 10_000


class OnePassage:
    """A search whose every result is one passage of ordinary length."""

    fingerprint = "one-passage"
    passage = Passage("p", "A title", "A sentence of a passage. " * 25)

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[self.passage] for _ in queries]


class Bare(gymnasium.Env[str, str]):
    """The least that an environment of texts can do in a step."""

    observation_space = UnicodeText()
    action_space = UnicodeText()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.said: list[str] = []
        return "Where is it?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.said.append(action)
        return "Write a search or an answer.", 0.0, False, False, {"turns": len(self.said)}


def measure(args: argparse.Namespace) -> list[Figure]:
    return [
        *operations(args),
        *beside_deepcopy(args),
        *memory(args),
        *steps(args),
        *foreign(args),
    ]


# -- the cost of an operation, by length ---------------------------------------------------------------------


def operations(args: argparse.Namespace) -> list[Figure]:
    """Snapshot, restore and fork after 1 to 1,000 turns: the same."""
    rounds, calls = (30, 100) if args.quick else (150, 200)
    named = {(name, turns): act for turns in TURNS for name, act in _operations(_played(turns)).items()}
    best = _best(named, rounds, calls)
    return [figure for name in ("snapshot", "restore", "fork") for figure in _figures(name, best)]


def _operations(env: TurnEnv[SearchQAState]) -> dict[str, Callable[[], object]]:
    snapshot = env.snapshot()
    return {"snapshot": env.snapshot, "restore": lambda: env.restore(snapshot), "fork": env.fork}


def _figures(name: str, best: dict[tuple[str, int], float]) -> list[Figure]:
    times = [Figure(f"{name} at turn {turns}", best[name, turns] * 1e6, "\u00b5s", "lower") for turns in TURNS]
    ratio = max(best[name, turns] for turns in TURNS) / best[name, 1]
    return [*times, Figure(f"{name}, dearest length against turn 1", ratio, "x", "lower", 1.2)]


def _played(turns: int) -> TurnEnv[SearchQAState]:
    core = SearchQACore(OnePassage(), limits=Limits(max_turns=max(TURNS) + 2))
    env = TurnEnv(core, [Question("q", "Where is it?", ("here",))])
    _play(env, turns)
    return env


def _play(env: gymnasium.Env[str, str], turns: int) -> None:
    env.reset(seed=0)
    for turn in range(turns):
        env.step(f"<think>A thought of ordinary length.</think><search>query {turn}</search>")


def _best(named: dict[Any, Callable[[], object]], rounds: int, calls: int) -> dict[Any, float]:
    """The least seconds of each; interleaved, so that a slow moment of the machine hits all alike."""
    best: dict[Any, float] = {}
    for _ in range(rounds):
        for name, act in named.items():
            seconds = _seconds(act, calls)
            best[name] = min(seconds, best.get(name, seconds))
    return best


def _seconds(operation: Callable[[], object], calls: int) -> float:
    """Mean seconds of a call, without the garbage collector, as ``timeit`` measures."""
    gc.disable()
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    seconds = (time.perf_counter() - start) / calls
    gc.enable()
    return seconds


# -- beside copy.deepcopy ------------------------------------------------------------------------------------


def beside_deepcopy(args: argparse.Namespace) -> list[Figure]:
    """The registered environment, with its generated world and index, at 100 turns.

    And the least that a copy can cost: the episode's state alone, as plain lists and dicts, without the environment.
    """
    env: Any = SearchQAEnv(max_turns=max(TURNS) + 2)
    figures = []
    for turns in TURNS[:3] if args.quick else TURNS:
        _play(env, turns)
        state = env.core.encode_state(env.snapshot().state)
        fork = _best({"": env.fork}, 20, 50)[""]
        whole = _best({"": functools.partial(copy.deepcopy, env)}, 3, 1)[""]
        bare = _best({"": functools.partial(copy.deepcopy, state)}, 10, 2)[""]
        figures += [
            Figure(f"deepcopy of the env at turn {turns}", whole * 1e6, "\u00b5s", "lower"),
            Figure(f"deepcopy, times a fork, at turn {turns}", whole / fork, "x", "higher", TARGETS.get(turns)),
            Figure(f"deepcopy of the bare state, times a fork, at turn {turns}", bare / fork, "x", "higher"),
        ]
    return figures


# -- memory --------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace) -> list[Figure]:
    """What a turn adds when a snapshot of every turn is kept, and what 10,000 dropped forks leave behind."""
    env = _played(1)
    turns = 200 if args.quick else 1000
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = []
    for turn in range(turns):
        env.step(f"<think>A thought of ordinary length.</think><search>query {turn}</search>")
        kept.append(env.snapshot())
    gc.collect()
    marginal = (tracemalloc.get_traced_memory()[0] - before) / len(kept)
    left = _left_by_forks(env)
    tracemalloc.stop()
    resident = _resident()
    for _ in range(FORKS):
        env.fork()
    return [
        Figure("memory of a turn and its snapshot", marginal, "B", "lower", 2048),
        Figure(f"left by {FORKS} forks", left / 1024, "KiB", "lower", 64),
        Figure(f"resident memory after {FORKS} forks more", (_resident() - resident) / 1024, "KiB", "lower", 1024),
    ]


def _left_by_forks(env: TurnEnv[SearchQAState]) -> int:
    """Bytes that are still there after the forks; the first thousand fill the caches of Python and numpy."""
    for count in (1000, FORKS):
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            env.fork()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) if sys.platform == "linux" else 0
    return pages * 4096


# -- steps ---------------------------------------------------------------------------------------------------


def steps(args: argparse.Namespace) -> list[Figure]:
    """A step without a search, beside a bare Gymnasium environment, and through Forkable."""
    rounds, calls = (10, 200) if args.quick else (30, 500)
    core = SearchQACore(OnePassage(), limits=Limits(max_turns=10**9))
    env = TurnEnv(core, [Question("q", "Where is it?", ("here",))])
    made: dict[Any, Any] = {"bare env": Bare(), "turn env": env, "bare env in Forkable": Forkable(Bare())}
    for each in made.values():
        each.reset(seed=0)
    best = _best(
        {name: functools.partial(e.step, "A turn without an action.") for name, e in made.items()}, rounds, calls
    )
    return [Figure(f"step of a {name}", seconds * 1e6, "\u00b5s", "lower") for name, seconds in best.items()]


# -- other environments --------------------------------------------------------------------------------------


def foreign(args: argparse.Namespace) -> list[Figure]:
    """CartPole, with its wrappers, in both ways of Forkable: replay costs steps, a copy costs the same at any turn."""
    figures = []
    for how in ("replay", "deepcopy"):
        env = Forkable(gymnasium.make("CartPole-v1"), how)
        for turns in (1, 20):
            env.reset(seed=5)
            for turn in range(turns):
                env.step(turn % 2)
            best = _best({"snapshot": env.snapshot, "fork": env.fork}, 10, 20)
            for name, seconds in best.items():
                figures.append(Figure(f"CartPole, {how}: {name} at turn {turns}", seconds * 1e6, "\u00b5s", "lower"))
    return figures


if __name__ == "__main__":
    run(measure, description="Cost of snapshot, restore and fork by length of the episode")
