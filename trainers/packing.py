"""From trees to tensors: two tables a pack, every token of a tree once.

A *pack* is one ``TensorDict`` with three nested tables:

``tokens`` (batch ``[N]``), each token of the packed trees once, depth first
    ``ids`` int64; ``position`` int64, depth of the token in its trajectory; ``subtree_end`` int64, one past the last
    token below it; ``predecessor`` int64, index of the token before it *on its path*, -1 for a first token;
    ``turn_id`` int64, unique per turn in the pack, -1 for environment tokens; ``loss_mask`` bool, true on sampled
    tokens; ``sampler_logp`` float32; ``version`` int64, of the weights that sampled the token. ``old_logp``,
    ``ref_logp`` and ``value`` (float32) are absent until a score pass has written them.
``occurrences`` (batch ``[O]``), one row per (scored leaf, sampled token), by leaf, then position
    ``token``, index into ``tokens``; ``leaf``, index into ``rows``; ``turn``, segment number, unique per (leaf,
    turn); ``turn_index``, the turn's place on its path from 0; ``advantage``, ``ret`` float32, 0 until written;
    ``weight`` float32, the declared weight omega of a shared turn.
``rows`` (batch ``[R]``), one per scored leaf
    ``group``, index into the packed groups; ``leaf``, index into ``group.scored_leaves()``; ``tree``; ``end``, index
    of the trajectory's last token.

A query token ``q`` sees a key ``k`` iff ``k <= q < subtree_end[k]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from turntree.errors import ConfigError, DataError
from turntree.trainers.tree import Group, Node

if TYPE_CHECKING:
    from turntree.trainers.credit import Advantages

__all__ = ["Pack", "SharedTurns", "column", "pack_groups", "row_tokens", "table", "write_advantages"]

Pack: TypeAlias = TensorDict

SharedTurns = Literal["per_leaf", "once"]
"""Weight of a turn that several leaves share: 1 in each of them, or 1 / (number of its scored leaves)."""


def table(pack: Pack, name: Literal["tokens", "occurrences", "rows"]) -> TensorDict:
    """One of a pack's tables."""
    return cast("TensorDict", pack.get(name))


def column(pack: Pack, name: Literal["tokens", "occurrences", "rows"], key: str) -> torch.Tensor:
    """One column of a pack's table; ``KeyError`` if it is absent (or not written yet)."""
    return cast("torch.Tensor", pack.get((name, key)))


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A scored leaf with its path, the root first."""

    group: int
    tree: int
    index: int
    path: tuple[Node, ...]
    name: str


@dataclass(frozen=True, slots=True)
class _Part:
    """Leaves of one tree that are packed together, depth first, and how many tokens they need."""

    leaves: tuple[_Leaf, ...]
    size: int


def pack_groups(groups: Sequence[Group], *, max_pack_tokens: int, shared_turns: SharedTurns = "per_leaf") -> list[Pack]:
    """Pack the scored leaves of ``groups`` (all groups of one mini-batch) under a token budget.

    Small trees share a pack. A tree over ``max_pack_tokens`` is cut between leaves: its ancestors are computed again
    in each part, its occurrences never are, and the weights of ``shared_turns="once"`` count the whole tree's leaves.
    A single trajectory over the budget gets a pack of its own. Nodes without a scored leaf below are left out; groups
    without any give no pack.

    Raises ``ConfigError`` for a budget below 1, ``DataError`` for a node whose token ids, log-probs, mask and turn
    ids have different lengths, or a prompt without tokens.
    """
    if max_pack_tokens < 1:
        raise ConfigError(f"max_pack_tokens must be at least 1, found {max_pack_tokens}")
    if shared_turns not in ("per_leaf", "once"):
        raise ConfigError(f"shared_turns must be 'per_leaf' or 'once', found {shared_turns!r}")
    trees = list(_trees(groups))
    sharing = _sharing(leaf for leaves in trees for leaf in leaves) if shared_turns == "once" else None
    parts = [part for leaves in trees for part in _cut(leaves, max_pack_tokens)]
    return [_build(bin_, sharing) for bin_ in _first_fit(parts, max_pack_tokens)]


def _trees(groups: Sequence[Group]) -> Iterator[list[_Leaf]]:
    """The scored leaves of every tree that has any, indexed as in ``Group.scored_leaves``."""
    for g, group in enumerate(groups):
        index = 0
        for tree in group.trees:
            leaves: list[_Leaf] = []
            for node in tree.scored_leaves():
                name = f"prompt {group.uid!r}, tree {tree.index}, leaf {node.path}"
                leaves.append(_Leaf(g, tree.index, index, (tree.root, *node.trajectory()), name))
                index += 1
            if leaves:
                yield leaves


def _sharing(leaves: Iterable[_Leaf]) -> dict[int, int]:
    """Number of scored leaves at or below each node, by ``id(node)``."""
    counts: dict[int, int] = {}
    for leaf in leaves:
        for node in leaf.path:
            counts[id(node)] = counts.get(id(node), 0) + 1
    return counts


def _common(a: Sequence[Node], b: Sequence[Node]) -> int:
    """Length of the common start of two paths."""
    n = 0
    while n < min(len(a), len(b)) and a[n] is b[n]:
        n += 1
    return n


def _length(nodes: Iterable[Node]) -> int:
    return sum(len(n.turn_ids) + len(n.observation_ids) for n in nodes)


def _cut(leaves: Sequence[_Leaf], budget: int) -> Iterator[_Part]:
    """Cut a tree between leaves so that each part fits the budget, ancestors included."""
    kept: list[_Leaf] = []
    size = 0
    for leaf in leaves:
        new = _length(leaf.path[_common(kept[-1].path, leaf.path) if kept else 0 :])
        if kept and size + new > budget:
            yield _Part(tuple(kept), size)
            kept, size, new = [], 0, _length(leaf.path)
        kept.append(leaf)
        size += new
    yield _Part(tuple(kept), size)


def _first_fit(parts: Iterable[_Part], budget: int) -> list[list[_Part]]:
    bins: list[list[_Part]] = []
    room: list[int] = []
    for part in parts:
        slot = next((i for i, free in enumerate(room) if free >= part.size), None)
        if slot is None:
            bins.append([])
            room.append(budget)
            slot = len(bins) - 1
        bins[slot].append(part)
        room[slot] -= part.size
    return bins


@dataclass(slots=True)
class _Span:
    """A node's place in the table: its first token, the end of its turn tokens, its last token on the path so far."""

    start: int
    turn_end: int
    last: int


