"""From trees to tensors: two tables a pack, every token of a tree once.

A *pack* is one ``TensorDict`` with three nested tables:

``tokens`` (batch ``[N]``), each token of the packed trees once, depth first
    ``ids`` int64; ``position`` int64, depth of the token in its trajectory; ``subtree_end`` int64, one past the last
    token below it; ``predecessor`` int64, index of the token before it *on its path*, -1 for a first token;
    ``turn_id`` int64, unique per turn in the pack, -1 for environment tokens; ``loss_mask`` bool, true on sampled
    tokens; ``sampler_logp`` float32; ``version`` int64, of the weights that sampled the token. ``old_logp``,
    ``ref_logp``, ``value`` and ``old_entropy`` (float32) are absent until a score pass has written them.
``occurrences`` (batch ``[O]``), one row per (scored leaf, sampled token), by leaf, then position
    ``token``, index into ``tokens``; ``leaf``, index into ``rows``; ``turn``, segment number, unique per (leaf,
    turn); ``turn_index``, the turn's place on its path from 0; ``advantage``, ``ret`` float32, 0 until written;
    ``weight`` float32, the declared weight omega of a shared turn.
``rows`` (batch ``[R]``), one per scored leaf
    ``group``, index into the packed groups; ``leaf``, index into ``group.scored_leaves()``; ``tree``; ``end``, index
    of the trajectory's last token; ``turn``, segment number of its last sampled turn, -1 without any.
``pairs`` (batch ``[P]``, packs of :func:`pack_pairs` only), one per pair of sibling turns
    ``winner``, ``loser``, segment numbers as in ``occurrences.turn``; ``margin`` float32.

A query token ``q`` sees a key ``k`` iff ``k <= q < subtree_end[k]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from turntree.errors import ConfigError, DataError
from turntree.trainers.tree import Group, Node, Tree

if TYPE_CHECKING:
    from turntree.trainers.credit import Advantages
    from turntree.trainers.pairs import Pair

__all__ = [
    "Pack",
    "SharedTurns",
    "column",
    "pack_groups",
    "pack_pairs",
    "row_tokens",
    "table",
    "turn_columns",
    "write_advantages",
]

Pack: TypeAlias = TensorDict
"""The tables ``tokens``, ``occurrences``, ``rows`` (and ``pairs``) of one forward pass."""

_ROW = ("group", "leaf", "tree", "end", "turn")

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
    """Leaves of one tree, or of trees below one prompt, that are packed depth first, and how many tokens they need."""

    leaves: tuple[_Leaf, ...]
    size: int


def pack_groups(groups: Sequence[Group], *, max_pack_tokens: int, shared_turns: SharedTurns = "per_leaf") -> list[Pack]:
    """Pack the scored leaves of ``groups`` (all groups of one mini-batch) under a token budget.

    Small trees share a pack; trees of one prompt that fit together share its tokens too. A tree over
    ``max_pack_tokens`` is cut between leaves: its ancestors are computed again in each part, its occurrences never are,
    and the weights of ``shared_turns="once"`` count the whole tree's leaves.
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
    sharing = _sharing(leaf for leaves in trees for leaf in leaves) if shared_turns == "once" else {}
    parts = [part for leaves in _joined(trees, max_pack_tokens) for part in _cut(leaves, max_pack_tokens)]
    return [
        _build(bin_, lambda node, leaf: 1.0 / sharing.get(id(node), 1)) for bin_ in _first_fit(parts, max_pack_tokens)
    ]


def pack_pairs(groups: Sequence[Group], *, max_pack_tokens: int, pairs: Callable[[Group], list[Pair]]) -> list[Pack]:
    """Pack the sibling turns that ``pairs`` compares, each with the path before it, winners beside their losers.

    A row is one such turn; only the turn itself has weight (1), whatever comes before is context. A tree over
    ``max_pack_tokens`` is cut between parents. Each pack has a ``pairs`` table; a group without pairs gives none.
    Pairs of a turn without sampled tokens are left out. Raises as :func:`pack_groups`.
    """
    if max_pack_tokens < 1:
        raise ConfigError(f"max_pack_tokens must be at least 1, found {max_pack_tokens}")
    chosen = [[p for p in pairs(group) if p.winner.turn_ids and p.loser.turn_ids] for group in groups]
    parts = [
        part
        for g, (group, found) in enumerate(zip(groups, chosen))
        for tree in group.trees
        for part in _pair_parts(g, group, tree, found, max_pack_tokens)
    ]
    return [_build_pairs(bin_, [p for found in chosen for p in found]) for bin_ in _first_fit(parts, max_pack_tokens)]


