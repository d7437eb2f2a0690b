"""What losses are computed on, and what they are divided by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from turntree.errors import ConfigError
from turntree.trainers.packing import Pack, column, table
from turntree.trainers.surrogate import AGGREGATIONS, Aggregation

__all__ = [
    "Denominators",
    "Occurrences",
    "aggregate",
    "segment_sum",
    "share",
    "segment_shares",
]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Flat occurrences of sampled tokens.

    ``logp``, ``old_logp``, ``advantage``, ``weight`` [O] float; ``leaf`` [O] int64 in [0, n_leaves); ``turn`` [O]
    int64 in [0, n_turns), unique per (leaf, turn). ``ref_logp``, ``sampler_logp``, ``entropy``, ``importance`` (a
    detached factor per token), ``value`` (of the state the token was sampled in), ``old_value`` (before the first
    update) and ``ret`` (the return that ``value`` regresses to) are [O] float or None.
    """

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    weight: Tensor
    leaf: Tensor
    turn: Tensor
    n_leaves: int
    n_turns: int
    ref_logp: Tensor | None = None
    sampler_logp: Tensor | None = None
    entropy: Tensor | None = None
    importance: Tensor | None = None
    value: Tensor | None = None
    old_value: Tensor | None = None
    ret: Tensor | None = None

    def __post_init__(self) -> None:
        expected = tuple(self.logp.shape)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor) and (tuple(value.shape) != expected or value.ndim != 1):
                raise ValueError(
                    f"{item.name} has shape {tuple(value.shape)}; all columns of occurrences need the shape of logp, "
                    f"{expected}, and one dimension"
                )

    def kept(self) -> Occurrences:
        """Without the occurrences of weight 0."""
        keep = self.weight > 0
        if bool(keep.all()):
            return self
        tensors = {f.name: v[keep] for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **cast("dict[str, Any]", tensors))


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a mini-batch's losses are divided by, summed over all of its packs (and ranks) before the first loss.

    ``weight``: sum of omega; ``rows``: trajectories with a positive sum of omega; ``width``: the constant of
    ``seq-mean-token-sum-norm`` (by default the largest number of sampled tokens of a trajectory); ``turns``: sum over
    (trajectory, turn) of the turn's mean omega; ``pairs``: pairs of sibling turns.
    """

    weight: float
    rows: float
    width: float
    turns: float = 0.0
    pairs: float = 0.0

    @classmethod
    def of(cls, packs: Iterable[Pack], *, width: float | None = None) -> Denominators:
        """Over all packs of a mini-batch."""
        parts = [cls._of_pack(pack) for pack in packs]
        return cls(
            weight=sum((p.weight for p in parts), 0.0),
            rows=sum((p.rows for p in parts), 0.0),
            width=max((p.width for p in parts), default=0.0) if width is None else width,
            turns=sum((p.turns for p in parts), 0.0),
            pairs=sum((p.pairs for p in parts), 0.0),
        )

    @classmethod
    def _of_pack(cls, pack: Pack) -> Denominators:
        weight, leaf, turn = (column(pack, "occurrences", key) for key in ("weight", "leaf", "turn"))
        found = cls.of_occurrences(weight, leaf, n_leaves=len(table(pack, "rows")), turn=turn)
        pairs = cast("TensorDict | None", pack.get("pairs", None))
        return found if pairs is None else replace(found, pairs=float(len(pairs)))

    @classmethod
    def of_occurrences(cls, weight: Tensor, leaf: Tensor, *, n_leaves: int, turn: Tensor | None = None) -> Denominators:
        """Of one table of occurrences; ``turn`` is needed for ``turns`` (0 without)."""
        sums = segment_sum(weight.double(), leaf, n_leaves)
        counts = segment_sum((weight > 0).double(), leaf, n_leaves)
        longest = float(counts.max()) if n_leaves else 0.0
        turns = float(segment_shares(weight.double(), turn).sum()) if turn is not None else 0.0
        return cls(float(sums.sum()), float((sums > 0).sum()), longest, turns)

    def write(self, pack: Pack) -> None:
        """Store in a pack under ``denominators``, where the objective looks for them."""
        values = {f.name: torch.tensor(getattr(self, f.name), dtype=torch.float64) for f in fields(self)}
        pack.set("denominators", TensorDict(values, batch_size=[]))

    @classmethod
    def read(cls, pack: Pack) -> Denominators:
        """The inverse of :meth:`write`; without stored ones, those of this pack alone."""
        stored = cast("TensorDict | None", pack.get("denominators", None))
        if stored is None:
            return cls.of([pack])
        return cls(**{f.name: float(cast("Tensor", stored.get(f.name))) for f in fields(cls)})


def aggregate(values: Tensor, occurrences: Occurrences, denominators: Denominators, *, how: Aggregation) -> Tensor:
    """This batch's share of the mini-batch's aggregate of ``values`` [O]; shares of all packs add up to it.

    token-mean = sum(omega f) / sum(omega); seq-mean-token-mean = mean over trajectories of the same; seq-mean-token-sum
    = mean over trajectories of sum(omega f); seq-mean-token-sum-norm = sum(omega f) / width (Dr. GRPO); turn-mean =
    mean of sum(omega f) / sum(omega) over the turns of all trajectories, each of which weighs its mean omega.
    Trajectories and turns whose omega sum to 0 are skipped; an empty batch gives 0.
    """
    omega = occurrences.weight
    if how == "token-mean":
        return share(omega * values, denominators.weight)
    if how == "seq-mean-token-sum":
        return share(omega * values, denominators.rows)
    if how == "seq-mean-token-sum-norm":
        return share(omega * values, denominators.width)
    if how == "seq-mean-token-mean":
        sums = segment_sum(omega, occurrences.leaf, occurrences.n_leaves)
        per_leaf = omega / torch.where(sums > 0, sums, torch.ones_like(sums))[occurrences.leaf]
        return share(per_leaf * values, denominators.rows)
    if how == "turn-mean":
        return share(segment_shares(omega, occurrences.turn) * values, denominators.turns)
    raise ConfigError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, found {how!r}")


def share(weighted: Tensor, denominator: float) -> Tensor:
    """Sum of ``weighted`` over a mini-batch's ``denominator``; 0 where there is nothing to divide by."""
    total = weighted.sum()
    return total / denominator if denominator > 0 else total * 0.0


def segment_shares(weight: Tensor, segment: Tensor) -> Tensor:
    """``weight`` [O] over the number of tokens of positive weight in its segment, so that a segment's shares add up to
    its mean weight."""
    counts = segment_sum((weight > 0).to(weight.dtype), segment, int(segment.max()) + 1 if len(segment) else 0)
    return weight / counts.clamp(min=1.0)[segment]


def segment_sum(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sum of ``values`` [O] in each segment, [count]."""
    return values.new_zeros(count).index_add(0, segment, values)
