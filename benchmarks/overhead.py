"""Where a training step's time goes: the share of everything besides engine, retriever and model.

A run is trained as usual while a ledger notes how long each part takes by itself (what it calls is booked on its own).
Measured on the quickstart's model after its cold start and on SmolLM2-135M-Instruct; first and last step are left out.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.hf import HFEngine
from turntree.agents.smollm2 import unpack_smollm2
from turntree.envs.search_qa import SearchQACore
from turntree.envs.tools import SearchTool
from turntree.envs.worlds import generate_world
from turntree.trainers import collector, desk, learner, preparation, run_checkpoints
from turntree.trainers.coldstart import cold_start
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.quickstart import SIZES, Stages, write_tiny_model
from turntree.trainers.run_folder import MetricsLog
from turntree.trainers.store import TreeStore

ENGINE, SEARCH, SCORE, UPDATE = "engine", "retriever", "score pass", "update"
THEIRS = (ENGINE, SEARCH, SCORE, UPDATE)
REST = "trainer loop and the rest"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

PARTS: tuple[tuple[Any, str, str], ...] = (
    (HFEngine, "generate", ENGINE),
    (HFEngine, "update_weights", ENGINE),
    (SearchTool, "run", SEARCH),
    (preparation, "score_packs", SCORE),
    (learner.PolicyStepper, "step", UPDATE),
    (SearchQACore, "act", "environment: reading turns, observations"),
    (SearchQACore, "resolve", "environment: reading turns, observations"),
    (SearchQACore, "initial", "environment: reading turns, observations"),
    (Dialogue, "prompt_ids", "dialogue: tokens"),
    (Dialogue, "observation_ids", "dialogue: tokens"),
    (Dialogue, "finish_turn", "dialogue: tokens"),
    (desk, "score", "scores of leaves"),
    (learner, "grow", "growing trees"),
    (preparation, "pack_groups", "packing"),
    (preparation, "write_advantages", "packing"),
    (preparation.Preparation, "prepare", "credit"),
    (preparation, "collected_metrics", "metrics"),
    (learner, "update_metrics", "metrics"),
    (learner, "step_metrics", "metrics"),
    (MetricsLog, "write", "metrics"),
    (TreeStore, "write", "rollout store"),
    (learner, "by_node", "rollout store"),
    (run_checkpoints, "save_checkpoint", "checkpoints"),
    (collector.TreeCollector, "collect", REST),
)
"""What is timed: (owner, attribute, row of the table). Time of a part inside another one is booked once, inside."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10, help="steps measured on the quickstart")
    parser.add_argument("--smollm2-steps", type=int, default=2, help="steps measured on SmolLM2 (0: none)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: on a machine that others use too")
    parser.add_argument("--sft-steps", type=int, default=None, help="steps of the cold start (default: quickstart's)")