def _pair_parts(g: int, group: Group, tree: Tree, pairs: Sequence[Pair], budget: int) -> Iterator[_Part]:
    """The paired turns of one tree depth first: in one part where they fit, else one part a parent."""
    turns = {id(node) for pair in pairs for node in (pair.winner, pair.loser)}
    leaves = [
        _Leaf(
            g, tree.index, i, (tree.root, *node.trajectory()), f"prompt {group.uid!r}, tree {tree.index}, {node.path}"
        )
        for i, node in enumerate(tree.root.walk())
        if id(node) in turns
    ]
    if not leaves or _size(leaves) <= budget:
        yield from [_Part(tuple(leaves), _size(leaves))] if leaves else []
        return
    families: dict[int, list[_Leaf]] = {}
    for leaf in leaves:
        families.setdefault(id(leaf.path[-2]), []).append(leaf)
    for family in families.values():
        yield _Part(tuple(family), _size(family))


def _size(leaves: Sequence[_Leaf]) -> int:
    """Tokens of the leaves' paths, each node once."""
    return _length({id(node): node for leaf in leaves for node in leaf.path}.values())


def _build_pairs(parts: Sequence[_Part], pairs: Sequence[Pair]) -> Pack:
    pack = _build(parts, lambda node, leaf: float(node is leaf.path[-1]))
    turns = column(pack, "rows", "turn").tolist()
    segment = {id(leaf.path[-1]): turns[i] for i, leaf in enumerate(leaf for part in parts for leaf in part.leaves)}
    here = [pair for pair in pairs if id(pair.winner) in segment]
    columns = {
        "winner": torch.tensor([segment[id(p.winner)] for p in here], dtype=torch.int64),
        "loser": torch.tensor([segment[id(p.loser)] for p in here], dtype=torch.int64),
        "margin": torch.tensor([p.margin for p in here], dtype=torch.float32),
    }
    pack.set("pairs", TensorDict(columns, batch_size=[len(here)]))
    return pack


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


def _joined(trees: Iterable[list[_Leaf]], budget: int) -> Iterator[list[_Leaf]]:
    """Neighbouring trees of one group whose roots hold the same tokens, as one, while they fit the budget whole."""
    kept: list[_Leaf] = []
    size = 0
    for leaves in trees:
        own = _unique(leaves)
        shared = _length(leaves[0].path[:1]) if kept and kept[0].group == leaves[0].group else 0
        if shared and _same(kept[0].path[0], leaves[0].path[0]) and size + own - shared <= budget:
            kept += leaves
            size += own - shared
            continue
        if kept:
            yield kept
        kept, size = list(leaves), own
    if kept:
        yield kept


def _unique(leaves: Sequence[_Leaf]) -> int:
    """Tokens of leaves in depth-first order, each node once."""
    pairs = zip([None, *leaves], leaves)
    return sum(_length(leaf.path[_common(before.path, leaf.path) if before else 0 :]) for before, leaf in pairs)


def _same(a: Node, b: Node) -> bool:
    """Whether two nodes are the same tokens after the same tokens: one node, or roots of equal prompts."""
    roots = a.parent is None and b.parent is None
    return a is b or (roots and a.turn_ids == b.turn_ids and a.observation_ids == b.observation_ids)


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
    while n < min(len(a), len(b)) and _same(a[n], b[n]):
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


@dataclass(frozen=True, slots=True)
class _Span:
    """A node's place in the table: its number there, its first token, the end of its turn, and the path up to its end:
    the last token (-1: none yet) and how many there are."""

    number: int
    start: int
    turn_end: int
    last: int
    depth: int


