"""The packed forward pass: log-probs and entropies of every sampled token, each computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turntree.agents.architecture import exact_positions, text_config
from turntree.errors import ConfigError
from turntree.trainers.logits import read_logits, widen
from turntree.trainers.packing import Pack, column, row_tokens, table
from turntree.trainers.recompute import recompute_activations, recomputing
from turntree.trainers.tree_attention import enable_packed_attention, plan_attention

__all__ = ["PackedOutput", "check_packed", "packed_logprobs", "recompute_activations", "row_logprobs", "score_packs"]


@dataclass(frozen=True, slots=True)
class PackedOutput:
    """Per token of a pack, at least float32, [N], 0 where the token was not sampled.

    ``logp``: log-prob of the token given its path; ``entropy``: in nats, of the distribution it was drawn from;
    ``value``: value of the state that the token was sampled in.
    """

    logp: Tensor
    entropy: Tensor | None = None
    value: Tensor | None = None


def packed_logprobs(
    model: nn.Module,
    pack: Pack,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    value_head: nn.Module | None = None,
    chunk: int = 4096,
    pieces: int | None = None,
) -> PackedOutput:
    """Run the network once over the pack and read the sampled tokens' log-probs.

    ``temperature`` is the sampling temperature; 0 (greedy) means the untempered distribution. The vocabulary
    projection runs only where a sampled token is predicted (from its predecessor on its path), at most ``chunk``
    positions at a time (or in ``pieces`` equal parts), the soft-max in float32. ``value_head`` maps the hidden states
    before the sampled tokens [P, D] to values [P] (:class:`turntree.trainers.value_head.ValueHead`). Raises
    ``ConfigError`` for a model that cannot run on packed trees.
    """
    device = next(model.parameters()).device
    ids, predecessor = column(pack, "tokens", "ids").to(device), column(pack, "tokens", "predecessor").to(device)
    target = torch.nonzero(column(pack, "tokens", "loss_mask").to(device)).flatten()
    hidden = _hidden(model, pack, device)[predecessor[target]]
    values, entropies = _head(model, hidden, ids[target], temperature, entropy, pieces or -(-len(target) // chunk) or 1)
    states = value_head(hidden) if value_head is not None else None

    def scattered(column: Tensor | None) -> Tensor | None:
        return None if column is None else column.new_zeros(len(ids)).index_copy(0, target, column)

    return PackedOutput(cast("Tensor", scattered(values)), scattered(entropies), scattered(states))


def _hidden(model: nn.Module, pack: Pack, device: torch.device) -> Tensor:
    """Last hidden states [N, D] of the network's body over the packed tokens."""
    plan = plan_attention(column(pack, "tokens", "subtree_end").to(device), column(pack, "tokens", "predecessor"))
    enable_packed_attention(model)
    _check_positions(model, plan.longest)
    with recomputing(model):
        output = cast("Any", model).get_decoder()(
            input_ids=column(pack, "tokens", "ids").to(device)[None],
            position_ids=column(pack, "tokens", "position").to(device)[None],
            # Four dimensions tell transformers that the mask is ready, so that none is built; attention reads the plan.
            attention_mask=torch.zeros(1, 1, 1, 1, device=device),
            use_cache=False,
            tree_plan=plan,
        )
    return cast("Tensor", output.last_hidden_state)[0]


def _check_positions(model: nn.Module, longest: int) -> None:
    limit = exact_positions(text_config(model))
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a trajectory has {longest} tokens, but past {limit} the rotation of {type(model).__name__} depends on "
            f"the length of the text, and so differs between rows of one pack; set sampling.max_context_tokens to at "
            f"most {limit}, or the model's rope_type to yarn or linear"
        )


