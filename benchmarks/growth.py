"""Growing trees without a barrier: wall time beside lock step over the batch, and how long the engine is idle.

The engine is a script that takes the time of a batch curve (a decoding step of n rows: a + b * n), the retriever one
that takes 50 to 500 ms a query. All arms grow the same trees, which is checked by their hash; only waiting differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from _barrier import grow_with_barrier
from _common import Figure, run
from _slow_parts import BatchCurve, SlowEngine, SlowSearch

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.search_qa import Limits as TaskLimits
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.trainers.episode import Setting
from turntree.trainers.expansion import Expansion, random_nodes
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.tree import Group, Tree

TREES, TREES_OF_A_PROMPT = 32, 2
TURN, TURNS = (40, 120), (2, 4)
LATENCY_S = (0.05, 0.5)
STEP_S, ROW_S = 0.005, 0.0001
SLOTS = 256
ARMS = ("barrier", "fixed", "batches", "joining", "any")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trees", type=int, default=TREES, help="trees, two of each prompt")
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm, alternated")
    parser.add_argument("--turn", type=int, nargs=2, default=TURN, help="least and most tokens of a turn")
    parser.add_argument("--turns", type=int, nargs=2, default=TURNS, help="least and most turns of a trajectory")
    parser.add_argument("--step", type=float, default=STEP_S, help="a of the batch curve, seconds")
    parser.add_argument("--row", type=float, default=ROW_S, help="b of the batch curve, seconds a row")


def eager(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
    """Random nodes, asked for as soon as any trajectory of the tree ends."""
    return random_nodes(tree, k, rng)


eager.needs = "any"  # type: ignore[attr-defined]


def measure(args: argparse.Namespace) -> list[Figure]:
    trees, runs, pace = (8, 1, 0.2) if args.quick else (args.trees, args.runs, 1.0)
    work = Work(
        trees=trees,
        turn=tuple(args.turn),
        turns=tuple(args.turns),
        curve=BatchCurve(args.step * pace, args.row * pace),
        latency=(LATENCY_S[0] * pace, LATENCY_S[1] * pace),
    )
    rows = [{name: grow_once(name, work, seed) for name in ARMS} for seed in range(runs)]
    different = sum(len({row[name]["hash"] for name in ARMS[:4]}) - 1 for row in rows)
    return figures(rows, different, quick=args.quick)


def figures(rows: Sequence[dict[str, Any]], different: int, *, quick: bool) -> list[Figure]:
    def median(name: str, key: str) -> float:
        return float(statistics.median(row[name][key] for row in rows))

    def faster(name: str) -> float:
        return float(statistics.median(row["barrier"]["seconds"] / row[name]["seconds"] for row in rows))

    titles = {
        "barrier": "lock step over the batch",
        "fixed": "schedule=fixed, engine of whole batches",
        "batches": "schedule=overlap, engine of whole batches",
        "joining": "schedule=overlap, rows join one by one",
        "any": "the same, a rule that needs no finished round",
    }
    found = []
    for name, title in titles.items():
        found.append(Figure(f"{title}: time", median(name, "seconds"), "s", "lower"))
        idle = 0.10 if name == "joining" and not quick else None
        found.append(Figure(f"{title}: engine idle", median(name, "idle"), "of the time", "lower", idle))
        found.append(Figure(f"{title}: rows a step", median(name, "width"), "rows", "higher"))
    for name in ARMS[1:]:
        target = 1.8 if name == "joining" and not quick else None
        found.append(Figure(f"{titles[name]}: against lock step", faster(name), "x", "higher", target))
    return [*found, Figure("arms whose trees differ from lock step's", different, "arms", "lower", 0)]


@dataclass(frozen=True, slots=True)
class Work:
    """What is grown: trees, tokens of a turn and turns of a trajectory (least and most), and the speed of all parts."""

    trees: int
    turn: tuple[int, int]
    turns: tuple[int, int]
    curve: BatchCurve
    latency: tuple[float, float]


def grow_once(name: str, work: Work, seed: int) -> dict[str, float | str]:
    """One rollout: seconds, the engine's share of idle time, mean rows a step, and the hash of the trees."""
    engine = SlowEngine(work.curve, work.turn, work.turns, in_flight=SLOTS if name in ("joining", "any") else 0)
    core = SearchQACore(SlowSearch(work.latency, in_flight=SLOTS), limits=TaskLimits(max_turns=work.turns[1]))
    limits = Limits(max_turn_tokens=4 * work.turn[1], max_context_tokens=100_000)
    sampling = SamplingParams(max_tokens=1, stop=core.stop)
    plan = GrowthPlan(trees=TREES_OF_A_PROMPT, rounds=2, expansions=2, rule=eager if name == "any" else random_nodes)
    prompts = [
        Prompt(f"p{i}", Question(f"q{i}", f"Who is it, number {i}?", ("nobody",))) for i in range(work.trees // 2)
    ]
    setting = Setting(core, Dialogue(ByteTokenizer()), sampling, limits, seed)
    start = time.monotonic()
    if name == "barrier":
        groups = grow_with_barrier(prompts, engine=engine, plan=plan, setting=setting)
    else:
        limits = dataclasses.replace(limits, schedule="fixed" if name == "fixed" else "overlap")
        groups = grow(
            prompts,
            core=core,
            engine=engine,
            dialogue=setting.dialogue,
            plan=plan,
            sampling=sampling,
            limits=limits,
            run_seed=seed,
        ).groups
    seconds = time.monotonic() - start
    clock = engine.clock
    return {
        "seconds": seconds,
        "idle": max(0.0, 1 - clock.busy_s / seconds),
        "width": clock.row_steps / clock.steps,
        "hash": hash_of(groups),
    }


def hash_of(groups: Sequence[Group]) -> str:
    """Of all that decides about a tree: every node's place, tokens, log-probs, observation, status and reward."""
    digest = hashlib.sha256()
    for group in groups:
        digest.update(json.dumps([_rows(tree) for tree in group.trees]).encode())
    return digest.hexdigest()


def _rows(tree: Tree) -> list[list[Any]]:
    return [
        [tree.prompt_uid, tree.index, n.path, n.turn_ids, n.logprobs, n.observation_ids, n.status, n.reward]
        for n in tree.root.walk()
    ]


if __name__ == "__main__":
    run(measure, description="growth without a barrier", options=options)
