"""Snapshot, fork and restore an episode, then grow a tree of trajectories from one question and read its credit.

A scripted engine stands in for a model, so this runs in seconds: python examples/fork_and_grow.py
"""

from __future__ import annotations

from turntree.agents import ByteTokenizer, Dialogue
from turntree.agents.engines import SamplingParams, ScriptedEngine
from turntree.envs import Question, SearchQAEnv
from turntree.trainers.credit import at2po, explain
from turntree.trainers.expansion import entropy
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.tree import Group, Tree


def fork_an_episode(env: SearchQAEnv, question: Question) -> None:
    """Two answers to one question from one search: the second episode resumes where the first one stood."""
    first_query = question.metadata["steps"][0]["query"]
    env.reset(seed=0, options={"task": question})
    env.step(f"<think>I look it up.</think><search>{first_query}</search>")
    snapshot = env.snapshot()  # a value: it can be kept, pickled, or written as JSON
    twin = env.fork()
    right = twin.step(f"<think>There it is.</think><answer>{question.golden_answers[0]}</answer>")
    wrong = env.step("<think>I guess.</think><answer>nobody</answer>")
    env.restore(snapshot)  # as if the guess had never been made
    again = env.step(f"<think>There it is.</think><answer>{question.golden_answers[0]}</answer>")
    print(f"the fork earned {right[1]:g}, the guess {wrong[1]:g}, the restored episode {again[1]:g}")


def grow_a_tree(env: SearchQAEnv, question: Question) -> Group:
    """One tree: two chains, then twice the two turns of highest entropy are generated again."""
    query, answer = question.metadata["steps"][0]["query"], question.golden_answers[0]

    def policy(context: str, seed: int) -> str:
        """What the "model" says after ``context``; the seed names the place in the tree."""
        if context.count("<information>Doc") < seed % 3:
            return f"<think>I look it up.</think><search>{query}</search>"
        return f"<think>I know.</think><answer>{answer if seed % 2 else 'nobody'}</answer>"

    rollout = grow(
        [Prompt("question-0", question)],
        core=env.core,
        engine=ScriptedEngine(policy),
        dialogue=Dialogue(ByteTokenizer()),
        plan=GrowthPlan(chains=2, rounds=2, expansions=2, rule=entropy),
        sampling=SamplingParams(max_tokens=128, stop=env.core.grammar.stop),
        limits=Limits(max_turn_tokens=128, max_context_tokens=4096),
        run_seed=3,
    )
    stats = rollout.stats
    print(f"{stats.trajectories} trajectories, {stats.generated_tokens} tokens, {stats.tool_calls} searches")
    return rollout.groups[0]


def show(tree: Tree) -> None:
    """The tree, one line a turn."""
    for node in tree.root.walk():
        reward = "" if node.reward is None else f"  reward {node.reward:g}"
        print(f"{'  ' * node.depth}{node.path or 'root'} {node.action} {node.info.get('answer', '')}{reward}")


def main() -> None:
    env = SearchQAEnv()  # without arguments: a small generated world
    question = env.tasks[0]
    fork_an_episode(env, question)
    group = grow_a_tree(env, question)
    show(group.trees[0])
    print(explain(group, at2po))


if __name__ == "__main__":
    main()
