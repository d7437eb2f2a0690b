"""Rows for other trainers: preference pairs for TRL, messages and tokens for supervised training, rows for verl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turntree.errors import ConfigError
from turntree.trainers.exchange.transcripts import (
    Message,
    Role,
    context_messages,
    messages,
    prompt_messages,
    token_row,
)
from turntree.trainers.pairs import Pair, sibling_pairs
from turntree.trainers.store import StoredTree, group_trees
from turntree.trainers.tree import Node

__all__ = ["IGNORED", "PairForm", "Selection", "message_rows", "pair_rows", "prompt_rows", "token_rows", "verl_rows"]

IGNORED = -100
"""The label of a token without loss, as TRL and transformers have it."""

PairForm = Literal["messages", "implicit", "text"]
"""``messages``: prompt, chosen, rejected as messages; ``implicit``: the prompt repeated in both; ``text``: texts with
the chat template's own words, decoded from the tokens."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which trajectories go out, and how.

    Failed and pruned leaves never do. ``min_reward``: only leaves worth at least that. ``shared_turns="once"``: a turn
    that several rows share is trained in the first of them only; ``role``: of observations in messages.
    """

    min_reward: float | None = None
    shared_turns: Literal["per_leaf", "once"] = "per_leaf"
    role: Role = "user"

    def __post_init__(self) -> None:
        if self.shared_turns not in ("per_leaf", "once"):
            raise ConfigError(f"shared_turns={self.shared_turns!r}: expected 'per_leaf' or 'once'")
        if self.role not in ("user", "tool"):
            raise ConfigError(f"role={self.role!r} of observations: expected 'user' or 'tool'")

    def leaves(self, trees: Iterable[StoredTree]) -> Iterator[tuple[StoredTree, Node, list[bool]]]:
        """Each chosen leaf with its tree, and for each of its turns whether it is trained there."""
        for stored in trees:
            seen: set[int] = set()
            for leaf in stored.tree.scored_leaves():
                if self.min_reward is not None and not (leaf.reward or 0.0) >= self.min_reward:
                    continue
                turns = leaf.trajectory()
                yield stored, leaf, [self.shared_turns == "per_leaf" or id(node) not in seen for node in turns]
                seen |= {id(node) for node in turns}


def _origin(stored: StoredTree, leaf: Node) -> dict[str, Any]:
    """Where a row comes from; other trainers ignore these columns."""
    task = stored.tree.task
    return {
        "question_id": task.id if task else "",
        "reward": leaf.reward if leaf.reward is not None and math.isfinite(leaf.reward) else None,
        "status": leaf.status,
        "step": stored.step,
        "uid": stored.tree.prompt_uid,
        "tree": stored.tree.index,
        "path": list(leaf.path),
    }


def message_rows(trees: Iterable[StoredTree], selection: Selection) -> Iterator[dict[str, Any]]:
    """``messages`` for supervised training, and ``train``: for each message whether it has a loss.

    TRL with ``assistant_only_loss=True`` and verl train every message of the assistant: with ``shared_turns="once"``
    the token rows are the ones to use.
    """
    for stored, leaf, trained in selection.leaves(trees):
        said = messages(stored.tree, leaf, selection.role)
        flags = iter(trained)
        train = [next(flags) if message["role"] == "assistant" else False for message in said]
        yield {"messages": said, "train": train, **_origin(stored, leaf)}


def token_rows(trees: Iterable[StoredTree], selection: Selection) -> Iterator[dict[str, Any]]:
    """``input_ids`` with ``labels`` and ``assistant_masks``: the tokens that the engine saw."""
    for stored, leaf, trained in selection.leaves(trees):
        row = token_row(stored.tree, leaf, trained=trained)
        mask = [0] * len(row.prompt) + list(row.mask)
        ids = [*row.prompt, *row.response]
        labels = [token if on else IGNORED for token, on in zip(ids, mask, strict=True)]
        yield {"input_ids": ids, "labels": labels, "assistant_masks": mask, **_origin(stored, leaf)}


def pair_rows(
    trees: Sequence[StoredTree],
    *,
    form: PairForm = "messages",
    role: Role = "user",
    min_margin: float = 0.0,
    max_pairs_per_parent: int | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Preference pairs of sibling turns (:func:`sibling_pairs`) of one step, as TRL's preference trainers read them.

    ``decode`` is needed for ``form="text"``. The pairs' values are mean rewards below the turns.
    """
    if form not in ("messages", "implicit", "text"):
        raise ConfigError(f"form={form!r} is not known; expected 'messages', 'implicit' or 'text'")
    if form == "text" and decode is None:
        raise ConfigError("form='text' needs the tokenizer that the tokens are of; pass --tokenizer DIR")
    owner = {id(node): stored for stored in trees for node in stored.tree.nodes()}
    for group in group_trees(trees):
        for pair in sibling_pairs(group, min_margin=min_margin, max_pairs_per_parent=max_pairs_per_parent):
            stored = owner[id(pair.winner)]
            if form == "text" and decode is not None:
                row: dict[str, Any] = _text_pair(pair, decode)
            else:
                row = _message_pair(stored, pair, role, implicit=form == "implicit")
            yield {
                **row,
                "margin": pair.margin,
                "question_id": stored.tree.task.id if stored.tree.task else "",
                "step": stored.step,
                "uid": group.uid,
                "tree": stored.tree.index,
                "chosen_path": list(pair.winner.path),
                "rejected_path": list(pair.loser.path),
            }