@dataclass(eq=False, slots=True)
class Ledger:
    """Seconds by part, each without those of the parts inside it.

    ``within`` and ``around``: what noting down one call costs in itself, inside the part and outside of it; both are
    left out (a look at the processor's clock is a system call). ``noted`` is what was left out in all.
    """

    clock: Callable[[], float] = time.perf_counter
    within: float = 0.0
    around: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inside: list[float] = field(default_factory=list)
    noted: float = 0.0

    @staticmethod
    def calibrated(clock: Callable[[], float], calls: int = 20_000) -> Ledger:
        """A ledger that knows its own cost, as calls in a row have it: rather too low than too high."""
        trial = Ledger(clock)
        timed = trial.timed("nothing", _nothing)
        start = clock()
        for _ in range(calls):
            timed()
        whole = (clock() - start) / calls
        within = trial.seconds["nothing"] / calls
        return Ledger(clock, within, whole - within)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timing(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(0.0)
            start = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self.clock() - start
                self.seconds[name] += seconds - self.inside.pop() - self.within
                self.noted += self.within + self.around
                if self.inside:
                    self.inside[-1] += seconds + self.around

        return timing

    def clear(self) -> None:
        """Begin anew."""
        self.seconds.clear()
        self.noted = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything in ``PARTS`` is noted down."""
        originals = [getattr(owner, name) for owner, name, _ in PARTS]
        for (owner, name, row), original in zip(PARTS, originals, strict=True):
            setattr(owner, name, self.timed(row, original))
        try:
            yield
        finally:
            for (owner, name, _), original in zip(PARTS, originals, strict=True):
                setattr(owner, name, original)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: its time, and the seconds of each part."""

    seconds: float
    parts: dict[str, float]

    @property
    def share(self) -> float:
        """Of everything besides engine, retriever and model."""
        return 1 - sum(self.parts.get(name, 0.0) for name in THEIRS) / self.seconds


def profile(config: RunConfig, steps: int, clock: Callable[[], float] = time.perf_counter) -> list[Step]:
    """The ``steps`` steps between the first and the last one of a run of two more."""
    ledger, found, last = Ledger.calibrated(clock), [], [clock()]

    def on_step(step: int, metrics: dict[str, float]) -> None:
        del metrics
        now = clock()
        if step > 1:
            booked = dict(ledger.seconds)
            whole = now - last[0] - ledger.noted
            rest = whole - sum(booked.values())
            found.append(Step(whole, {**booked, REST: booked.get(REST, 0.0) + rest}))
        ledger.clear()
        last[0] = now

    trainer = replace(config.trainer, steps=steps + 2, eval_every=0, check_packed=False)
    with ledger.watching():
        learner.train(replace(config, trainer=trainer), on_step=on_step)
    return found[:-1]


def quickstart_config(root: Path, sft_steps: int | None) -> RunConfig:
    """The quickstart's run after its cold start."""
    more = [] if sft_steps is None else [f"sft.steps={sft_steps}"]
    config = compose(["experiment=quickstart", "seed=3", f"out={root / 'quickstart'}", *more])
    stages = Stages(root / "stages")
    for split, (entities, questions) in SIZES.items():
        world = generate_world("quickstart", seed=3, split=split, entities=entities, questions=questions)
        world.save(stages.worlds / split)
    write_tiny_model(stages.initial, seed=3)
    cold_start(replace(stages.configure(config, stages.initial), out=str(stages.cold_start)))
    return stages.configure(config, stages.cold_start / "model")


def smollm2_config(root: Path) -> RunConfig:
    """SmolLM2 as ``experiment=smollm2`` trains it, on one small tree of each of two questions."""
    unpack_smollm2(root / "smollm2")
    world = generate_world("standard", seed=3, entities=300, questions=64)
    world.save(root / "standard")
    return compose(
        [
            "experiment=smollm2",
            "algorithm=tree_grpo",
            "algorithm.trees=1",
            "seed=3",
            f"out={root / 'smollm2-run'}",
            f"model.path={root / 'smollm2'}",
            f"env.questions={root / 'standard' / 'questions.jsonl'}",
        ]
    )


def measure(args: argparse.Namespace) -> list[Figure]:
    steps, sft = (3, args.sft_steps or 60) if args.quick else (args.steps, args.sft_steps)
    clock = CLOCKS[args.clock]
    with tempfile.TemporaryDirectory(prefix="turntree-benchmark-") as tmp:
        root = Path(tmp)
        figures = table("quickstart", profile(quickstart_config(root, sft), steps, clock), strict=not args.quick)
        if args.smollm2_steps and not args.quick:
            figures += table("SmolLM2", profile(smollm2_config(root), args.smollm2_steps, clock), strict=True)
    return figures


def table(name: str, steps: Sequence[Step], *, strict: bool) -> list[Figure]:
    """Rows of a run: the median step, each part's share, and what all but engine, retriever and model take."""
    whole = sum(step.seconds for step in steps)
    parts: dict[str, float] = defaultdict(float)
    for step in steps:
        for row, seconds in step.parts.items():
            parts[row] += seconds
    figures = [Figure(f"{name}: a step", statistics.median(s.seconds for s in steps), "s", "lower")]
    rows = sorted(parts, key=lambda row: (row not in THEIRS, -parts[row]))
    figures += [Figure(f"{name}: {row}", 100 * parts[row] / whole, "% of a step", "lower") for row in rows]
    share = 100 * sum(step.share * step.seconds for step in steps) / whole
    title = f"{name}: all besides {', '.join(THEIRS)}"
    return [*figures, Figure(title, share, "% of a step", "lower", 5.0 if strict else None)]


if __name__ == "__main__":
    run(measure, description="overhead of a training step", options=options)
