"""A vector environment beside a plain loop over single environments: turns a second, searches a step."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run

from turntree.envs import Question, SearchQAEnv, TurnVectorEnv
from turntree.envs.worlds import generate_world
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend

ENVS = 32
TURNS = 8
ROUND_TRIP_S = 0.002


class Distant:
    """A backend behind a network: every request takes a round trip, however many queries it carries."""

    def __init__(self, backend: BM25Backend) -> None:
        self.backend = backend
        self.fingerprint = f"distant-{backend.fingerprint}"
        self.requests = 0

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.requests += 1
        time.sleep(ROUND_TRIP_S)
        return self.backend.search(queries, k=k)


class Free:
    """A search that costs nothing: what is left is the environment itself."""

    fingerprint = "free"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[] for _ in queries]


def measure(args: argparse.Namespace) -> list[Figure]:
    return vector_figures(quick=args.quick)


def vector_figures(*, quick: bool) -> list[Figure]:
    """The figures of this script, for scripts that measure more."""
    world = generate_world("quickstart", seed=0)
    index = BM25Backend.from_passages(world.passages)
    rounds = 3 if quick else 10
    figures = []
    # Retrieval over a network is where a batch pays: 32 round trips become one. In-process BM25 has little to share, so
    # there, and without any search, batching must at least cost nothing worth speaking of.
    for name, search, target in (
        (f"search with a {ROUND_TRIP_S * 1e3:g} ms round trip", Distant(index), 5.0),
        ("BM25 in the process", index, 0.9),
        ("no retrieval", Free(), 0.8),
    ):
        figures += _compare(name, search, world.questions, rounds=rounds, target=target)
    distant = Distant(index)
    _play_vector(_vector(distant, world.questions))
    return [*figures, Figure(f"requests a step of {ENVS} environments", distant.requests / TURNS, "", "lower", 1.0)]


def _compare(name: str, search: Any, questions: Sequence[Question], *, rounds: int, target: float) -> list[Figure]:
    loop = [_single(search, questions) for _ in range(ENVS)]
    vector = _vector(search, questions)
    # Interleaved, and the ratio of neighbours: a slow moment of the machine hits both.
    seconds = [(_seconds(lambda: _play_loop(loop)), _seconds(lambda: _play_vector(vector))) for _ in range(rounds)]
    return [
        Figure(f"loop, {name}", ENVS * TURNS / min(plain for plain, _ in seconds), "turns/s", "higher"),
        Figure(f"vector, {name}", ENVS * TURNS / min(batched for _, batched in seconds), "turns/s", "higher"),
        Figure(f"vector against loop, {name}", statistics.median(a / b for a, b in seconds), "x", "higher", target),
    ]


def _single(search: Any, questions: Sequence[Question]) -> SearchQAEnv:
    return SearchQAEnv(questions, search=search, max_turns=TURNS + 2)


def _vector(search: Any, questions: Sequence[Question]) -> TurnVectorEnv[Any]:
    return TurnVectorEnv(_single(search, questions), ENVS)


def _turn(env: int, turn: int) -> str:
    return f"<think>A thought of ordinary length.</think><search>where does person {env} of town {turn} live</search>"


def _play_loop(envs: Sequence[SearchQAEnv]) -> None:
    for i, env in enumerate(envs):
        env.reset(seed=i)
    for turn in range(TURNS):
        for i, env in enumerate(envs):
            env.step(_turn(i, turn))


def _play_vector(envs: TurnVectorEnv[Any]) -> None:
    envs.reset(seed=0)
    for turn in range(TURNS):
        envs.step([_turn(i, turn) for i in range(ENVS)])


def _seconds(play: Callable[[], None]) -> float:
    start = time.perf_counter()
    play()
    return time.perf_counter() - start


if __name__ == "__main__":
    run(measure, description=f"{ENVS} environments in step, {TURNS} turns each: one batch of searches against a loop")
