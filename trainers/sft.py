"""Cold start: supervised training on a teacher's turns, with loss on model tokens only.

A demonstration is a tree with one branch, so supervised training uses the same tables and the same packed forward
as policy optimisation; observations and template boundaries carry a zero mask by provenance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from turntree.agents.dialogue import Dialogue
from turntree.agents.teacher import Demonstration
from turntree.agents.tokenizer import encode
from turntree.errors import DataError
from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from turntree.trainers.config import SftConfig
from turntree.trainers.forward import packed_logprobs
from turntree.trainers.packing import Pack, pack_groups
from turntree.trainers.seeds import derive_seed
from turntree.trainers.tree import Group, Node, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SftResult", "demonstration_group", "nll", "train_sft"]


@dataclass(frozen=True, slots=True)
class SftResult:
    """What a cold start did. ``losses``: mean negative log-likelihood per model token in nats, one a step."""

    steps: int
    seconds: float
    losses: tuple[float, ...]


def demonstration_group(demo: Demonstration, dialogue: Dialogue, *, uid: str, max_tokens: int) -> Group:
    """One demonstration as a group of one tree with one leaf; each text is tokenised once.

    Raises:
        DataError: the demonstration is longer than ``max_tokens``; cutting it silently would teach broken turns.
    """
    root = Node(observation_ids=dialogue.prompt_ids(demo.prompt))
    node, length = root, len(root.observation_ids)
    for turn in demo.turns:
        ids = encode(dialogue.tokenizer, turn.text)
        observed = dialogue.observation_ids(turn.observation, after=ids) if turn.observation else ()
        node = node.add_child(Node(turn_ids=ids, logprobs=(0.0,) * len(ids), observation_ids=observed, text=turn.text))
        length += len(ids) + len(observed)
    if node is root:
        raise DataError(f"demonstration {uid}: expected at least one turn, found none")
    if length > max_tokens:
        raise DataError(
            f"demonstration {uid} has {length} tokens, but sampling.max_context_tokens={max_tokens}; "
            "raise the limit or lower search.top_k / env.max_observation_tokens"
        )
    node.status, node.reward = "answered", 1.0
    return Group(uid=uid, trees=[Tree(root=root, prompt_uid=uid)])


def nll(model: PreTrainedModel, packs: Sequence[Pack], *, backward: bool = False) -> float:
    """Mean negative log-likelihood (nats per model token) over all packs; optionally back-propagates it.

    The denominator is global: splitting the same trajectories into other packs changes nothing.
    """
    counts = [int(pack["tokens", "loss_mask"].sum()) for pack in packs]
    total = sum(counts)
    value = 0.0
    for pack, count in zip(packs, counts):
        if count == 0:
            continue
        with torch.set_grad_enabled(backward):
            # Log-probs are 0 wherever no token was sampled, so observations add nothing.
            loss = -packed_logprobs(model, pack).logp.sum() / total
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        value += float(loss.detach())
    return value


def learning_rate_factor(step: int, *, warmup: int, steps: int) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def batch_order(size: int, batch: int, *, seed: int, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of one step: shuffled epochs derived from (seed, epoch), so that a resumed run draws the same."""
    rows = np.arange(step * batch, (step + 1) * batch)
    orders = {
        int(epoch): np.random.default_rng(derive_seed(seed, "sft", int(epoch))).permutation(size)
        for epoch in np.unique(rows // size)
    }
    return np.array([orders[int(r // size)][r % size] for r in rows], dtype=np.int64)


def train_sft(
    model: PreTrainedModel,
    groups: Sequence[Group],
    *,
    config: SftConfig,
    seed: int,
    max_pack_tokens: int,
    max_grad_norm: float = 1.0,
    checkpoints: Path | None = None,
    resume: bool = False,
    on_step: Callable[[int, float], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> SftResult:
    """Train ``model`` in place on demonstrations (:func:`demonstration_group`).

    ``on_step(step, loss)`` is called after each optimiser step; ``should_stop`` is asked before each one. With
    ``checkpoints`` the state is saved every ``config.save_every`` steps and at the end, and ``resume`` continues it.
    """
    if not groups:
        raise DataError("cold start: expected at least one demonstration, found none")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(0.9, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    losses: list[float] = []
    elapsed = 0.0
    if resume and checkpoints is not None and (found := latest_checkpoint(checkpoints)) is not None:
        state = load_checkpoint(found, model=model, optimizer=optimizer).state
        losses, elapsed = list(state["losses"]), float(state["seconds"])

    def save(step: int) -> None:
        if checkpoints is not None:
            state = {"losses": losses, "seconds": elapsed + time.monotonic() - start}
            save_checkpoint(checkpoints, step, model=model, optimizer=optimizer, state=state, keep=1)

    model.train()
    start = time.monotonic()
    step = len(losses)
    while step < config.steps and not should_stop():
        if config.max_seconds is not None and elapsed + time.monotonic() - start >= config.max_seconds:
            break
        factor = learning_rate_factor(step, warmup=config.warmup_steps, steps=config.steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        rows = batch_order(len(groups), config.batch_size, seed=seed, step=step)
        packs = pack_groups([groups[i] for i in rows], max_pack_tokens=max_pack_tokens)
        optimizer.zero_grad(set_to_none=True)
        losses.append(nll(model, packs, backward=True))
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        step += 1
        if on_step is not None:
            on_step(step, losses[-1])
        if step % config.save_every == 0:
            save(step)
    save(step)
    model.eval()
    return SftResult(steps=step, seconds=elapsed + time.monotonic() - start, losses=tuple(losses))
