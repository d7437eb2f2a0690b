"""A trajectory as messages, and as tokens with train masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from turntree.trainers.tree import Node, Tree

__all__ = ["Message", "Role", "TokenRow", "context_messages", "messages", "prompt_messages", "token_row"]

Role = Literal["user", "tool"]
"""Of observations: messages of the user, or of a tool."""


class Message(TypedDict):
    """One message as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A trajectory as the engine saw it. ``mask`` is 1 on sampled tokens; all but ``prompt`` have one entry a token
    after it. ``logprobs`` are the sampler's and ``advantages`` those of the turn in this leaf, 0 where mask is 0."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]


def prompt_messages(tree: Tree) -> list[Message]:
    """The prompt as one message of the user."""
    return [{"role": "user", "content": tree.root.observation}]


def context_messages(tree: Tree, node: Node, role: Role) -> list[Message]:
    """Everything before ``node``'s turn: prompt, earlier turns, observations."""
    found = prompt_messages(tree)
    for earlier in node.trajectory()[:-1]:
        found += _turn(earlier, role)
    return found


def messages(tree: Tree, leaf: Node, role: Role) -> list[Message]:
    """The whole trajectory; it ends with the leaf's turn."""
    return [*context_messages(tree, leaf, role), {"role": "assistant", "content": leaf.text}]


def _turn(node: Node, role: Role) -> list[Message]:
    said: list[Message] = [{"role": "assistant", "content": node.text}]
    return [*said, {"role": role, "content": node.observation}] if node.observation else said


def token_row(
    tree: Tree, leaf: Node, *, advantages: Sequence[float | None] = (), trained: Sequence[bool] = ()
) -> TokenRow:
    """The tokens of one trajectory, up to the end of the leaf's turn.

    ``advantages``: one a turn, None where there is none. ``trained``: whether each turn's mask is 1 (all by default).
    """
    turns = leaf.trajectory()
    given = list(advantages) or [None] * len(turns)
    counted = list(trained) or [True] * len(turns)
    response: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    values: list[float] = []
    for node, advantage, on in zip(turns, given, counted, strict=True):
        after = () if node is leaf else node.observation_ids
        sampled, added = len(node.turn_ids), len(after)
        response += (*node.turn_ids, *after)
        mask += [int(on)] * sampled + [0] * added
        logprobs += [*(node.logprobs or [0.0] * sampled), *[0.0] * added]
        values += [advantage or 0.0] * sampled + [0.0] * added
    return TokenRow(tree.root.observation_ids, tuple(response), tuple(mask), tuple(logprobs), tuple(values))
