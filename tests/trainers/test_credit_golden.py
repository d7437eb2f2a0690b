"""Credit rules against numbers computed with the published code."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from turntree.trainers.credit import (
    Advantages,
    CreditRule,
    at2po,
    at2po_values,
    child_weights,
    dr_grpo,
    gae,
    grpo,
    opo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    tree_diff_reference,
    tree_grpo,
)
from turntree.trainers.tree import Group, Node, Tree

Array = npt.NDArray[np.float64]


def build(nodes: list[dict[str, Any]], index: int = 0) -> tuple[Tree, dict[int, Node]]:
    """A tree from the golden files' node lists."""
    made: dict[int, Node] = {}
    for n in nodes:
        leaf = n["leaf"]
        node = Node(
            status="answered" if leaf else "open", entropy=n.get("entropy", 0.0), reward=n["reward"] if leaf else None
        )
        made[n["id"]] = node
        if n["parent"] is not None:
            parent = made[n["parent"]]
            node.ordinal = len(parent.children)
            parent.add_child(node)
    return Tree(made[nodes[0]["id"]], index=index), made


def load(golden_dir: Path, name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((golden_dir / f"{name}.json").read_text())["cases"]
    assert cases
    return cases


# Trees


def test_golden_tree_grpo_advantage(golden_dir: Path) -> None:
    names: dict[str, Any] = {"inter_tree": "inter", "intra_tree": "intra", "tree_sum": "sum", "tree_2norm": "2norm"}
    for case in load(golden_dir, "tree_grpo_advantage"):
        groups, at = [], []
        for prompt in case["inputs"]["prompts"]:
            trees = []
            for i, t in enumerate(prompt["trees"]):
                tree, made = build(t["nodes"], i)
                trees.append(tree)
                index = {made[n["id"]]: n["leaf_index"] for n in t["nodes"] if n["leaf"]}
                at += [index[leaf] for leaf in tree.scored_leaves()]
            groups.append(Group(prompt["prompt"], trees))
        for key, estimator in names.items():
            got = tree_grpo(groups, estimator=estimator, singleton="raw")
            arrays = [a for group in got.values for a in group]
            expected = [case["expected"][key][i] for i in at]
            assert len(arrays) == len(case["inputs"]["leaf_rewards"])
            for array, number in zip(arrays, expected, strict=True):
                np.testing.assert_allclose(array, number, atol=1e-6, err_msg=key)


def spans(leaf: Node, ids: dict[Node, int], ends: dict[int, int], turns: np.ndarray[Any, Any], width: int) -> Any:
    row = np.zeros(width)
    for node, a in zip(leaf.trajectory(), turns, strict=True):
        assert node.parent is not None
        row[ends[ids[node.parent]] : ends[ids[node]]] = a
    return row


def test_golden_at2po_credit(golden_dir: Path) -> None:
    modes = {"child_softmax": "child", "child_mean": "child_mean", "leaf_mean": "leaf_mean"}
    for case in load(golden_dir, "at2po_credit"):
        nodes = case["inputs"]["nodes"]
        tree, made = build(nodes)
        ids = {node: i for i, node in made.items()}
        ends = {n["id"]: n["end"] for n in nodes}
        group = Group("q", [tree])
        for expected in case["expected"]:
            options: dict[str, Any] = {
                "weights": "softmax",
                "value": modes[expected["node_value_mode"]],
                "normalise_leaves": expected["leaf_value_norm"],
            }
            values = at2po_values(group, **options)
            assert len(values) == len(nodes)
            for node, v in values.items():
                assert v == pytest.approx(expected["node_value"][str(ids[node])], abs=1e-6)
            got = at2po([group], advantage=expected["node_adv_mode"], **options)
            leaves = group.scored_leaves()
            for leaf, turns in zip(leaves, got.values[0], strict=True):
                want = [expected["node_advantage"][str(ids[n])] for n in leaf.trajectory()]
                np.testing.assert_allclose(turns, want, atol=1e-6)
            for leaf_id, row in zip(expected.get("leaf_order", []), expected.get("token_advantages", []), strict=True):
                turns = got.values[0][leaves.index(made[leaf_id])]
                np.testing.assert_allclose(spans(made[leaf_id], ids, ends, turns, len(row)), row, atol=1e-6)


def test_golden_at2po_linear_weights(golden_dir: Path) -> None:
    for case in load(golden_dir, "at2po_credit"):
        tree, made = build(case["inputs"]["nodes"])
        derived = case["derived_not_reference"]
        for want in derived["child_weights"].values():
            h = [made[i].entropy for i in want["children"]]
            np.testing.assert_allclose(child_weights(h, weights="linear"), want["linear"], atol=1e-6)
            np.testing.assert_allclose(child_weights(h, weights="softmax"), want["softmax"], atol=1e-6)
        values = at2po_values(Group("q", [tree]))
        for i, want in derived["node_value_with_linear_weights_paper_variant"].items():
            assert values[made[int(i)]] == pytest.approx(want, abs=1e-6)


def test_golden_tree_diff_scores(golden_dir: Path) -> None:
    for case in load(golden_dir, "tree_diff_scores"):
        nodes, expected = case["inputs"]["nodes"], case["expected"]["final_score"]
        tree, made = build([{"reward": None, **n} for n in nodes])
        ids = {node: str(i) for i, node in made.items()}
        group = Group("q", [tree])
        got = tree_diff_reference([group], margin=case["inputs"]["margin"])
        assert got.values[0]
        for leaf, turns in zip(group.scored_leaves(), got.values[0], strict=True):
            np.testing.assert_allclose(turns, [expected[ids[n]] for n in leaf.trajectory()], atol=1e-6)


# Chains, given as padded rows: a run of 1 in the mask is a turn, a run of 0 after it an observation


def chain(root: Node, ordinal: int, mask: list[int], reward: float) -> list[tuple[Node, slice]]:
    """A trajectory below ``root``; its nodes with the columns of their tokens."""
    steps = np.flatnonzero(np.diff([0, *mask, 0]))
    nodes: list[tuple[Node, slice]] = []
    parent = root
    for i, (start, stop) in enumerate(zip(steps[::2], steps[1::2], strict=True)):
        seen = int(steps[2 * i + 2] - stop) if 2 * i + 2 < len(steps) else 0
        node = Node(ordinal=0 if i else ordinal, turn_ids=(7,) * int(stop - start), observation_ids=(8,) * seen)
        parent = parent.add_child(node)
        nodes.append((node, slice(int(start), int(stop))))
    if parent is root:  # a row without any model token
        parent = root.add_child(Node(ordinal=ordinal))
    parent.status, parent.reward = "answered", reward
    return nodes


class Flat:
    """The groups of a case, and where each scored leaf of each group stands in its rows.

    With ``token_level`` the rewards are those of tokens and the leaves' own are 0.
    """

    def __init__(self, inputs: dict[str, Any], *, token_level: bool = False) -> None:
        self.mask: Array = np.array(inputs["response_mask"], dtype=np.float64)
        self.rewards: Array = np.array(inputs["token_level_rewards"], dtype=np.float64)
        table = inputs.get("values")
        values = np.zeros_like(self.rewards) if table is None else np.array(table, dtype=np.float64)
        names = [str(name) for name in inputs["group"]]
        self.groups: list[Group] = []
        self.rows: list[list[int]] = []
        self.values: dict[Node, Array] = {}
        self.token_rewards: dict[Node, Array] = {}
        for name in dict.fromkeys(names):
            root, rows = Node(), [i for i, n in enumerate(names) if n == name]
            for ordinal, i in enumerate(rows):
                reward = 0.0 if token_level else float(self.rewards[i].sum())
                for node, columns in chain(root, ordinal, inputs["response_mask"][i], reward):
                    self.values[node] = values[i, columns]
                    self.token_rewards[node] = self.rewards[i, columns]
            self.groups.append(Group(name, [Tree(root)]))
            self.rows.append(rows)

    @property
    def single_turn(self) -> bool:
        return bool((np.abs(np.diff(self.mask, axis=1, prepend=0.0, append=0.0)).sum(axis=1) == 2).all())

    def padded(self, per: str, rows: tuple[tuple[Array, ...], ...]) -> Array:
        """Rows of a rule's result as ``[rows, columns]``, 0 under a mask of 0."""
        out = np.zeros_like(self.mask)
        for group, indices, values in zip(self.groups, self.rows, rows, strict=True):
            for leaf, i, row in zip(group.scored_leaves(), indices, values, strict=True):
                lengths = [len(n.turn_ids) for n in leaf.trajectory()]
                out[i, self.mask[i] > 0] = np.repeat(row, lengths) if per == "turn" else row
        return out

    def advantages(self, found: Advantages) -> Array:
        return self.padded(found.per, found.values)


def flat_cases(golden_dir: Path, *, token_level: bool = False) -> list[tuple[Flat, dict[str, Any], dict[str, Any]]]:
    return [
        (Flat(case["inputs"], token_level=token_level), case["expected"], case.get("derived_not_reference", {}))
        for case in load(golden_dir, "flat_advantages")
    ]


def factors(key: str) -> list[float]:
    """The numbers of a key such as ``gae_new_verl_g0.99_l0.95``."""
    return [float(re.sub("^(gamma|g|l)", "", part)) for part in key.split("_") if part[-1].isdigit()]


def whitened(rows: Array, mask: Array) -> Array:
    x = rows[mask > 0]
    white: Array = (rows - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    return white * mask


RAW: Any = {"singleton": "raw"}
OF_TRAJECTORIES: dict[str, CreditRule] = {
    "grpo": partial(grpo, **RAW),
    "dr_grpo": partial(dr_grpo, **RAW),
    "rloo": partial(rloo, **RAW),
    "opo": partial(opo, **RAW),
    "reinforce_pp_baseline": partial(reinforce_pp_baseline, **RAW),
}


def test_golden_flat_advantages_of_trajectories(golden_dir: Path) -> None:
    seen: set[str] = set()
    for flat, expected, _ in flat_cases(golden_dir):
        for key in OF_TRAJECTORIES.keys() & expected.keys():
            got = flat.advantages(OF_TRAJECTORIES[key](flat.groups))
            np.testing.assert_allclose(got, np.array(expected[key]) * flat.mask, atol=1e-6, err_msg=key)
            seen.add(key)
    assert seen


def test_every_golden_flat_advantage_has_its_test(golden_dir: Path) -> None:
    tested = ("reinforce_pp_gamma", "gae_new_verl_g", "gae_old_verl_g")
    for _, expected, _ in flat_cases(golden_dir):
        assert not [key for key in expected if key not in OF_TRAJECTORIES and not key.startswith(tested)]


def returns_to_go(flat: Flat, gamma: float) -> Array:
    out = np.zeros_like(flat.mask)
    for row, mask, rewards in zip(out, flat.mask, flat.rewards, strict=True):
        following = 0.0
        for t in np.flatnonzero(mask)[::-1]:
            following = row[t] = rewards[t] + gamma * following
    return out


def last_turns(mask: Array) -> Array:
    """1 on the tokens after the last observation."""
    later_gaps = np.cumsum(np.diff(mask[:, ::-1], axis=1, prepend=0.0) == 1.0, axis=1)[:, ::-1]
    last: Array = mask * (later_gaps == 1)
    return last


def test_golden_reinforce_pp(golden_dir: Path) -> None:
    """Published code resets the return at observations, so only rows of one turn, and last turns, have its numbers."""
    seen = 0
    for flat, expected, _ in flat_cases(golden_dir, token_level=True):
        for key in (k for k in expected if k.startswith("reinforce_pp_gamma")):
            (gamma,) = factors(key)
            got = flat.advantages(reinforce_pp(flat.groups, gamma=gamma, token_rewards=flat.token_rewards))
            returns = returns_to_go(flat, gamma)
            np.testing.assert_allclose(got, whitened(returns, flat.mask), atol=1e-6, err_msg=key)
            last, want = last_turns(flat.mask), expected[key]
            np.testing.assert_allclose(returns * last, np.array(want["returns"]) * last, atol=1e-6, err_msg=key)
            if flat.single_turn:
                np.testing.assert_allclose(got, np.array(want["adv"]) * flat.mask, atol=1e-6, err_msg=key)
            assert last.any()
            seen += 1
    assert seen


def test_golden_reinforce_pp_goes_through_observations(golden_dir: Path) -> None:
    seen = 0
    for flat, _, derived in flat_cases(golden_dir):
        for returns in (v for k, v in derived.items() if k.startswith("reinforce_pp_gamma1_returns_carried")):
            got = flat.advantages(reinforce_pp(flat.groups))
            np.testing.assert_allclose(got, whitened(np.array(returns), flat.mask), atol=1e-6)
            seen += 1
    assert seen


def test_golden_gae(golden_dir: Path) -> None:
    seen = 0
    for flat, expected, _ in flat_cases(golden_dir, token_level=True):
        for key in (k for k in expected if k.startswith("gae_new_verl_g")):
            gamma, lam = factors(key)
            got = gae(flat.groups, values=flat.values, token_rewards=flat.token_rewards, gamma=gamma, lam=lam)
            want = expected[key]
            np.testing.assert_allclose(flat.advantages(got), np.array(want["adv"]) * flat.mask, atol=1e-6, err_msg=key)
            assert got.returns is not None
            returns = flat.padded("token", got.returns)
            np.testing.assert_allclose(returns, np.array(want["returns"]) * flat.mask, atol=1e-6, err_msg=key)
            seen += 1
    assert seen


def test_golden_gae_of_older_code_agrees_where_observations_cannot_matter(golden_dir: Path) -> None:
    """It steps through observations and padding, whose values cancel only where gamma and lambda are 1."""
    seen = 0
    for flat, expected, _ in flat_cases(golden_dir, token_level=True):
        for key in (k for k in expected if k.startswith("gae_old_verl_g") and factors(k) == [1.0, 1.0]):
            got = flat.advantages(gae(flat.groups, values=flat.values, token_rewards=flat.token_rewards))
            np.testing.assert_allclose(got, np.array(expected[key]["adv"]) * flat.mask, atol=1e-6, err_msg=key)
            seen += 1
    assert seen
