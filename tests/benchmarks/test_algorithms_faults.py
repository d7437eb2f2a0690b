"""The algorithm benchmark under faults: torn and corrupted files, failing runs, arguments that do not fit."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import script
from turntree.errors import ConfigError, DataError

common = script("_common")
stored = script("_algorithms_store")
analysis = script("_algorithms_analysis")
simulator = script("_algorithms_simulator")
models = script("_algorithms_model")
algorithms = script("algorithms")
turnworld = script("turnworld")


def line(em: float = 0.5, points: int = 2) -> Any:
    return stored.Trace(tuple(range(points)), (0,) * points, (em,) * points)


def never() -> Any:
    raise AssertionError("this run fails")


# -- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [b"{", b'{"key": {}}', b"\xff\xfe", b"[1]", b""])
def test_a_corrupted_line_is_named(tmp_path: Path, broken: bytes) -> None:
    stored.Store(tmp_path).traces("x", [({"seed": 1}, line), ({"seed": 2}, line)])
    path = tmp_path / "x.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + broken + b"\n" + second)
    with pytest.raises(DataError, match=r"x\.jsonl, line 2: expected a finished run.* delete this line"):
        stored.Store(tmp_path).has("x", {"seed": 1})
    assert path.read_bytes() == first + broken + b"\n" + second


def test_keys_may_hold_any_character(tmp_path: Path) -> None:
    key = {"option": "é 世界 \u2028 \x85 \n \x0c"}
    stored.Store(tmp_path).traces("x", [(key, line), ({"seed": 2}, line)])
    assert stored.Store(tmp_path).traces("x", [(key, never), ({"seed": 2}, never)]) == [line(), line()]


def test_a_torn_line_of_another_process_is_cut_off_before_one_is_added(tmp_path: Path) -> None:
    store = stored.Store(tmp_path)
    store.traces("x", [({"seed": 1}, line)])
    path = tmp_path / "x.jsonl"
    with path.open("ab") as handle:
        handle.write(b'{"key": {"seed": 7}, "tok')
    store.traces("x", [({"seed": 2}, line)])
    assert [json.loads(row)["key"]["seed"] for row in path.read_text().splitlines()] == [1, 2]


def test_a_line_that_is_not_written_whole_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored.Store(tmp_path)
    store.traces("x", [({"seed": 1}, line)])
    path = tmp_path / "x.jsonl"
    before, held = path.read_bytes(), stored._held

    class Full:
        """A file on a disk that is full after a few bytes."""

        def __init__(self, handle: Any) -> None:
            self.handle, self.left = handle, 5

        def write(self, data: Any) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            self.left, written = 0, self.handle.write(data[: self.left])
            return int(written)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

    class Held:
        def __init__(self, path: Path, mode: str) -> None:
            self.inner = held(path, mode)

        def __enter__(self) -> Full:
            return Full(self.inner.__enter__())

        def __exit__(self, *error: Any) -> None:
            self.inner.__exit__(*error)

    monkeypatch.setattr(stored, "_held", Held)
    with pytest.raises(OSError, match="No space"):
        store.traces("x", [({"seed": 2}, line)])
    assert path.read_bytes() == before


def write_many(folder: Path, first: int) -> None:
    store = stored.Store(folder)
    for seed in range(first, first + 20):
        store.traces("x", [({"seed": seed}, lambda: line(points=5_000))])
        assert stored.Store(folder).has("x", {"seed": seed})  # reads while the other one writes


@pytest.mark.slow
def test_two_processes_that_write_one_file_lose_nothing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_many, args=(tmp_path, first)) for first in (0, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    found = [json.loads(row)["key"]["seed"] for row in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert sorted(found) == [*range(20), *range(100, 120)]


def test_a_folder_that_cannot_be_written_is_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="expected a folder that can be written"):
        stored.Store(tmp_path / "file").check()
    stored.Store(tmp_path / "new").check()


def test_a_run_that_fails_loses_none_that_was_under_way(tmp_path: Path) -> None:
    failed = threading.Event()

    def fails() -> Any:
        failed.set()
        return never()

    def slow() -> Any:
        assert failed.wait(30)
        return line()

    with ThreadPoolExecutor(2) as pool:
        store = stored.Store(tmp_path, pool)
        runs = [({"seed": 1}, slow), ({"seed": 2}, fails), *(({"seed": 3 + i}, line) for i in range(50))]
        with pytest.raises(AssertionError, match="this run fails") as error:
            store.traces("x", runs)
    assert '"seed": 2' in str(error.value.__notes__)
    assert stored.Store(tmp_path).has("x", {"seed": 1})


# -- what a folder of runs holds -------------------------------------------------------------------------------------


def test_a_cold_start_is_of_its_options(tmp_path: Path) -> None:
    """Those of ``--quick`` must not serve a whole run in the same folder."""

    def folder(*options: str) -> Path:
        found: Path = models.Workshop(tmp_path, models.ModelProtocol(options=options)).folder(1)
        return found

    assert folder() == tmp_path / "seed-1"
    assert len({folder(), folder("sft.steps=40"), folder("sft.steps=41")}) == 3


# -- tables ----------------------------------------------------------------------------------------------------------


def rising(em: float) -> Any:
    return stored.Trace((0, 100), (0, 10), (0.0, em))


def compared(*traces: Any, seeds: int = 1) -> list[Any]:
    results = [analysis.ArmResult(f"{i}", "4", 0.1, dict.fromkeys(range(seeds), t)) for i, t in enumerate(traces)]
    found: list[Any] = analysis.compare(results, baseline="0", budget=120)
    return found


def test_one_seed_has_no_interval() -> None:
    base, lower = compared(rising(0.3), rising(0.2))
    assert (str(base.final), str(base.to_final), str(base.to_final_calls)) == ("0.30", "1.00", "1.00")
    assert (str(lower.to_final), str(lower.to_half)) == ("not reached", "not reached")
    assert math.isnan(base.final.low)
    assert str(compared(rising(0.3), rising(0.2), seeds=2)[0].final) == "0.30 [0.30, 0.30]"


def test_a_plateau_gets_to_its_own_mean_however_that_is_rounded() -> None:
    (base,) = compared(rising(0.1 + 0.2))
    assert base.to_final.value == 1.0


def test_there_is_no_budget_to_the_end_of_a_baseline_that_has_not_learnt() -> None:
    for base, other in (compared(line(0.3), line(0.4), seeds=2), compared(line(0.3), rising(0.5), seeds=2)):
        assert [str(r.to_final) for r in (base, other)] == ["undefined", "undefined"]
        assert math.isnan(other.to_final_calls.value)


def test_who_is_there_from_the_start_needs_no_negative_nor_zero_budget() -> None:
    _, higher = compared(rising(0.5), line(0.6), seeds=2)
    assert 0 < higher.to_final.value < 0.01


def test_another_baseline_makes_other_tables_of_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = turnworld.World(10, 4, 2, (2, 3), advantage=0.5, known=0.3, tokens=6_000)
    monkeypatch.setitem(simulator.WORLDS, "A", small)
    ran = []
    for baseline in ("grpo", "grpo_x1"):
        store = stored.Store(tmp_path)
        args = Namespace(worlds=["A"], arms=["grpo_x1"], baseline=baseline, seeds=2, tuning_seeds=0, budget=1.0)
        algorithms.simulator(args, store)
        ran.append(store.ran)
    assert ran == [4, 0]
    rows = {path.stem: path.read_text().splitlines()[2:] for path in tmp_path.glob("*.md")}
    assert rows.keys() == {"simulator-A", "simulator-A-beside-grpo_x1"}
    assert "| 1.00 [1.00, 1.00] |" in rows["simulator-A"][0]
    assert "| 1.00 [1.00, 1.00] |" in rows["simulator-A-beside-grpo_x1"][1]


def test_arms_without_a_common_seed_are_refused() -> None:
    results = [analysis.ArmResult(f"{i}", "4", 0.1, {i: line()}) for i in range(2)]
    with pytest.raises(ValueError, match="expected some that both have"):
        analysis.compare(results, baseline="0", budget=1)


# -- tuning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peak", "told"), [(0.8, False), (1e9, True)])
def test_a_rate_at_the_end_of_the_search_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peak: float, told: bool
) -> None:
    monkeypatch.setattr(simulator.Runs, "score", lambda _, subject, rate, seeds: -abs(math.log2(rate / peak)))
    runs = simulator.Runs(stored.Store(tmp_path), "A", simulator.WORLDS["A"])
    runs.tuned(simulator.simulator_arms()["entropy_leaf"], seeds=2)
    assert ("while still rising" in capsys.readouterr().err) is told


# -- arguments -------------------------------------------------------------------------------------------------------


def called(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> str:
    """What the script says as it refuses."""
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    monkeypatch.setattr(module, "settle", lambda: None, raising=False)
    with pytest.raises(SystemExit) as refused:
        common.run(module.measure, description="d", options=module.options)
    return str(refused.value.code)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--workers 0", "--workers: expected a whole number of at least 1, found '0'"),
        ("--workers -1", "--workers: expected a whole number of at least 1, found '-1'"),
        ("--seeds 0", "--seeds: expected a whole number of at least 1"),
        ("--tuning-seeds -1", "--tuning-seeds: expected a whole number of at least 0"),
        ("--budget 0", "--budget: expected a number above 0, found '0'"),
        ("--budget nan", "--budget: expected a number above 0"),
        ("--budget x", "--budget: expected a number above 0, found 'x'"),
        ("--tokens 0", "--tokens: expected a whole number of at least 1"),
        ("--model-updates 0", "--model-updates: expected a whole number of at least 1"),
        ("--model-rates 0", "--model-rates: expected a number above 0"),
        ("--model-shapes 3", "--model-shapes: invalid choice: '3'"),
    ],
)
def test_numbers_out_of_range_are_refused_as_they_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert called(monkeypatch, algorithms, *arguments.split()) == "2"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--budget 1e-9", "--budget 1e-09 of world A is not one token"),
        ("--worlds A A", "--worlds: expected each value once, found A twice"),
        ("--model-updates 2 2", "--model-updates: expected each value once"),
        ("--model-rates 3e-4 0.0003", "--model-rates: expected each value once"),
        ("--model-arms tree_grpo --model-shapes 4", "none of them is a group size of tree_grpo; expected one of 2x(1"),
        ("--model-seeds 7 7", "--model-seeds: expected each value once"),
        ("--model-seeds 1 7 --model-tuning-seeds 1", "--model-seeds 1: also in --model-tuning-seeds"),
        ("--set seed=3", "--set seed=3: arms or the protocol set this themselves"),
        ("--set ++algorithm.clip_low=1", "arms or the protocol set this themselves"),
        ("--set trainer.epochs=4", "arms or the protocol set this themselves"),
        ("--set trainer.prompts_per_stepp=4", "Did you mean 'trainer.prompts_per_step'"),
        ("--keep /dev/null", "expected a folder that can be written"),
        ("--json /dev", "expected a file that can be written, found Is a directory"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_run(
    monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    for level in ("simulator", "run_models"):
        monkeypatch.setattr(algorithms, level, lambda *_: pytest.fail("a run was made"))
    assert said in called(monkeypatch, algorithms, "--workers", "1", *arguments.split())


def test_a_file_of_figures_is_checked_and_not_made(tmp_path: Path) -> None:
    algorithms.check_json(tmp_path / "new" / "figures.json")
    assert list(tmp_path.rglob("*.json")) == []
    with pytest.raises(ConfigError, match="Is a directory"):
        algorithms.check_json(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--arms chain_grpo --arm name=chain_grpo", "found chain_grpo twice"),
        ("--arm expansion=turntree.trainers.expansion:nothing rounds=1 expansions=1", "has no 'nothing'"),
        ("--arm credit=no_such_module:rule", "cannot import module 'no_such_module'"),
    ],
)
def test_a_rule_that_does_not_load_is_refused_before_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.setattr(turnworld, "measured", lambda *_: pytest.fail("an arm was measured"))
    monkeypatch.setattr(turnworld.gc, "freeze", lambda: None)
    monkeypatch.setattr(turnworld.gc, "set_threshold", lambda *_: None)
    option, _, rest = arguments.rpartition("--arm ")
    assert said in called(monkeypatch, turnworld, *option.split(), "--arm", rest)


def test_no_budget_of_zero_is_taken_for_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, turnworld, "--tokens", "0") == "2"
    assert "--tokens: expected a whole number of at least 1" in capsys.readouterr().err


# -- processes -------------------------------------------------------------------------------------------------------


def arguments(keep: Path | None) -> Namespace:
    return Namespace(quick=False, workers=2, keep=keep, json=None, level=["simulator"], worlds=["A"], budget=1.0,
                     model_seeds=[], model_tuning_seeds=[], model_updates=[2], model_shapes=[],
                     model_rates=[])  # fmt: skip


def test_a_process_that_dies_is_told_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(args: Namespace, store: Any) -> Any:
        return store.traces("x", [({"seed": 1}, partial(os._exit, 3))])

    monkeypatch.setattr(algorithms, "settle", lambda: None)
    monkeypatch.setattr(algorithms, "simulator", lost)
    monkeypatch.setattr(algorithms, "get_context", lambda _: multiprocessing.get_context("fork"))
    with pytest.raises(SystemExit, match=r"ended at once.*Finished runs are in .*: the same command goes on"):
        algorithms.measure(arguments(tmp_path))


@pytest.mark.parametrize(("kept", "said"), [(True, "the same command goes on"), (False, "nothing is kept")])
def test_an_interrupt_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: bool, said: str
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(algorithms, "settle", lambda: None)
    monkeypatch.setattr(algorithms, "simulator", interrupted)
    with pytest.raises(SystemExit, match="130"):
        algorithms.measure(arguments(tmp_path if kept else None))
    assert said in capsys.readouterr().err
