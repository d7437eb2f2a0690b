"""The two tables of a pack, against the trees they were made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import ConfigError, DataError
from turntree.trainers.credit import Advantages
from turntree.trainers.packing import (
    Pack,
    column,
    pack_groups,
    pack_pairs,
    row_tokens,
    table,
    turn_columns,
    write_advantages,
)
from turntree.trainers.pairs import Pair, sibling_pairs
from turntree.trainers.tree import Group, Node, Status, Tree

Groups = Callable[..., list[Group]]
seeds = st.integers(0, 10_000)
budgets = st.sampled_from([1, 12, 25, 60, 10_000])


def trajectory_ids(leaf: Node) -> list[int]:
    nodes = leaf.trajectory()
    assert nodes[0].parent is not None
    return [i for n in (nodes[0].parent, *nodes) for i in (*n.turn_ids, *n.observation_ids)]


def sampled(leaf: Node) -> list[int]:
    return [i for n in leaf.trajectory() for i in n.turn_ids]


def with_one_prompt(groups: list[Group]) -> list[Group]:
    """The trees of each group below equal prompts, as rollouts make them: equal tokens in roots of their own."""
    for group in groups:
        for tree in group.trees:
            tree.root.observation_ids = tuple(group.trees[0].root.observation_ids)
    return groups


def prompts(groups: list[Group]) -> int:
    """Tokens of the prompts of trees with scored leaves; neighbouring trees of a group share equal ones."""
    total = 0
    for group in groups:
        roots = [tree.root.observation_ids for tree in group.trees if tree.scored_leaves()]
        total += sum(len(root) for before, root in zip([None, *roots], roots) if root != before)
    return total


@settings(max_examples=60, deadline=None)
@given(seed=seeds, budget=budgets, one_prompt=st.booleans())
def test_rows_are_the_trajectories_that_the_engine_saw(
    random_groups: Groups, seed: int, budget: int, one_prompt: bool
) -> None:
    groups = with_one_prompt(random_groups(seed)) if one_prompt else random_groups(seed)
    seen: list[tuple[int, int]] = []
    for pack in pack_groups(groups, max_pack_tokens=budget):
        ids = column(pack, "tokens", "ids")
        occurrence_leaf, token = column(pack, "occurrences", "leaf"), column(pack, "occurrences", "token")
        group, leaf_index = column(pack, "rows", "group").tolist(), column(pack, "rows", "leaf").tolist()
        for r, path in enumerate(row_tokens(pack)):
            leaf = groups[group[r]].scored_leaves()[leaf_index[r]]
            assert ids[path].tolist() == trajectory_ids(leaf)
            assert column(pack, "tokens", "position")[path].tolist() == list(range(len(path)))
            mine = token[occurrence_leaf == r]
            assert ids[mine].tolist() == sampled(leaf)
            torch.testing.assert_close(
                column(pack, "tokens", "sampler_logp")[mine],
                torch.tensor([lp for n in leaf.trajectory() for lp in n.logprobs]),
            )
            assert column(pack, "tokens", "version")[mine].tolist() == [
                n.version for n in leaf.trajectory() for _ in n.turn_ids
            ]
            seen.append((group[r], leaf_index[r]))
    assert sorted(seen) == [(g, i) for g, group_ in enumerate(groups) for i in range(len(group_.scored_leaves()))]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, budget=budgets, one_prompt=st.booleans())
def test_a_query_sees_its_path_and_nothing_else(
    random_groups: Groups, seed: int, budget: int, one_prompt: bool
) -> None:
    groups = with_one_prompt(random_groups(seed)) if one_prompt else random_groups(seed)
    for pack in pack_groups(groups, max_pack_tokens=budget):
        end, before = column(pack, "tokens", "subtree_end"), column(pack, "tokens", "predecessor").tolist()
        index = torch.arange(len(end))
        seen = (index[None] <= index[:, None]) & (index[:, None] < end[None])
        for q in range(len(end)):
            path, token = [], q
            while token >= 0:
                path.append(token)
                token = before[token]
            assert seen[q].nonzero().flatten().tolist() == path[::-1]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, budget=budgets, shared=st.sampled_from(["per_leaf", "once"]), one_prompt=st.booleans())
def test_cutting_keeps_occurrences_weights_and_the_budget(
    random_groups: Groups, seed: int, budget: int, shared: Literal["per_leaf", "once"], one_prompt: bool
) -> None:
    groups = with_one_prompt(random_groups(seed)) if one_prompt else random_groups(seed)
    packs = pack_groups(groups, max_pack_tokens=budget, shared_turns=shared)
    for pack in packs:
        assert len(table(pack, "tokens")) <= budget or len(table(pack, "rows")) == 1
    total = sum(float(column(p, "occurrences", "weight").double().sum()) for p in packs)
    nodes = {id(n): n for g in groups for leaf in g.scored_leaves() for n in leaf.trajectory()}
    per_leaf = sum(len(sampled(leaf)) for g in groups for leaf in g.scored_leaves())
    once = sum(len(n.turn_ids) for n in nodes.values())
    assert total == pytest.approx(per_leaf if shared == "per_leaf" else once, rel=1e-6)
    if budget == 10_000 and packs:
        assert len(packs) == 1
        observed = sum(len(n.observation_ids) for n in nodes.values())
        assert len(table(packs[0], "tokens")) == once + observed + prompts(groups)


def test_trees_that_do_not_fit_together_whole_keep_their_prompts(random_groups: Groups) -> None:
    groups = with_one_prompt(random_groups(3, groups=1))
    sizes = [
        len(table(pack, "tokens"))
        for tree in groups[0].trees
        for pack in pack_groups([Group("q", [tree])], max_pack_tokens=10_000)
    ]
    together = sum(sizes) - len(groups[0].trees[0].root.observation_ids)
    (one,) = pack_groups(groups, max_pack_tokens=together)
    assert len(table(one, "tokens")) == together
    assert [len(table(p, "tokens")) for p in pack_groups(groups, max_pack_tokens=together - 1)] == sizes


def test_turn_ids_are_explicit_so_adjacent_turns_stay_apart() -> None:
    root = Node(observation_ids=(1,))
    first = root.add_child(Node(turn_ids=(2, 3), logprobs=(-1.0, -1.0)))
    first.add_child(Node(turn_ids=(4,), logprobs=(-1.0,), status="answered", reward=1.0))
    (pack,) = pack_groups([Group("q", [Tree(root)])], max_pack_tokens=10)
    assert column(pack, "tokens", "turn_id").tolist() == [-1, 0, 0, 1]
    assert column(pack, "occurrences", "turn").tolist() == [0, 0, 1]


def test_small_trees_share_a_pack(random_groups: Groups) -> None:
    groups = random_groups(3, groups=6)
    (pack,) = pack_groups(groups, max_pack_tokens=100_000)
    assert set(column(pack, "rows", "group").tolist()) == {g for g, x in enumerate(groups) if x.scored_leaves()}


def test_unequal_lengths_name_the_row() -> None:
    root = Node(observation_ids=(1,))
    child = root.add_child(Node(turn_ids=(2, 3), logprobs=(-1.0, -1.0), status="answered", reward=1.0))
    child.logprobs = (-1.0,)
    with pytest.raises(DataError) as refusal:
        pack_groups([Group("what?", [Tree(root, index=4)])], max_pack_tokens=10)
    assert str(refusal.value) == (
        "prompt 'what?', tree 4, leaf (0,): node (0,) has 2 sampled token ids but 1 sampler log-probs; ids, mask, "
        "log-probs and turn ids need equal lengths. Take both from the same generation."
    )


def test_a_tree_without_prompt_is_refused() -> None:
    root = Node()
    root.add_child(Node(turn_ids=(2,), logprobs=(-1.0,), status="answered", reward=1.0))
    with pytest.raises(DataError, match="prompt"):
        pack_groups([Group("q", [Tree(root)])], max_pack_tokens=10)


@pytest.mark.parametrize("options", [{"max_pack_tokens": 0}, {"max_pack_tokens": 9, "shared_turns": "twice"}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        pack_groups([], **options)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, budget=budgets, per=st.sampled_from(["turn", "token"]))
def test_advantages_land_on_their_leaf_and_turn(
    random_groups: Groups, seed: int, budget: int, per: Literal["turn", "token"]
) -> None:
    groups = random_groups(seed)
    values: list[tuple[Any, ...]] = []
    for g, group in enumerate(groups):
        rows = []
        for i, leaf in enumerate(group.scored_leaves()):
            count = len(leaf.trajectory()) if per == "turn" else len(sampled(leaf))
            rows.append(np.arange(count, dtype=np.float64) + 100.0 * i + 10_000.0 * g)
        values.append(tuple(rows))
    packs = pack_groups(groups, max_pack_tokens=budget)
    write_advantages(packs, Advantages(per=per, values=tuple(values)))
    for pack in packs:
        check_advantages(pack, groups, values, per)


def check_advantages(pack: Pack, groups: list[Group], values: list[tuple[Any, ...]], per: str) -> None:
    advantage = column(pack, "occurrences", "advantage")
    assert advantage.dtype == torch.float32
    for r, (g, i) in enumerate(
        zip(column(pack, "rows", "group").tolist(), column(pack, "rows", "leaf").tolist(), strict=True)
    ):
        leaf = groups[g].scored_leaves()[i]
        expected = values[g][i].tolist()
        if per == "turn":
            expected = [expected[d] for d, n in enumerate(leaf.trajectory()) for _ in n.turn_ids]
        assert advantage[column(pack, "occurrences", "leaf") == r].tolist() == expected


def test_advantages_of_other_groups_are_refused(random_groups: Groups) -> None:
    groups = random_groups(1)
    packs = pack_groups(groups, max_pack_tokens=1000)
    with pytest.raises(DataError, match="same groups"):
        write_advantages(packs, Advantages(per="turn", values=()))
    short = tuple(tuple(np.zeros(0) for _ in g.scored_leaves()) for g in groups)
    with pytest.raises(DataError, match="expected at least"):
        write_advantages(packs, Advantages(per="turn", values=short))
    infinite = tuple(tuple(np.full(9, np.nan) for _ in g.scored_leaves()) for g in groups)
    with pytest.raises(DataError, match="finite"):
        write_advantages(packs, Advantages(per="turn", values=infinite))


@settings(max_examples=30, deadline=None)
@given(seed=seeds, budget=budgets)
def test_returns_and_weights_land_on_their_tokens(random_groups: Groups, seed: int, budget: int) -> None:
    groups = random_groups(seed)

    def rows(f: Callable[[Node], list[float]]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(np.array(f(leaf), dtype=np.float64) for leaf in g.scored_leaves()) for g in groups)

    returns = rows(lambda leaf: [i + 0.5 for i in range(len(sampled(leaf)))])
    zeros = rows(lambda leaf: [0.0] * leaf.depth)
    weights = rows(lambda leaf: [i % 2.0 for i in range(leaf.depth)])
    packs = pack_groups(groups, max_pack_tokens=budget, shared_turns="once")
    before = [column(pack, "occurrences", "weight").clone() for pack in packs]
    write_advantages(packs, Advantages("turn", zeros, returns=returns, weights=weights))
    for pack, omega in zip(packs, before, strict=True):
        leaf = column(pack, "occurrences", "leaf")
        for r in range(len(table(pack, "rows"))):
            count = int((leaf == r).sum())
            assert column(pack, "occurrences", "ret")[leaf == r].tolist() == [i + 0.5 for i in range(count)]
        factor = column(pack, "occurrences", "turn_index") % 2
        torch.testing.assert_close(column(pack, "occurrences", "weight"), omega * factor)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, budget=budgets)
def test_columns_come_back_by_node(random_groups: Groups, seed: int, budget: int) -> None:
    groups = random_groups(seed)
    found = turn_columns(pack_groups(groups, max_pack_tokens=budget), groups, "sampler_logp")
    nodes = {node for group in groups for leaf in group.scored_leaves() for node in leaf.trajectory()}
    assert found.keys() == nodes
    for node, values in found.items():
        np.testing.assert_allclose(values, node.logprobs, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, budget=budgets)
def test_pairs_are_packed_side_by_side_with_their_context(random_groups: Groups, seed: int, budget: int) -> None:
    groups = random_groups(seed)
    packs = pack_pairs(groups, max_pack_tokens=budget, pairs=sibling_pairs)
    wanted = {(id(p.winner), id(p.loser)): p for g in groups for p in sibling_pairs(g)}
    turns = {tuple(n.turn_ids): n for g in groups for t in g.trees for n in t.nodes() if n.turn_ids}
    count = 0
    for pack in packs:
        occurrences, ids = table(pack, "occurrences"), column(pack, "tokens", "ids")
        paths = row_tokens(pack)
        for row, path in enumerate(paths):
            segment = int(column(pack, "rows", "turn")[row])
            mine = occurrences["leaf"] == row
            assert (occurrences["weight"][mine] == (occurrences["turn"][mine] == segment)).all()
            assert column(pack, "tokens", "position")[path].tolist() == list(range(len(path)))
        for winner, loser, margin in zip(*(pack["pairs", k].tolist() for k in ("winner", "loser", "margin"))):
            count += 1
            rows = [column(pack, "rows", "turn").tolist().index(segment) for segment in (winner, loser)]
            contexts, sides = [], []
            for row, segment in zip(rows, (winner, loser), strict=True):
                token = occurrences["token"][occurrences["turn"] == segment]
                sides.append(tuple(ids[token].tolist()))
                before = paths[row].tolist()
                contexts.append(ids[before[: before.index(int(token[0]))]].tolist())
            assert contexts[0] == contexts[1]
            assert margin > 0
            assert sides[0] in turns
            assert sides[1] in turns
    assert count == len(wanted)
    whole = pack_pairs(groups, max_pack_tokens=100_000, pairs=sibling_pairs)
    unique = {id(n): n for p in wanted.values() for side in (p.winner, p.loser) for n in (*side.trajectory(),)}
    roots = {id(t.root): t.root for g in groups for t in g.trees if any(id(n) in unique for n in t.nodes())}
    size = sum(len(n.turn_ids) + len(n.observation_ids) for n in (*unique.values(), *roots.values()))
    assert sum(len(table(pack, "tokens")) for pack in whole) == size


def test_a_pair_with_an_empty_turn_is_left_out() -> None:
    root = Node(observation_ids=(1, 2))
    made = [Node(ordinal=i, turn_ids=ids, logprobs=(-1.0,) * len(ids)) for i, ids in enumerate([(3,), (), (4, 5)])]
    for node in made:
        node.status, node.reward = "answered", float(node.ordinal)
        root.add_child(node)
    pairs = [Pair(made[1], made[0], 1.0), Pair(made[2], made[0], 2.0)]
    (pack,) = pack_pairs([Group("q", [Tree(root)])], max_pack_tokens=100, pairs=lambda _: pairs)
    assert pack["pairs", "margin"].tolist() == [2.0]
    assert column(pack, "tokens", "ids").tolist() == [1, 2, 3, 4, 5]


# Whole packs of small trees, column by column


def leaf(ids: tuple[int, ...], *, seen: tuple[int, ...] = (), version: int = 0, reward: float | None = 1.0) -> Node:
    logprobs = tuple(-0.5 * i for i in ids)
    status: Status = "open" if reward is None else "answered"
    return Node(turn_ids=ids, logprobs=logprobs, observation_ids=seen, version=version, status=status, reward=reward)


def forked() -> Group:
    """A prompt of two tokens, a turn that two leaves share, a leaf without a sampled token, and one beside them."""
    root = Node(observation_ids=(11, 12))
    shared = root.add_child(leaf((3, 4), seen=(5,), version=2, reward=None))
    for ordinal, child in enumerate((leaf((6,), version=3), leaf((7, 8), seen=(9,)), leaf((), seen=(10,)))):
        child.ordinal = ordinal
        shared.add_child(child)
    last = root.add_child(leaf((2,), version=1))
    last.ordinal = 1
    return Group("q", [Tree(root, index=3)])


def columns(pack: Pack, name: Any) -> dict[str, list[Any]]:
    return {str(key): value.tolist() for key, value in table(pack, name).items()}


def test_every_column_of_a_small_pack() -> None:
    (pack,) = pack_groups([forked()], max_pack_tokens=100)
    assert columns(pack, "tokens") == {
        "ids": [11, 12, 3, 4, 5, 6, 7, 8, 9, 10, 2],
        "position": [0, 1, 2, 3, 4, 5, 5, 6, 7, 5, 2],
        "subtree_end": [11, 11, 10, 10, 10, 6, 9, 9, 9, 10, 11],
        "predecessor": [-1, 0, 1, 2, 3, 4, 4, 6, 7, 4, 1],
        "turn_id": [-1, -1, 0, 0, -1, 1, 2, 2, -1, -1, 3],
        "version": [0, 0, 2, 2, 2, 3, 0, 0, 0, 0, 1],
        "loss_mask": [False, False, True, True, False, True, True, True, False, False, True],
        "sampler_logp": [0.0, 0.0, -1.5, -2.0, 0.0, -3.0, -3.5, -4.0, 0.0, 0.0, -1.0],
    }
    assert columns(pack, "occurrences") == {
        "token": [2, 3, 5, 2, 3, 6, 7, 2, 3, 10],
        "leaf": [0, 0, 0, 1, 1, 1, 1, 2, 2, 3],
        "turn": [0, 0, 1, 2, 2, 3, 3, 4, 4, 5],
        "turn_index": [0, 0, 1, 0, 0, 1, 1, 0, 0, 0],
        "weight": [1.0] * 10,
        "advantage": [0.0] * 10,
        "ret": [0.0] * 10,
    }
    assert columns(pack, "rows") == {
        "group": [0, 0, 0, 0],
        "leaf": [0, 1, 2, 3],
        "tree": [3, 3, 3, 3],
        "end": [5, 8, 9, 10],
        "turn": [1, 3, 4, 5],
    }
    assert [path.tolist() for path in row_tokens(pack)] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 9],
        [0, 1, 10],
    ]
    (once,) = pack_groups([forked()], max_pack_tokens=100, shared_turns="once")
    third = pytest.approx(1 / 3)
    assert columns(once, "occurrences")["weight"] == [third, third, 1.0, third, third, 1.0, 1.0, third, third, 1.0]


def test_a_cut_tree_repeats_its_ancestors_and_keeps_the_weights() -> None:
    packs = pack_groups([forked()], max_pack_tokens=9, shared_turns="once")
    assert [columns(pack, "tokens")["ids"] for pack in packs] == [
        [11, 12, 3, 4, 5, 6, 7, 8, 9],
        [11, 12, 3, 4, 5, 10, 2],
    ]
    third = pytest.approx(1 / 3)
    assert columns(packs[1], "occurrences")["weight"] == [third, third, 1.0]
    assert columns(packs[1], "rows")["leaf"] == [2, 3]
    alone = pack_groups([forked()], max_pack_tokens=1)
    assert [columns(pack, "rows")["leaf"] for pack in alone] == [[0], [1], [2], [3]]


TYPES = {
    "loss_mask": torch.bool,
    **dict.fromkeys(("sampler_logp", "weight", "advantage", "ret", "margin"), torch.float32),
}


def test_columns_have_their_types_even_where_nothing_was_sampled() -> None:
    root = Node(observation_ids=(1,))
    root.add_child(leaf(()))
    empty = Group("q", [Tree(root)])
    nothing = pack_pairs([forked()], max_pack_tokens=100, pairs=lambda _: [])
    assert nothing == []
    packs = [*pack_groups([empty], max_pack_tokens=9), *pack_groups([forked()], max_pack_tokens=99)]
    for pack in packs:
        for name in ("tokens", "occurrences", "rows"):
            for key, values in table(pack, name).items():
                assert cast("torch.Tensor", values).dtype == TYPES.get(str(key), torch.int64), key
    assert columns(packs[0], "rows") == {"group": [0], "leaf": [0], "tree": [0], "end": [0], "turn": [-1]}
    assert columns(packs[0], "occurrences")["token"] == []


def test_the_first_pack_with_room_is_filled() -> None:
    def of(tokens: int) -> Group:
        root = Node(observation_ids=(1,))
        root.add_child(leaf((2,) * (tokens - 1)))
        return Group("q", [Tree(root)])

    packs = pack_groups([of(6), of(7), of(4), of(3), of(10)], max_pack_tokens=10)
    assert [columns(pack, "rows")["group"] for pack in packs] == [[0, 2], [1, 3], [4]]
    assert [len(table(pack, "tokens")) for pack in packs] == [10, 10, 10]


def test_pairs_of_a_small_tree() -> None:
    group = forked()
    shared, last = group.trees[0].root.children
    first, second, _ = shared.children
    pairs = [Pair(second, first, 0.5), Pair(last, shared, 0.25)]
    (pack,) = pack_pairs([group], max_pack_tokens=100, pairs=lambda _: pairs)
    found = {key: pack["pairs", key].tolist() for key in ("winner", "loser", "margin")}
    assert found == {"winner": [4, 5], "loser": [2, 0], "margin": [0.5, 0.25]}
    assert columns(pack, "occurrences")["weight"] == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert pack["pairs", "winner"].dtype == pack["pairs", "loser"].dtype == torch.int64
    assert pack["pairs", "margin"].dtype == torch.float32
    # Under a budget that the tree does not fit, turns of one parent stay together.
    parts = pack_pairs([group], max_pack_tokens=9, pairs=lambda _: pairs)
    assert [part["pairs", "margin"].tolist() for part in parts] == [[0.25], [0.5]]
    assert [columns(part, "tokens")["ids"] for part in parts] == [[11, 12, 3, 4, 5, 2], [11, 12, 3, 4, 5, 6, 7, 8, 9]]


def test_refusals_say_what_was_found() -> None:
    with pytest.raises(ConfigError, match=r"^max_pack_tokens must be at least 1, found 0$"):
        pack_groups([], max_pack_tokens=0)
    with pytest.raises(ConfigError, match=r"^max_pack_tokens must be at least 1, found 0$"):
        pack_pairs([], max_pack_tokens=0, pairs=sibling_pairs)
    with pytest.raises(ConfigError, match=r"^shared_turns must be 'per_leaf' or 'once', found 'twice'$"):
        pack_groups([], max_pack_tokens=1, shared_turns="twice")  # type: ignore[arg-type]
    assert pack_groups([], max_pack_tokens=1) == []
    group = forked()
    turns = [np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(1)]
    packs = pack_groups([group], max_pack_tokens=100)
    wrong: list[tuple[Advantages, str]] = [
        (
            Advantages("turn", (tuple(turns[:3]),)),
            r"^no advantages for group 0, scored leaf 3; credit must run over the same groups, in the same order, as "
            r"were packed$",
        ),
        (
            Advantages("turn", ((np.zeros(1), *turns[1:]),)),
            r"^group 0, scored leaf 0: expected at least 2 advantages \(one a turn\), found 1$",
        ),
        (
            Advantages("token", ((np.zeros(4), *turns[1:]),)),
            r"^group 0, scored leaf 0: expected at least 3 advantages \(one a token\), found 4$",
        ),
        (
            Advantages("turn", (tuple(turns),), returns=((np.zeros(3), np.zeros(4), np.zeros(1), np.zeros(1)),)),
            r"^group 0, scored leaf 2: expected at least 2 returns \(one a token\), found 1$",
        ),
        (
            Advantages("turn", (tuple(turns),), weights=((np.full(2, np.inf), *turns[1:]),)),
            r"^group 0, scored leaf 0: weights must be finite, found \[inf inf\]$",
        ),
    ]
    for advantages, words in wrong:
        with pytest.raises(DataError, match=words):
            write_advantages(packs, advantages)


def test_what_is_written_are_float32_numbers() -> None:
    packs = pack_groups([forked()], max_pack_tokens=100)
    ones: Any = [[1, 2], [1, 2], [1], [3]]
    returns = tuple(np.arange(n, dtype=np.float64) for n in (3, 4, 2, 1))
    write_advantages(packs, Advantages("turn", (tuple(ones),), returns=(returns,), weights=(tuple(ones),)))
    found = columns(packs[0], "occurrences")
    assert found["advantage"] == found["weight"] == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 3.0]
    assert found["ret"] == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 0.0]
    for name in ("advantage", "weight", "ret"):
        assert column(packs[0], "occurrences", name).dtype == torch.float32


def test_columns_of_turns_of_a_small_pack() -> None:
    group = forked()
    shared, last = group.trees[0].root.children
    found = turn_columns(pack_groups([group], max_pack_tokens=9), [group], "sampler_logp")
    wanted = {shared: [-1.5, -2.0], last: [-1.0]}
    wanted |= dict(zip(shared.children, ([-3.0], [-3.5, -4.0], []), strict=True))
    assert {node: values.tolist() for node, values in found.items()} == wanted
    assert all(values.dtype == np.float64 for values in found.values())


def test_numbers_of_a_node_may_be_arrays() -> None:
    plain, arrays = forked(), forked()
    for node in arrays.trees[0].root.walk():
        for name in ("turn_ids", "observation_ids", "logprobs"):
            setattr(node, name, np.array(getattr(node, name), dtype=float if name == "logprobs" else int))
    found, expected = (pack_groups([group], max_pack_tokens=100)[0] for group in (arrays, plain))
    for name in ("tokens", "occurrences", "rows"):
        assert columns(found, name) == columns(expected, name)
