"""Run folders with made-up trees, for the tests of the studio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from turntree.envs.task import FrozenDict, Question
from turntree.trainers.run_folder import MetricsLog, RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Status, Tree

EVIL = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned=2'><svg onload=window.pwned=3></svg>"
    "</textarea></title><a href=\"javascript:window.pwned=4\">click</a>{{constructor.constructor('window.pwned=5')()}}"
    "\"' onmouseover=window.pwned=6 x='"
)
"""Text that would run, or load something, were it ever read as HTML."""

WORDS = (
    "river",
    "city",
    "mayor",
    "college",
    "mentor",
    "ally",
    "founder",
    "site",
    "border",
    "lake",
    "twin",
    "北京",
    "Łódź",
)


def write_run(
    folder: Path, *, steps: int = 2, trees: int = 3, leaves: int = 8, seed: int = 0, evil: bool = False, **config: Any
) -> Path:
    """A run of made-up trees: every step asks the same questions; the run looks as if it had just been trained."""
    rng = np.random.default_rng(seed)
    run = RunFolder.create(folder, {"seed": 0, "algorithm": RULE, "model": {"path": ""}, **config})
    store = TreeStore(run.trees)
    with MetricsLog(run.metrics_file) as log:
        for step in range(1, steps + 1):
            write_step(store, log, rng, step, trees=trees, leaves=leaves, evil=evil)
    return folder


RULE = {"name": "grpo", "credit": "turntree.trainers.credit:grpo", "credit_args": {}}


def write_step(
    store: TreeStore, log: MetricsLog, rng: np.random.Generator, step: int, *, trees: int, leaves: int, evil: bool
) -> None:
    groups = [Group(f"0/{i}", [made_up(rng, i, leaves, evil=evil)]) for i in range(trees)]
    scored = [(leaf, float(leaf.reward or 0)) for group in groups for leaf in group.scored_leaves()]
    mean = float(np.mean([reward for _, reward in scored]))
    advantages = {(leaf, node): reward - mean for leaf, reward in scored for node in leaf.trajectory()}
    nodes = [node for group in groups for node in group.trees[0].nodes() if node.turn_ids]
    values = {node: rng.normal(size=len(node.turn_ids)).round(3).tolist() for node in nodes}
    store.write(step, groups, advantages, {"value": values})
    log.write(step, {"critic/rewards/mean": mean, "tree/entropy": 0.5, "num_turns/mean": 2.0})


def made_up(rng: np.random.Generator, number: int, leaves: int, *, evil: bool = False) -> Tree:
    """A tree with exactly so many leaves, three to five turns deep where there is room."""
    bad = EVIL if evil else ""
    question = f"Who rules the {WORDS[number % len(WORDS)]} number {number}? {bad}".strip()
    root = Node(observation=question, observation_ids=(1, 2, 3))
    open_nodes: list[tuple[Node, int]] = []
    for _ in range(leaves):
        target = int(rng.integers(2, 5))
        parent, depth = root, 0
        shallow = [item for item in open_nodes if item[1] < target] if rng.random() < 0.6 else []
        if shallow:
            parent, depth = shallow[int(rng.integers(len(shallow)))]
        grown = depth > 0
        while depth < target:
            depth += 1
            child = _turn(rng, len(parent.children), last=depth == target, bad=bad)
            if grown:
                child.picked, child.score, child.reason = parent, 0.5, f"rank 1 of 4 {bad}".strip()
            grown = False
            parent = parent.add_child(child)
            if depth < target:
                open_nodes.append((child, depth))
    task = Question(f"q{number}", question, (f"King {number}", bad or "somebody"), FrozenDict({"hops": 2}))
    return Tree(root, f"0/{number}", 0, task, rounds=1)


def _turn(rng: np.random.Generator, ordinal: int, *, last: bool, bad: str) -> Node:
    length = int(rng.integers(8, 30))
    logprobs = (-rng.exponential(0.6, length)).round(4)
    words = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), 5))
    kind = "answer" if last else "search"
    status: Status = "open"
    if last:
        status = ("answered", "truncated", "failed")[int(rng.choice(3, p=(0.85, 0.1, 0.05)))]
    found = [] if last else [{"id": f"p{i}", "title": f"{words} {bad}"} for i in range(3)]
    return Node(
        ordinal=ordinal,
        turn_ids=tuple(rng.integers(0, 500, length).tolist()),
        logprobs=tuple(logprobs.tolist()),
        entropies=tuple((-logprobs).tolist()),
        entropy=float(-logprobs.mean()),
        observation_ids=() if last else (4, 5),
        text=f"<think>Look for {words}. {bad}</think><{kind}>{words} {bad}</{kind}>",
        action=kind,
        observation="" if last else f"<information>{words} is the {words}. {bad}</information>",
        status=status,
        reward=float(rng.integers(0, 3)) / 2 if status in ("answered", "truncated") else None,
        info=FrozenDict({"action": kind, "retrieved": found, "note": bad}),
    )
