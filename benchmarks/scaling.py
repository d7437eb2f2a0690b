"""How time and memory of an update grow: against leaves, turns and context, with the exponents of the growth.

Every point is one tree in a process of its own: packing, forward pass, backward pass and one step of AdamW. Time is CPU
time (the fastest of some runs), memory the peak above model, gradients and moments. The exponent p of a sweep is the
slope of log time (memory) against log size, a fit over all its points: time grows as size ** p.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _common import Figure, run
from _shapes import VOCABULARY, Lengths, Shape, decoder, grow_group

from turntree.trainers.expansion import random_nodes
from turntree.trainers.forward import packed_logprobs
from turntree.trainers.packing import column, pack_groups
from turntree.trainers.report.plots import Series, plot_curve

TURN, OBSERVATION = 16, 48
WHOLE = 1 << 30


@dataclass(frozen=True, slots=True)
class Point:
    """One tree: ``leaves`` trajectories of ``turns`` turns after ``prompt`` tokens, in packs of ``budget``."""

    leaves: int = 16
    turns: int = 4
    prompt: int = 256
    budget: int = WHOLE


@dataclass(frozen=True, slots=True)
class Measured:
    """Unique tokens of the tree, tokens of its trajectories one by one, pairs of tokens that see each other."""

    tokens: int
    flat: int
    pairs: int
    seconds: float
    megabytes: float


def context_points(sizes: Sequence[int]) -> list[tuple[int, Point]]:
    """Contexts of ``sizes`` tokens in all: the prompt is what four turns leave of them."""
    return [(size, Point(prompt=size - 4 * TURN - 3 * OBSERVATION)) for size in sizes]


def sweeps(*, quick: bool) -> dict[str, list[tuple[int, Point]]]:
    """Sizes and points by what is swept."""
    leaves, turns = ((8, 16, 32), (2, 4)) if quick else ((8, 16, 32, 64, 128, 256), (2, 4, 8, 16))
    context = (512, 1024) if quick else (512, 1024, 2048, 4096, 8192)
    return {
        "leaves": [(n, Point(leaves=n)) for n in leaves],
        "leaves, packs of 4,096 tokens": [(n, Point(leaves=n, budget=4096)) for n in leaves],
        "turns": [(n, Point(turns=n)) for n in turns],
        "context": context_points(context),
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the decoder")
    parser.add_argument("--layers", type=int, default=4, help="layers of the decoder")
    parser.add_argument("--runs", type=int, default=2, help="runs of a point, after one that warms up")
    parser.add_argument("--plots", type=Path, default=None, help="folder for scaling-time.svg and scaling-memory.svg")


def measure(args: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    curves: dict[str, list[tuple[int, Measured]]] = {}
    for name, points in sweeps(quick=args.quick).items():
        curves[name] = [(size, in_process(point, args)) for size, point in points]
        for size, found in curves[name]:
            label = f"{size} {name}" if name != "context" else f"context of {size}"
            figures += [
                Figure(f"{label}: unique tokens", found.tokens, "tokens", "lower"),
                Figure(
                    f"{label}: tokens of the trajectories by unique tokens", found.flat / found.tokens, "x", "higher"
                ),
                Figure(f"{label}: time", found.seconds, "s", "lower"),
                Figure(f"{label}: memory", found.megabytes, "MB", "lower"),
            ]
    figures += [figure for name, curve in curves.items() for figure in exponents(name, curve)]
    if args.plots is not None:
        draw(args.plots, curves)
    return figures


def exponents(name: str, curve: Sequence[tuple[int, Measured]]) -> list[Figure]:
    """Of unique tokens, of seen pairs, of time and of memory."""
    sizes = [size for size, _ in curve]
    columns: dict[str, list[float]] = {
        "unique tokens": [m.tokens for _, m in curve],
        "pairs of tokens in attention": [m.pairs for _, m in curve],
        "time": [m.seconds for _, m in curve],
        "memory": [m.megabytes for _, m in curve],
    }
    return [Figure(f"{name}: exponent of {what}", slope(sizes, ys), "", "lower") for what, ys in columns.items()]


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent p of ``value = c * size ** p``, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def draw(folder: Path, curves: dict[str, list[tuple[int, Measured]]]) -> None:
    """Both plots show multiples of the smallest point, so that sweeps can be compared."""
    folder.mkdir(parents=True, exist_ok=True)
    for what in ("time", "memory"):
        lines = []
        for name, curve in curves.items():
            ys = [m.seconds if what == "time" else m.megabytes for _, m in curve]
            first = curve[0][0]
            lines.append(Series(name, [size / first for size, _ in curve], [y / ys[0] for y in ys]))
        plot_curve(
            folder / f"scaling-{what}.svg", lines, x_label="times the smallest size", y_label=f"times the {what} there"
        )


# -- one point ----------------------------------------------------------------------------------------------------


def in_process(point: Point, args: argparse.Namespace) -> Measured:
    """Measure in a fresh process, whose peak of memory is the point's own."""
    context = multiprocessing.get_context("fork")  # torch is imported once, and has computed nothing yet
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(point, args, sender))
    process.start()
    sender.close()
    try:
        found: Measured = receiver.recv()
        return found
    finally:
        process.join(60)


def _child(point: Point, args: argparse.Namespace, sender: Any) -> None:
    torch.set_num_threads(1)
    sender.send(measured(point, args))


def measured(point: Point, args: argparse.Namespace) -> Measured:
    """One update of a tree."""
    lengths = Lengths(point.prompt, (TURN, TURN), (OBSERVATION, OBSERVATION), (point.turns, point.turns))
    shape = Shape("scaling", 1, 1, 1, point.leaves - 1, random_nodes, lengths)
    group = grow_group(shape, 0, vocabulary=VOCABULARY)
    model = decoder(args, positions=16384)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    def update() -> float:
        start = time.process_time()
        for pack in pack_groups([group], max_pack_tokens=point.budget):
            logp = packed_logprobs(model, pack).logp[column(pack, "occurrences", "token")]
            (-logp.mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return time.process_time() - start

    _forget_peak()
    before = _resident("VmRSS")
    update()
    peak = _resident("VmHWM") - before
    [pack] = pack_groups([group], max_pack_tokens=WHOLE)
    end = column(pack, "tokens", "subtree_end")
    leaves = group.scored_leaves()
    flat = sum(
        point.prompt + sum(len(n.turn_ids) + len(n.observation_ids) for n in leaf.trajectory()) for leaf in leaves
    )
    pairs = int((end - torch.arange(len(end))).sum())
    return Measured(len(end), flat, pairs, min(update() for _ in range(args.runs)), max(peak, 0.1))


def _forget_peak() -> None:
    """The peak of resident memory starts again from what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _resident(key: str) -> float:
    """MB, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1024


if __name__ == "__main__":
    run(measure, description="scaling of an update", options=options)
