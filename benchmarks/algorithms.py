"""Which algorithm needs how much? Tuned arms beside tuned chain GRPO, on a simulator and with a language model.

``--level simulator``: TurnWorld-S (see ``_turnworld.py``), worlds A, B and F. Group size, clip and learning rate of
every arm are chosen on seeds of their own by the mean exact match over the budget, then frozen and run once on fresh
seeds.

A finished run is stored in ``--keep`` as it ends, and never run twice: a stopped benchmark goes on where it was, and
more seeds or arms add only what is missing. Tables are written there too. Budgets are those at which the mean curve of
an arm gets to the final exact match of chain GRPO, in sampled tokens and in tool calls, each relative to chain GRPO's
own; intervals are 95 % bootstraps over seeds, paired.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _algorithms_analysis import ArmResult, Compared, compare, figures, markdown, series
from _algorithms_simulator import ABLATIONS, ARMS, BASELINE, FURTHER, Protocol, run_world
from _algorithms_store import Store
from _common import Figure, run
from _turnworld import WORLDS

from turntree.trainers.report.plots import plot_curve

SIMULATED = (*ARMS, *FURTHER, *ABLATIONS)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", nargs="+", choices=["simulator"], default=["simulator"])
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS), help="of the simulator")
    parser.add_argument("--arms", nargs="+", choices=SIMULATED, default=None, help="of the simulator (all)")
    parser.add_argument("--seeds", type=int, default=20, help="simulator: fresh seeds of an arm")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="simulator: seeds to tune on (0: no tuning)")
    parser.add_argument("--budget", type=float, default=1.0, help="simulator: share of the worlds' budgets")
    parser.add_argument("--keep", type=Path, default=None, help="folder that keeps the runs, and goes on with them")


def simulator(args: argparse.Namespace, store: Store) -> list[Figure]:
    """Every world's table, as Markdown, as figures and as a picture."""
    protocol = Protocol(args.seeds, args.tuning_seeds, args.budget)
    wanted = [name for name in SIMULATED if not args.arms or name in args.arms or name == BASELINE]
    found: list[Figure] = []
    for world in args.worlds:
        budget = WORLDS[world].tokens * args.budget
        results = list(run_world(store, world, wanted, protocol))
        found += tell(store, f"simulator-{world}", results, budget)
    return found


def tell(store: Store, name: str, results: Sequence[ArmResult], budget: float) -> list[Figure]:
    """Write and print the table of one world, and draw its curves."""
    rows: list[Compared] = compare(results, baseline=BASELINE, budget=budget)
    text = markdown(rows)
    print(f"\n## {name}, {budget:,.0f} tokens a run\n\n{text}", flush=True)
    store.folder.mkdir(parents=True, exist_ok=True)
    (store.folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    drawn = [r for r in results if r.name in ARMS]
    plot_curve(store.folder / f"{name}.svg", series(drawn, budget=budget), x_label="sampled tokens")
    return list(figures(name, rows))


def measure(args: argparse.Namespace) -> list[Figure]:
    # Trees are released as they were used: the collector need not look at what was imported.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    torch.set_num_threads(1)
    if args.quick:
        args.worlds, args.seeds, args.tuning_seeds, args.budget = args.worlds[:1], 4, 0, 0.5
    with tempfile.TemporaryDirectory(prefix="turntree-benchmark-") as tmp:
        store = Store(args.keep or Path(tmp))
        return simulator(args, store)


if __name__ == "__main__":
    run(measure, description="algorithms", options=options)
