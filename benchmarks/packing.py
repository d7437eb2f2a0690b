"""Training on trees: each token once (packed), beside a row a trajectory, packed or padded. Exactness, time, memory."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _common import Figure, run
from _shapes import SHAPES, VOCABULARY, Lengths, Shape, chains_of, decoder, grow_group
from torch import Tensor

from turntree.trainers.config import TrainerConfig
from turntree.trainers.forward import packed_logprobs
from turntree.trainers.packing import Pack, column, pack_groups, row_tokens
from turntree.trainers.recompute import Recompute, recompute_activations

MODES: tuple[str, ...] = (
    "packed",
    "leaf-packed rows",
    "padded rows, logits at loss positions",
    "padded rows, full logits",
)
#: Packed, by ``trainer.activation_checkpointing``; the modes above have its default.
CHECKPOINTING: tuple[Recompute, ...] = ("none", "selective", "full")
DEFAULT = cast("Recompute", TrainerConfig().activation_checkpointing)
PARTS = ("times", "checkpointing", "memory", "exactness")
#: Against padded rows with full logits, by shape; the share of the ideal and of the memory hold for every shape.
TARGETS = dict(zip((shape.name for shape in SHAPES), (2.6, 2.4, 4.5), strict=True))
IDEAL, MEMORY, EXACT = 0.9, 0.25, 1e-5
#: Rows of one padded forward pass where time is measured: what fits the caches, and so is kind to the padded modes.
#: Where memory is measured, every mode has the whole group in one pass.
ROWS = 4


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the decoder")
    parser.add_argument("--layers", type=int, default=6, help="layers of the decoder")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=int,
        choices=range(len(SHAPES)),
        default=range(len(SHAPES)),
        help="which trees, from 0",
    )


def measure(args: argparse.Namespace) -> list[Figure]:
    torch.set_num_threads(args.threads)
    seeds, rounds = ((0,), 1) if args.quick else ((0, 1, 2), 3)
    if args.quick:  # what has targets, on the model that they are for
        args.shapes, args.parts = args.shapes[:1], [part for part in args.parts if part != "checkpointing"]
    figures: list[Figure] = []
    for shape in (SHAPES[i] for i in args.shapes):
        if "times" in args.parts:
            figures += _times(args, shape, seeds, rounds)
        if "checkpointing" in args.parts:
            figures += _checkpointing(args, shape, rounds)
        if "memory" in args.parts:
            figures += _memory(args, shape)
    return [*figures, *(_exactness(args, SHAPES[0]) if "exactness" in args.parts else ())]


# -- one update in each mode --------------------------------------------------------------------------------------


def _prepare(shape: Shape, seed: int, *, rows_a_pass: int = ROWS) -> dict[str, Callable[[Any], Tensor]]:
    """For each mode, a function of the model: forward, backward, and the log-probs of all occurrences [O].

    The loss is the sum of log-probs with random weights: the same occurrences in the same order in every mode.
    """
    group = grow_group(shape, seed, vocabulary=VOCABULARY)
    packs = pack_groups([group], max_pack_tokens=1 << 30)
    chains = pack_groups(chains_of(group), max_pack_tokens=1 << 30)
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=_occurrences(packs))).float()
    rows, targets = _rows(chains[0]), _targets(chains[0])
    return {
        MODES[0]: lambda model: _packed(model, packs[0], weights),
        MODES[1]: lambda model: _packed(model, chains[0], weights),
        MODES[2]: lambda model: _padded(model, rows, targets, weights, _some_logits, rows_a_pass),
        MODES[3]: lambda model: _padded(model, rows, targets, weights, _all_logits, rows_a_pass),
    }


def _occurrences(packs: Sequence[Pack]) -> int:
    return sum(len(column(pack, "occurrences", "token")) for pack in packs)


def _rows(pack: Pack) -> list[Tensor]:
    ids = column(pack, "tokens", "ids")
    return [ids[path] for path in row_tokens(pack)]


def _targets(pack: Pack) -> list[Tensor]:
    """Of each row, the indices of its sampled tokens."""
    mask = column(pack, "tokens", "loss_mask")
    return [torch.nonzero(mask[path]).flatten() for path in row_tokens(pack)]


def _packed(model: Any, pack: Pack, weights: Tensor) -> Tensor:
    logp = packed_logprobs(model, pack).logp[column(pack, "occurrences", "token")]
    (logp * weights.to(logp.dtype)).sum().backward()
    return logp.detach()


def _padded(
    model: Any,
    rows: Sequence[Tensor],
    targets: Sequence[Tensor],
    weights: Tensor,
    logprobs: Callable[[Any, Tensor, Tensor, Sequence[Tensor]], Tensor],
    rows_a_pass: int,
) -> Tensor:
    """Rows padded at the right to the longest of all, ``rows_a_pass`` a pass, gradients accumulated."""
    longest, done, out = max(map(len, rows)), 0, []
    for start in range(0, len(rows), rows_a_pass):
        batch, wanted = rows[start : start + rows_a_pass], targets[start : start + rows_a_pass]
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        for i, row in enumerate(batch):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        logp = logprobs(model, ids, mask, wanted)
        part = weights[done : done + len(logp)].to(logp.dtype)
        (logp * part).sum().backward()
        done += len(logp)
        out.append(logp.detach())
    return torch.cat(out)


def _all_logits(model: Any, ids: Tensor, mask: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    logp = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
    picked = logp.gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([picked[i, at - 1] for i, at in enumerate(wanted)])


def _some_logits(model: Any, ids: Tensor, mask: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    before = torch.cat([hidden[i, at - 1] for i, at in enumerate(wanted)])
    target = torch.cat([ids[i, at] for i, at in enumerate(wanted)])
    logp: Tensor = model.get_output_embeddings()(before).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    return logp


# -- figures ------------------------------------------------------------------------------------------------------


def _times(args: argparse.Namespace, shape: Shape, seeds: Sequence[int], rounds: int) -> list[Figure]:
    """Ratios of CPU time, modes in turns on the same tree, the fastest round of each; geometric mean over trees."""
    models = {mode: _model(args, mode) for mode in MODES}
    _warm(models.items())
    ratios: dict[str, list[float]] = {mode: [] for mode in MODES[1:]}
    ideal: dict[str, list[float]] = {"flat": [], "padded": []}
    for seed in seeds:
        best = dict.fromkeys(MODES, float("inf"))
        ways = _prepare(shape, seed)
        for _ in range(rounds):
            for mode, way in ways.items():
                models[mode].zero_grad()
                start = time.process_time()
                way(models[mode])
                best[mode] = min(best[mode], time.process_time() - start)
        for mode in MODES[1:]:
            ratios[mode].append(best[mode] / best["packed"])
        for name, value in _sizes(shape, seed).items():
            ideal[name].append(value)
    means = {name: _mean(values) for name, values in (ratios | ideal).items()}
    flat, full = means["leaf-packed rows"], means[MODES[3]]
    return [
        Figure(f"{shape.name}: unique-token ideal against leaf-packed rows", means["flat"], "x", "higher"),
        Figure(f"{shape.name}: unique-token ideal against padded rows", means["padded"], "x", "higher"),
        Figure(f"{shape.name}: packed against leaf-packed rows", flat, "x", "higher"),
        Figure(f"{shape.name}: share of the ideal", flat / means["flat"], "", "higher", IDEAL),
        Figure(f"{shape.name}: packed against padded rows, logits at loss positions", means[MODES[2]], "x", "higher"),
        Figure(f"{shape.name}: packed against padded rows, full logits", full, "x", "higher", TARGETS[shape.name]),
    ]


def _warm(models: Iterable[tuple[str, Any]]) -> None:
    """One update of a small tree for each (mode, model): what is imported and set up on first use is not counted."""
    ways = _prepare(replace(SHAPES[0], lengths=Lengths(40).scaled(0.1)), 0)
    for mode, model in models:
        ways[mode](model)


def _model(args: argparse.Namespace, mode: str) -> Any:
    """The decoder as a mode or an item of ``CHECKPOINTING`` has it; padded rows keep everything, as they come."""
    model = decoder(args)
    if mode in CHECKPOINTING:
        recompute_activations(model, mode)
    elif mode in MODES[:2]:
        recompute_activations(model, DEFAULT)
    return model


def _checkpointing(args: argparse.Namespace, shape: Shape, rounds: int) -> list[Figure]:
    """CPU time of a packed update by what is computed again, the fastest of rounds in turns; peak memory of each."""
    models: dict[str, Any] = {how: _model(args, how) for how in CHECKPOINTING}
    _warm([("packed", model) for model in models.values()])
    way, best = _prepare(shape, 0)["packed"], dict.fromkeys(models, float("inf"))
    for _ in range(rounds):
        for how, model in models.items():
            model.zero_grad()
            start = time.process_time()
            way(model)
            best[how] = min(best[how], time.process_time() - start)
    name = f"{shape.name}: packed, activation_checkpointing="
    return [
        *(Figure(f"{name}{how}, time", best[how] / best["none"], "x", "lower") for how in CHECKPOINTING),
        *(Figure(f"{name}{how}, peak memory", _in_process(args, shape, how), "MB", "lower") for how in CHECKPOINTING),
    ]


def _mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def _sizes(shape: Shape, seed: int) -> dict[str, float]:
    """Tokens of all rows, unpadded and padded, by unique tokens."""
    group = grow_group(shape, seed, vocabulary=VOCABULARY)
    [pack], [chains] = (pack_groups(gs, max_pack_tokens=1 << 30) for gs in ([group], chains_of(group)))
    unique, lengths = len(column(pack, "tokens", "ids")), [len(row) for row in _rows(chains)]
    return {"flat": sum(lengths) / unique, "padded": max(lengths) * len(lengths) / unique}


def _memory(args: argparse.Namespace, shape: Shape) -> list[Figure]:
    """Peak memory of an update above that of the model, each mode in a process of its own."""
    peaks = {mode: _in_process(args, shape, mode) for mode in ("packed", "leaf-packed rows", MODES[3])}
    return [
        *(Figure(f"{shape.name}: peak memory, {mode}", peak, "MB", "lower") for mode, peak in peaks.items()),
        Figure(
            f"{shape.name}: peak memory against padded rows", peaks["packed"] / peaks[MODES[3]], "", "lower", MEMORY
        ),
    ]


def _in_process(args: argparse.Namespace, shape: Shape, mode: str) -> float:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(args, shape.name, mode, sender))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        process.join(60)


def _peak(args: argparse.Namespace, name: str, mode: str, sender: Any) -> None:
    torch.set_num_threads(args.threads)
    shape = next(s for s in SHAPES if s.name == name)
    model = _model(args, mode)
    _warm([("packed" if mode in CHECKPOINTING else mode, model)])
    way = _prepare(shape, 0, rows_a_pass=1 << 30)["packed" if mode in CHECKPOINTING else mode]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients belong to the model, in every mode
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _resident("VmRSS")
    way(model)
    sender.send(_resident("VmHWM") - before)


def _resident(key: str) -> float:
    """MB, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def _exactness(args: argparse.Namespace, shape: Shape) -> list[Figure]:
    """Largest differences from padded rows, in float32: of log-probs, and of gradients by the largest gradient."""
    found = {}
    for mode, way in _prepare(shape, 0).items():
        if mode in (MODES[0], MODES[3]):
            model = _model(args, mode)
            logp = way(model)
            found[mode] = logp, [p.grad.clone() for p in model.parameters() if p.grad is not None]
    (logp, grads), (row_logp, row_grads) = found[MODES[0]], found[MODES[3]]
    largest = max(float(g.abs().max()) for g in row_grads)
    gap = max(float((a - b).abs().max()) for a, b in zip(grads, row_grads, strict=True))
    return [
        Figure("largest difference of log-probs", float((logp - row_logp).abs().max()), "nats", "lower", EXACT),
        Figure("largest difference of gradients, relative", gap / largest, "", "lower", EXACT),
    ]


if __name__ == "__main__":
    run(measure, description="Packed training on trees", options=options)
