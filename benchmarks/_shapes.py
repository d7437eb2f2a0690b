"""Trees of stated shape with random tokens: what packing and training cost is measured on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turntree.trainers.expansion import entropy, random_nodes
from turntree.trainers.expansion.rule import ExpansionRule
from turntree.trainers.tree import Group, Node, Tree

__all__ = ["SHAPES", "VOCABULARY", "Lengths", "Shape", "chains_of", "decoder", "grow_group"]

VOCABULARY = 4096

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt, and ranges (both ends included) of what is drawn for each turn; turns of a trajectory."""

    prompt: int
    turn: Span = (40, 120)
    observation: Span = (200, 400)
    turns: Span = (2, 4)

    def scaled(self, factor: float) -> Lengths:
        """Turns and observations ``factor`` times as long, the prompt as it is."""

        def part(span: Span) -> Span:
            return max(1, round(span[0] * factor)), max(1, round(span[1] * factor))

        return Lengths(self.prompt, part(self.turn), part(self.observation), self.turns)


@dataclass(frozen=True, slots=True)
class Shape:
    """One prompt's trees: ``trees`` of ``chains`` first chains, expanded ``rounds`` times by ``expansions``."""

    name: str
    trees: int
    chains: int
    rounds: int
    expansions: int
    rule: ExpansionRule
    lengths: Lengths


SHAPES = (
    Shape("Tree-GRPO M2 N2 L2, prompt 300", 2, 1, 2, 2, random_nodes, Lengths(300)),
    Shape("AT2PO M10 L2 K6", 1, 10, 2, 6, entropy, Lengths(300).scaled(1 / 3)),
    Shape("Tree-GRPO M2 N3 L2, prompt 500", 2, 1, 2, 3, random_nodes, Lengths(500).scaled(1 / 3)),
)
"""The settings of the papers; turns are shortened to a third where whole ones would take minutes on two cores."""


def grow_group(shape: Shape, seed: int, *, vocabulary: int) -> Group:
    """Random trees of ``shape``: the rule's own choices, over entropies drawn uniformly from [0, 1)."""
    rng = np.random.default_rng(seed)

    def tokens(span: Span) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocabulary, int(rng.integers(span[0], span[1] + 1))).tolist())

    prompt, trees = tokens((shape.lengths.prompt, shape.lengths.prompt)), []
    for index in range(shape.trees):
        tree = Tree(Node(observation_ids=prompt), "q", index)
        for _ in range(shape.chains):
            _finish(tree.root, shape.lengths, rng, tokens)
        for _ in range(shape.rounds):
            for expansion in shape.rule(tree, shape.expansions, rng):
                _finish(expansion.parent, shape.lengths, rng, tokens)
        trees.append(tree)
    return Group("q", trees)


def _finish(node: Node, lengths: Lengths, rng: np.random.Generator, tokens: Callable[[Span], tuple[int, ...]]) -> None:
    """Grow one trajectory below ``node`` to its leaf."""
    depth = max(node.depth + 1, int(rng.integers(lengths.turns[0], lengths.turns[1] + 1)))
    while node.depth < depth:
        last = node.depth + 1 == depth
        turn = tokens(lengths.turn)
        child = Node(
            ordinal=len(node.children),
            turn_ids=turn,
            logprobs=tuple((-rng.random(len(turn))).tolist()),
            observation_ids=() if last else tokens(lengths.observation),
            entropy=float(rng.random()),
            status="answered" if last else "open",
            reward=float(rng.integers(0, 2)) if last else None,
        )
        node = node.add_child(child)


def chains_of(group: Group) -> list[Group]:
    """The same trajectories, nothing shared: each leaf in a tree and a group of its own, in the same order."""
    groups = []
    for index, leaf in enumerate(group.scored_leaves()):
        path = leaf.trajectory()
        root = Node(observation_ids=(path[0].parent or path[0]).observation_ids)
        at = root
        for node in path:
            at = at.add_child(
                Node(
                    turn_ids=node.turn_ids,
                    logprobs=node.logprobs,
                    observation_ids=node.observation_ids,
                    entropy=node.entropy,
                    status=node.status,
                    reward=node.reward,
                )
            )
        uid = f"{group.uid}-{index}"
        groups.append(Group(uid, [Tree(root, uid, 0)]))
    return groups


def decoder(args: argparse.Namespace, *, positions: int = 8192, **options: Any) -> LlamaForCausalLM:
    """A Llama of ``args.hidden`` by ``args.layers`` with random weights, the same each time.

    Its output layer has the share of the body that SmolLM2-135M's has: about a quarter.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 128),
        max_position_embeddings=positions,
        **options,
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config)
    return model
