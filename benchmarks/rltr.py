"""RLTR on generated worlds: tool-use completeness before and after RL by completeness, beside what it is compared with.

For every seed, on a world of search and code questions: DIRECT, end-to-end SFT, end-to-end RL by exact match, the
planner's cold start and RLTR after it; RLTR with further algorithms from the same cold start; and cold start and RLTR
on a world of search questions only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run

from turntree.envs.sandbox import probe
from turntree.trainers.compose import compose
from turntree.trainers.report.arms import TITLES, Comparison
from turntree.trainers.rltr import compare_arms
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.stats import Interval

CODE, SEARCH = "rltr_code", "rltr"
WORLDS = {CODE: "search and code", SEARCH: "search"}
ALGORITHM = "tree_grpo"
FURTHER = ("grpo", "reinforce_pp")
LEAVES = 6
"""Trajectories a prompt, as many as Tree-GRPO's."""
QUICK = ("sft.steps=60", "trainer.steps=2", "trainer.eval_every=0", "rltr.test_questions=60", "rltr.entities=600",
         "rltr.train_questions=800")  # fmt: skip
SHARED = ("worlds", "initial-model", "planner_sft")
"""Stages that an algorithm does not change."""
GAIN = 0.20


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[6, 7, 8], help="seeds to run")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), help="presets to run")
    parser.add_argument("--algorithms", nargs="*", default=FURTHER, help=f"of RLTR, besides {ALGORITHM}")
    parser.add_argument("--keep", type=Path, default=None, help="folder that keeps the runs, and goes on with them")
    parser.add_argument("--set", nargs="*", default=(), metavar="OPTION=VALUE", help="options of every run")


@dataclass(frozen=True, slots=True)
class Bench:
    """What is run, and where."""

    root: Path
    seeds: Sequence[int]
    overrides: Sequence[str]

    def compare(self, name: str, arms: Sequence[str], *more: str) -> Comparison:
        """``arms`` of every seed in the folder ``name``, as one table."""
        found: list[Comparison] = []
        for seed in self.seeds:
            out = self.root / f"{name}-{seed}"
            given = [*more, f"rltr.arms=[{','.join(arms)}]", f"seed={seed}", f"out={out}", *self.overrides]
            found.append(compare_arms(compose([*given, f"resume={str(out.exists()).lower()}"])))
            print(f"{name}, seed {seed}: {_gain_line(found[-1])}", file=sys.stderr, flush=True)
        whole = Comparison(tuple(arm for one in found for arm in one.arms), found[0].budget)
        whole.save(self.root / f"{name}-all")
        return whole

    def share(self, source: str, target: str, *more: str) -> None:
        """Copy the stages that ``target`` has in common with ``source``."""
        for seed in self.seeds:
            out = self.root / f"{target}-{seed}"
            if out.exists():
                continue
            RunFolder.create(out, compose([*more, f"seed={seed}", f"out={out}", *self.overrides]))
            for stage in SHARED:
                shutil.copytree(self.root / f"{source}-{seed}" / f"seed-{seed}" / stage, out / f"seed-{seed}" / stage)


def measure(args: argparse.Namespace) -> list[Figure]:
    if CODE in args.worlds and probe().missing:
        raise SystemExit(f"code cannot be isolated here: {probe().missing}; run --worlds {SEARCH}")
    with tempfile.TemporaryDirectory(prefix="turntree-benchmark-") as tmp:
        seeds = args.seeds[:1] if args.quick else args.seeds
        bench = Bench(args.keep or Path(tmp), seeds, [*(QUICK if args.quick else ()), *args.set])
        return [figure for world in args.worlds for figure in of_world(bench, world, args)]


def of_world(bench: Bench, world: str, args: argparse.Namespace) -> list[Figure]:
    """The table (of search alone: cold start and RLTR), and RLTR by other algorithms."""
    main = world == args.worlds[0]
    preset = (f"experiment={world}", f"algorithm={ALGORITHM}")
    arms = ("direct", "sft", "rl", "planner_sft", "rltr") if main else ("planner_sft", "rltr")
    table = bench.compare(world, arms, *preset)
    print(f"\n## {WORLDS[world]}, {ALGORITHM}\n\n{table.markdown()}", flush=True)
    target = None if args.quick else GAIN
    figures = [*gains(table, f"{WORLDS[world]}, {ALGORITHM}", target), *means(table, WORLDS[world])]
    for algorithm in args.algorithms if main else ():
        name, other = f"{world}-{algorithm}", (preset[0], f"algorithm={algorithm}", f"algorithm.chains={LEAVES}")
        bench.share(world, name, *other)
        found = bench.compare(name, ("planner_sft", "rltr"), *other)
        print(f"\n## {WORLDS[world]}, {algorithm}\n\n{found.markdown()}", flush=True)
        figures += gains(found, f"{WORLDS[world]}, {algorithm}", target)
    return figures


def gains(table: Comparison, name: str, target: float | None) -> list[Figure]:
    """Completeness of each seed before and after, and the smallest gain."""
    figures: list[Figure] = []
    before, after = (_by_seed(table, arm) for arm in ("planner_sft", "rltr"))
    for seed in table.seeds:
        figures.append(Figure(f"{name}, seed {seed}: cold start", before[seed], "completeness", "higher"))
        figures.append(Figure(f"{name}, seed {seed}: RLTR", after[seed], "completeness", "higher"))
    smallest = min(after[seed] - before[seed] for seed in table.seeds)
    return [*figures, Figure(f"{name}: smallest gain over seeds", smallest, "completeness", "higher", target)]


def means(table: Comparison, name: str) -> list[Figure]:
    """EM and completeness of every arm, with the ends of their 95 % intervals."""
    figures = []
    for arm in table.names:
        for measure_name in ("em", "completeness"):
            found = table.interval(arm, measure_name)
            figures += [
                _figure(f"{name}, {TITLES[arm]}: {measure_name}", found, end) for end in ("mean", "low", "high")
            ]
    return figures


def _figure(name: str, found: Interval, end: str) -> Figure:
    label = "" if end == "mean" else f", 95 % {end}"
    return Figure(f"{name}{label}", getattr(found, end), "share", "higher")


def _by_seed(table: Comparison, arm: str) -> dict[int, float]:
    values = {one.seed: [v for v in one.values["completeness"] if v is not None] for one in table.of(arm)}
    return {seed: sum(found) / len(found) for seed, found in values.items()}


def _gain_line(table: Comparison) -> str:
    shown = {arm: table.interval(arm, "completeness").mean for arm in table.names}
    return "; ".join(f"{arm} {value:.3f}" for arm, value in shown.items())


if __name__ == "__main__":
    run(measure, description="rltr", options=options)
