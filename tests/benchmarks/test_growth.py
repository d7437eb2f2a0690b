"""Growth without a barrier: equal trees in all arms, and what the slow engine and the slow search promise."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.benchmarks.scripts import script

growth = script("growth")
parts = script("_slow_parts")
scaling = script("scaling")
overhead = script("overhead")

FAST = parts.BatchCurve(0.0001, 0.0)


def test_every_arm_grows_the_trees_of_lock_step() -> None:
    work = growth.Work(4, growth.TURN, growth.TURNS, FAST, (0.001, 0.004))
    rows = {name: growth.grow_once(name, work, 5) for name in growth.ARMS}
    hashes = {name: row["hash"] for name, row in rows.items()}
    assert len({hashes[name] for name in growth.ARMS[:4]}) == 1
    assert growth.grow_once("barrier", work, 6)["hash"] != hashes["barrier"]
    assert all(0 <= row["idle"] < 1 and row["width"] >= 1 for row in rows.values())


def test_figures_name_the_targets_unless_quick() -> None:
    row = {"seconds": 2.0, "idle": 0.05, "width": 3.0, "hash": "x"}
    rows = [{name: row | ({"seconds": 1.0} if name == "joining" else {}) for name in growth.ARMS}]
    found = {figure.name: figure for figure in growth.figures(rows, 0, quick=False)}
    assert found["schedule=overlap, rows join one by one: against lock step"].met
    assert found["schedule=overlap, rows join one by one: engine idle"].met
    quick = [figure for figure in growth.figures(rows, 0, quick=True) if figure.target is not None]
    assert [figure.name for figure in quick] == ["arms whose trees differ from lock step's"]


def test_rows_share_the_steps_of_a_batch() -> None:
    clock = parts._Clock(parts.BatchCurve(0.002, 0.0))
    for end in clock.decode([3, 5, 8]):
        assert end.wait(20)
    assert (clock.steps, clock.row_steps) == (8, 16)


def test_a_search_takes_what_its_slowest_query_takes() -> None:
    search = parts.SlowSearch((0.001, 0.02), in_flight=2)
    queries = [str(i) for i in range(20)]
    start = time.monotonic()
    assert [p[0].id for p in search.search(queries, k=1)] == queries
    assert time.monotonic() - start >= max(map(search.seconds, queries))
    assert 0.001 <= min(map(search.seconds, queries)) < 0.006


# Overhead ------------------------------------------------------------------------------------------------------


def test_a_ledger_books_what_is_inside_once() -> None:
    ledger = overhead.Ledger()
    inner = ledger.timed("inner", lambda: time.sleep(0.03))

    def both() -> None:
        time.sleep(0.01)
        inner()

    outer = ledger.timed("outer", both)
    outer()
    assert ledger.seconds["inner"] >= 0.03
    assert 0.01 <= ledger.seconds["outer"] < 0.03 + 0.5 * ledger.seconds["inner"]
    assert ledger.inside == []


def test_watching_puts_everything_back() -> None:
    before = [getattr(owner, name) for owner, name, _ in overhead.PARTS]
    with overhead.Ledger().watching():
        assert all(getattr(o, n) is not b for (o, n, _), b in zip(overhead.PARTS, before, strict=True))
    assert [getattr(owner, name) for owner, name, _ in overhead.PARTS] == before


def test_the_table_adds_up() -> None:
    steps = [overhead.Step(2.0, {"engine": 1.5, "update": 0.4, "packing": 0.1})] * 2
    found = {figure.name: figure.value for figure in overhead.table("run", steps, strict=True)}
    assert found["run: a step"] == 2.0
    assert found["run: engine"] == 75.0
    assert found["run: all besides engine, retriever, score pass, update"] == pytest.approx(5.0)


# Scaling -------------------------------------------------------------------------------------------------------


def test_exponents_are_slopes_of_logarithms() -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert scaling.slope(sizes, [3 * s**1.5 for s in sizes]) == pytest.approx(1.5)


def test_a_point_counts_its_tokens() -> None:
    args = SimpleNamespace(hidden=64, layers=1, runs=1)
    leaves, turns, prompt = 3, 2, 10
    found = scaling.measured(scaling.Point(leaves, turns, prompt), args)
    each = prompt + turns * scaling.TURN + (turns - 1) * scaling.OBSERVATION
    assert found.flat == leaves * each
    assert each < found.tokens < found.flat
    assert found.pairs >= found.tokens
    assert found.seconds > 0
    assert found.megabytes > 0


def test_contexts_are_as_long_as_they_say() -> None:
    for size, point in scaling.context_points([512, 1024]):
        assert point.prompt + point.turns * scaling.TURN + (point.turns - 1) * scaling.OBSERVATION == size


def test_plots_are_drawn(tmp_path: Path) -> None:
    curve = [(n, scaling.Measured(n, n, n * n, n * 0.1, float(n))) for n in (8, 16)]
    scaling.draw(tmp_path, {"leaves": curve})
    assert {p.name for p in tmp_path.iterdir()} == {"scaling-time.svg", "scaling-memory.svg"}
    assert [f.value for f in scaling.exponents("leaves", curve)] == pytest.approx([1, 2, 1, 1])
