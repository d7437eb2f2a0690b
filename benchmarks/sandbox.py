"""What a cell of the code tool costs: in a fresh sandbox, after a fork, after executing the cells before it again."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run

from turntree.envs.core import ToolCall, ToolResult
from turntree.envs.sandbox import PythonTool, probe

CELLS = ("import math\nx = 1832", "y = 1790\nx - y", "z = [n * n for n in range(1000)]\nsum(z)", "math.gcd(x, y)")


def measure(args: argparse.Namespace) -> list[Figure]:
    if probe().missing:
        raise SystemExit(f"code cannot be isolated here: {probe().missing}")
    rounds = 10 if args.quick else 60
    return [*latency(rounds), *kinds(rounds), *episodes(args)]


def latency(rounds: int) -> list[Figure]:
    """Milliseconds of one cell, medians: the first of an episode, a later one of one, one of a sibling."""
    warm, anew = PythonTool(), PythonTool(live=0)
    step(warm, "1")  # starts what makes the sandboxes
    step(anew, "1")
    cold = [timed(lambda: step(warm, CELLS[0])) for _ in range(rounds)]
    prefix = play(warm, CELLS)
    forked = [timed(lambda: step(warm, "x + y", prefix)) for _ in range(rounds)]
    replayed = [timed(lambda: step(anew, "x + y", prefix)) for _ in range(rounds)]
    exclusive = [continued(warm) for _ in range(rounds)]
    figures = [
        Figure("first cell of an episode (fresh sandbox)", median(cold), "ms", "lower", 100.0),
        Figure("cell after 4 cells, forked from a live interpreter", median(forked), "ms", "lower", 20.0),
        Figure("cell after 4 cells, executed again in a fresh sandbox", median(replayed), "ms", "lower"),
        Figure("cell of an interpreter that cannot be forked (it has a file)", median(exclusive), "ms", "lower"),
        Figure("executed again / forked", median(replayed) / median(forked), "x", "higher", 2.0),
    ]
    for tool in (warm, anew):
        tool.pool.close()
    return figures


def continued(tool: PythonTool) -> float:
    """A second cell in an interpreter that goes on itself."""
    memory = step(tool, "open('file', 'w').close()")
    return timed(lambda: step(tool, "1 + 1", memory))


def kinds(rounds: int) -> list[Figure]:
    """The first cell by what builds the walls, and with numpy to import."""
    figures = []
    found = {"unshare": probe().unshare.works, "bubblewrap": probe().bubblewrap.works}
    for kind in (kind for kind, works in found.items() if works):
        options: dict[str, Any] = {"isolation": kind, "wall_s": 31}
        figures.append(first(f"first cell, {kind}", PythonTool(**options), "1", rounds))
    with_numpy = PythonTool(packages=("numpy",), memory_mb=1024)
    figures.append(first("first cell that imports numpy", with_numpy, "import numpy\nnumpy.arange(3).sum()", rounds))
    return figures


def first(name: str, tool: PythonTool, code: str, rounds: int) -> Figure:
    step(tool, code)
    found = Figure(name, median([timed(lambda: step(tool, code)) for _ in range(rounds)]), "ms", "lower")
    tool.pool.close()
    return found


def episodes(args: argparse.Namespace) -> list[Figure]:
    """Episodes of four cells a second: chains side by side, and trees of siblings that share a first cell."""
    many = 16 if args.quick else 128
    figures = []
    for name, live in (("forked", 64), ("executed again", 0)):
        tool = PythonTool(live=live)
        step(tool, "1")
        seconds = timed(functools.partial(chains, tool, many)) / 1000
        figures.append(Figure(f"episodes of 4 cells, {name}", many / seconds, "episodes/s", "higher"))
        root = step(tool, CELLS[0])
        calls = [ToolCall("python", f"x + {i}", root) for i in range(many)]
        seconds = timed(functools.partial(results, tool, calls)) / 1000
        figures.append(Figure(f"siblings of one batch, {name}", many / seconds, "cells/s", "higher"))
        tool.pool.close()
    return figures


def chains(tool: PythonTool, many: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: play(tool, CELLS), range(many)))


def play(tool: PythonTool, cells: Sequence[str]) -> Any:
    """What the tool remembers after the cells."""
    memory = None
    for code in cells:
        memory = step(tool, code, memory)
    return memory


def step(tool: PythonTool, code: str, memory: Any = None) -> Any:
    return results(tool, [ToolCall("python", code, memory)])[0].memory


def results(tool: PythonTool, calls: Sequence[ToolCall]) -> list[ToolResult]:
    outcomes = tool.run(calls)
    found = [outcome for outcome in outcomes if isinstance(outcome, ToolResult)]
    if len(found) != len(outcomes):
        raise SystemExit(f"a cell could not be run: {outcomes}")
    return found


def timed(act: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1000


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    run(measure, description="Cells of the code tool")
