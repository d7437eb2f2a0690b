"""A credit rule of your own, given by import path, in a training run started from Python.

Numbers are tiny so that it takes seconds; nothing is learned: python examples/custom_credit.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turntree.envs.worlds import generate_world
from turntree.trainers.credit import Advantages
from turntree.trainers.learner import train
from turntree.trainers.quickstart import write_tiny_model
from turntree.trainers.tree import Group


def depth_weighted(groups: Sequence[Group], *, discount: float = 0.9) -> Advantages:
    """A(l, t) = discount^(T - 1 - t) (r(l) - mean r) for turn t of the T turns of leaf l: late turns get more."""
    values = []
    for group in groups:
        leaves = group.scored_leaves()
        rewards = np.array([leaf.reward for leaf in leaves], dtype=np.float64)
        centred = rewards - rewards.mean()
        values.append(tuple(c * discount ** np.arange(leaf.depth)[::-1] for c, leaf in zip(centred, leaves)))
    return Advantages("turn", tuple(values))


def main(folder: Path) -> None:
    # In a package of your own the path would be "my_package.rules:depth_weighted".
    rule = f"{__name__}:depth_weighted"
    world = generate_world("quickstart", seed=0, questions=32).save(folder / "world")
    model = write_tiny_model(folder / "model", seed=0)
    result = train(
        [
            "experiment=quickstart",  # sizes and the grammar that fit the tiny model
            f"model.path={model}",
            f"env.questions={world / 'questions.jsonl'}",
            f"env.dev_questions={world / 'questions.jsonl'}",
            f"out={folder / 'run'}",
            f"algorithm.credit={rule}",
            "algorithm.credit_args.discount=0.8",
            "trainer.steps=2",
            "trainer.prompts_per_step=4",
            "trainer.eval_every=2",
            "trainer.eval_questions=4",
        ],
        on_step=lambda step, metrics: print(f"step {step}: reward {metrics['critic/rewards/mean']:.3f}"),
    )
    progress = result.progress
    print(f"{progress.trajectories} trajectories, {progress.generated_tokens} tokens -> {result.folder}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
