"""Random trees of turns and a tiny model, for the tests of packing, forward pass and objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turntree.trainers.tree import Group, Node, Status, Tree

VOCABULARY = 23
ENDINGS: tuple[Status, ...] = ("answered", "truncated", "failed")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _tokens(rng: np.random.Generator, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCABULARY, int(rng.integers(low, high + 1))).tolist())


def _child(rng: np.random.Generator, ordinal: int, status: Status) -> Node:
    turn = _tokens(rng, 0 if rng.random() < 0.1 else 1, 5)
    return Node(
        ordinal=ordinal,
        turn_ids=turn,
        logprobs=tuple((-rng.random(len(turn))).tolist()),
        observation_ids=_tokens(rng, 0, 4),
        status=status,
        reward=None if status in ("open", "failed") else float(rng.integers(0, 3)) / 2,
        version=int(rng.integers(0, 3)),
    )


def _tree(rng: np.random.Generator, uid: str, index: int, depth: int, branch: int) -> Tree:
    root = Node(observation_ids=_tokens(rng, 1, 6))
    level = [root]
    for d in range(depth):
        following: list[Node] = []
        for node in level:
            for ordinal in range(int(rng.integers(1, branch + 1))):
                ends = d + 1 == depth or rng.random() < 0.3
                status: Status = "open"
                if ends:
                    status = ENDINGS[int(rng.choice(3, p=(0.6, 0.25, 0.15)))]
                child = node.add_child(_child(rng, ordinal, status))
                if not ends:
                    following.append(child)
        level = following
    return Tree(root, uid, index)


@pytest.fixture(scope="session")
def random_groups() -> Callable[..., list[Group]]:
    """``make(seed, groups=2, trees=2, depth=3, branch=3)``: ragged trees with failed leaves and empty turns."""

    def make(seed: int, *, groups: int = 2, trees: int = 2, depth: int = 3, branch: int = 3) -> list[Group]:
        rng = np.random.default_rng(seed)
        return [Group(f"q{g}", [_tree(rng, f"q{g}", t, depth, branch) for t in range(trees)]) for g in range(groups)]

    return make


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """Two layers, grouped-query attention, float32. Callers leave it unchanged."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: LlamaForCausalLM = LlamaForCausalLM(config)
    model.eval()
    return model
