"""Which algorithm needs how much? Tuned arms beside tuned chain GRPO, on a simulator and with a language model.

``--level simulator``: TurnWorld-S (see ``_turnworld.py``), worlds A, B and F. Group size, clip and learning rate of
every arm are chosen on seeds of their own by the mean exact match over the budget, then frozen and run once on fresh
seeds.

``--level model``: a tiny decoder on worlds of the profile ``uncertain``, from the cold start of the preset of that
name. Group size and learning rate of every arm are chosen on development seeds and frozen likewise; every fresh seed
has a world and, without ``--start-seed``, a cold start of its own.

A finished run is stored in ``--keep`` as it ends, and never run twice: a stopped benchmark goes on where it was, and
more seeds or arms add only what is missing. Tables are written there too. Budgets are those at which the mean curve of
an arm gets to the final exact match of chain GRPO, in sampled tokens and in tool calls, each relative to chain GRPO's
own; intervals are 95 % bootstraps over seeds, paired.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _algorithms_analysis import ArmResult, Compared, compare, figures, markdown, series, smoothed
from _algorithms_model import (
    MODEL_ABLATIONS,
    MODEL_ARMS,
    MODEL_FURTHER,
    ModelProtocol,
    Runs,
    Workshop,
    run_models,
    shape_label,
)
from _algorithms_simulator import ABLATIONS, ARMS, BASELINE, FURTHER, Protocol, run_world
from _algorithms_store import Store
from _arguments import check_json, different, positive, whole
from _common import Figure, machine, run
from _turnworld import WORLDS

from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.report.plots import plot_curve

SIMULATED = (*ARMS, *FURTHER, *ABLATIONS)
MODEL_USUAL = (*(arm.name for arm in MODEL_ARMS), *MODEL_ABLATIONS)
MODELLED = (*MODEL_USUAL, *(arm.name for arm in MODEL_FURTHER))
SHAPES = dict.fromkeys(shape_label(shape) for arm in (*MODEL_ARMS, *MODEL_FURTHER) for shape in arm.shapes)
SMOOTHING = 0.2
"""Width of the window, as a share of the budget, over which the noisy curves of language models are averaged."""
ENDS = ("em_sampled_before", "em_sampled", "em_greedy_before", "em_greedy")
QUICK = ("sft.steps=40", "sft.demonstrations=1000", "trainer.prompts_per_step=8")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", nargs="+", choices=["simulator", "model"], default=["simulator", "model"])
    parser.add_argument("--keep", type=Path, default=None, help="folder that keeps the runs, and goes on with them")
    cores = int(machine()["cores"] or 1)
    parser.add_argument("--workers", type=whole(1), default=cores, help="runs made at the same time, each by a process")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS), help="simulator: worlds")
    parser.add_argument("--arms", nargs="+", choices=SIMULATED, default=None, help="simulator: only these and grpo")
    parser.add_argument("--baseline", choices=SIMULATED, default=BASELINE,
                        help="simulator: the arm that tables compare with; run beside --arms")  # fmt: skip
    parser.add_argument("--seeds", type=whole(1), default=20, help="simulator: fresh seeds of an arm")
    parser.add_argument("--tuning-seeds", type=whole(0), default=2,
                        help="simulator: seeds to tune on (0: each arm's last shape, and the first rate)")  # fmt: skip
    parser.add_argument("--budget", type=positive, default=1.0, help="simulator: share of the worlds' budgets")
    known = ModelProtocol()
    parser.add_argument("--model-arms", nargs="+", choices=MODELLED, default=None,
                        help="model: only these and grpo (default: the six and the ablations)")  # fmt: skip
    parser.add_argument("--model-seeds", nargs="+", type=whole(0), default=known.seeds, help="model: fresh seeds")
    parser.add_argument("--model-tuning-seeds", nargs="*", type=whole(0), default=known.tuning_seeds,
                        help="model: development seeds (none: each arm's first group size and rate)")  # fmt: skip
    parser.add_argument("--model-updates", nargs="+", type=whole(1), default=known.updates,
                        help="model: updates of a rollout to choose from; the first chooses group sizes")  # fmt: skip
    parser.add_argument("--model-shapes", nargs="+", choices=list(SHAPES), default=known.shapes,
                        help="model: group sizes to choose from, of grpo too (default: each arm's own)")  # fmt: skip
    parser.add_argument("--model-rates", nargs="+", type=positive, default=known.rates,
                        help="model: learning rates to choose from (default: each arm's own)")  # fmt: skip
    parser.add_argument("--tokens", type=whole(1), default=known.tokens, help="model: sampled tokens of a run")
    parser.add_argument(
        "--start-seed", type=whole(0), default=None, help="model: world and cold start of this seed for all"
    )
    parser.add_argument("--set", nargs="*", default=(), metavar="OPTION=VALUE", help="model: options of every run")


def check(args: argparse.Namespace, store: Store) -> None:
    """Refuse what would fail later, or say something that is not so. Raises ``TurnTreeError``."""
    check_json(args.json)
    store.check()
    for option in ("worlds", "model_seeds", "model_tuning_seeds", "model_updates", "model_shapes", "model_rates"):
        different(f"--{option.replace('_', '-')}", getattr(args, option))
    if "simulator" in args.level:
        for world in args.worlds:
            if WORLDS[world].tokens * args.budget < 1:
                raise ConfigError(
                    f"--budget {args.budget:g} of world {world} is not one token; expected a share such as 0.5"
                )
    if "model" in args.level:
        both = sorted(set(args.model_seeds) & set(args.model_tuning_seeds))
        if both:
            raise ConfigError(
                f"--model-seeds {' '.join(map(str, both))}: also in --model-tuning-seeds; figures must come from seeds "
                "that nothing was chosen on: take others"
            )
        Workshop(store.folder / "model", protocol(args)).check(chosen_arms(args))


def simulator(args: argparse.Namespace, store: Store) -> list[Figure]:
    """Every world's table, as Markdown, as figures and as a picture."""
    protocol = Protocol(args.seeds, args.tuning_seeds, args.budget)
    wanted = [name for name in SIMULATED if not args.arms or name in {*args.arms, BASELINE, args.baseline}]
    found: list[Figure] = []
    for world in args.worlds:
        budget = WORLDS[world].tokens * args.budget
        results = list(run_world(store, world, wanted, protocol))
        beside = "" if args.baseline == BASELINE else f"-beside-{args.baseline}"
        found += tell(store, f"simulator-{world}{beside}", results, budget, args.baseline)
    return found


