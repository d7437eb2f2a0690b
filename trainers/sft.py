"""Cold start: supervised training on a teacher's turns, with loss on model tokens only.

A demonstration is a tree with one branch, so supervised training uses the same tables and the same packed forward
as policy optimisation; observations and template boundaries carry a zero mask by provenance.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from turntree.agents.dialogue import Dialogue
from turntree.agents.lora import trained_part
from turntree.agents.teacher import Demonstration
from turntree.agents.tokenizer import encode
from turntree.errors import DataError
from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint, resumable_checkpoint, save_checkpoint
from turntree.trainers.config import SftConfig
from turntree.trainers.diagnosis import Skipped, stop_diverged
from turntree.trainers.distributed.ranks import Ranks
from turntree.trainers.distributed.strategy import Gathered, Single, Strategy
from turntree.trainers.forward import check_packed, packed_logprobs
from turntree.trainers.packing import Pack, pack_groups
from turntree.trainers.seeds import derive_seed
from turntree.trainers.tree import Group, Node, Tree
from turntree.trainers.updates import update

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

__all__ = ["SftResult", "TaughtTurn", "demonstration_group", "nll", "taught_group", "train_sft"]


@dataclass(frozen=True, slots=True)
class SftResult:
    """What a cold start did.

    ``losses``: mean negative log-likelihood per model token in nats, one a step. ``skipped``: steps that were not
    taken because their gradient was not finite. ``seconds``: of training, those before a resume included.
    """

    steps: int
    seconds: float
    losses: tuple[float, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class TaughtTurn:
    """A turn with its tokens. One that is not ``learnt`` is context like an observation: no token of it has a loss."""

    ids: tuple[int, ...]
    observation: str
    text: str = ""
    learnt: bool = True


def taught_group(prompt: str, turns: Sequence[TaughtTurn], dialogue: Dialogue, *, uid: str, max_tokens: int) -> Group:
    """A trajectory as a group of one tree with one leaf; prompt and observations are tokenised once.

    Raises:
        DataError: there is no turn to learn from, or the trajectory is longer than ``max_tokens``; cutting it silently
            would teach broken turns.
    """
    root = Node(observation_ids=dialogue.prompt_ids(prompt))
    node, length = root, len(root.observation_ids)
    for turn in turns:
        observed = dialogue.observation_ids(turn.observation, after=turn.ids) if turn.observation else ()
        length += len(turn.ids) + len(observed)
        if not turn.learnt:
            node.observation_ids = (*node.observation_ids, *turn.ids, *observed)
            continue
        zeros = (0.0,) * len(turn.ids)
        node = node.add_child(Node(turn_ids=turn.ids, logprobs=zeros, observation_ids=observed, text=turn.text))
    if node is root:
        raise DataError(f"demonstration {uid}: expected at least one turn, found none")
    if length > max_tokens:
        raise DataError(
            f"demonstration {uid} has {length} tokens, but sampling.max_context_tokens={max_tokens}; "
            "raise the limit or lower search.top_k / env.max_observation_tokens"
        )
    node.status, node.reward = "answered", 1.0
    return Group(uid=uid, trees=[Tree(root=root, prompt_uid=uid)])


def demonstration_group(
    demo: Demonstration, dialogue: Dialogue, *, uid: str, max_tokens: int, stops: Sequence[str] | None = None
) -> Group:
    """One demonstration as a group of one tree with one leaf; each text is tokenised once.

    ``stops``: the grammar's stop strings. A turn that ends with none of them gets the end-of-turn token, so that its
    end is learnt; without ``stops`` no turn does. Raises ``DataError`` as :func:`taught_group` does.
    """

    def ids(text: str) -> tuple[int, ...]:
        return encode(dialogue.tokenizer, text) if stops is None else dialogue.written_ids(text, stops)

    turns = [TaughtTurn(ids(turn.text), turn.observation, turn.text) for turn in demo.turns]
    return taught_group(demo.prompt, turns, dialogue, uid=uid, max_tokens=max_tokens)


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
            loss.backward()
        value += float(loss.detach())
    return value


def learning_rate_factor(step: int, *, warmup: int, steps: int, spent: float = 0.0) -> float:
    """Linear warm-up, then cosine decay to a tenth, by steps or by the share of the time that is ``spent``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, max(spent, (step - warmup) / max(1, steps - warmup)))
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
    fingerprint: Mapping[str, Any] | None = None,
    on_step: Callable[[int, float], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    strategy: Strategy | None = None,
    check: bool = True,
) -> SftResult:
    """Train ``model`` in place on demonstrations (:func:`demonstration_group`).

    ``strategy`` trains it with the options of ``config``, on its ranks, which were all given the same demonstrations
    (None: this process, with AdamW).

    ``on_step(step, loss)`` is called after each optimiser step; ``should_stop`` is asked before each one. With
    ``checkpoints`` the state is saved every ``config.save_every`` steps and at the end, and ``resume`` continues it;
    a run stopped and resumed is equal to one that was never stopped. With ``check`` the first pack is compared with one
    plain forward pass a trajectory before anything is learnt (:func:`turntree.trainers.forward.check_packed`).

    Raises:
        DataError: there are no demonstrations.
        ConfigError: the model cannot run on packs, or is not exact on them.
        CheckpointError: the checkpoint to resume was made with another ``fingerprint``.
        DivergenceError: ``config.max_skipped_updates`` steps in a row had a gradient that is not finite. The batch
            and a diagnosis lie beside ``checkpoints``.
    """
    if not groups:
        raise DataError("cold start: expected at least one demonstration, found none")
    if strategy is None:
        own = torch.optim.AdamW(model.parameters(), betas=(0.9, config.adam_beta2), weight_decay=config.weight_decay)
        strategy = Single(model, own, parameters=model.parameters(), clip=max_grad_norm)
    ranks = strategy.ranks
    state = _resume(model, strategy, checkpoints, fingerprint) if resume and checkpoints is not None else _State()
    save = functools.partial(_save, model, strategy, state, checkpoints, fingerprint)

    def batch(step: int) -> list[Pack]:
        rows = batch_order(len(groups), config.batch_size, seed=seed, step=step)
        return pack_groups([groups[i] for i in rows], max_pack_tokens=max_pack_tokens)

    if check and state.step < config.steps:
        check_packed(model, batch(state.step)[0])
    strategy.train(True)
    while state.step < config.steps and not ranks.any(should_stop()):
        if config.max_seconds is not None and state.seconds >= config.max_seconds:
            break
        start = time.monotonic()
        spent = 0.0 if config.max_seconds is None else state.seconds / config.max_seconds
        factor = learning_rate_factor(state.step, warmup=config.warmup_steps, steps=config.steps, spent=spent)
        packs = batch(state.step)
        reports, norm = _update(strategy, packs, rate=config.learning_rate * factor)
        state.add(sum(report["nll"] for report in reports), norm)
        if config.max_skipped_updates is not None and state.in_a_row >= config.max_skipped_updates:
            _stop(ranks, Skipped(packs, reports, norm), model, state, checkpoints)
        state.seconds += ranks.gather(time.monotonic() - start)[0]  # all ranks go by the first one's clock
        if on_step is not None and ranks.is_main:
            on_step(state.step, state.losses[-1])
        if state.step % config.save_every == 0:
            save()
    save()
    strategy.train(False)
    return SftResult(state.step, state.seconds, tuple(state.losses), state.skipped)


