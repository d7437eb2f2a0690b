"""The second level of the algorithm benchmark: a tiny decoder on worlds of the profile ``uncertain``.

World, initial model and cold start belong to a seed and are the same for all arms. With ``start_seed`` those of one
seed serve all: seeds then differ in the order of questions and in draws, and say nothing about other worlds. Every arm
has its own group sizes and learning rates to choose from, on seeds of their own. A rollout is used for two updates,
unless an arm may choose how many: with its group size, each number beside each learning rate.

The learning curve is the exact match of the first chains of every rollout, before any expansion: draws of the policy as
it is then, on questions that no rollout had before. The policy at the end is scored on the test world, whose names and
question templates are new, by sampling and greedily.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from _algorithms_analysis import ArmResult
from _algorithms_store import Store, Trace
from turnworld import report

from turntree.envs.worlds import generate_world
from turntree.envs.worlds.names import Split
from turntree.errors import ConfigError
from turntree.trainers.coldstart import cold_start
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.quickstart import write_tiny_model
from turntree.trainers.run_folder import RunFolder, read_metrics
from turntree.trainers.scoring import score
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Node

__all__ = ["MODEL_ABLATIONS", "MODEL_ARMS", "MODEL_FURTHER", "ModelProtocol", "run_models", "shape_label"]

PRESET = "uncertain"
SIZES: dict[Split, tuple[int, int]] = {"train": (1200, 8000), "dev": (180, 100), "test": (180, 200)}
"""(entities, questions) of the worlds of a seed."""


@dataclass(frozen=True, slots=True)
class ModelProtocol:
    """How much is run: fresh seeds, development seeds to choose on (none: each arm's first choice), numbers of updates
    of a rollout to choose from, group sizes and rates (none: each arm's own), sampled tokens of a run, the seed whose
    world and cold start all use (None: each its own), and options of every run."""

    seeds: tuple[int, ...] = (11, 12, 13, 14, 15)
    tuning_seeds: tuple[int, ...] = (1,)
    updates: tuple[int, ...] = (2,)
    shapes: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    tokens: int = 180_000
    start_seed: int | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelArm:
    """An arm as options of a run, its group sizes (each a group of options) and its learning rates."""

    name: str
    options: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    rates: tuple[float, ...] = (6e-4, 3e-4)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is tuned. Two updates are the preset's, and no option."""

    shape: tuple[str, ...]
    rate: float
    updates: int = 2

    @property
    def options(self) -> tuple[str, ...]:
        return self.shape if self.updates == 2 else (*self.shape, f"trainer.epochs={self.updates}")

    @property
    def label(self) -> str:
        shape = shape_label(self.shape)
        return shape if self.updates == 2 else f"{shape}, {self.updates} updates"


def _chains(*sizes: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"algorithm.chains={n}",) for n in sizes)


def _trees(*sizes: tuple[int, int, int], trees: int = 1) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            f"algorithm.trees={trees}",
            f"algorithm.chains={c}",
            f"algorithm.rounds={r}",
            f"algorithm.expansions={e}",
        )
        for c, r, e in sizes
    )


CHAINS = _chains(8, 4)
TREES = _trees((2, 2, 2), (4, 2, 4))
WIDE = ("algorithm.clip_low=0.02", "algorithm.clip_high=0.027")
PRODUCT = (
    "algorithm.ratio=turn", "algorithm.turn_ratio=product", "algorithm.clip_low=0.4", "algorithm.clip_high=0.9",
)  # fmt: skip
PRODUCT_WIDE = (*PRODUCT[:2], "algorithm.clip_low=0.6", "algorithm.clip_high=2")
AT2PO = ("algorithm=at2po", *WIDE)

