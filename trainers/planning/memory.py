"""Bytes of trainer and engines: weights, gradients, moments, activations, logits, keys and values.

The formulas count what is held at the worst moment of a step. They were checked on CPU against measured runs
(``benchmarks/scale.py``): tensors kept for the backward pass, optimiser states, and the growth of the process.
"""

from __future__ import annotations

from dataclasses import dataclass

from turntree.trainers.config import RunConfig
from turntree.trainers.planning.models import ModelShape
from turntree.trainers.planning.tokens import StepTokens

__all__ = ["Item", "activation_bytes", "engine_items", "logit_bytes", "trainer_items", "trains_with_reference"]

_HEAD_PIECE = 4096
"""Positions of a vocabulary projection at a time (``turntree.trainers.forward``)."""


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory in bytes. ``host``: in the machine's memory, also where the network is on a GPU."""

    name: str
    size: float
    host: bool = False


def value_size(config: RunConfig) -> int:
    """Bytes of a weight."""
    return 2 if config.model.dtype == "bfloat16" else 4


def trains_with_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the policy is held beside it."""
    pairs = config.algorithm.objective.rpartition(":")[2] in ("step_dpo", "dpo", "ipo")
    return config.algorithm.kl_coef != 0 or pairs


def activation_bytes(shape: ModelShape, tokens: float, size: int, *, recompute: bool) -> float:
    """Bytes that a forward pass over ``tokens`` packed tokens keeps for the backward pass, logits left out.

    A layer keeps, in numbers a token: input, normalised input and its weighted copy of two norms (in float32 where the
    weights are not), queries, keys and values widened to the query heads, the attention's output and about half as much
    of rows that paths share; gate, its activation, up and their product. With ``recompute`` only layers' inputs, and
    all of that for one layer.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = (6 if size == 4 else 9) * shape.hidden
    layer = norms + 4.5 * q + 4 * shape.inner + (2 * q + 2 * kv) * shape.normed
    last = norms / 2 + shape.hidden
    layers = shape.hidden * shape.layers + layer if recompute else layer * shape.layers
    return tokens * (layers + last) * size


def logit_bytes(shape: ModelShape, targets: float, size: int) -> float:
    """Bytes at the worst moment of the vocabulary projection: scaled logits, soft-max and two gradients, in float32."""
    rows = min(targets, _HEAD_PIECE)
    return rows * shape.vocab * (16 + (size if size != 4 else 0))


def trainer_items(config: RunConfig, shape: ModelShape, tokens: StepTokens, *, ranks: int, gpu: bool) -> list[Item]:
    """What one training rank holds at the worst moment of an update."""
    size, weights = value_size(config), shape.parameters
    spread = config.trainer.strategy == "deepspeed"
    stage = config.deepspeed.stage if spread else 0
    pack = min(max(float(config.trainer.max_pack_tokens), tokens.longest), tokens.unique)
    targets = pack * min(1.0, tokens.generated / tokens.unique)
    items = [Item("weights", weights * size)]
    if stage == 3:
        items.append(Item("weights, trained part", weights * size / ranks, host=config.deepspeed.offload_params))
    if trains_with_reference(config):
        items.append(Item("reference", weights * size))
    items.append(Item("gradients", weights * size / (ranks if stage >= 2 else 1)))
    if spread:  # moments and weights in float32, whatever the network's type
        items.append(Item("moments", weights * 12 / ranks, host=config.deepspeed.offload_optimizer))
    else:
        items.append(Item("moments", weights * 2 * size))
    backward = activation_bytes(shape, pack, size, recompute=config.trainer.activation_checkpointing)
    backward += logit_bytes(shape, targets, size)
    # On a GPU, torch steps all weights at once and holds a copy of them; activations are gone by then.
    items.append(Item("activations and logits", max(backward, weights * size / ranks if gpu else 0.0)))
    if gpu:
        items.append(Item("CUDA, fragments", 1.5e9))
    return items


def engine_items(config: RunConfig, shape: ModelShape, tokens: StepTokens, *, gpu: int, own: bool) -> list[Item]:
    """What an engine holds. ``gpu``: bytes of its GPU (0: it runs on CPU); ``own``: in a process of its own."""
    size, engine = value_size(config), config.engine
    weights = Item("engine: weights", shape.parameters * size)
    if engine.name == "vllm":
        copy = [Item("weights for vLLM", shape.parameters * size, host=True)] if own else []
        if gpu:
            return [*copy, Item("vLLM (gpu_memory_utilization)", engine.gpu_memory_utilization * gpu)]
        return [*copy, weights, Item("engine: keys and values", engine.kv_cache_gb * 2**30)]
    if engine.name in ("vllm_server", "openai"):
        return []
    trees = min(tokens.trees, config.trainer.max_concurrent_trees or tokens.trees)
    cached = min(float(engine.max_cached_tokens), tokens.unique * trees / tokens.trees)
    batch = min(float(engine.max_batch_rows), float(tokens.trajectories)) * tokens.longest
    values = [
        Item("engine: kept keys and values", cached * shape.kv_values() * size),
        Item("engine: keys and values of a batch", batch * shape.kv_values() * size),
    ]
    return [weights, *values] if own else values
