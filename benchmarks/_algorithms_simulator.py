"""The first level of the algorithm benchmark: arms, tuning and fresh seeds on TurnWorld-S.

All arms use a rollout for four updates, except those whose name ends in ``_x1``. Every arm has its own shapes (group
size, and for ratios of turns and sequences the clip), and its own learning rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from _algorithms_analysis import ArmResult
from _algorithms_store import Store, Trace
from _turnworld import WORLDS, World
from _turnworld_learn import EPS, PROMPTS, Arm, Learner
from turnworld import CHAINS, PRODUCT, TREES, TWO_TREES, arm, climb, report

__all__ = ["ABLATIONS", "ARMS", "BASELINE", "Protocol", "run_world", "simulator_arms"]

BASELINE = "grpo"
UPDATES = 4
TUNING_SEEDS, FRESH_SEEDS = 10_000, 100
FIRST_RATES = {1: 1.6, UPDATES: 0.4}
WIDE = {"clip_low": 0.02, "clip_high": 0.027}
"""A clip of geometric ratios for the rates that tables learn at; the published ones (3e-3, 3e-4) are for 1e-6."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How much is run: fresh seeds, seeds to tune on (0: none), and the share of the worlds' budgets."""

    seeds: int = 20
    tuning_seeds: int = 2
    budget: float = 1.0


def _clipped(shapes: Sequence[Mapping[str, Any]], published: Mapping[str, float]) -> tuple[dict[str, Any], ...]:
    """The first shape with the published clip, and all with the wide one."""
    return ({**shapes[0], **published}, *({**s, **WIDE} for s in shapes))


