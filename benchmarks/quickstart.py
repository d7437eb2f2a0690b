"""The quickstart with its default knobs: exact match before and after, beside what else the same budget buys.

For every seed: the cold start's teacher, the quickstart itself, supervised training from the same cold start for the
wall time that RL took, and chain GRPO from the same cold start for the tokens that RL generated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run

from turntree.trainers.coldstart import cold_start
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.quickstart import Stages, quickstart
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.scoring import score

QUICK = ("sft.steps=150", "trainer.steps=6", "trainer.eval_every=0")
SHARED = ("worlds", "initial-model", "cold-start", "evaluation-before")
REPEATED = ("em_before", "em_after", "f1_before", "f1_after", "generated_tokens", "tool_calls", "trajectories")
ENDLESS = 1_000_000


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5, 6, 7], help="seeds to run")
    parser.add_argument("--algorithm", default="tree_grpo", help="algorithm of the quickstart")
    parser.add_argument("--keep", type=Path, default=None, help="folder that keeps the runs (default: a temporary one)")


def measure(args: argparse.Namespace) -> list[Figure]:
    seeds = args.seeds[:1] if args.quick else args.seeds
    with tempfile.TemporaryDirectory(prefix="turntree-benchmark-") as tmp:
        root = args.keep or Path(tmp)
        rows = [one_seed(root, seed, args) for seed in seeds]
        changed = 0 if args.quick else differences(root, seeds[0], args, rows[0])
    figures = [figure for seed, row in zip(seeds, rows) for figure in seed_figures(seed, row, args.quick)]
    gains = [row["em_after"] - row["em_before"] for row in rows]
    figures.append(Figure("smallest gain in EM", min(gains), "EM", "higher", None if args.quick else 0.20))
    if not args.quick:
        figures.append(Figure("numbers that differ in a second run of the first seed", changed, "numbers", "lower", 0))
    return figures


def one_seed(root: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The quickstart and its companions for one seed."""
    config = configured(root / f"seed-{seed}", seed, args)
    summary = quickstart(config)
    stages = Stages(Path(config.out))
    teacher = json.loads((stages.cold_start / "summary.json").read_text(encoding="utf-8"))["teacher_em"]
    supervised = supervised_for(summary["seconds_rl"], config, stages)
    chains = chain_grpo(summary["generated_tokens"], root / f"seed-{seed}-grpo", seed, stages, args)
    return {**summary, "teacher_em": teacher, "em_supervised": supervised, "em_grpo": chains["em_after"]}


def configured(out: Path, seed: int, args: argparse.Namespace, *more: str) -> RunConfig:
    quick = QUICK if args.quick else ()
    return compose(
        ["experiment=quickstart", f"algorithm={args.algorithm}", f"seed={seed}", f"out={out}", *quick, *more]
    )


def supervised_for(seconds: float, config: RunConfig, stages: Stages) -> float:
    """EM after training the cold start's model on the teacher for ``seconds`` more."""
    out = stages.root / "supervised"
    more = replace(
        stages.configure(config, stages.cold_start / "model"),
        out=str(out),
        sft=replace(config.sft, steps=ENDLESS, max_seconds=seconds),
    )
    cold_start(more)
    return float(score(stages.configure(config, out / "model"), out / "evaluation")["em"])


def chain_grpo(tokens: int, out: Path, seed: int, stages: Stages, args: argparse.Namespace) -> dict[str, Any]:
    """The quickstart with chain GRPO from the same cold start, stopped at the same number of generated tokens."""
    config = configured(
        out, seed, args, f"trainer.steps={ENDLESS}", f"trainer.max_generated_tokens={tokens}", "resume=true"
    )
    config = replace(config, algorithm=replace(compose(["algorithm=grpo"]).algorithm, kl_coef=0.0))
    RunFolder.create(out, config)
    for name in SHARED:
        shutil.copytree(stages.root / name, out / name)
    return quickstart(config)


def differences(root: Path, seed: int, args: argparse.Namespace, first: dict[str, Any]) -> int:
    """How many numbers of the summary change when the same seed runs again."""
    again = quickstart(configured(root / f"seed-{seed}-again", seed, args))
    return sum(first[key] != again[key] for key in REPEATED)


def seed_figures(seed: int, row: dict[str, Any], quick: bool) -> Sequence[Figure]:
    def em(name: str, key: str) -> Figure:
        return Figure(f"seed {seed}: {name}", row[key], "EM", "higher")

    return [
        em("teacher, on its training questions", "teacher_em"),
        em("cold start", "em_before"),
        em("quickstart", "em_after"),
        em("supervised, same wall time", "em_supervised"),
        em("chain GRPO, same tokens", "em_grpo"),
        Figure(f"seed {seed}: generated tokens", row["generated_tokens"], "tokens", "lower"),
        Figure(f"seed {seed}: total time", row["seconds_total"], "s", "lower", None if quick else 300),
    ]


if __name__ == "__main__":
    run(measure, description="quickstart", options=options)
