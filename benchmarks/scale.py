"""What leaving one process costs and brings: Ray beside local rollouts, weight broadcasts, planned against measured."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module, util
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import Figure, run
from _shapes import SHAPES, Lengths, Shape, grow_group

from turntree.envs.worlds import generate_world
from turntree.trainers.cluster.connect import connect
from turntree.trainers.cluster.kit import ConfiguredKit
from turntree.trainers.cluster.pool import WorkerPool
from turntree.trainers.cluster.rollout import ClusterRollout
from turntree.trainers.cluster.wire import Ticket
from turntree.trainers.collector import PromptStream
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.expansion import random_nodes
from turntree.trainers.planning.memory import trainer_items
from turntree.trainers.planning.models import KNOWN, ModelShape, model_shape
from turntree.trainers.planning.tokens import Play, step_tokens
from turntree.trainers.quickstart import write_tiny_model
from turntree.trainers.recompute import Recompute, recompute_activations
from turntree.trainers.rollout import Prompt
from turntree.trainers.task import build_task

KIT = "turntree.trainers.cluster.kit:ConfiguredKit"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="alternations of every comparison")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a rollout")
    parser.add_argument("--skip-memory", action="store_true", help="leave out the runs that plans are compared with")


def measure(args: argparse.Namespace) -> list[Figure]:
    torch.set_num_threads(1)
    rounds, prompts = (2, 12) if args.quick else (args.rounds, args.prompts)
    with tempfile.TemporaryDirectory(prefix="turntree-scale-") as tmp:
        config = _config(Path(tmp))
        figures = [*_rollouts(config, rounds, prompts), *_broadcasts(args.quick)]
        if not args.skip_memory:
            figures += _plans(Path(tmp), quick=args.quick)
    return [*figures, *_deepspeed(args)]


def _config(folder: Path) -> RunConfig:
    generate_world("quickstart", seed=1, split="train", questions=200).save(folder / "world")
    write_tiny_model(folder / "model", seed=0)
    return compose(
        [
            "experiment=quickstart", f"model.path={folder / 'model'}", f"env.questions={folder / 'world'}",
            "cluster=ray", "trainer.threads=1",
        ]
    )  # fmt: skip


# Rollouts -------------------------------------------------------------------------------------------------------------


def _rollouts(config: RunConfig, rounds: int, count: int) -> list[Figure]:
    """The same trees in this process, by one worker and by two; each round does all three, in turns."""
    local = ConfiguredKit(config)
    stream = PromptStream(build_task(local.config, local.bench.tokenizer).questions, count, config.seed)
    trees = config.algorithm.trees
    connection = connect(replace(config.cluster, workers=3))
    pools = [WorkerPool(replace(config.cluster, workers=n), KIT, (config,)) for n in (1, 2)]
    seconds: dict[str, list[float]] = {"local": [], "1 worker": [], "2 workers": []}
    generated: list[int] = []
    try:
        growers = []
        for pool in pools:
            pool.publish(local.bench.model.state_dict, 0)
            growers.append(ClusterRollout(pool, local._parts["plan"]))
        for number in range(-1, rounds):  # the first round warms up
            prompts = stream.step(number + 1)
            ways: dict[str, Any] = {
                "local": lambda p=prompts: local.grow(_ticket(p, trees), lambda tree, tally: None),
                "1 worker": lambda p=prompts: growers[0](p),
                "2 workers": lambda p=prompts: growers[1](p),
            }
            for name in list(ways)[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                tokens = ways[name]().stats.generated_tokens
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
                    generated.append(tokens)
    finally:
        for pool in pools:
            pool.close()
        local.close()
        connection.close()
    took = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [one / own for one, own in zip(seconds["1 worker"], seconds["local"], strict=True)]
    gains = [one / two for one, two in zip(seconds["1 worker"], seconds["2 workers"], strict=True)]
    tokens = statistics.median(generated)
    return [
        Figure(f"rollout of {count * trees} trees in this process", took["local"], "s", "lower"),
        Figure("the same trees by one Ray worker, against this process", statistics.median(ratios), "x", "lower"),
        Figure("rollout throughput, one worker", tokens / took["1 worker"], "tokens/s", "higher"),
        Figure("rollout throughput, two workers", tokens / took["2 workers"], "tokens/s", "higher"),
        Figure("two workers against one", statistics.median(gains), "x", "higher"),
        Figure(
            "load of the machine meanwhile, processes a core", os.getloadavg()[0] / (os.cpu_count() or 1), "", "lower"
        ),
    ]


def _ticket(prompts: Sequence[Prompt], trees: int) -> Ticket:
    return Ticket(tuple(prompts), {p.uid: tuple(range(trees)) for p in prompts})


# Weights --------------------------------------------------------------------------------------------------------------


class WeightsKit:
    """A worker that holds tensors of some sizes in megabytes, and nothing that generates."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.model = torch.nn.Module()
        for mb in sizes:
            weight = torch.nn.Parameter(torch.zeros(mb * 250_000), requires_grad=False)
            self.model.register_parameter(f"mb{mb}", weight)
        self.engine = self

    def update_weights(self, version: int) -> None:
        """The tensors are all there is."""

    def close(self) -> None:
        """Nothing to let go of."""


