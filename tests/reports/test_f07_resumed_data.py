"""Report F07: a resumed run began its data anew, and said nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.envs import Question
from turntree.trainers.collector import PromptStream
from turntree.trainers.learner import train
from turntree.trainers.store import TreeStore


def ids(run: Path) -> list[list[str]]:
    store = TreeStore(run / "trees")
    found = ((step, [s.tree.task for s in store.read(step)]) for step in store.steps())
    return [sorted({task.id for task in tasks if task is not None}) for _, tasks in found]


def test_f07_resumed_twice_and_one_tree_at_a_time(make_config: Any, tmp_path: Path) -> None:
    """How many trees grow at a time changes neither which questions a step has nor their order."""
    options = ("trainer.prompts_per_step=5", "trainer.eval_every=0", "trainer.save_every=1")
    train(make_config(*options, "trainer.steps=6", f"out={tmp_path / 'straight'}"))
    for steps, at_once in ((2, "1"), (4, "4"), (6, "null")):
        train(make_config(*options, f"trainer.steps={steps}", f"trainer.max_concurrent_trees={at_once}",
                          "resume=true", f"out={tmp_path / 'resumed'}"))  # fmt: skip
    straight = ids(tmp_path / "straight")
    assert ids(tmp_path / "resumed") == straight
    assert len(straight) == 6
    assert straight[0] != straight[1] != straight[2]


def test_f07_every_question_once_an_epoch() -> None:
    questions = [Question(f"q{i}", f"Question {i}?", ("yes",)) for i in range(7)]
    stream = PromptStream(questions, per_step=3, seed=4)
    order = [prompt.task.id for step in range(7) for prompt in stream.step(step)]
    epochs = [order[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == sorted(q.id for q in questions) for epoch in epochs)
    assert epochs[0] != epochs[1]
