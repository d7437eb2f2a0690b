"""Expansion and credit rules on TurnWorld-S, a simulated task that needs no language model.

Two measurements, both of the library's own rules on real trees (see ``_turnworld.py`` for the task):

``gradient``: sampled tokens until the gradient that an arm estimates at the cold start, without learning, reaches a
cosine of 0.5 with the exact gradient of expected exact match. Seconds an arm.

``train``: learning curves at an equal budget of sampled tokens (``--observations``: of sampled and observed ones).
Shape and learning rate of every arm are tuned on seeds of their own (the largest area under the curve; the rate is
doubled or halved for as long as that helps), and the figures come from fresh seeds: tokens to an exact match of 0.5,
relative to the best arm that grows chains and uses a rollout once, and the mean exact match over the budget. Intervals
are 95 % bootstraps over seeds, paired in ratios.
"""

from __future__ import annotations

import argparse
import ast
import gc
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import numpy.typing as npt
import torch
from _arguments import check_json, different, whole
from _common import Figure, run
from _turnworld import WORLDS, World
from _turnworld_learn import Arm, Curve, Learner, true_gradient

from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.config import AlgorithmConfig
from turntree.trainers.seeds import derive_rng

FloatArray = npt.NDArray[np.float64]

COSINE = 0.5
EXACT_MATCH = 0.5
FIRST_RATE, STEPS = 0.4, 5
FRESH_SEEDS, TUNING_SEEDS = 0, 10_000
RESAMPLES = 2_000
ARM = "one more arm: 'name=mine expansion=my_pkg:rule credit=rloo chains=2 rounds=2 expansions=2 epochs=1'"
ORDERS = 100
WITH_OBSERVATIONS = 7
"""Sampled and observed tokens of a mean search turn (50 and 300), by sampled ones: how budgets grow that count both."""


# Arms


def arm(name: str, *, shapes: Sequence[dict[str, Any]] = ({},), epochs: int = 1, **options: Any) -> Arm:
    """An arm in the words of ``AlgorithmConfig``; rules without a module are those of the library."""
    for kind in ("expansion", "credit"):
        if ":" not in options.get(kind, ":"):
            options[kind] = f"turntree.trainers.{kind}:{options[kind]}"
    first, *_ = shapes = tuple(shapes)
    return Arm(AlgorithmConfig(name=name, **{**options, **first}), epochs, shapes)