def _head(
    model: nn.Module, hidden: Tensor, ids: Tensor, temperature: float, entropy: bool, pieces: int
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (and entropies) of ``ids`` [P] from hidden states [P, D], in pieces that keep no logits."""
    head = _Head(_output_layer(model), _soft_cap(model), 1.0 / temperature if temperature > 0 else 1.0)
    parts: list[tuple[Tensor, Tensor]] = []
    for h, i in zip(torch.tensor_split(hidden, pieces), torch.tensor_split(ids, pieces)):
        if torch.is_grad_enabled() and pieces > 1:
            parts.append(cast("Any", checkpoint(_read, head, h, i, entropy, use_reentrant=False)))
        else:
            parts.append(_read(head, h, i, entropy))
    logp = torch.cat([p[0] for p in parts])
    return logp, torch.cat([p[1] for p in parts]) if entropy else None


@dataclass(frozen=True, slots=True)
class _Head:
    """The output layer, the bound of its logits (Gemma 2), and one over the temperature."""

    layer: nn.Module
    softcap: float | None
    scale: float

    def logits(self, hidden: Tensor) -> Tensor:
        logits = cast("Tensor", self.layer(hidden))
        # The bound in the model's own precision, as the model does.
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def _read(head: _Head, hidden: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    return read_logits(head.logits(hidden), ids, scale=head.scale, entropy=entropy)


def _output_layer(model: nn.Module) -> nn.Module:
    head = cast("Any", model).get_output_embeddings()
    config = cast("Any", model).config
    for option, neutral in (("logits_scaling", 1.0), ("logit_scale", 1.0)):
        value = getattr(config, option, None)
        if value is not None and value != neutral:
            raise ConfigError(f"{type(model).__name__} changes its logits by {option}={value}; not supported packed")
    return cast("nn.Module", head)


def _soft_cap(model: nn.Module) -> float | None:
    return cast("float | None", getattr(text_config(model), "final_logit_softcapping", None))


def row_logprobs(model: nn.Module, pack: Pack, *, temperature: float = 1.0) -> list[Tensor]:
    """The same log-probs by one plain forward pass per trajectory: for each row, float32 [its sampled tokens].

    Slow, and independent of packed attention: what :func:`check_packed` and tests compare with.
    """
    device = next(model.parameters()).device
    scale = 1.0 / temperature if temperature > 0 else 1.0
    out: list[Tensor] = []
    for path in row_tokens(pack):
        ids = column(pack, "tokens", "ids")[path].to(device)
        mask = column(pack, "tokens", "loss_mask")[path][1:].to(device)
        # Of the sampled tokens alone: in float32 all logits of a long trajectory would be some gigabytes.
        logits = widen(cast("Any", model)(input_ids=ids[None], use_cache=False).logits[0, :-1][mask]) * scale
        out.append(torch.log_softmax(logits, dim=-1).gather(1, ids[1:][mask][:, None])[:, 0])
    return out


def check_packed(model: nn.Module, pack: Pack, *, temperature: float = 1.0, tolerance: float | None = None) -> float:
    """Compare the packed pass with one row per trajectory; returns the largest difference in log-prob.

    ``tolerance`` is 1e-3 for float32 weights (largest difference) and 0.05 for half precision (mean difference).
    Raises ``ConfigError`` above it: this model's attention or position scheme is not exact on packed trees.
    """
    with torch.no_grad(), _evaluating(model):
        packed = packed_logprobs(model, pack, temperature=temperature).logp
        rows = row_logprobs(model, pack, temperature=temperature)
    token = column(pack, "occurrences", "token").to(packed.device)
    if not len(token):
        return 0.0
    ours, theirs = packed[token], torch.cat(rows)
    # Weights that are not finite are the model's own trouble, which shows in its gradient.
    neither = ~(ours.isfinite() | theirs.isfinite())
    difference = (ours - theirs).abs().masked_fill(neither, 0.0)
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    limit = tolerance if tolerance is not None else (0.05 if half else 1e-3)
    found = float(difference.mean() if half else difference.max())
    if not found <= limit:
        raise ConfigError(
            f"packed log-probs of {type(model).__name__} differ from one row per trajectory by {found:.3g} (allowed "
            f"{limit:.3g}); its attention or positions do not allow packed trees"
        )
    return float(difference.max())


def score_packs(
    model: nn.Module,
    packs: Sequence[Pack],
    *,
    key: Literal["old_logp", "ref_logp"] = "old_logp",
    temperature: float = 1.0,
    entropy: bool = False,
    value_head: nn.Module | None = None,
    chunk: int = 4096,
) -> None:
    """Write the model's log-probs into ``tokens[key]`` of every pack, in place, without a graph.

    With ``entropy`` also ``tokens.old_entropy``, with a ``value_head`` also ``tokens.value``.
    """
    with torch.no_grad(), _evaluating(model):
        for pack in packs:
            output = packed_logprobs(
                model, pack, temperature=temperature, entropy=entropy, value_head=value_head, chunk=chunk
            )
            device = column(pack, "tokens", "ids").device
            columns = {key: output.logp, "old_entropy": output.entropy, "value": output.value}
            for name, values in columns.items():
                if values is not None:
                    table(pack, "tokens").set(name, values.to(device))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the ``with`` block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
