"""Nothing grows: memory, open files and threads stay flat over thousands of episodes, trees and requests."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.search_qa import SearchQACore, SearchQAEnv
from turntree.envs.task import Question
from turntree.search_backend.passage import Passage
from turntree.trainers.expansion import random_nodes
from turntree.trainers.plan import GrowthPlan, Limits, Prompt
from turntree.trainers.rollout import grow
from turntree.trainers.store import TreeStore

pytestmark = pytest.mark.slow

TOKENS = ByteTokenizer()
MOST_MB = 8.0


class Fresh:
    """Another passage at each search, so that whatever is kept by text is kept each time."""

    fingerprint = "fresh"

    def __init__(self) -> None:
        self.count = 0

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.count += len(queries)
        return [
            [Passage(f"{self.count}-{i}", f"T {self.count}", f"{q} {self.count} " * 40)] for i, q in enumerate(queries)
        ]


def used() -> tuple[float, int, int]:
    """Resident memory in MB, open files, threads."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")), threading.active_count()


def stays_flat(work: Callable[[int], None], *, rounds: int) -> None:
    """``work(i)`` for each round. The first third warms caches up; the growth by the slope of the rest is bounded."""
    seen = []
    for i in range(rounds):
        work(i)
        seen.append(used())
    memory, files, threads = (np.array(column) for column in zip(*seen[rounds // 3 :], strict=True))
    grown = float(np.polyfit(range(len(memory)), memory, 1)[0]) * len(memory)
    assert grown < MOST_MB, f"{grown:.1f} MB more from round {rounds // 3} to {rounds}: {memory.round(1).tolist()}"
    assert len(set(files.tolist())) == 1, files.tolist()
    assert len(set(threads.tolist())) == 1, threads.tolist()


def test_ten_thousand_episodes() -> None:
    questions = [Question(str(i), f"Who is {i}?", (str(i),)) for i in range(100)]
    env = SearchQAEnv(questions, search=Fresh(), max_turns=4, render_mode="ansi")

    def episodes(round_: int) -> None:
        for i in range(500):
            env.reset(seed=500 * round_ + i)
            env.step(f"<think>t</think><search>who is {round_} {i}</search>")
            snapshot = env.snapshot()
            env.step("no action")
            env.restore(env.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(snapshot)))), seed=i)
            env.fork().step("<answer>a fork</answer>")
            env.render()
            assert env.step(f"<think>t</think><answer>{round_} {i} {'x' * 500}</answer>")[2]

    stays_flat(episodes, rounds=20)


@pytest.mark.parametrize("schedule", ["fixed", "overlap"])
def test_a_thousand_trees(schedule: Any, tmp_path: Path) -> None:
    search: Any = Fresh()
    search.in_flight = 2
    turns = ("<search>{}</search>", "<search>{} again</search>", "<answer>{}</answer>", "hm")
    store = TreeStore(tmp_path, max_bytes=3_000_000)

    def trees(round_: int) -> None:
        core = SearchQACore(search)
        engine: Any = ScriptedEngine(
            lambda context, seed: turns[seed % 4].format(seed), TOKENS
        )  # it keeps all requests
        engine.in_flight = 4
        rollout = grow(
            [Prompt(f"{round_}/{i}", Question(str(i), "Who?", ("x",))) for i in range(25)],
            core=core,
            engine=engine,
            dialogue=Dialogue(TOKENS),
            plan=GrowthPlan(trees=2, rounds=2, expansions=2, rule=random_nodes),
            sampling=SamplingParams(64, 1.0, stop=tuple(core.stop)),
            limits=Limits(max_turn_tokens=64, max_context_tokens=4000, schedule=schedule, max_concurrent_trees=8),
            run_seed=round_,
        )
        store.write(round_, rollout.groups)
        list(store.read(round_))

    stays_flat(trees, rounds=20)