def protocol(args: argparse.Namespace) -> ModelProtocol:
    return ModelProtocol(
        seeds=tuple(args.model_seeds),
        tuning_seeds=tuple(args.model_tuning_seeds),
        updates=tuple(args.model_updates),
        shapes=tuple(args.model_shapes),
        rates=tuple(args.model_rates),
        tokens=args.tokens,
        start_seed=args.start_seed,
        options=tuple(args.set),
    )


def chosen_arms(args: argparse.Namespace) -> list[str]:
    return [name for name in MODELLED if name in (args.model_arms or MODEL_USUAL) or name == BASELINE]


def model(args: argparse.Namespace, store: Store) -> list[Figure]:
    """The table of the language model, and how its policies ended on test worlds."""
    workshop = Workshop(store.folder / "model", protocol(args))
    results = list(run_models(Runs(workshop, store), chosen_arms(args)))
    found = tell(store, "model", [smoothed(r, SMOOTHING * args.tokens) for r in results], args.tokens)
    lines = ["| arm | seeds | test EM, sampled, before | after | greedy, before | after |", "|---|---|---|---|---|---|"]
    for r in results:
        ends = {key: float(np.mean([t.extra[key] for t in r.traces.values()])) for key in ENDS}
        lines.append(f"| {r.name} | {len(r.traces)} | {' | '.join(f'{v:.3f}' for v in ends.values())} |")
        found += [Figure(f"model {r.name}: test {key.replace('_', ' ')}", v, "EM", "higher") for key, v in ends.items()]
    print("\n" + "\n".join(lines), flush=True)
    (store.folder / "model-test.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found


def tell(
    store: Store, name: str, results: Sequence[ArmResult], budget: float, baseline: str = BASELINE
) -> list[Figure]:
    """Write and print the table of one world, and draw its curves."""
    rows: list[Compared] = compare(results, baseline=baseline, budget=budget)
    text = markdown(rows)
    print(f"\n## {name}, {budget:,.0f} tokens a run\n\n{text}", flush=True)
    store.folder.mkdir(parents=True, exist_ok=True)
    (store.folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    drawn = results if len(results) <= len(ARMS) else [r for r in results if r.name in ARMS]
    plot_curve(store.folder / f"{name}.svg", series(drawn, budget=budget), x_label="sampled tokens")
    return list(figures(name, rows))


def settle() -> None:
    """One thread; trees are released as they were used, so the collector need not look at what was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    torch.set_num_threads(1)


def begin() -> None:
    """A process of the pool settles, and ends with the one that started it, however that ends."""
    settle()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def workers(number: int) -> Iterator[Executor | None]:
    """Processes that make runs; None for one, which is this process."""
    if number == 1:
        yield None
        return
    pool = ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def measure(args: argparse.Namespace) -> list[Figure]:
    settle()
    if args.quick:
        args.worlds, args.seeds, args.tuning_seeds, args.budget = args.worlds[:1], 4, 0, 0.2
        args.model_arms, args.model_seeds, args.model_tuning_seeds = ["grpo", "ours"], [1], []
        args.tokens, args.start_seed, args.set = 12_000, 1, QUICK
        args.model_shapes, args.model_rates = (), ()
    with tempfile.TemporaryDirectory(prefix="turntree-benchmark-") as tmp, workers(args.workers) as pool:
        store = Store(args.keep or Path(tmp), pool)
        try:
            check(args, store)
            return [
                *(simulator(args, store) if "simulator" in args.level else ()),
                *(model(args, store) if "model" in args.level else ()),
            ]
        except TurnTreeError as error:
            sys.exit("\n".join(["algorithms: " + str(error), *getattr(error, "__notes__", ())]))
        except BrokenExecutor as error:
            sys.exit(
                f"algorithms: one of {args.workers} processes ended at once ({error}); it was stopped from outside, or "
                f"there was no memory. {_kept(args)}, with fewer --workers if memory was short"
            )
        except KeyboardInterrupt:
            print(f"algorithms: stopped. {_kept(args)}", file=sys.stderr)
            sys.exit(130)


def _kept(args: argparse.Namespace) -> str:
    if args.keep is None:
        return "Without --keep nothing is kept; start again"
    return f"Finished runs are in {args.keep}: the same command goes on with them"


if __name__ == "__main__":
    run(measure, description="algorithms", options=options)
