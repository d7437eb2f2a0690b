"""What goes between trainer and workers: tickets, trees, weights and requests, as plain values.

They travel by Ray's own transport between processes of one run (which pickles); nothing here is read from files.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.errors import EngineError
from turntree.trainers.plan import Prompt
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Node, Tree

if TYPE_CHECKING:
    import torch

__all__ = [
    "FlatTree",
    "GrownTree",
    "PackedWeights",
    "Ticket",
    "TreeId",
    "WireGeneration",
    "WireRequest",
    "WorkDone",
    "flatten_tree",
    "load_weights",
    "oldest_version",
    "pack_weights",
    "rebuild_tree",
    "split_ticket",
]

TreeId: TypeAlias = tuple[str, int]
"""Prompt instance and index: names a tree of a rollout, and with the run's seed everything that happens in it."""

_LINKS = ("parent", "picked", "children", "prefix")
_NODE = tuple(f.name for f in fields(Node) if f.name not in _LINKS)
_TREE = tuple(f.name for f in fields(Tree) if f.name != "root")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Trees to grow: prompts, and of each the indices of its trees."""

    prompts: tuple[Prompt, ...]
    only: Mapping[str, tuple[int, ...]]

    @property
    def trees(self) -> frozenset[TreeId]:
        return frozenset((uid, index) for uid, indices in self.only.items() for index in indices)

    def without(self, done: frozenset[TreeId] | set[TreeId]) -> Ticket:
        """What is left once the trees of ``done`` are there."""
        only = {uid: tuple(i for i in indices if (uid, i) not in done) for uid, indices in self.only.items()}
        only = {uid: indices for uid, indices in only.items() if indices}
        return Ticket(tuple(p for p in self.prompts if p.uid in only), only)


def split_ticket(ticket: Ticket, parts: int) -> list[Ticket]:
    """``ticket`` in at most ``parts`` parts of whole prompts, as equal as they can be, in order; none is empty."""
    prompts, parts = ticket.prompts, min(parts, len(ticket.prompts))
    bounds = [len(prompts) * i // parts for i in range(parts + 1)] if parts else []
    slices = (prompts[low:high] for low, high in itertools.pairwise(bounds))
    return [Ticket(some, {p.uid: ticket.only[p.uid] for p in some}) for some in slices]


# Trees ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlatTree:
    """A tree without links: nodes in depth-first order, each with the places of its parent and its picked node.

    Flat, because trees are linked both ways and as deep as episodes are long, which recursion does not survive.
    """

    about: tuple[Any, ...]
    rows: tuple[tuple[int, int, tuple[Any, ...]], ...]

    @property
    def id(self) -> TreeId:
        values = dict(zip(_TREE, self.about))
        return values["prompt_uid"], values["index"]


@dataclass(frozen=True, slots=True)
class GrownTree:
    """A finished tree and what it used."""

    tree: FlatTree
    tally: Tally


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The end of a ticket: calls handed to tools, seconds, and what a summariser used."""

    tool_attempts: int
    seconds: float
    usage: Mapping[str, float] = field(default_factory=dict)


def flatten_tree(tree: Tree) -> FlatTree:
    """Everything of a finished tree but the engine's handles."""
    nodes = list(tree.root.walk())
    place = {id(node): i for i, node in enumerate(nodes)}
    rows = tuple(
        (
            place[id(node.parent)] if node.parent is not None else -1,
            place[id(node.picked)] if node.picked is not None else -1,
            tuple(getattr(node, name) for name in _NODE),
        )
        for node in nodes
    )
    return FlatTree(tuple(getattr(tree, name) for name in _TREE), rows)


def rebuild_tree(flat: FlatTree) -> Tree:
    """The tree that :func:`flatten_tree` was given."""
    nodes = [Node(**dict(zip(_NODE, values))) for _, _, values in flat.rows]
    for node, (parent, picked, _) in zip(nodes, flat.rows):
        if parent >= 0:
            nodes[parent].add_child(node)
        node.picked = nodes[picked] if picked >= 0 else None
    return Tree(nodes[0], **dict(zip(_TREE, flat.about)))


def oldest_version(tree: Tree) -> int | None:
    """The version of the oldest weights that sampled a turn of ``tree``; None for a tree without turns."""
    return min((node.version for node in tree.root.walk() if node.turn_ids), default=None)


# Weights --------------------------------------------------------------------------------------------------------------

PackedWeights: TypeAlias = dict[str, tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]]
"""dtype, shape and bytes by name: bfloat16 has no numpy type. Tied tensors are sent once."""


def pack_weights(state: Mapping[str, torch.Tensor]) -> PackedWeights:
    """A state dict as arrays that Ray's object store shares without copying."""
    import torch

    packed: PackedWeights = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        storage = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and storage in seen:
            continue
        seen.add(storage)
        flat = tensor.detach().to("cpu").contiguous().flatten()
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
        packed[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    return packed


def load_weights(module: torch.nn.Module, packed: PackedWeights) -> None:
    """Write packed weights into ``module``. Raises ``EngineError`` where they do not fit; nothing is changed then."""
    import torch

    own = module.state_dict()
    for name, (_, shape, _) in packed.items():
        if name not in own or tuple(own[name].shape) != shape:
            found = tuple(own[name].shape) if name in own else "no such tensor"
            raise EngineError(
                f"the trainer sent {name} of shape {shape}, the worker's model has {found}; both must load the same "
                "model.path: look whether the folder differs between the machines"
            )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the store's arrays are read-only, and are only read
        for name, (dtype, shape, data) in packed.items():
            if data.size:
                own[name].copy_(torch.from_numpy(data).view(getattr(torch, dtype)).view(shape))


# Requests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request whose prefix is its token ids."""

    ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    key: tuple[Any, ...]

    @staticmethod
    def of(request: Request) -> WireRequest:
        return WireRequest(tuple(request.prefix.token_ids()), request.params, request.seed, request.key)

    def request(self) -> Request:
        return Request(Prefix(self.ids), self.params, self.seed, self.key)


@dataclass(frozen=True, slots=True)
class WireGeneration:
    """A generation without its continuation: the asker knows the prefix."""

    values: Mapping[str, Any]

    @staticmethod
    def of(generation: Generation) -> WireGeneration:
        names = [f.name for f in fields(Generation) if f.name != "continuation"]
        return WireGeneration({name: getattr(generation, name) for name in names})

    def generation(self, request: Request) -> Generation:
        return Generation(continuation=request.prefix.extend(self.values["ids"]), **self.values)