@dataclass(slots=True)
class _Table:
    """Columns under construction; plain lists, because nodes are short and many."""

    ids: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    subtree_end: list[int] = field(default_factory=list)
    predecessor: list[int] = field(default_factory=list)
    turn_id: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    sampler_logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    turns: int = 0

    def open(self, node: Node, parent: _Span | None, name: str) -> _Span:
        """Append a node's tokens: its turn, then its observation."""
        start, turn, seen = len(self.ids), len(node.turn_ids), len(node.observation_ids)
        length = turn + seen
        last = parent.last if parent is not None else -1
        if turn and last < 0:
            raise DataError(f"{name}: the first turn has no token before it; give the tree's root a prompt")
        _check_lengths(node, name)
        first_position = self.position[last] + 1 if last >= 0 else 0
        self.ids += [*node.turn_ids, *node.observation_ids]
        self.position += range(first_position, first_position + length)
        self.predecessor += [last, *range(start, start + length - 1)][:length]
        self.subtree_end += [-1] * length
        self.turn_id += [self.turns] * turn + [-1] * seen
        self.loss_mask += [True] * turn + [False] * seen
        self.sampler_logp += [*node.logprobs, *([0.0] * seen)]
        self.version += [node.version] * length
        self.turns += 1 if turn else 0
        return _Span(start, start + turn, start + length - 1 if length else last)

    def close(self, span: _Span, node: Node) -> None:
        """All tokens below ``node`` are in: its own tokens are seen up to here."""
        length = len(node.turn_ids) + len(node.observation_ids)
        self.subtree_end[span.start : span.start + length] = [len(self.ids)] * length

    def tensors(self) -> TensorDict:
        ints = ("ids", "position", "subtree_end", "predecessor", "turn_id", "version")
        columns = {name: torch.tensor(getattr(self, name), dtype=torch.int64) for name in ints}
        columns["loss_mask"] = torch.tensor(self.loss_mask, dtype=torch.bool)
        columns["sampler_logp"] = torch.tensor(self.sampler_logp, dtype=torch.float32)
        return TensorDict(columns, batch_size=[len(self.ids)])


def _check_lengths(node: Node, name: str) -> None:
    if len(node.logprobs) != len(node.turn_ids):
        raise DataError(
            f"{name}: node {node.path} has {len(node.turn_ids)} sampled token ids but {len(node.logprobs)} sampler "
            "log-probs; ids, mask, log-probs and turn ids need equal lengths. Take both from the same generation."
        )