MODEL_ARMS = (
    ModelArm("grpo", ("algorithm=grpo",), CHAINS),
    ModelArm("gspo", ("algorithm=gspo", *WIDE), CHAINS),
    ModelArm("tree_grpo", ("algorithm=tree_grpo",), _trees((1, 2, 2), (1, 1, 2), trees=2)),
    ModelArm("at2po", AT2PO, TREES),
    ModelArm("entropy_leaf", ("algorithm=entropy_leaf",), TREES),
    ModelArm("ours", ("algorithm=entropy_leaf", *PRODUCT), TREES),
)
MODEL_FURTHER = (
    ModelArm("grpo_product", ("algorithm=grpo", *PRODUCT), CHAINS),
    ModelArm("ours_wide", ("algorithm=entropy_leaf", *PRODUCT_WIDE), TREES),
    ModelArm("grpo_product_wide", ("algorithm=grpo", *PRODUCT_WIDE), CHAINS),
)
"""No arms of the six, run where they are asked for: the product ratio without a tree, and with a wider clip."""
MODEL_ABLATIONS = {
    "at2po_random": ("algorithm.expansion=turntree.trainers.expansion:random_nodes",),
    "at2po_token": ("algorithm.ratio=token", "algorithm.clip_low=0.2", "algorithm.clip_high=0.28"),
    "at2po_sequence": ("algorithm.ratio=sequence",),
    "at2po_leaf": ("algorithm.credit=turntree.trainers.credit:grpo",),
    "at2po_once": ("algorithm.shared_turns=once",),
}
"""What replaces a part of AT2PO in its chosen setting."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: an arm's options, its rate and a seed."""

    name: str
    options: tuple[str, ...]
    rate: float
    seed: int


def _named(option: str) -> str:
    """What an override sets."""
    return option.lstrip("+~").partition("=")[0]


