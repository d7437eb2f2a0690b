"""A tree grown by the rollout of turntree over a foreign task, on scripted turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs import TurnEnv
from turntree.trainers.expansion import random_nodes
from turntree.trainers.plan import GrowthPlan
from turntree.trainers.rollout import Limits, Prompt, grow
from turntree.trainers.tree import Tree


def grow_tree(env: TurnEnv[Any], task: Any, turns: Sequence[str], *, stop: Sequence[str]) -> Tree:
    """One tree of two chains and three expansions; which of ``turns`` is spoken follows from the seed."""
    engine = ScriptedEngine(lambda _context, seed: turns[seed % len(turns)])
    rollout = grow(
        [Prompt("foreign", task)],
        core=env.core,
        engine=engine,
        dialogue=Dialogue(ByteTokenizer()),
        plan=GrowthPlan(rule=random_nodes, trees=1, chains=2, rounds=1, expansions=3),
        sampling=SamplingParams(200, stop=tuple(stop)),
        limits=Limits(max_turn_tokens=200, max_context_tokens=20_000),
    )
    (group,) = rollout.groups
    (tree,) = group.trees
    return tree


def check_tree(tree: Tree, env: TurnEnv[Any]) -> Mapping[str, int]:
    """Every trajectory, played alone from the root's state in a fresh environment, gives what its nodes hold."""
    leaves = list(tree.leaves())
    assert len(leaves) == 5, "two chains and three branches"
    for leaf in leaves:
        state, rewards = tree.root.state, 0.0
        for node in leaf.trajectory():
            step: Any = env.core.act(state, node.text)
            assert (step.observation, step.reward) == (node.observation, node.step_reward)
            state, rewards = step.state, rewards + step.reward
        assert rewards == leaf.reward
    inner = [node for node in tree.root.walk() if len(node.children) > 1 and node is not tree.root]
    assert inner, "the tree must branch below its root"
    return {"nodes": sum(1 for _ in tree.root.walk()), "branch points": len(inner)}
