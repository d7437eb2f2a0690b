"""A step with DeepSpeed beside a plain one, on the same packs: by one rank and by two. Part of ``scale.py``.

Run by itself it is one of the ranks, which torchrun starts: ``_scale_deepspeed.py OUT.json STEPS``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import Figure
from _shapes import Lengths, Shape, grow_group
from transformers import LlamaConfig, LlamaForCausalLM

from turntree.trainers.deepspeed_config import DeepSpeedConfig
from turntree.trainers.distributed import Ranks, join
from turntree.trainers.distributed.deepspeed import DeepSpeedStrategy
from turntree.trainers.distributed.strategy import Single, Strategy
from turntree.trainers.expansion import random_nodes
from turntree.trainers.packing import Pack, column, pack_groups
from turntree.trainers.updates import update

__all__ = ["measure"]

VOCABULARY = 4096


def measure(args: argparse.Namespace) -> list[Figure]:
    """Ratios of alternated steps: above 1, DeepSpeed's takes longer than the plain one of one process."""
    steps = 3 if args.quick else 9
    figures: list[Figure] = []
    for ranks in (1, 2):
        for name, ratio in _run(ranks, steps).items():
            label = f"DeepSpeed, {ranks} rank{'s' * (ranks > 1)}, {name}: time of a step / plain step in one process"
            figures.append(Figure(label, ratio, "x", "lower"))
    return figures


def _run(ranks: int, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="turntree-scale-") as tmp:
        out = Path(tmp) / "out.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [*launcher, str(Path(__file__).resolve()), str(out), str(steps)]
        subprocess.run(command, check=True, timeout=900, env=environment, stdout=sys.stderr)
        found: dict[str, float] = json.loads(out.read_text())
    return found


def _model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _step(strategy: Strategy, packs: list[Pack]) -> None:
    total = sum(int(column(pack, "tokens", "loss_mask").sum()) for pack in packs)

    def loss(pack: Pack) -> tuple[torch.Tensor, None]:
        return -strategy.forward(pack).logp.sum() / total, None

    update(strategy, packs, loss)


def _spread(model: Any, ranks: Ranks, stage: int) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(
        copy.deepcopy(model), None, ranks=ranks, options=DeepSpeedConfig(stage=stage), learning_rate=1e-5, beta2=0.999,
        weight_decay=0.0, clip=1.0,
    )  # fmt: skip


def _worker(out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    ranks, model = join(), _model()
    plain = copy.deepcopy(model)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-5, betas=(0.9, 0.999), weight_decay=0.0)
    single = Single(plain, adamw, parameters=plain.parameters(), clip=1.0)
    strategies = {f"ZeRO-{stage}": _spread(model, ranks, stage) for stage in (1, 2, 3)}
    packs = _packs()

    def by_one() -> None:
        if ranks.is_main:
            _step(single, packs)

    ways: dict[str, Callable[[], None]] = {"plain": by_one}
    for name, strategy in strategies.items():
        ways[name] = lambda strategy=strategy: _step(strategy, packs)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, steps):  # the first round warms up
        for name in list(ways)[:: 1 if number % 2 else -1]:
            ranks.gather(None)
            start = time.perf_counter()
            ways[name]()
            ranks.gather(None)
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    if ranks.is_main:
        plain_s = seconds.pop("plain")
        ratios = {name: statistics.median(a / b for a, b in zip(own, plain_s)) for name, own in seconds.items()}
        out.write_text(json.dumps(ratios))


def _packs() -> list[Pack]:
    """Six trees of four leaves, one a pack."""
    shape = Shape("four leaves", 1, 2, 1, 2, random_nodes, Lengths(100, turn=(20, 40), observation=(40, 80)))
    groups = [grow_group(shape, seed, vocabulary=VOCABULARY) for seed in range(6)]
    return [pack for group in groups for pack in pack_groups([group], max_pack_tokens=10_000)]


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), int(sys.argv[2]))