OWN = frozenset((
    "algorithm", "algorithm.kl_coef", "algorithm.entropy_coef", "env.questions", "env.test_questions", "experiment",
    "model.path", "out", "resume", "sampling.eval_temperature", "seed", "trainer.epochs", "trainer.eval_every",
    "trainer.keep_checkpoints", "trainer.learning_rate", "trainer.max_generated_tokens", "trainer.save_every",
    "trainer.steps",
    *(_named(o) for arm in (*MODEL_ARMS, *MODEL_FURTHER) for o in (*arm.options, *itertools.chain(*arm.shapes))),
    *(_named(o) for options in MODEL_ABLATIONS.values() for o in options),
))  # fmt: skip
"""What the protocol or an arm sets: given to every run, it would make them something else than their names say."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """Worlds, cold starts and run folders below ``root``."""

    root: Path
    protocol: ModelProtocol

    def key(self, run: Run) -> dict[str, Any]:
        """Everything that a run depends on."""
        return {"preset": PRESET, "options": list(run.options), "rate": run.rate, "seed": run.seed,
                "tokens": self.protocol.tokens, "start": self.start_of(run.seed), "shared": list(self.protocol.options),
                "sizes": dict(SIZES)}  # fmt: skip

    def arm(self, name: str) -> ModelArm:
        """An arm by name, AT2PO for an ablation, with the group sizes and rates that the protocol leaves it."""
        arms = {arm.name: arm for arm in (*MODEL_ARMS, *MODEL_FURTHER)}
        arm = arms[name if name in arms else "at2po"]
        wanted = self.protocol.shapes
        shapes = tuple(shape for shape in arm.shapes if not wanted or shape_label(shape) in wanted)
        if not shapes:
            raise ConfigError(
                f"--model-shapes {' '.join(wanted)}: none of them is a group size of {name}; expected one of "
                f"{', '.join(map(shape_label, arm.shapes))} among them"
            )
        return replace(arm, shapes=shapes, rates=self.protocol.rates or arm.rates)

    def check(self, names: Sequence[str]) -> None:
        """Whether the options of every run fit, before any is made. Raises ``ConfigError``."""
        taken = [option for option in self.protocol.options if _named(option) in OWN]
        if taken:
            raise ConfigError(
                f"--set {' '.join(taken)}: arms or the protocol set this themselves; expected an option that is the "
                "same in all runs, such as trainer.prompts_per_step=8"
            )
        for name in names:
            arm = self.arm(name)
            self.configured(0, *arm.options, *arm.shapes[0], *MODEL_ABLATIONS.get(name, ()))

    def configured(self, seed: int, *options: str) -> RunConfig:
        """The preset on the worlds of ``seed``. No KL: it would be another knob to tune."""
        config = compose(
            [f"experiment={PRESET}", *options, "algorithm.kl_coef=0", "algorithm.entropy_coef=0", f"seed={seed}",
             "trainer.eval_every=0", *self.protocol.options]
        )  # fmt: skip
        files = {split: str(self.folder(self.start_of(seed)) / "worlds" / split / "questions.jsonl") for split in SIZES}
        env = replace(config.env, questions=files["train"], test_questions=files["test"])
        return replace(config, env=env)

    def folder(self, seed: int) -> Path:
        """Options of every run may change the cold start: each set of them has folders of its own."""
        options = self.protocol.options
        if not options:
            return self.root / f"seed-{seed}"
        return self.root / f"seed-{seed}-{sha256(json.dumps(options).encode()).hexdigest()[:12]}"

    def start_of(self, seed: int) -> int:
        """The seed whose world and cold start ``seed`` uses."""
        return seed if self.protocol.start_seed is None else self.protocol.start_seed

    def worlds(self, seed: int) -> None:
        folder = self.folder(seed)
        for split, (entities, questions) in SIZES.items():
            if not (folder / "worlds" / split / "meta.json").is_file():
                world = generate_world("uncertain", seed=seed, split=split, entities=entities, questions=questions)
                world.save(folder / "worlds" / split)

    def start(self, seed: int) -> Path:
        """The cold start's model; worlds, model and training are made where they are not there yet."""
        seed = self.start_of(seed)
        self.worlds(seed)
        folder = self.folder(seed)
        if not (folder / "initial-model" / "config.json").is_file():
            write_tiny_model(folder / "initial-model", seed=seed, style="vague")
        out = folder / "cold-start"
        if not (out / "summary.json").is_file():
            config = self.configured(seed)
            model = replace(config.model, path=str(folder / "initial-model"))
            cold_start(replace(config, model=model, out=str(out), resume=True))
        return out / "model"

    def prepare(self, seed: int) -> None:
        """Everything that runs of a seed begin with."""
        self.scored(seed, self.start(seed), self.folder(self.start_of(seed)) / "evaluation-before")

    def scored(self, seed: int, model: Path, folder: Path) -> dict[str, float]:
        """Exact match on the test world: sampled as in rollouts, and greedy."""
        found = {}
        for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            document = folder / way / "evaluation.json"
            if not document.is_file():
                config = self.configured(seed, f"sampling.eval_temperature={temperature}")
                score(replace(config, model=replace(config.model, path=str(model))), folder / way)
            found[f"em_{way}"] = float(json.loads(document.read_text(encoding="utf-8"))["em"])
        return found

    def train(self, run: Run) -> Trace:
        """Train until the tokens are used; the folder goes once the curve is read."""
        began = time.perf_counter()
        model = self.start(run.seed)
        before = self.scored(run.seed, model, self.folder(self.start_of(run.seed)) / "evaluation-before")
        settings = [o.rpartition("=")[2].rpartition(":")[2] for o in run.options]
        start, tokens = self.start_of(run.seed), self.protocol.tokens
        out = self.folder(run.seed) / "-".join([run.name, *settings, f"{run.rate:g}", f"{start}", f"{tokens}"])
        more = (f"trainer.learning_rate={run.rate}", f"trainer.max_generated_tokens={self.protocol.tokens}",
                "trainer.steps=1000000", "trainer.save_every=10", "trainer.keep_checkpoints=1")  # fmt: skip
        config = self.configured(run.seed, *run.options, *more)
        config = replace(config, model=replace(config.model, path=str(model)), out=str(out), resume=out.exists())
        if train(config).interrupted:  # the next call goes on with it
            raise KeyboardInterrupt
        after = self.scored(run.seed, out / "model", out / "evaluation")
        trace = curve(out, {f"{k}_before": v for k, v in before.items()} | after)
        seconds = time.perf_counter() - began
        report(f"model {run.name} {' '.join(run.options)} rate {run.rate:g} seed {run.seed}: "
               f"{before['em_sampled']:.3f} -> {after['em_sampled']:.3f} sampled, {after['em_greedy']:.3f} greedy, "
               f"{seconds:.0f} s")  # fmt: skip
        shutil.rmtree(out)
        return trace


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs in a workshop; finished ones are in ``store``."""

    workshop: Workshop
    store: Store

    @property
    def protocol(self) -> ModelProtocol:
        return self.workshop.protocol

    def traces(self, runs: Sequence[Run]) -> list[Trace]:
        """Those of runs of one arm."""
        shop, file = self.workshop, f"model-{runs[0].name}"
        missing = [run for run in runs if not self.store.has(file, shop.key(run))]
        # Runs that start from the same model must not make it at the same time.
        starts = {shop.start_of(run.seed): partial(shop.prepare, run.seed) for run in missing}
        for _ in self.store.made({str(seed): prepare for seed, prepare in starts.items()}):
            pass
        return self.store.traces(file, [(shop.key(run), partial(shop.train, run)) for run in runs])

    def chosen(self, arm: ModelArm) -> Choice:
        """The choice of the largest mean exact match on the development seeds: group size and rate with the first
        number of updates, then the others beside every rate with that group size."""
        first, *others = self.protocol.updates
        choices = [Choice(shape, rate, first) for shape in arm.shapes for rate in arm.rates]
        if not self.protocol.tuning_seeds:
            return choices[0]
        best = self.best(arm, choices)
        more = [Choice(best.shape, rate, updates) for updates in others for rate in arm.rates]
        return self.best(arm, [best, *more])

    def best(self, arm: ModelArm, choices: Sequence[Choice]) -> Choice:
        """The choice of the largest mean exact match over budget and development seeds."""
        runs = [
            Run(arm.name, (*arm.options, *choice.options), choice.rate, seed)
            for choice in choices
            for seed in self.protocol.tuning_seeds
        ]
        areas = [trace.area(self.protocol.tokens) for trace in self.traces(runs)]
        means = np.reshape(areas, (len(choices), -1)).mean(axis=1)
        return choices[int(means.argmax())]


def curve(out: Path, extra: Mapping[str, float]) -> Trace:
    """A run's curve. A step's point lies at the tokens that were used before it: its policy had learnt from those."""
    rows = read_metrics(out / "metrics.jsonl")
    store = TreeStore(RunFolder(out).trees)
    em = [_first_chains(store, int(row["step"])) for row in rows]
    tokens = [0, *(int(row["total/generated_tokens"]) for row in rows)][:-1]
    calls = [0, *(int(row["total/tool_calls"]) for row in rows)][:-1]
    last = rows[-1]
    kept = {"updates": float(last["total/updates"]), "seconds": float(last["total/seconds"]), **extra}
    return Trace(tuple(tokens), tuple(calls), tuple(em), kept)


def _first_chains(store: TreeStore, step: int) -> float:
    leaves = [leaf for group in store.groups(step) for leaf in group.scored_leaves() if _is_first(leaf)]
    return sum(leaf.reward or 0.0 for leaf in leaves) / len(leaves)


def _is_first(leaf: Node) -> bool:
    """Whether no turn of the trajectory was chosen by an expansion rule."""
    return all(node.picked is None for node in leaf.trajectory())


def run_models(runs: Runs, names: Sequence[str]) -> Iterator[ArmResult]:
    """Choose, freeze, and run the fresh seeds, arm by arm; ablations follow AT2PO's choice of group size and rate."""
    for name in names:
        arm = runs.workshop.arm(name)
        choice = runs.chosen(arm)
        options = (*arm.options, *choice.options, *MODEL_ABLATIONS.get(name, ()))
        seeds = runs.protocol.seeds
        traces = runs.traces([Run(name, options, choice.rate, seed) for seed in seeds])
        yield ArmResult(name, choice.label, choice.rate, dict(zip(seeds, traces, strict=True)))


def shape_label(shape: Sequence[str]) -> str:
    """``trees x (chains + rounds x expansions)`` from the options of a shape."""
    given = {key.removeprefix("algorithm."): int(value) for key, value in (o.split("=") for o in shape)}
    tree = f"{given['chains']}" + (f"+{given['rounds']}x{given['expansions']}" if given.get("rounds") else "")
    return f"{given['trees']}x({tree})" if given.get("trees", 1) > 1 else tree
