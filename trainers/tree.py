"""Trees of turns: the one data structure that rollout, credit, packing and reports share.

A node is one model turn plus the observation it caused; the root holds the prompt only. A child's context is
its parent's context, the parent's turn tokens and the parent's observation tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turntree.agents.engines.protocol import Prefix
from turntree.envs.task import EMPTY, FrozenDict, Question

__all__ = ["Group", "Node", "Status", "Tree"]

Status = Literal["open", "answered", "truncated", "failed"]
"""``open``: may be continued; the others are leaves. Truncated leaves are scored, failed ones never."""


@dataclass(eq=False, slots=True)
class Node:
    """One turn and its observation.

    Lengths: ``logprobs`` has one entry per token of ``turn_ids``; ``entropies`` too, or is empty.
    ``entropy`` is the mean negative log-prob of the sampled tokens in nats (kind ``nll``); the root's is 0.
    ``observation_ids`` holds what the environment added after the turn, template boundaries included; for the
    root it is the whole prompt. ``state`` is the environment's state after the turn, ``prefix`` the context
    after the observation (dropped once the tree is finished, so that engines can free their caches).
    ``step_reward`` is what the environment gave for this turn; ``reward``, the whole trajectory's, is set on
    scored leaves only. A ``pruned`` leaf was generated and counted but takes no part in credit or batches.
    """

    parent: Node | None = None
    ordinal: int = 0
    turn_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    observation_ids: tuple[int, ...] = ()
    entropy: float = 0.0
    text: str = ""
    action: str = ""
    observation: str = ""
    status: Status = "open"
    reward: float | None = None
    branchable: bool = True
    version: int = 0
    state: Any = None
    prefix: Prefix | None = None
    picked: Node | None = None
    score: float | None = None
    reason: str = ""
    info: FrozenDict = EMPTY
    children: list[Node] = field(default_factory=list)
    step_reward: float = 0.0
    pruned: bool = False

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.turn_ids):
            raise ValueError(
                f"node {self.path}: {len(self.turn_ids)} turn tokens but {len(self.logprobs)} log-probs; "
                "each sampled token needs exactly one"
            )
        if self.entropies and len(self.entropies) != len(self.turn_ids):
            raise ValueError(
                f"node {self.path}: {len(self.turn_ids)} turn tokens but {len(self.entropies)} entropies; "
                "each sampled token needs exactly one, or none at all"
            )

    @property
    def path(self) -> tuple[int, ...]:
        """Child ordinals from the root; the root's is ``()``. Fixed when the node is scheduled."""
        parts: list[int] = []
        node = self
        while node.parent is not None:
            parts.append(node.ordinal)
            node = node.parent
        return tuple(reversed(parts))

    @property
    def depth(self) -> int:
        """Number of turns up to and including this node; the root's is 0."""
        return len(self.path)

    @property
    def is_leaf(self) -> bool:
        return self.status != "open"

    @property
    def is_scored(self) -> bool:
        """Whether this is a leaf with a reward that counts (failed and pruned leaves never do)."""
        return self.status in ("answered", "truncated") and self.reward is not None and not self.pruned

    def add_child(self, child: Node) -> Node:
        """Attach ``child``, keeping children sorted by ordinal (arrival order does not matter)."""
        child.parent = self
        index = len(self.children)
        while index > 0 and self.children[index - 1].ordinal > child.ordinal:
            index -= 1
        self.children.insert(index, child)
        return child

    @property
    def root(self) -> Node:
        """The node above all others of its tree; itself, where it has no parent."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def trajectory(self) -> list[Node]:
        """The turns from the root's child to this node; the root itself is left out."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def walk(self) -> Iterator[Node]:
        """This node and everything below it, depth first, children in order."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack += node.children[::-1]


@dataclass(eq=False, slots=True)
class Tree:
    """All trajectories that grew from one root. ``index`` counts the trees of a prompt from 0.

    ``seed`` derives from the run, the prompt and ``index``: expansion rules that decide node by node draw from
    ``derive_rng(tree.seed, node.path, ...)``.
    """

    root: Node
    prompt_uid: str = ""
    index: int = 0
    task: Question | None = None
    rounds: int = 0
    seed: int = 0

    def nodes(self) -> list[Node]:
        """All nodes breadth first, children in order, the root first."""
        out: list[Node] = []
        queue = deque([self.root])
        while queue:
            node = queue.popleft()
            out.append(node)
            queue.extend(node.children)
        return out

    def holds(self, node: Node) -> bool:
        """Whether ``node`` is one of this tree."""
        return node.root is self.root

    def leaves(self) -> list[Node]:
        """All finished trajectories' last nodes, depth first."""
        found: list[Node] = []
        stack = [self.root]  # walk() in place: every part of a step asks for the leaves
        while stack:
            node = stack.pop()
            if node.status != "open":
                found.append(node)
            if node.children:
                stack += node.children[::-1]
        return found

    def scored_leaves(self) -> list[Node]:
        """Leaves that carry a reward (failed and pruned ones never do), depth first."""
        return [leaf for leaf in self.leaves() if leaf.is_scored]

    @property
    def generated_tokens(self) -> int:
        """Tokens that the model sampled for this tree; shared turns count once."""
        return sum(len(n.turn_ids) for n in self.root.walk())


@dataclass(eq=False, slots=True)
class Group:
    """All trees of one prompt. ``uid`` names the prompt *instance*, so two equal questions never share one."""

    uid: str
    trees: Sequence[Tree]

    def scored_leaves(self) -> list[Node]:
        """Scored leaves of all trees, tree by tree, each depth first. Credit and batches use this order."""
        return [leaf for tree in self.trees for leaf in tree.scored_leaves()]
