"""What each rank does of the work of a step, and how all come to know the whole.

Prompts are dealt out one by one; since seeds derive from (run, prompt, tree, path), a tree is the same on whichever
rank it grows. Packs are dealt out by size, in slots: in each slot every rank has one pack, or none and then runs a
dummy, so that all ranks do the same number of forward and backward passes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from turntree.trainers.distributed.ranks import Ranks
from turntree.trainers.tree import Group, Node, Tree

if TYPE_CHECKING:
    import torch

    from turntree.trainers.packing import Pack
    from turntree.trainers.rollout import Prompt, Rollout

__all__ = ["deal", "fingerprint", "share_groups", "share_rollout", "share_scores"]

T = TypeVar("T")
Slots = list[list[int | None]]

_COLUMNS = ("old_logp", "ref_logp", "value", "old_entropy")
_LINKS = ("parent", "children", "picked", "state", "prefix")
_PLAIN = tuple(item.name for item in fields(Node) if item.name not in _LINKS)


def deal(sizes: Sequence[int], ranks: int) -> Slots:
    """``slots[i][r]``: the index that rank ``r`` works on in slot ``i``; None: a dummy.

    The items of a slot have similar sizes, since ranks wait for each other. One rank keeps the order.
    """
    order = list(range(len(sizes)))
    if ranks > 1:
        order.sort(key=lambda i: -sizes[i])
    slots: Slots = [[*order[start : start + ranks]] for start in range(0, len(order), ranks)]
    for slot in slots:
        slot += [None] * (ranks - len(slot))
    # The largest of every second slot goes to the last rank, so that no rank gets the largest of all.
    return [slot[::-1] if number % 2 else slot for number, slot in enumerate(slots)]


def share_rollout(prompts: Sequence[Prompt], grow: Callable[[Sequence[Prompt]], Rollout], *, ranks: Ranks) -> Rollout:
    """``grow`` on this rank's prompts; returns the rollout of all prompts, in their order, on every rank.

    Environment states are not sent: the trees that come back have none.
    """
    if ranks.size == 1:
        return grow(prompts)
    from turntree.trainers.rollout import Rollout
    from turntree.trainers.tally import RolloutStats

    mine = prompts[ranks.rank :: ranks.size]
    own = grow(mine) if mine else Rollout((), RolloutStats())
    parts = ranks.gather(([_flat_group(group) for group in own.groups], own.stats))
    groups = _interleave([[_group(flat) for flat in flats] for flats, _ in parts])
    return Rollout(tuple(groups), RolloutStats.joined([stats for _, stats in parts]))


def share_groups(
    prompts: Sequence[Prompt], grow: Callable[[Sequence[Prompt]], Sequence[Group]], *, ranks: Ranks
) -> tuple[Group, ...]:
    """As :func:`share_rollout`, for the groups alone."""
    if ranks.size == 1:
        return tuple(grow(prompts))
    mine = prompts[ranks.rank :: ranks.size]
    parts = ranks.gather([_flat_group(group) for group in (grow(mine) if mine else ())])
    return tuple(_interleave([[_group(flat) for flat in flats] for flats in parts]))


def share_scores(packs: Sequence[Pack], score: Callable[[Sequence[Pack]], None], *, ranks: Ranks) -> None:
    """``score`` on this rank's packs; afterwards every rank has what was written into all of them."""
    if ranks.size == 1:
        score(packs)
        return
    from turntree.trainers.packing import table

    slots = deal([_tokens(pack) for pack in packs], ranks.size)
    mine = [index for slot in slots if (index := slot[ranks.rank]) is not None]
    score([packs[index] for index in mine])
    for part in ranks.gather({index: _scores(packs[index]) for index in mine}):
        for index, columns in part.items():
            for name, values in columns.items():
                table(packs[index], "tokens").set(name, values)


def fingerprint(packs: Sequence[Pack]) -> int:
    """A number that is the same for equal packs: their tokens, and which of them are trained on."""
    from turntree.trainers.packing import column

    found = len(packs)
    for pack in packs:
        for values in (column(pack, "tokens", "ids"), column(pack, "occurrences", "token")):
            found = zlib.crc32(values.cpu().numpy().tobytes(), found)
    return found


def _tokens(pack: Pack) -> int:
    from turntree.trainers.packing import table

    return len(table(pack, "tokens"))


def _scores(pack: Pack) -> dict[str, torch.Tensor]:
    from turntree.trainers.packing import table

    tokens = table(pack, "tokens")
    return {name: values for name in _COLUMNS if (values := tokens.get(name, None)) is not None}


def _interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """The inverse of ``items[rank::size]``."""
    total = sum(map(len, parts))
    return [parts[i % len(parts)][i // len(parts)] for i in range(total)]


# Trees as flat rows: pickled as they are, they would take a recursion as deep as they are ----------------------------


def _flat_group(group: Group) -> tuple[str, list[tuple[Tree, list[tuple[Any, ...]]]]]:
    return group.uid, [(replace(tree, root=Node()), _rows(tree)) for tree in group.trees]


def _rows(tree: Tree) -> list[tuple[Any, ...]]:
    """For each node, depth first: the places of its parent and of the node it was picked for, then its fields."""
    nodes = list(tree.root.walk())
    place = {id(node): i for i, node in enumerate(nodes)}
    return [
        (
            None if node.parent is None else place[id(node.parent)],
            None if node.picked is None else place[id(node.picked)],
            *(getattr(node, name) for name in _PLAIN),
        )
        for node in nodes
    ]


def _group(flat: tuple[str, list[tuple[Tree, list[tuple[Any, ...]]]]]) -> Group:
    uid, trees = flat
    return Group(uid, [replace(tree, root=_root(rows)) for tree, rows in trees])


def _root(rows: Sequence[tuple[Any, ...]]) -> Node:
    nodes = [Node(**dict(zip(_PLAIN, row[2:], strict=True))) for row in rows]
    for node, (parent, picked, *_) in zip(nodes, rows, strict=True):
        if parent is not None:
            node.parent = nodes[parent]
            nodes[parent].children.append(node)  # depth first: siblings arrive in their order
        if picked is not None:
            node.picked = nodes[picked]
    return nodes[0]
