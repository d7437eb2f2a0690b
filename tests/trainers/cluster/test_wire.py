"""What goes between trainer and workers: nothing is lost on the way."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.errors import EngineError
from turntree.trainers.cluster.wire import (
    Ticket,
    WireGeneration,
    WireRequest,
    flatten_tree,
    load_weights,
    oldest_version,
    pack_weights,
    rebuild_tree,
    split_ticket,
)
from turntree.trainers.plan import Prompt
from turntree.trainers.store import StoredTree, encode_line
from turntree.trainers.tree import Group, Node, Tree


def line(tree: Tree) -> bytes:
    return encode_line(StoredTree(0, tree, {}))


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_comes_back_as_it_was(random_groups: Callable[..., list[Group]], seed: int) -> None:
    for group in random_groups(seed):
        for tree in group.trees:
            tree.seed, tree.rounds = 11, 3
            last = tree.leaves()[-1]
            last.picked, last.state = tree.root, {"turns": (1, 2)}
            back = rebuild_tree(pickle.loads(pickle.dumps(flatten_tree(tree))))
            assert line(back) == line(tree)
            assert (back.seed, back.rounds, back.index, back.prompt_uid) == (11, 3, tree.index, group.uid)
            assert back.leaves()[-1].picked is back.root
            assert back.leaves()[-1].state == {"turns": (1, 2)}
            assert flatten_tree(tree).id == (group.uid, tree.index)


def test_deep_trees_survive() -> None:
    node = root = Node(observation_ids=(1,))
    for _ in range(5000):
        node = node.add_child(Node(turn_ids=(1,), logprobs=(-1.0,)))
    node.status = "truncated"
    back = rebuild_tree(pickle.loads(pickle.dumps(flatten_tree(Tree(root, "p")))))
    assert sum(1 for _ in back.root.walk()) == 5001


def test_a_tree_is_as_old_as_its_oldest_turn() -> None:
    root = Node()
    child = root.add_child(Node(turn_ids=(1,), logprobs=(0.0,), version=5))
    child.add_child(Node(turn_ids=(1,), logprobs=(0.0,), version=4, status="answered"))
    assert oldest_version(Tree(root)) == 4
    assert oldest_version(Tree(Node())) is None


@given(prompts=st.integers(0, 9), trees=st.integers(1, 3), parts=st.integers(1, 6), done=st.sets(st.integers(0, 26)))
@settings(max_examples=80, deadline=None)
def test_parts_of_a_ticket_are_the_ticket(prompts: int, trees: int, parts: int, done: set[int]) -> None:
    whole = Ticket(
        tuple(Prompt(f"p{i}", None) for i in range(prompts)), {f"p{i}": tuple(range(trees)) for i in range(prompts)}
    )
    arrived = {name for k, name in enumerate(sorted(whole.trees)) if k in done}
    left = whole.without(arrived)
    assert left.trees == whole.trees - arrived
    assert {p.uid for p in left.prompts} == set(left.only)
    tickets = split_ticket(left, parts)
    assert len(tickets) == min(parts, len(left.prompts))
    assert [p for t in tickets for p in t.prompts] == list(left.prompts)
    assert frozenset().union(*(t.trees for t in tickets)) == left.trees
    assert max((len(t.prompts) for t in tickets), default=0) - min((len(t.prompts) for t in tickets), default=0) <= 1


def test_weights_arrive_bit_for_bit_and_tied_ones_once() -> None:
    class Net(torch.nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 4, bias=False)
            self.b = torch.nn.Linear(3, 4, bias=False)
            self.b.weight = self.a.weight
            self.coarse = torch.nn.Parameter(torch.full((5,), fill, dtype=torch.bfloat16))
            self.register_buffer("count", torch.tensor(int(fill)))
            self.register_buffer("empty", torch.zeros(0))

    one, other = Net(1.5), Net(0.0)
    packed = pack_weights(one.state_dict())
    assert set(packed) == {"a.weight", "coarse", "count", "empty"}
    load_weights(other, packed)
    assert all(torch.equal(x, y) for x, y in zip(one.state_dict().values(), other.state_dict().values()))
    assert other.b.weight is other.a.weight


def test_weights_of_another_model_are_refused_before_anything_changes(tiny_llama: LlamaForCausalLM) -> None:
    packed = pack_weights(tiny_llama.state_dict())
    name = next(iter(packed))
    dtype, shape, data = packed[name]
    packed[name] = (dtype, (*shape, 1), data)
    before = {key: value.clone() for key, value in tiny_llama.state_dict().items()}
    with pytest.raises(EngineError, match=f"the trainer sent {name} of shape .* the worker's model has"):
        load_weights(tiny_llama, packed)
    assert all(torch.equal(before[key], value) for key, value in tiny_llama.state_dict().items())


def test_requests_and_generations() -> None:
    request = Request(Prefix((1, 2)).extend((3,)), SamplingParams(4, 0.5, stop=("x",)), 9, ("p", 0, 1))
    back = pickle.loads(pickle.dumps(WireRequest.of(request))).request()
    assert back.prefix.token_ids() == [1, 2, 3]
    assert (back.params, back.seed, back.key) == (request.params, 9, ("p", 0, 1))
    given = Generation((7, 8), (-0.1, -0.2), "stop", 3, request.prefix.extend((7, 8)), stop_string="x")
    found = pickle.loads(pickle.dumps(WireGeneration.of(given))).generation(request)
    assert found.continuation.token_ids() == [1, 2, 3, 7, 8]
    assert (found.ids, found.logprobs, found.version, found.stop_string) == ((7, 8), (-0.1, -0.2), 3, "x")