@dataclass(slots=True)
class _Table:
    """The table of tokens under construction: one entry a node, spread over its tokens when all are in.

    An entry of ``nodes`` is (sampled tokens, observed tokens, last token before them, depth of the first, version).
    """

    ids: list[int] = field(default_factory=list)
    sampler_logp: list[float] = field(default_factory=list)
    nodes: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def open(self, node: Node, parent: _Span | None, name: str) -> _Span:
        """Append a node's tokens: its turn, then its observation."""
        start, turn, seen = len(self.ids), len(node.turn_ids), len(node.observation_ids)
        last, depth = (parent.last, parent.depth) if parent is not None else (-1, 0)
        if turn and last < 0:
            raise DataError(f"{name}: the first turn has no token before it; give the tree's root a prompt")
        _check_lengths(node, name)
        # Not +=, which would add the numbers of an array to those that are there.
        self.ids.extend(node.turn_ids)
        self.ids.extend(node.observation_ids)
        self.sampler_logp.extend(node.logprobs)
        span = _Span(
            len(self.nodes), start, start + turn, start + turn + seen - 1 if turn or seen else last, depth + turn + seen
        )
        self.nodes.append((turn, seen, last, depth, node.version))
        self.ends.append(start)
        return span

    def close(self, span: _Span) -> None:
        """All tokens below a node are in: its own tokens are seen up to here."""
        self.ends[span.number] = len(self.ids)

    def tensors(self) -> TensorDict:
        size = len(self.ids)
        turn, seen, last, depth, version = np.array(self.nodes, dtype=np.int64).reshape(-1, 5).T
        lengths = turn + seen
        starts = np.cumsum(lengths) - lengths
        row = np.arange(size)
        predecessor, some = row - 1, lengths > 0
        predecessor[starts[some]] = last[some]
        halves = np.stack([turn, seen], axis=1).ravel()  # turn, observation, turn, ...
        numbers = np.stack([np.cumsum(turn > 0) - 1, np.full(len(turn), -1)], axis=1).ravel()
        turn_id = np.repeat(numbers, halves)
        sampled = turn_id >= 0
        logp = np.zeros(size, dtype=np.float32)
        logp[sampled] = self.sampler_logp
        columns = {
            "ids": np.array(self.ids, dtype=np.int64),
            "position": row - np.repeat(starts - depth, lengths),
            "subtree_end": np.repeat(np.array(self.ends, dtype=np.int64), lengths),
            "predecessor": predecessor,
            "turn_id": turn_id,
            "loss_mask": sampled,
            "sampler_logp": logp,
            "version": np.repeat(version, lengths),
        }
        return TensorDict({name: torch.from_numpy(values) for name, values in columns.items()}, batch_size=[size])


def _check_lengths(node: Node, name: str) -> None:
    if len(node.logprobs) != len(node.turn_ids):
        raise DataError(
            f"{name}: node {node.path} has {len(node.turn_ids)} sampled token ids but {len(node.logprobs)} sampler "
            "log-probs; ids, mask, log-probs and turn ids need equal lengths. Take both from the same generation."
        )


def _build(parts: Sequence[_Part], omega: Callable[[Node, _Leaf], float]) -> Pack:
    tokens = _Table()
    turns: list[tuple[int, int, int, int]] = []
    weights: list[float] = []
    rows: list[tuple[int, int, int, int, int]] = []
    for leaf, spans in _layout(parts, tokens):
        last = -1
        for depth, (node, span) in enumerate(zip(leaf.path, spans)):
            if span.turn_end == span.start:
                continue
            last = len(turns)
            turns.append((span.start, span.turn_end - span.start, len(rows), depth - 1))
            weights.append(omega(node, leaf))
        rows.append((leaf.group, leaf.index, leaf.tree, spans[-1].last, last))
    row_columns = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(_ROW)).unbind(1)
    return TensorDict(
        {
            "tokens": tokens.tensors(),
            "occurrences": _occurrences(turns, weights),
            "rows": TensorDict(dict(zip(_ROW, row_columns)), batch_size=[len(rows)]),
        },
        batch_size=[],
    )


def _occurrences(turns: Sequence[tuple[int, int, int, int]], weights: Sequence[float]) -> TensorDict:
    """The table of that name from (first token, number of tokens, leaf, place on its path) of every turn of a leaf."""
    starts, counts, leaf, place = np.array(turns, dtype=np.int64).reshape(-1, 4).T
    first = np.cumsum(counts) - counts
    size = int(counts.sum())
    columns = {
        "token": np.arange(size) - np.repeat(first - starts, counts),
        "leaf": np.repeat(leaf, counts),
        "turn": np.repeat(np.arange(len(counts)), counts),
        "turn_index": np.repeat(place, counts),
        "weight": np.repeat(np.array(weights, dtype=np.float32), counts),
        "advantage": np.zeros(size, dtype=np.float32),
        "ret": np.zeros(size, dtype=np.float32),
    }
    return TensorDict({name: torch.from_numpy(values) for name, values in columns.items()}, batch_size=[size])


def _layout(parts: Sequence[_Part], tokens: _Table) -> Iterator[tuple[_Leaf, list[_Span]]]:
    """Append the parts' nodes depth first; yields each leaf with the spans of the nodes on its path."""
    for part in parts:
        path: tuple[Node, ...] = ()
        spans: list[_Span] = []
        for leaf in part.leaves:
            _close(tokens, spans, _common(path, leaf.path))
            for node in leaf.path[len(spans) :]:
                spans.append(tokens.open(node, spans[-1] if spans else None, leaf.name))
            path = leaf.path
            yield leaf, spans
        _close(tokens, spans, 0)