def _build(parts: Sequence[_Part], sharing: dict[int, int] | None) -> Pack:
    tokens = _Table()
    token: list[int] = []
    leaf_of: list[int] = []
    turn: list[int] = []
    turn_index: list[int] = []
    weight: list[float] = []
    rows: list[tuple[int, int, int, int]] = []
    segments = 0
    for leaf, spans in _layout(parts, tokens):
        for depth, (node, span) in enumerate(zip(leaf.path, spans)):
            count = span.turn_end - span.start
            if not count:
                continue
            token += range(span.start, span.turn_end)
            leaf_of += [len(rows)] * count
            turn += [segments] * count
            turn_index += [depth - 1] * count
            weight += [1.0 / sharing[id(node)] if sharing is not None else 1.0] * count
            segments += 1
        rows.append((leaf.group, leaf.index, leaf.tree, spans[-1].last))
    ints = {"token": token, "leaf": leaf_of, "turn": turn, "turn_index": turn_index}
    columns = {name: torch.tensor(values, dtype=torch.int64) for name, values in ints.items()}
    columns["weight"] = torch.tensor(weight, dtype=torch.float32)
    columns["advantage"] = torch.zeros(len(token))
    columns["ret"] = torch.zeros(len(token))
    row_columns = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 4).unbind(1)
    return TensorDict(
        {
            "tokens": tokens.tensors(),
            "occurrences": TensorDict(columns, batch_size=[len(token)]),
            "rows": TensorDict(dict(zip(("group", "leaf", "tree", "end"), row_columns)), batch_size=[len(rows)]),
        },
        batch_size=[],
    )


def _layout(parts: Sequence[_Part], tokens: _Table) -> Iterator[tuple[_Leaf, list[_Span]]]:
    """Append the parts' nodes depth first; yields each leaf with the spans of the nodes on its path."""
    for part in parts:
        path: tuple[Node, ...] = ()
        spans: list[_Span] = []
        for leaf in part.leaves:
            keep = _common(path, leaf.path)
            _close(tokens, path, spans, keep)
            for node in leaf.path[keep:]:
                spans.append(tokens.open(node, spans[-1] if spans else None, leaf.name))
            path = leaf.path
            yield leaf, spans
        _close(tokens, path, spans, 0)


def _close(tokens: _Table, path: Sequence[Node], spans: list[_Span], keep: int) -> None:
    while len(spans) > keep:
        tokens.close(spans[-1], path[len(spans) - 1])
        spans.pop()


def write_advantages(packs: Sequence[Pack], advantages: Advantages) -> None:
    """Write the credit rule's float64 advantages into the packs' ``occurrences`` as float32, in place.

    ``advantages.values[g][l]`` holds, for the ``l``-th scored leaf of group ``g``, one value per turn of its path
    (``per="turn"``) or one per sampled token (``per="token"``). Raises ``DataError`` naming the row otherwise.
    """
    for pack in packs:
        turn_index = column(pack, "occurrences", "turn_index").numpy()
        groups, leaves = column(pack, "rows", "group").tolist(), column(pack, "rows", "leaf").tolist()
        starts = np.searchsorted(column(pack, "occurrences", "leaf").numpy(), np.arange(len(groups) + 1)).tolist()
        out = np.zeros(len(turn_index))
        for group, leaf, start, stop in zip(groups, leaves, starts, starts[1:]):
            values = _row_values(advantages, group, leaf)
            picked = turn_index[start:stop] if advantages.per == "turn" else np.arange(stop - start)
            _check_row(values, picked, advantages.per, f"group {group}, scored leaf {leaf}")
            out[start:stop] = values[picked]
        table(pack, "occurrences").set("advantage", torch.from_numpy(out).to(torch.float32))


def _row_values(advantages: Advantages, group: int, leaf: int) -> npt.NDArray[np.float64]:
    try:
        return np.asarray(advantages.values[group][leaf], dtype=np.float64)
    except (IndexError, KeyError):
        raise DataError(
            f"no advantages for group {group}, scored leaf {leaf}; credit must run over the same groups, in the same "
            "order, as were packed"
        ) from None


def _check_row(values: npt.NDArray[np.float64], picked: npt.NDArray[np.int64], per: str, name: str) -> None:
    needed = int(picked.max()) + 1 if picked.size else 0
    if len(values) < needed or (per == "token" and len(values) != needed):
        raise DataError(f"{name}: expected at least {needed} advantages (one a {per}), found {len(values)}")
    if not np.isfinite(values).all():
        raise DataError(f"{name}: advantages must be finite, found {values}")


def row_tokens(pack: Pack) -> list[torch.Tensor]:
    """For each row, the token indices of its trajectory from the first token to the last, int64."""
    predecessor = column(pack, "tokens", "predecessor").tolist()
    out: list[torch.Tensor] = []
    for end in column(pack, "rows", "end").tolist():
        indices: list[int] = []
        while end >= 0:
            indices.append(end)
            end = predecessor[end]
        out.append(torch.tensor(indices[::-1], dtype=torch.int64))
    return out