def _message_pair(stored: StoredTree, pair: Pair, role: Role, *, implicit: bool) -> dict[str, Any]:
    prompt = context_messages(stored.tree, pair.winner, role)
    chosen: list[Message] = [{"role": "assistant", "content": pair.winner.text}]
    rejected: list[Message] = [{"role": "assistant", "content": pair.loser.text}]
    if implicit:
        return {"chosen": prompt + chosen, "rejected": prompt + rejected}
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _text_pair(pair: Pair, decode: Callable[[Sequence[int]], str]) -> dict[str, str]:
    parent = pair.winner.parent
    ids: list[int] = []
    above: list[Node] = []
    while parent is not None:
        above.append(parent)
        parent = parent.parent
    for node in reversed(above):
        ids += (*node.turn_ids, *node.observation_ids)
    return {"prompt": decode(ids), "chosen": decode(pair.winner.turn_ids), "rejected": decode(pair.loser.turn_ids)}


# verl -----------------------------------------------------------------------------------------------------------------


def prompt_rows(trees: Iterable[StoredTree], *, data_source: str, ability: str) -> Iterator[dict[str, Any]]:
    """One row a question, the first time that it comes: what verl's reinforcement learning reads."""
    seen: set[tuple[str, str]] = set()
    for stored in trees:
        task = stored.tree.task
        key = (task.id, task.question) if task else ("", stored.tree.root.observation)
        if key not in seen:
            seen.add(key)
            yield _verl_prompt(stored, len(seen) - 1, data_source, ability)


def verl_rows(
    trees: Iterable[StoredTree], selection: Selection, *, data_source: str, ability: str
) -> Iterator[dict[str, Any]]:
    """One row a trajectory: verl's prompt columns, ``messages``, and the tokens under the names of verl's batches.

    ``prompts`` and ``responses`` are not padded; ``response_mask``, ``rollout_log_probs`` and ``advantages`` have one
    entry a token of ``responses``.
    """
    for index, (stored, leaf, trained) in enumerate(selection.leaves(trees)):
        turns = leaf.trajectory()
        given = [stored.advantages.get((leaf, node)) for node in turns]
        row = token_row(stored.tree, leaf, advantages=given, trained=trained)
        length = len(row.prompt) + len(row.response)
        yield {
            **_verl_prompt(stored, index, data_source, ability),
            "messages": messages(stored.tree, leaf, selection.role),
            "prompts": list(row.prompt),
            "responses": list(row.response),
            "response_mask": list(row.mask),
            "input_ids": [*row.prompt, *row.response],
            "attention_mask": [1] * length,
            "position_ids": list(range(length)),
            "loss_mask": [0] * len(row.prompt) + list(row.mask),
            "rollout_log_probs": list(row.logprobs),
            "advantages": list(row.advantages),
            "reward": leaf.reward,
        }


def _verl_prompt(stored: StoredTree, index: int, data_source: str, ability: str) -> dict[str, Any]:
    task = stored.tree.task
    answers = list(task.golden_answers) if task else []
    return {
        "data_source": data_source,
        "prompt": prompt_messages(stored.tree),
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {
            "split": "train",
            "index": index,
            "id": task.id if task else "",
            "question": task.question if task else stored.tree.root.observation,
            "answer": answers,
            "uid": stored.tree.prompt_uid,
            "step": stored.step,
            "tree": stored.tree.index,
        },
    }