CHAINS = ({"chains": 4}, {"chains": 8})
TREES = ({"chains": 2, "rounds": 2, "expansions": 2}, {"chains": 4, "rounds": 2, "expansions": 4})
TWO_TREES = tuple({"trees": 2, "chains": 1, "rounds": rounds, "expansions": 2} for rounds in (1, 2))
COPIES = tuple({"chains": n // 2, "rounds": n, "expansions": n, "budget_leaves": n} for n in (4, 8))
PRODUCT: dict[str, Any] = {"epochs": 4, "ratio": "turn", "turn_ratio": "product", "clip_low": 0.4, "clip_high": 0.9}


def arms() -> list[Arm]:
    """What is compared by default. The last three use each rollout for four updates."""
    return [
        arm("chain_grpo", shapes=CHAINS),
        arm("chain_rloo", shapes=CHAINS, credit="rloo"),
        arm("tree_grpo", shapes=TWO_TREES, expansion="random_nodes", credit="tree_grpo"),
        arm("at2po", shapes=TREES, expansion="entropy", credit="at2po"),
        arm("at2po_softmax", shapes=TREES, expansion="entropy", credit="at2po", credit_args={"weights": "softmax"}),
        arm("at2po_centred", shapes=TREES, expansion="entropy", credit="at2po_centred"),
        arm("entropy_leaf", shapes=TREES, expansion="entropy", credit="grpo"),
        arm("guided_loo", shapes=TREES, expansion="guided", credit="shrunk_loo"),
        arm("guided_loo_group", shapes=TREES, expansion="guided", credit="shrunk_loo", credit_args={"prior": "group"}),
        arm("ucb_tree", shapes=TREES, expansion="ucb", credit="grpo"),
        arm("arpo", shapes=COPIES, expansion="arpo", credit="grpo"),
        arm("sibling_baseline", shapes=TREES, expansion="entropy", credit="sibling_baseline"),
        arm("tree_diff", shapes=TREES, expansion="entropy", credit="tree_diff"),
        arm("value_variance", shapes=TREES, expansion="value_variance", credit="grpo"),
        arm("chain_grpo_x4", shapes=CHAINS, **PRODUCT),
        arm("entropy_leaf_x4", shapes=TREES, expansion="entropy", credit="grpo", **PRODUCT),
        arm("guided_loo_x4", shapes=TREES, expansion="guided", credit="shrunk_loo", **PRODUCT),
    ]


def parse_arm(text: str) -> Arm:
    """An arm from options of an algorithm, ``epochs`` and ``name``, separated by spaces.

    ``"name=mine expansion=my_pkg.rules:least_visited credit=shrunk_loo credit_args.kappa=1 chains=2 rounds=2
    expansions=2"``. Raises ``ConfigError`` for what is no option of an algorithm.
    """
    options: dict[str, Any] = {"name": "custom"}
    known = {"epochs", *(f.name for f in fields(AlgorithmConfig))}
    for word in shlex.split(text):
        key, eq, value = word.partition("=")
        option, _, argument = key.partition(".")
        if not eq or option not in known:
            raise ConfigError(f"--arm {text!r}: expected option=value of an algorithm, or epochs=N, found {word!r}")
        if argument:
            options.setdefault(option, {})[argument] = _literal(value)
        else:
            options[option] = _literal(value)
    return arm(**options)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


# Gradient


def tokens_to_cosine(gradients: FloatArray, tokens: float, truth: FloatArray, rng: np.random.Generator) -> float:
    """Tokens at which the mean of ``gradients`` ``[R, D]`` reaches the cosine with ``truth`` ``[D]``; infinite if
    never.

    Each took ``tokens``. The cosine of the mean of k is itself averaged over random orders; its square grows almost
    linearly and is interpolated.
    """
    along = gradients @ (truth / np.linalg.norm(truth))
    gram = gradients @ gradients.T
    cosines = np.zeros(len(gradients))
    for _ in range(ORDERS):
        order = rng.permutation(len(gradients))
        norms = np.sqrt(gram[np.ix_(order, order)].cumsum(0).cumsum(1).diagonal())
        cosines += along[order].cumsum() / np.maximum(norms, 1e-300) / ORDERS
    squares = np.concatenate([[0.0], np.maximum(cosines, 0.0) ** 2])
    reached = np.flatnonzero(squares >= COSINE**2)
    if not reached.size:
        return math.inf
    k = int(reached[0])
    return float(tokens * (k - (squares[k] - COSINE**2) / (squares[k] - squares[k - 1])))


def frozen(world: World, subject: Arm, *, seed: int, tokens: int) -> float:
    """:func:`tokens_to_cosine` from rollouts of about ``tokens`` tokens, at the cold start of ``seed``."""
    learner = Learner(world, subject, seed=seed)
    truth = true_gradient(world, learner.logits).numpy().ravel()
    used, found = 0, list[FloatArray]()
    while used < tokens:
        rollout = learner.rollout()
        used += rollout.cost(world)
        found.append(learner.gradient(rollout).numpy().ravel())
    return tokens_to_cosine(np.stack(found), used / len(found), truth, derive_rng("turnworld", seed, "orders"))


def gradient_figures(name: str, world: World, subjects: Sequence[Arm], args: argparse.Namespace) -> Iterator[Figure]:
    """Every shape (quick: the first) of every arm that uses a rollout once."""
    shapes = 1 if args.quick else None
    for subject in (s for s in subjects if s.epochs > 1):
        report(f"{name} {subject.name}: no gradient with {subject.epochs} updates a rollout, only with epochs=1")
    for subject in (v for s in subjects if s.epochs == 1 for v in s.variants()[:shapes]):
        start = time.perf_counter()
        tokens = args.gradient_tokens * (WITH_OBSERVATIONS if world.observations else 1)
        found = np.array([frozen(world, subject, seed=s, tokens=tokens) for s in range(args.gradient_seeds)])
        label = f"{name} {subject.name} {subject.shape}: tokens to cosine {COSINE:g}"
        report(f"{label}: {np.round(found / 1e6, 3).tolist()} M, {time.perf_counter() - start:.1f} s")
        mean = found.mean()
        low, high = interval(lambda rows, found=found: found[rows].mean(), len(found))  # type: ignore[misc]
        yield from three(label, mean / 1e6, low / 1e6, high / 1e6, "M tokens", "lower")


# Learning


@dataclass(frozen=True, slots=True)
class Result:
    """A tuned arm on fresh seeds: tokens to the exact match ``[seeds]`` (infinite: never), areas ``[seeds]``."""

    arm: Arm
    rate: float
    tokens: FloatArray
    areas: FloatArray


def train_figures(name: str, world: World, subjects: Sequence[Arm], args: argparse.Namespace) -> Iterator[Figure]:
    """Tunes every arm, then compares them on fresh seeds."""
    results = []
    for subject in subjects:
        start = time.perf_counter()
        chosen, rate = tuned(world, subject, seeds=args.tuning_seeds)
        curves = learn(world, chosen, rate, seeds=range(FRESH_SEEDS, FRESH_SEEDS + args.seeds))
        found = [c.reaches(EXACT_MATCH) for c in curves]
        areas = [c.area(world.tokens) for c in curves]
        results.append(Result(chosen, rate, np.array(found), np.array(areas)))
        mean, took = float(np.mean(areas)), time.perf_counter() - start
        report(f"{name} {subject.name} {chosen.shape}, rate {rate:g}: mean EM {mean:.3f}, {took:.0f} s")
    chains = [r for r in results if r.arm.is_chain and r.arm.epochs == 1]
    baseline = max(chains or results[:1], key=lambda r: float(r.areas.mean()))
    for result in results:
        yield from result_figures(name, world, result, baseline)


def result_figures(name: str, world: World, result: Result, baseline: Result) -> Iterator[Figure]:
    """Tokens of a seed that never gets there count as the whole budget; the share that does is a figure of its own."""
    label = f"{name} {result.arm.name} {result.arm.shape}"
    own, other = (np.minimum(r.tokens, world.tokens) for r in (result, baseline))

    def ratio(rows: npt.NDArray[np.int64]) -> float:
        return float(own[rows].mean() / other[rows].mean())

    everyone = np.arange(len(own))
    relative = f"{label}: tokens to EM {EXACT_MATCH:g} / {baseline.arm.name}"
    yield from three(relative, ratio(everyone), *interval(ratio, len(own)), "", "lower")
    mean = interval(lambda rows: float(result.areas[rows].mean()), len(own))
    yield from three(f"{label}: mean EM", float(result.areas.mean()), *mean, "EM", "higher")
    yield Figure(f"{label}: tokens to EM {EXACT_MATCH:g}", float(own.mean() / 1e6), "M tokens", "lower")
    yield Figure(f"{label}: seeds that reach it", float(np.isfinite(result.tokens).mean()), "share", "higher")
    yield Figure(f"{label}: learning rate", result.rate, "", "lower")


def learn(world: World, subject: Arm, rate: float, *, seeds: Sequence[int]) -> list[Curve]:
    return [Learner(world, subject, seed=seed).train(world.tokens, lr=rate) for seed in seeds]


def tuned(world: World, subject: Arm, *, seeds: int) -> tuple[Arm, float]:
    """Shape and rate of the largest area; the first of each without seeds to tune on."""
    variants = subject.variants()
    if not seeds:
        return variants[0], FIRST_RATE

    def area(variant: Arm, rate: float) -> float:
        curves = learn(world, variant, rate, seeds=range(TUNING_SEEDS, TUNING_SEEDS + seeds))
        return float(np.mean([c.area(world.tokens) for c in curves]))

    climbed = [(variant, *climb(partial(area, variant))) for variant in variants]
    chosen, rate, _ = max(climbed, key=lambda found: found[2])
    return chosen, rate


def climb(score: Callable[[float], float], rate: float = FIRST_RATE) -> tuple[float, float]:
    """The rate that neither neighbour beats, or the one reached after ``STEPS`` steps of a factor of two; its score."""
    known: dict[float, float] = {}

    def of(rate: float) -> float:
        if rate not in known:
            known[rate] = score(rate)
        return known[rate]

    for _ in range(STEPS):
        rate = max((rate, rate / 2, rate * 2), key=of)
    return rate, known[rate]


# Statistics and the script


def interval(statistic: Callable[[npt.NDArray[np.int64]], float], n: int) -> tuple[float, float]:
    """95 % of a bootstrap over ``n`` seeds; nan for fewer than two."""
    if n < 2:
        return math.nan, math.nan
    rng = derive_rng("turnworld", "bootstrap", n)
    drawn = np.array([statistic(rng.integers(n, size=n)) for _ in range(RESAMPLES)])
    low, high = np.quantile(drawn, [0.025, 0.975], method="nearest")
    return float(low), float(high)


def three(name: str, value: float, low: float, high: float, unit: str, better: Any) -> Iterator[Figure]:
    yield Figure(name, value, unit, better)
    yield Figure(f"{name}, 95 % from", low, unit, better)
    yield Figure(f"{name}, 95 % to", high, unit, better)


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", nargs="+", choices=["gradient", "train"], default=["gradient", "train"])
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=["A"], help="worlds to measure in")
    parser.add_argument("--arms", nargs="+", choices=[a.name for a in arms()], help="only these of the default arms")
    parser.add_argument("--arm", action="append", default=[], metavar="OPTIONS", help=ARM)
    parser.add_argument("--seeds", type=whole(1), default=12, help="fresh seeds of a learning curve")
    parser.add_argument("--tuning-seeds", type=whole(0), default=2, help="seeds to tune on (0: no tuning)")
    parser.add_argument(
        "--tokens", type=whole(1), default=None, help="sampled tokens of a learning curve, if not the world's"
    )
    parser.add_argument(
        "--observations", action="store_true", help="budgets count observations, and are 7 times as big"
    )
    parser.add_argument("--gradient-seeds", type=whole(1), default=3, help="cold starts of the gradient")
    parser.add_argument("--gradient-tokens", type=whole(1), default=1_200_000, help="sampled tokens at a cold start")


def budgeted(world: World, args: argparse.Namespace) -> World:
    """The world with the budget that the arguments ask for."""
    times = WITH_OBSERVATIONS if args.observations else 1
    return replace(world, tokens=(args.tokens or world.tokens) * times, observations=args.observations)


def measure(args: argparse.Namespace) -> list[Figure]:
    # Trees are cycles, made and dropped all the time: let the collector look at them only, and not too often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    torch.set_num_threads(1)
    if args.quick:
        args.seeds, args.tuning_seeds, args.tokens = 2, 0, 500_000
        args.gradient_seeds, args.gradient_tokens = 1, 600_000
    try:
        check_json(args.json)
        return measured(compared(args), args)
    except TurnTreeError as error:
        sys.exit(f"turnworld: {error}")


def compared(args: argparse.Namespace) -> list[Arm]:
    """The arms that are asked for, whose rules are tried first. Raises ``ConfigError``."""
    found = [a for a in arms() if not args.arms or a.name in args.arms] + [parse_arm(text) for text in args.arm]
    different("names of arms (--arms, name= in --arm)", [a.name for a in found])
    for subject in found:
        for variant in subject.variants():
            variant.plan(WORLDS[args.worlds[0]])
    return found


def measured(subjects: Sequence[Arm], args: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    for name in args.worlds:
        world = budgeted(WORLDS[name], args)
        if "gradient" in args.measure:
            figures += gradient_figures(name, world, subjects, args)
        if "train" in args.measure:
            figures += train_figures(name, world, subjects, args)
    return figures


if __name__ == "__main__":
    run(measure, description="TurnWorld-S", options=options)
