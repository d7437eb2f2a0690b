"""Dealing packs and prompts to ranks, and trees on their way between them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs.task import FrozenDict
from turntree.errors import CheckpointError, RankError
from turntree.trainers.distributed import Ranks
from turntree.trainers.distributed.share import deal, fingerprint, share_groups, share_rollout, share_scores
from turntree.trainers.packing import pack_groups, table
from turntree.trainers.rollout import Prompt, Rollout, RolloutStats
from turntree.trainers.tree import Group, Node, Tree

T = TypeVar("T")


class Meeting:
    """Ranks as threads of this process: what they gather is pickled, as between processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[bytes] = [b""] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = pickle.dumps(value)
        self.barrier.wait()
        found = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait()
        return found


class Threaded(Ranks):
    """A rank of a :class:`Meeting`."""

    meeting: Meeting

    def gather(self, value: T) -> list[T]:
        return self.meeting.gather(self.rank, value)


def meet(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What ``work`` returns on each of ``size`` ranks."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        me = Threaded(rank, size)
        object.__setattr__(me, "meeting", meeting)
        try:
            results[rank] = work(me)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return results


# Packs ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 9))
def test_every_pack_is_dealt_once_and_ranks_get_equal_counts(sizes: list[int], ranks: int) -> None:
    slots = deal(sizes, ranks)
    assert sorted(i for slot in slots for i in slot if i is not None) == list(range(len(sizes)))
    assert all(len(slot) == ranks for slot in slots)
    assert len(slots) == -(-len(sizes) // ranks)  # as few as there can be
    assert all(None not in slot for slot in slots[:-1])
    largest = [max(sizes[i] for i in slot if i is not None) for slot in slots]
    assert ranks == 1 or largest == sorted(largest, reverse=True)


def test_one_rank_keeps_the_order() -> None:
    assert deal([3, 9, 1], 1) == [[0], [1], [2]]


def test_the_largest_packs_are_on_different_ranks() -> None:
    assert deal([5, 7, 6, 8], 2) == [[3, 1], [0, 2]]
    assert deal([5, 7, 6], 2) == [[1, 2], [None, 0]]


# Trees ----------------------------------------------------------------------------------------------------------------


def group(uid: str, depth: int = 2) -> Group:
    root = Node(observation_ids=(1, 2), state=lambda: "no process may see this")
    node = root
    for level in range(depth):
        for ordinal in (0, 1):
            leaf = Node(
                ordinal=ordinal,
                turn_ids=(3 + level, 4),
                logprobs=(-0.1, -0.25),
                observation_ids=(5,),
                status="answered" if ordinal or level == depth - 1 else "open",
                reward=float(ordinal),
                info=FrozenDict({"em": ordinal}),
                text=f"turn {level}",
            )
            node.add_child(leaf)
        node = node.children[0]
    node.picked = root.children[1]
    return Group(uid, [Tree(root, uid, seed=7)])


def seen(groups: Sequence[Group]) -> list[Any]:
    return [
        (g.uid, tree.seed, n.path, n.turn_ids, n.logprobs, n.observation_ids, n.status, n.reward, n.info, n.text,
         None if n.picked is None else n.picked.path)
        for g in groups for tree in g.trees for n in tree.root.walk()
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_every_rank_gets_all_trees_in_the_order_of_the_prompts(count: int) -> None:
    prompts = [Prompt(f"q/{i}", f"question {i}") for i in range(count)]
    asked: list[str] = []

    def grow(mine: Sequence[Prompt]) -> Rollout:
        asked.extend(p.uid for p in mine)
        stats = RolloutStats(prompts=len(mine), generated_tokens=10 * len(mine), errors=FrozenDict({"ToolError": 1}))
        return Rollout(tuple(group(p.uid) for p in mine), stats)

    alone = grow(prompts)
    asked.clear()
    for rollout in meet(3, lambda ranks: share_rollout(prompts, grow, ranks=ranks)):
        assert isinstance(rollout, Rollout), rollout
        assert seen(rollout.groups) == seen(alone.groups)
        assert all(n.state is None for g in rollout.groups for n in g.trees[0].root.walk())
        assert rollout.stats.prompts == count
        assert rollout.stats.generated_tokens == 10 * count
    assert sorted(asked) == sorted(p.uid for p in prompts)
    groups = meet(2, lambda ranks: share_groups(prompts, lambda mine: grow(mine).groups, ranks=ranks))
    assert all(seen(found) == seen(alone.groups) for found in groups)


def test_trees_deeper_than_a_recursion_goes_arrive() -> None:
    deep = group("deep", depth=3000)
    found = meet(2, lambda ranks: share_groups([Prompt("deep", "")], lambda mine: [deep] * len(mine), ranks=ranks))
    assert [len(list(groups[0].trees[0].root.walk())) for groups in found] == [6001, 6001]


def test_scores_of_all_packs_reach_every_rank() -> None:
    def work(ranks: Ranks) -> list[list[float]]:
        packs = pack_groups([group(str(i)) for i in range(5)], max_pack_tokens=20)
        assert len(packs) == 5

        def score(mine: Sequence[Any]) -> None:
            for pack in mine:
                tokens = table(pack, "tokens")
                tokens.set("old_logp", tokens.get("ids").float() + 0.5)

        share_scores(packs, score, ranks=ranks)
        return [table(pack, "tokens").get("old_logp").tolist() for pack in packs]

    one, two = meet(2, work)
    assert one == two == meet(1, work)[0]


def test_a_fingerprint_tells_packs_apart() -> None:
    first, other = (pack_groups([group(uid, depth)], max_pack_tokens=99) for uid, depth in (("a", 2), ("b", 3)))
    assert fingerprint(first) == fingerprint(pack_groups([group("c", 2)], max_pack_tokens=99))
    assert len({fingerprint(first), fingerprint(other), fingerprint([*first, *first]), fingerprint([])}) == 4


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_ranks_that_differ_are_named() -> None:
    found: list[Any] = meet(2, lambda ranks: ranks.agree("the packs", 5 + ranks.rank))
    assert all(isinstance(error, RankError) and "the packs: [5, 6]" in str(error) for error in found)
    assert meet(2, lambda ranks: ranks.agree("the packs", 5)) == [None, None]


def test_one_flag_is_enough() -> None:
    assert meet(3, lambda ranks: ranks.any(ranks.rank == 2)) == [True, True, True]
    assert meet(3, lambda ranks: ranks.any(False)) == [False, False, False]


def test_what_the_main_rank_makes_or_fails_with_is_everybodys() -> None:
    calls: list[int] = []

    def work(ranks: Ranks, fail: bool) -> str:
        def make() -> str:
            calls.append(ranks.rank)
            if fail:
                raise CheckpointError("the folder is in use")
            return "folder"

        return ranks.main(make)

    assert meet(3, lambda ranks: work(ranks, False)) == ["folder"] * 3
    found: list[Any] = meet(3, lambda ranks: work(ranks, True))
    assert all(isinstance(error, CheckpointError) and "in use" in str(error) for error in found)
    assert calls == [0, 0]


def test_only_broken_connections_are_called_lost_ranks() -> None:
    ranks = Ranks(1, 2)
    with pytest.raises(RankError, match=r"rank 1 of 2 stopped because another rank is gone.*resume=true"):
        with ranks.naming_losses():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    with pytest.raises(RuntimeError, match="shapes"):
        with ranks.naming_losses():
            raise RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="gloo"):
        with Ranks().naming_losses():
            raise RuntimeError("gloo")