def _broadcasts(quick: bool) -> list[Figure]:
    """Put once, pulled and loaded by two workers."""
    figures: list[Figure] = []
    sizes = (10, 100) if quick else (10, 100, 540)
    cluster = compose(["cluster=ray"]).cluster
    connection = connect(cluster)
    pool = WorkerPool(cluster, f"{Path(__file__).stem}:WeightsKit", (sizes,))
    try:
        for mb in sizes:
            weights = {f"mb{mb}": torch.ones(mb * 250_000)}
            totals: list[float] = []
            for version in range(4):  # the first one starts the workers
                start = time.perf_counter()
                pool.publish(functools.partial(dict, weights), version)
                while not all(pool.settle(seat, timeout_s=60.0) for seat in pool.seats):
                    pass
                totals.append(time.perf_counter() - start)
            figures.append(Figure(f"broadcast of {mb} MB to two workers", statistics.median(totals[1:]), "s", "lower"))
    finally:
        pool.close()
        connection.close()
    return figures


# Plans ----------------------------------------------------------------------------------------------------------------


_TREE = Shape("one tree", 1, 1, 1, 2, random_nodes, Lengths(200, (40, 80), (40, 80), (2, 3)))
"""Some hundred tokens: with ten times as many an update of SmolLM2's shape takes more than 10 GB."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def _plans(folder: Path, *, quick: bool) -> list[Figure]:
    """Memory of an update: what the plan says over what a process grew by, for the tiny model and SmolLM2's shape."""
    shapes = [("tiny model", model_shape(str(folder / "model")), SHAPES[0])]
    if not quick:
        shapes.append(("SmolLM2-135M shape", KNOWN["SmolLM2-135M"], _TREE))
    figures: list[Figure] = []
    for name, shape, trees in shapes:
        for recompute in _RECOMPUTE:
            # What the allocator holds beyond what is asked for varies by 20 MB from run to run.
            times = 1 if quick or shape.parameters > 10_000_000 else 5
            runs = [_in_process(shape, trees, recompute) for _ in range(times)]
            size, ratio = (statistics.median(run[key] for run in runs) for key in ("measured", "ratio"))
            what = f"an update with trainer.activation_checkpointing={recompute}"
            figures.append(Figure(f"{name}, {what}: measured", size / 1e6, "MB", "lower"))
            figures.append(Figure(f"{name}, {what}: planned over measured", ratio, "x", "lower"))
    return figures


def _in_process(shape: ModelShape, trees: Shape, recompute: Recompute) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_update, args=(shape, trees, recompute, sender))
    process.start()
    sender.close()
    try:
        found: dict[str, float] = json.loads(receiver.recv())
        return found
    finally:
        process.join(60)


def _update(shape: ModelShape, trees: Shape, recompute: Recompute, sender: Any) -> None:
    """Two updates on one pack of trees, the second with moments; by how much the process grew at most meanwhile."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from turntree.trainers.forward import packed_logprobs
    from turntree.trainers.packing import column, pack_groups

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, max_position_embeddings=4096,
    )  # fmt: skip
    (pack,) = pack_groups([grow_group(trees, 0, vocabulary=1000)], max_pack_tokens=100_000)
    warm = AutoModelForCausalLM.from_config(  # what torch itself takes, once
        LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    )
    packed_logprobs(warm, pack).logp.sum().backward()
    del warm
    before = _resident("VmRSS")
    model = AutoModelForCausalLM.from_config(config).eval()
    recompute_activations(model, recompute)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        packed_logprobs(model, pack).logp.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    measured = _resident("VmHWM") - before
    tokens, targets = len(column(pack, "tokens", "ids")), int(column(pack, "tokens", "loss_mask").sum())
    run_config = compose([f"trainer.max_pack_tokens={tokens}", f"trainer.activation_checkpointing={recompute}"])
    about = replace(
        step_tokens(run_config, Play(1, 1, 1, 1)), unique=float(tokens), generated=float(targets), longest=1.0
    )
    planned = sum(item.size for item in trainer_items(run_config, shape, about, ranks=1, gpu=False))
    sender.send(json.dumps({"measured": measured, "ratio": planned / measured, "tokens": tokens}))


def _resident(key: str) -> float:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) * 1024


# DeepSpeed ------------------------------------------------------------------------------------------------------------


def _deepspeed(args: argparse.Namespace) -> list[Figure]:
    """A step with DeepSpeed beside a plain one, where its part of this benchmark is there."""
    if util.find_spec("_scale_deepspeed") is None:
        print("benchmarks/_scale_deepspeed.py is not there: the DeepSpeed step is left out", file=sys.stderr)
        return []
    found: list[Figure] = list(import_module("_scale_deepspeed").measure(args))
    return found


if __name__ == "__main__":
    run(measure, description="Past one process: Ray, weights, plans", options=options)