def _close(tokens: _Table, spans: list[_Span], keep: int) -> None:
    while len(spans) > keep:
        tokens.close(spans.pop())


def write_advantages(packs: Sequence[Pack], advantages: Advantages) -> None:
    """Write what the credit rule gave into the packs' ``occurrences``, in place, as float32. Call it once a pack.

    For the ``l``-th scored leaf of group ``g``, ``advantages.values[g][l]`` holds one value per turn of its path
    (``per="turn"``) or one per sampled token (``per="token"``); ``returns``, per sampled token, go to ``ret``;
    ``weights``, per turn, multiply ``weight``. Raises ``DataError`` naming the row where they do not fit.
    """
    for pack in packs:
        turn = column(pack, "occurrences", "turn_index").numpy()
        columns = {"advantage": _spread(pack, turn, advantages.values, advantages.per, "advantages")}
        if advantages.returns is not None:
            columns["ret"] = _spread(pack, turn, advantages.returns, "token", "returns")
        if advantages.weights is not None:
            weight = column(pack, "occurrences", "weight").numpy()
            columns["weight"] = weight * _spread(pack, turn, advantages.weights, "turn", "weights")
        for name, values in columns.items():
            table(pack, "occurrences").set(name, torch.from_numpy(values).to(torch.float32))


_Rows: TypeAlias = Sequence[Sequence[npt.NDArray[np.float64]]]


def _spread(pack: Pack, turn: npt.NDArray[np.int64], rows: _Rows, per: str, what: str) -> npt.NDArray[np.float64]:
    """``rows[group][leaf]`` as one float64 column over the pack's occurrences [O]."""
    names = list(zip(column(pack, "rows", "group").tolist(), column(pack, "rows", "leaf").tolist()))
    values = [_row_values(rows, group, leaf, what) for group, leaf in names]
    row = column(pack, "occurrences", "leaf").numpy()
    counts = np.bincount(row, minlength=len(names))
    picked = turn if per == "turn" else np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    needed = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(needed, row, picked + 1)
    lengths = np.array([len(given) for given in values], dtype=np.int64)
    flat = np.concatenate([np.zeros(0), *values])
    wrong = lengths != needed if per == "token" else lengths < needed
    if wrong.any() or not np.isfinite(flat).all():
        for (group, leaf), given, least in zip(names, values, needed.tolist()):
            _check_row(given, least, per, f"group {group}, scored leaf {leaf}", what)
    spread: npt.NDArray[np.float64] = flat[(np.cumsum(lengths) - lengths)[row] + picked]
    return spread


def _row_values(rows: _Rows, group: int, leaf: int, what: str) -> npt.NDArray[np.float64]:
    try:
        return np.asarray(rows[group][leaf], dtype=np.float64)
    except (IndexError, KeyError):
        raise DataError(
            f"no {what} for group {group}, scored leaf {leaf}; credit must run over the same groups, in the same "
            "order, as were packed"
        ) from None


def _check_row(values: npt.NDArray[np.float64], needed: int, per: str, name: str, what: str) -> None:
    if len(values) < needed or (per == "token" and len(values) != needed):
        raise DataError(f"{name}: expected at least {needed} {what} (one a {per}), found {len(values)}")
    if not np.isfinite(values).all():
        raise DataError(f"{name}: {what} must be finite, found {values}")


def turn_columns(packs: Sequence[Pack], groups: Sequence[Group], key: str) -> dict[Node, npt.NDArray[np.float64]]:
    """``tokens[key]`` of all packs of ``groups``, as one float64 array per node: an entry for each sampled token."""
    trajectories = [[leaf.trajectory() for leaf in group.scored_leaves()] for group in groups]
    nodes = (node for group in trajectories for path in group for node in path)
    out = {node: np.zeros(0) for node in nodes if not node.turn_ids}
    for pack in packs:
        values = column(pack, "tokens", key).double().numpy()
        occurrences = table(pack, "occurrences")
        leaf_of, turn, token = (occurrences.get(name).numpy() for name in ("leaf", "turn_index", "token"))
        where = zip(column(pack, "rows", "group").tolist(), column(pack, "rows", "leaf").tolist())
        paths = [trajectories[g][leaf] for g, leaf in where]
        starts = np.flatnonzero(np.diff(leaf_of, prepend=-1) | np.diff(turn, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(token)]):
            out.setdefault(paths[leaf_of[start]][turn[start]], values[token[start:stop]])
    return out


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
