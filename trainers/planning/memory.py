"""Bytes of trainer and engines: weights, gradients, moments, activations, logits, keys and values.

The formulas count what is held at the worst moment of a step. They were checked on CPU against measured runs
(``benchmarks/scale.py``): tensors kept for the backward pass, optimiser states, and the growth of the process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from turntree.trainers.config import SELECTIVE_FROM, RunConfig
from turntree.trainers.planning.models import ModelShape
from turntree.trainers.planning.tokens import StepTokens

__all__ = [
    "Item", "activation_bytes", "engine_items", "logit_bytes", "taking_turns", "trainer_items", "trains_with_reference",
]  # fmt: skip

ACTIVATIONS, VLLM = "activations and logits", "vLLM (gpu_memory_utilization)"
"""Items of a GPU that are never full at the same time where vLLM sleeps (``engine.sleep``)."""

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


def activation_bytes(
    shape: ModelShape, tokens: float, size: int, *, recompute: str = "none", gpu: bool = False
) -> float:
    """Bytes that a forward pass over ``tokens`` packed tokens keeps for the backward pass, logits left out.

    A layer keeps, in numbers a token: input, normalised input and its weighted copy of two norms (in float32 where the
    weights are not); gate, its activation, up and their product; and of attention queries, keys, values and output, on
    CPU with a log-sum-exp a head, on a GPU with keys and values widened to the query heads and about half as much of
    rows that paths share. ``recompute`` as ``trainer.activation_checkpointing`` has it: with ``selective`` the layer's
    input and the results of attention and of seven products, with ``full`` its input alone; and all of one layer.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = shape.heads * 4 / size
    attention = 4.5 * q if gpu else 2 * q + 2 * kv + norm
    norms = (6 if size == 4 else 9) * shape.hidden
    layer = norms + attention + 4 * shape.inner + (2 * q + 2 * kv) * shape.normed
    last = norms / 2 + shape.hidden
    results = q + 2 * kv + (1.5 * q if gpu else q + norm) + 2 * shape.inner + 2 * shape.hidden
    kept = {"none": layer, "selective": shape.hidden + results, "full": shape.hidden}[recompute]
    return tokens * (kept * shape.layers + (layer if recompute != "none" else 0.0) + last) * size


def logit_bytes(shape: ModelShape, targets: float, size: int, *, scaled: bool = False, entropy: bool = False) -> float:
    """Bytes at the worst moment of the vocabulary projection.

    Beside the logits their log-probs, or their gradient, in float32; of half-precision ones a copy in float32.
    ``scaled``: a temperature that is not 1 makes another. With ``entropy`` probabilities, log-probs without infinities
    and their product.
    """
    plain = 4 + (4 if size != 4 else 0) + (4 if scaled else 0)
    return min(targets, _HEAD_PIECE) * shape.vocab * (size + max(plain, 16 if entropy else 0))


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
    recompute = config.trainer.activation_checkpointing
    if recompute == "auto":
        recompute = "selective" if shape.hidden >= SELECTIVE_FROM else "none"
    backward = activation_bytes(shape, pack, size, recompute=recompute, gpu=gpu)
    scaled, entropy = config.sampling.temperature != 1.0, config.algorithm.entropy_coef != 0.0
    backward += logit_bytes(shape, targets, size, scaled=scaled, entropy=entropy)
    # On a GPU, torch steps all weights at once and holds a copy of them; activations are gone by then.
    items.append(Item(ACTIVATIONS, max(backward, weights * size / ranks if gpu else 0.0)))
    if gpu:
        items.append(Item("CUDA, fragments", 1.5e9))
    return items


def taking_turns(items: list[Item], weights: float) -> list[Item]:
    """vLLM sleeps while the trainer computes: the larger of both needs counts. Its ``weights`` wait in CPU memory."""
    activations = sum(item.size for item in items if item.name == ACTIVATIONS)
    awake = [replace(i, size=max(0.0, i.size - activations)) if i.name == VLLM else i for i in items]
    return [*awake, Item("weights of vLLM while it sleeps", weights, host=True)]


def engine_items(config: RunConfig, shape: ModelShape, tokens: StepTokens, *, gpu: int, own: bool) -> list[Item]:
    """What an engine holds. ``gpu``: bytes of its GPU (0: it runs on CPU); ``own``: in a process of its own."""
    size, engine = value_size(config), config.engine
    weights = Item("engine: weights", shape.parameters * size)
    if engine.name == "vllm":
        copy = [Item("weights for vLLM", shape.parameters * size, host=True)] if own else []
        if gpu:
            return [*copy, Item(VLLM, engine.gpu_memory_utilization * gpu)]
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
