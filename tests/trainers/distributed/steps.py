"""Five steps of a tiny network, by a plain AdamW and by DeepSpeed, in each of the ranks that torchrun started.

``steps.py OPTIONS.json OUT.json``: the first rank writes how far apart losses, norms, weights and moments are.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import turntree.trainers.updates
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.trainers.deepspeed_config import DeepSpeedConfig
from turntree.trainers.distributed import join
from turntree.trainers.distributed.deepspeed import DeepSpeedStrategy
from turntree.trainers.distributed.strategy import Single, Strategy
from turntree.trainers.forward import recompute_activations
from turntree.trainers.packing import Pack, column, pack_groups
from turntree.trainers.tree import Group, Node, Tree
from turntree.trainers.updates import update
from turntree.trainers.value_head import ValueHead


def tree(uid: str, vocabulary: int, rng: np.random.Generator) -> Group:
    def draw(count: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(0, vocabulary, count))

    root = Node(observation_ids=draw(12))
    for ordinal in range(3):
        node = root.add_child(Node(ordinal=ordinal, turn_ids=draw(9), logprobs=(0.0,) * 9, observation_ids=draw(5)))
        node.add_child(Node(turn_ids=draw(7), logprobs=(0.0,) * 7, status="answered", reward=float(ordinal)))
    return Group(uid, [Tree(root, uid)])


def batches(vocabulary: int, *, trees: int, max_pack_tokens: int) -> list[list[Pack]]:
    rng = np.random.default_rng(0)
    groups = [tree(str(i), vocabulary, rng) for i in range(trees)]
    return [pack_groups(groups, max_pack_tokens=max_pack_tokens) for _ in range(5)]


def run(strategy: Strategy, head: ValueHead | None, steps: list[list[Pack]], *, poison: int) -> list[Any]:
    """Loss and norm of every step. Step ``poison`` has a loss that is not finite."""
    out: list[Any] = []
    for number, packs in enumerate(steps):
        total = sum(int(column(pack, "tokens", "loss_mask").sum()) for pack in packs)

        def loss(pack: Pack, total: int = total, bad: bool = number == poison) -> tuple[torch.Tensor, float]:
            found = strategy.forward(pack, temperature=0.9, entropy=True, value_head=head)
            assert found.entropy is not None
            value = (-found.logp.sum() - 0.01 * found.entropy.sum()) / total
            if found.value is not None:
                value = value + ((found.value - 1.0) ** 2 * column(pack, "tokens", "loss_mask")).sum() / total
            return value * (float("inf") if bad else 1.0), float(value.detach())

        reports, norm = update(strategy, packs, loss)
        out.append((sum(reports), norm))
    return out


def distance(a: Any, b: Any) -> float:
    return float((a.float() - b.float()).abs().max().detach())


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    turntree.trainers.updates.PIECE = options.get("piece", 4096)
    ranks = join(timeout_s=120)
    model: PreTrainedModel = build_tiny_model(
        build_tokenizer(["river", "king", "of"], ["ba"]), hidden=48, layers=2, heads=2, seed=1
    )
    model.eval()
    if options.get("bf16"):
        model.bfloat16()
    if options.get("recompute"):
        recompute_activations(model)
    head = ValueHead.of(model) if options.get("head") else None
    steps = batches(
        model.config.vocab_size, trees=options.get("trees", 5), max_pack_tokens=options.get("max_pack_tokens", 60)
    )
    plain, plain_head = copy.deepcopy(model), copy.deepcopy(head)
    own = [*plain.parameters(), *(plain_head.parameters() if plain_head else ())]
    adamw = torch.optim.AdamW(own, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    single = Single(plain, adamw, parameters=own, clip=1.0)
    poison = options.get("poison", -1)
    expected = run(single, plain_head, steps, poison=poison)
    spread = DeepSpeedStrategy(
        model, head, ranks=ranks, options=DeepSpeedConfig(**options["deepspeed"]), learning_rate=1e-3, beta2=0.99,
        weight_decay=0.01, clip=1.0,
    )  # fmt: skip
    found = run(spread, head, steps, poison=poison)
    spread.sync()
    moments, states = spread.state_dict(), single.state_dict()["state"]
    weights = [*model.parameters(), *(head.parameters() if head else ())]
    if ranks.is_main:
        result = {
            "ranks": ranks.size,
            "packs": len(steps[0]),
            "loss": max(abs(a[0] - b[0]) for a, b in zip(expected, found)),
            "norm": max(abs(a[1] - b[1]) for i, (a, b) in enumerate(zip(expected, found)) if i != poison),
            "skipped": [i for i, (_, norm) in enumerate(found) if not np.isfinite(norm)],
            "weights": max(distance(a, b) for a, b in zip(own, weights, strict=True)),
            "weights_mean": sum(float((a - b).abs().sum().detach()) for a, b in zip(own, weights))
            / sum(a.numel() for a in own),
            "moments": max(
                distance(states[i][name], moments["state"][i][name])
                for i in states
                for name in ("exp_avg", "exp_avg_sq")
            ),
            "steps": float(moments["state"][0]["step"]),
        }
        Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