# Presets of entropy trees clip at 0.2 and 0.28, those of GRPO and Tree-GRPO at 0.2 and 0.2: ``grpo_higher`` tells
# what that makes without a tree.
TOKEN: dict[str, Any] = {"ratio": "token", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
TOKEN_GRPO: dict[str, Any] = {**TOKEN, "clip_high": 0.2}
GSPO: dict[str, Any] = {"ratio": "sequence", "aggregation": "seq-mean-token-mean"}
AT2PO: dict[str, Any] = {
    "expansion": "entropy",
    "credit": "at2po",
    "ratio": "turn",
    "aggregation": "seq-mean-token-mean",
}
PRODUCT_WIDE: dict[str, Any] = {**PRODUCT, "clip_low": 0.6, "clip_high": 2.0}
"""Chosen on development seeds, by trees in worlds A and B; see docs/experiments.md."""
AT2PO_SHAPES = _clipped(TREES, {"clip_low": 0.003, "clip_high": 0.004})

ARMS = ("grpo", "gspo", "tree_grpo", "at2po", "entropy_leaf", "ours")
FURTHER = (
    "grpo_x1", "grpo_higher", "entropy_leaf_x1", "grpo_product", "guided_product", "ours_wide", "grpo_product_wide",
)  # fmt: skip
ABLATIONS = ("at2po_random", "at2po_token", "at2po_sequence", "at2po_leaf", "at2po_once")
"""Of AT2PO: random for entropy expansion; ratios of tokens and of the sequence for those of turns; flat credit for that
of turns; shared turns once for once a leaf. Each in AT2PO's tuned shape, with a rate of its own."""


def simulator_arms() -> dict[str, Arm]:
    """Every arm but the ablations, which follow AT2PO's tuned shape."""
    made = [
        arm("grpo", shapes=CHAINS, epochs=UPDATES, **TOKEN_GRPO),
        arm("gspo", shapes=_clipped(CHAINS, {"clip_low": 3e-4, "clip_high": 4e-4}), epochs=UPDATES, **GSPO),
        arm("tree_grpo", shapes=TWO_TREES, epochs=UPDATES, expansion="random_nodes", credit="tree_grpo", **TOKEN_GRPO),
        arm("at2po", shapes=AT2PO_SHAPES, epochs=UPDATES, **AT2PO),
        arm("entropy_leaf", shapes=TREES, epochs=UPDATES, expansion="entropy", credit="grpo", **TOKEN),
        arm("ours", shapes=TREES, expansion="entropy", credit="grpo", **PRODUCT),
        arm("grpo_x1", shapes=CHAINS),
        arm("grpo_higher", shapes=CHAINS, epochs=UPDATES, **TOKEN),
        arm("entropy_leaf_x1", shapes=TREES, expansion="entropy", credit="grpo"),
        arm("grpo_product", shapes=CHAINS, **PRODUCT),
        arm("guided_product", shapes=TREES, expansion="guided", credit="shrunk_loo", **PRODUCT),
        arm("ours_wide", shapes=TREES, expansion="entropy", credit="grpo", **PRODUCT_WIDE),
        arm("grpo_product_wide", shapes=CHAINS, **PRODUCT_WIDE),
    ]
    return {a.name: a for a in made}


def ablation(name: str, tuned: Arm) -> Arm:
    """AT2PO in its tuned shape with one part replaced."""
    if name == "at2po_random":
        changed: dict[str, Any] = {"expansion": "turntree.trainers.expansion:random_nodes"}
    elif name == "at2po_token":
        changed = dict(TOKEN)
    elif name == "at2po_sequence":
        changed = {"ratio": "sequence", **WIDE}
    elif name == "at2po_leaf":
        changed = {"credit": "turntree.trainers.credit:grpo"}
    else:
        changed = {"shared_turns": "once"}
    return Arm(replace(tuned.algorithm, name=name, **changed), tuned.epochs)


def label(subject: Arm) -> str:
    """The shape, with the clip where arms differ in it."""
    a = subject.algorithm
    return subject.shape if a.ratio == "token" else f"{subject.shape}, clip {a.clip_low:g}"


def learn(world: World, subject: Arm, rate: float, seed: int) -> Trace:
    """A learning curve, and the seconds that it took."""
    start = time.perf_counter()
    curve = Learner(world, subject, seed=seed).train(world.tokens, lr=rate)
    seconds = time.perf_counter() - start
    return Trace(tuple(curve.tokens), tuple(curve.calls), tuple(round(y, 6) for y in curve.em), {"seconds": seconds})


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one world, from the store or made now."""

    store: Store
    name: str
    world: World

    def traces(self, subject: Arm, rate: float, seeds: Sequence[int]) -> list[Trace]:
        a = subject.algorithm
        options = {k: v for k, v in asdict(a).items() if v not in (None, "", {}, [])}
        shared = {"world": asdict(self.world), "arm": options, "epochs": subject.epochs, "rate": rate,
                  "prompts": PROMPTS, "eps": EPS}  # fmt: skip
        runs = [({**shared, "seed": seed}, partial(learn, self.world, subject, rate, seed)) for seed in seeds]
        return self.store.traces(f"simulator-{self.name}-{a.name}", runs)

    def score(self, subject: Arm, rate: float, seeds: int) -> float:
        """Mean exact match over the budget, on the tuning seeds."""
        found = self.traces(subject, rate, [TUNING_SEEDS + s for s in range(seeds)])
        return math.fsum(trace.area(self.world.tokens) for trace in found) / len(found)

    def tuned(self, subject: Arm, *, seeds: int, first: float | None = None) -> tuple[Arm, float]:
        """Shape and rate of the largest area; each further shape starts from the rate of the one before."""
        rate = first or FIRST_RATES[subject.epochs]
        variants = subject.variants()
        if not seeds:
            return variants[-1], rate
        best: tuple[float, Arm, float] | None = None
        for variant in variants:
            tried: dict[float, float] = {}

            def score(rate: float, variant: Arm = variant, tried: dict[float, float] = tried) -> float:
                tried[rate] = self.score(variant, rate, seeds)
                return tried[rate]

            rate, area = climb(score, rate)
            if not {rate / 2, rate * 2} <= tried.keys():
                report(f"{self.name} {subject.name} {label(variant)}: tuning ended at rate {rate:g} while still rising")
            if best is None or area > best[0]:
                best = area, variant, rate
        assert best is not None
        return best[1], best[2]

    def result(self, subject: Arm, protocol: Protocol, *, first: float | None = None) -> tuple[Arm, ArmResult]:
        """Tune, freeze, and run the fresh seeds."""
        start = time.perf_counter()
        chosen, rate = self.tuned(subject, seeds=protocol.tuning_seeds, first=first)
        fresh = range(FRESH_SEEDS, FRESH_SEEDS + protocol.seeds)
        traces = dict(zip(fresh, self.traces(chosen, rate, fresh), strict=True))
        mean = sum(t.area(self.world.tokens) for t in traces.values()) / len(traces)
        report(
            f"{self.name} {subject.name} {label(chosen)}, rate {rate:g}: mean EM {mean:.3f}, "
            f"{time.perf_counter() - start:.0f} s"
        )
        return chosen, ArmResult(subject.name, label(chosen), rate, traces)


def run_world(store: Store, name: str, names: Sequence[str], protocol: Protocol) -> Iterator[ArmResult]:
    """The named arms and ablations in one world, one after the other."""
    world = replace(WORLDS[name], tokens=round(WORLDS[name].tokens * protocol.budget))
    runs, known = Runs(store, name, world), simulator_arms()
    base: tuple[Arm, float] | None = None
    for one in names:
        if one in known:
            chosen, result = runs.result(known[one], protocol)
            base = (chosen, result.rate) if one == "at2po" else base
        else:
            tuned, rate = base or runs.tuned(known["at2po"], seeds=protocol.tuning_seeds)
            base = tuned, rate
            changed = ablation(one, tuned)
            # Another ratio has another rate, far from AT2PO's: climbed to from the usual start.
            same = changed.algorithm.ratio == tuned.algorithm.ratio
            _, result = runs.result(changed, protocol, first=rate if same else None)
        yield result
