"""The algorithm benchmark: stored runs, budgets from curves, arms that differ where they say, the frozen gradient."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.scripts import FOLDER, script
from turntree.trainers.compose import compose
from turntree.trainers.credit import Advantages, grpo
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Tree

turnworld = script("turnworld")
worlds = script("_turnworld")
stored = script("_algorithms_store")
analysis = script("_algorithms_analysis")
simulator = script("_algorithms_simulator")
models = script("_algorithms_model")
algorithms = script("algorithms")

SMALL = worlds.World(10, 4, 2, (2, 3), advantage=0.5, known=0.3, tokens=8_000)


# -- stored runs -----------------------------------------------------------------------------------------------------


def line(speed: float, *, until: int = 1000, calls: int = 2) -> Any:
    """EM grows with the tokens to 0.8 after ``800 / speed`` of them."""
    tokens = tuple(range(0, until + 1, 10))
    em = tuple(min(0.8, speed * t / 1000) for t in tokens)
    return stored.Trace(tokens, tuple(calls * t for t in tokens), em)


def never() -> Any:
    raise AssertionError("a stored run must not run again")


def test_a_finished_run_is_stored_and_never_runs_twice(tmp_path: Path) -> None:
    key = {"arm": "a", "rate": 0.1, "seed": 3}
    first = stored.Store(tmp_path).traces("x", [(key, lambda: line(1))])
    again = stored.Store(tmp_path)
    assert again.traces("x", [(dict(reversed(key.items())), never)]) == first
    assert again.ran == 0
    assert again.has("x", key)
    other = {**key, "rate": 0.2}
    assert not again.has("x", other)
    assert again.traces("x", [(other, lambda: line(2)), (key, never)]) == [line(2), *first]
    assert again.ran == 1


def test_runs_of_a_pool_come_in_the_order_asked_for_and_are_stored_as_they_end(tmp_path: Path) -> None:
    def slow() -> Any:
        until = time.monotonic() + 30
        while not (tmp_path / "x.jsonl").exists():  # the other run, asked for later
            assert time.monotonic() < until
            time.sleep(0.01)
        return line(1)

    with ThreadPoolExecutor(2) as pool:
        store = stored.Store(tmp_path, pool)
        assert store.traces("x", [({"seed": 1}, slow), ({"seed": 2}, lambda: line(2))]) == [line(1), line(2)]
    assert [json.loads(row)["key"]["seed"] for row in (tmp_path / "x.jsonl").read_text().splitlines()] == [2, 1]
    with ThreadPoolExecutor(1) as pool, pytest.raises(AssertionError, match="run again"):
        stored.Store(tmp_path, pool).traces("x", [({"seed": 3}, lambda: line(3)), ({"seed": 4}, never)])
    assert stored.Store(tmp_path).has("x", {"seed": 3})


@pytest.mark.slow
def test_processes_make_what_this_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simulator.WORLDS, "small", SMALL)
    monkeypatch.syspath_prepend(FOLDER)  # processes find the scripts as this one does
    protocol = simulator.Protocol(seeds=2, tuning_seeds=0, budget=0.1)
    alone = list(simulator.run_world(stored.Store(tmp_path / "alone"), "small", ["grpo"], protocol))
    with algorithms.workers(2) as pool:
        store = stored.Store(tmp_path / "pool", pool)
        (found,) = simulator.run_world(store, "small", ["grpo"], protocol)
    assert [(t.tokens, t.em) for t in found.traces.values()] == [(t.tokens, t.em) for t in alone[0].traces.values()]


def test_a_line_that_a_killed_process_left_is_made_again(tmp_path: Path) -> None:
    store = stored.Store(tmp_path)
    for seed in (1, 2):
        store.traces("x", [({"seed": seed}, lambda: line(1))])
    path = tmp_path / "x.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    store = stored.Store(tmp_path)
    store.traces("x", [({"seed": 1}, never), ({"seed": 2}, lambda: line(1))])
    assert [json.loads(row)["key"]["seed"] for row in path.read_text().splitlines()] == [1, 2]


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = stored.Store(tmp_path)
    with pytest.raises(AssertionError):
        store.traces("x", [({"seed": 1}, never)])
    assert not stored.Store(tmp_path).has("x", {"seed": 1})


def test_areas_interpolate_and_stay_flat_after_the_end() -> None:
    curve = stored.Trace((0, 10, 30), (0, 1, 2), (0.0, 0.2, 0.6))
    assert curve.area(30) == pytest.approx((1.0 + 8.0) / 30)
    assert curve.area(20) == pytest.approx((1.0 + 3.0) / 20)
    assert curve.area(40) == pytest.approx((1.0 + 8.0 + 6.0) / 40)
    assert [curve.em_at(t) for t in (0, 5, 20, 99)] == pytest.approx([0.0, 0.1, 0.4, 0.6])
    with pytest.raises(ValueError, match="3, 3 and 2"):
        stored.Trace((0, 10, 30), (0, 1, 2), (0.0, 0.2))


# -- budgets ---------------------------------------------------------------------------------------------------------


def result(name: str, traces: Sequence[Any]) -> Any:
    return analysis.ArmResult(name, "4", 0.1, dict(enumerate(traces)))


def compared(*results: Any, **options: Any) -> dict[str, Any]:
    return {r.arm.name: r for r in analysis.compare(results, baseline="base", budget=1000, **options)}


def test_an_arm_that_learns_twice_as_fast_needs_half() -> None:
    speeds = [0.4, 0.5, 0.6, 0.5]
    rows = compared(result("base", [line(s) for s in speeds]), result("fast", [line(2 * s) for s in speeds]))
    fast, base = rows["fast"], rows["base"]
    assert (base.to_final.value, base.to_final_calls.value, base.to_nearly.value) == (1.0, 1.0, 1.0)
    assert fast.to_final.value == pytest.approx(0.5, abs=0.01)
    assert fast.to_nearly.value == pytest.approx(0.5, abs=0.01)
    assert fast.to_final.low == pytest.approx(0.5, abs=0.01)
    assert fast.to_final.high == pytest.approx(0.5, abs=0.01)
    assert base.final.low < base.final.value < base.final.high
    assert fast.final.value == pytest.approx(0.8, abs=0.02)
    assert str(fast.to_final) == "0.50 [0.50, 0.50]"


def test_calls_are_a_budget_of_their_own() -> None:
    few = [line(1.0, calls=1) for _ in range(3)]
    rows = compared(result("base", [line(1.0, calls=4)] * 3), result("few", few))
    assert rows["few"].to_final.value == pytest.approx(1.0)
    assert rows["few"].to_final_calls.value == pytest.approx(0.25, abs=0.01)


def test_what_is_not_reached_is_said_so() -> None:
    rows = compared(result("base", [line(0.6), line(0.7)]), result("slow", [line(0.1), line(0.2)]))
    assert rows["slow"].to_final.value == math.inf
    assert str(rows["slow"].to_final) == "not reached"
    assert rows["slow"].to_half.value == math.inf
    # The baseline alone does not get there: its budget counts, so that the ratio is an upper bound.
    turned = compared(result("base", [line(0.1), line(0.2)]), result("fast", [line(1.0), line(1.0)]))
    assert turned["fast"].to_half.value == pytest.approx(0.5, abs=0.01)


def test_only_seeds_that_both_have_are_compared() -> None:
    slow = replace(result("slow", []), traces={1: line(0.5), 2: line(0.5), 7: line(0.0)})
    rows = compared(result("base", [line(0.5)] * 3), slow)
    assert rows["slow"].seeds == 2
    assert rows["slow"].final.value == pytest.approx(0.475, abs=0.01)


def test_a_table_has_a_row_an_arm_and_figures_with_their_intervals() -> None:
    rows = list(compared(result("base", [line(0.6)] * 2), result("b", [line(0.9)] * 2)).values())
    text = analysis.markdown(rows).splitlines()
    assert len(text) == 4
    assert text[3].startswith("| b | 4 | 0.1 | 2 | 0.80")
    names = [f.name for f in analysis.figures("world A", rows)]
    assert "world A b 4: tokens to the baseline's final EM, 95 % to" in names
    assert len(names) == len(set(names)) == 2 * 20
    drawn = analysis.series([r.arm for r in rows], budget=1000)
    assert [len(s.x) for s in drawn] == [21, 21]


def test_noisy_curves_are_means_over_neighbours() -> None:
    trace = stored.Trace((0, 10, 20, 100), (0, 0, 0, 0), (0.0, 0.3, 0.6, 1.0))
    smooth = analysis.smoothed(result("a", [trace]), 20).traces[0]
    assert smooth.em == pytest.approx((0.15, 0.3, 0.45, 1.0))


# -- the simulator ---------------------------------------------------------------------------------------------------


def test_a_world_is_run_once_and_ablations_differ_from_at2po_in_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(simulator.WORLDS, "small", SMALL)
    names = ("grpo", "at2po", *simulator.ABLATIONS)
    protocol = simulator.Protocol(seeds=2, tuning_seeds=0, budget=0.5)
    store = stored.Store(tmp_path)
    results = list(simulator.run_world(store, "small", names, protocol))
    assert [r.name for r in results] == list(names)
    assert all(len(r.traces) == 2 for r in results)
    assert all(t.tokens[-1] >= 4_000 for r in results for t in r.traces.values())
    assert store.ran == 2 * len(names)
    again = stored.Store(tmp_path)
    assert list(simulator.run_world(again, "small", names, protocol)) == results
    assert again.ran == 0
    whole = simulator.simulator_arms()["at2po"].variants()[0]
    for name in simulator.ABLATIONS:
        other = simulator.ablation(name, whole).algorithm
        changed = {k for k, v in asdict(whole.algorithm).items() if asdict(other)[k] != v} - {"name"}
        assert changed <= {"expansion"} or changed <= {"credit"} or changed <= {"shared_turns"} or "ratio" in changed
        assert changed


def test_tuning_takes_shape_and_rate_of_the_largest_area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = simulator.Runs(stored.Store(tmp_path), "small", SMALL)
    best = {"4": 0.2, "8": 0.8}
    monkeypatch.setattr(
        simulator.Runs, "score", lambda _, subject, rate, seeds: len(subject.shape) + (subject.shape == "8")
        - abs(math.log2(rate / best[subject.shape])) * 0.1 * seeds
    )  # fmt: skip
    chosen, rate = runs.tuned(simulator.simulator_arms()["grpo"], seeds=2)
    assert (chosen.shape, rate) == ("8", pytest.approx(0.8))


# -- the language model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [*models.MODEL_ARMS, *models.MODEL_FURTHER], ids=lambda a: a.name)
def test_every_arm_of_the_language_model_composes_and_has_two_updates_or_more(arm: Any) -> None:
    parts = [(), *models.MODEL_ABLATIONS.values()] if arm.name == "at2po" else [()]
    for more in parts:
        config = compose([f"experiment={models.PRESET}", *arm.options, *arm.shapes[0], *more])
        algorithm = config.algorithm
        assert config.trainer.epochs >= 2
        assert algorithm.trees * (algorithm.chains + algorithm.rounds * algorithm.expansions) in (6, 8, 10)
    assert models.shape_label(arm.shapes[0]) in {"8", "2+2x2", "2x(1+2x2)"}


def test_group_sizes_and_rates_can_be_frozen(tmp_path: Path) -> None:
    frozen = models.ModelProtocol(shapes=("4", "2+2x2"), rates=(1e-4,), tuning_seeds=(), updates=(4,))
    runs = models.Runs(models.Workshop(tmp_path, frozen), stored.Store(tmp_path))
    for name, label in (("grpo", "4"), ("ours_wide", "2+2x2"), ("at2po_once", "2+2x2")):
        chosen = runs.chosen(runs.workshop.arm(name))
        assert (chosen.label, chosen.rate) == (f"{label}, 4 updates", 1e-4)
    free = models.Workshop(tmp_path, models.ModelProtocol()).arm("grpo")
    assert (len(free.shapes), free.rates) == (2, (6e-4, 3e-4))


def test_the_curve_is_of_first_chains_and_lies_at_the_tokens_before_each_step(tmp_path: Path) -> None:
    for step in (1, 2):
        groups = [Group(str(i), [tree(str(i), first=float(step == 2 and i == 0))]) for i in range(2)]
        TreeStore(tmp_path / "trees", seed=0).write(step, groups)
    rows = [{"step": s, "total/generated_tokens": 100 * s, "total/tool_calls": 7 * s, "total/updates": 2 * s,
             "total/seconds": 3.0 * s} for s in (1, 2)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = models.curve(tmp_path, {"em_greedy": 0.5})
    assert (found.tokens, found.calls, found.em) == ((0, 100), (0, 7), (0.0, 0.5))
    assert found.extra == {"updates": 4.0, "seconds": 6.0, "em_greedy": 0.5}


def tree(uid: str, *, first: float) -> Tree:
    """One chain of the given reward, and a branch that is right and does not count."""
    root = Node()
    for ordinal, (reward, picked) in enumerate(((first, None), (1.0, root))):
        node = Node(turn_ids=(1,), logprobs=(0.0,), status="answered", reward=reward, ordinal=ordinal, picked=picked)
        root.add_child(node)
    return Tree(root, uid)


# -- the frozen gradient ---------------------------------------------------------------------------------------------


def negated(groups: Sequence[Group]) -> Advantages:
    """A wrong rule: what succeeded is made less likely."""
    right = grpo(groups)
    return Advantages("turn", tuple(tuple(-row for row in group) for group in right.values))


def of_the_next(groups: Sequence[Group]) -> Advantages:
    """A wrong rule: every trajectory gets the credit of the next one."""
    right = grpo(groups)
    return Advantages(
        "turn",
        tuple(tuple(np.full(len(row), group[i - 1][0]) for i, row in enumerate(group)) for group in right.values),
    )


def frozen(subject: Any) -> float:
    """Thousands of sampled tokens until the estimated gradient has a cosine of 0.5 with the true one, over 3 starts."""
    return float(np.mean([turnworld.frozen(SMALL, subject, seed=s, tokens=100_000) / 1e3 for s in range(3)]))


POINTING = ("chain_grpo", "chain_rloo", "tree_grpo", "at2po", "entropy_leaf", "guided_loo", "ucb_tree", "arpo",
            "tree_diff", "value_variance")  # fmt: skip


@pytest.mark.parametrize("name", POINTING)
def test_a_shipped_rule_points_along_the_true_gradient(name: str) -> None:
    subject = next(a for a in turnworld.arms() if a.name == name).variants()[0]
    assert frozen(subject) < 45


@pytest.mark.parametrize("rule", [negated, of_the_next])
def test_a_wrong_rule_never_does(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wrong_rules", sys.modules[__name__])
    subject = turnworld.arm("wrong", chains=4, credit=f"wrong_rules:{rule.__name__}")
    assert frozen(subject) == math.inf