def _resume(
    model: PreTrainedModel, strategy: Strategy, checkpoints: Path, fingerprint: Mapping[str, Any] | None
) -> _State:
    """Where the newest whole checkpoint stands, loaded into model and strategy; the start where there is none."""
    found = strategy.ranks.main(lambda: resumable_checkpoint(checkpoints))
    if found is None:
        return _State()
    loaded = load_checkpoint(found, model=trained_part(model), optimizer=strategy, fingerprint=fingerprint)
    strategy.adopt()
    return _State.from_json(loaded.state)


def _save(
    model: PreTrainedModel,
    strategy: Strategy,
    state: _State,
    checkpoints: Path | None,
    fingerprint: Mapping[str, Any] | None,
) -> None:
    """Save where training stands, if it does not lie there yet."""
    strategy.sync()
    if checkpoints is None or state.saved_step == state.step:
        return
    moments, state.saved_step = Gathered(strategy.state_dict()), state.step
    strategy.ranks.main(
        lambda: save_checkpoint(
            checkpoints,
            state.step,
            model=trained_part(model),
            optimizer=moments,
            state=state.to_json(),
            fingerprint=fingerprint,
            keep=1,
        )
    )


def _update(strategy: Strategy, packs: Sequence[Pack], *, rate: float) -> tuple[list[dict[str, float]], float]:
    """One optimiser step at learning rate ``rate``; returns each pack's share of the loss and the gradient's norm."""
    for group in strategy.param_groups:
        group["lr"] = rate
    total = sum(int(pack["tokens", "loss_mask"].sum()) for pack in packs)

    def loss(pack: Pack) -> tuple[torch.Tensor, dict[str, float]]:
        # Log-probs are 0 wherever no token was sampled, so observations add nothing.
        value = -strategy.forward(pack).logp.sum() / total
        return value, {"nll": float(value.detach())}

    return update(strategy, packs, loss)


def _stop(ranks: Ranks, skipped: Skipped, model: torch.nn.Module, state: _State, checkpoints: Path | None) -> None:
    """Raise :class:`DivergenceError`; the batch is kept beside the checkpoints, where there are any."""
    ranks.main(
        lambda: stop_diverged(
            None if checkpoints is None else checkpoints.parent / "diagnosis" / f"step-{state.step:06d}",
            skipped,
            model,
            step=state.step,
            in_a_row=state.in_a_row,
            newest=None if checkpoints is None else latest_checkpoint(checkpoints),
            option="sft.max_skipped_updates",
        )
    )


@dataclass(slots=True)
class _State:
    """What a checkpoint carries besides weights and moments."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    skipped: int = 0
    in_a_row: int = 0
    saved_step: int | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def add(self, loss: float, norm: float) -> None:
        """Take in a step; one whose gradient was not finite was not taken."""
        self.losses.append(loss)
        self.in_a_row = 0 if math.isfinite(norm) else self.in_a_row + 1
        if self.in_a_row:
            self.skipped += 1
            _log.warning("step %d was skipped: the norm of its gradient is %s", self.step, norm)

    def to_json(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "skipped_in_a_row": self.in_a_row,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> _State:
        losses = list(data["losses"])
        in_a_row = int(data.get("skipped_in_a_row", 0))  # earlier checkpoints have none
        return _State(losses, float(data["seconds"]), int(data["skipped"]), in_a_row, saved_step=len(losses))
