"""A trajectory that a teacher finished: what it was played for, what it used, and its form as JSON."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from turntree.agents.completeness import call_turns
from turntree.agents.scorer import Finished, FinishedTurn
from turntree.agents.tokenizer import Tokenizer, encode
from turntree.envs.core import TurnCore
from turntree.envs.language import normalizer_for
from turntree.envs.metrics import exact_match
from turntree.envs.task import FrozenDict, thaw
from turntree.errors import DataError
from turntree.trainers.tree import Tree

__all__ = ["Key", "Played", "Slot", "played_tree", "question_names", "slots", "vocabulary"]


class Key(NamedTuple):
    """Names a trajectory: the question's name and the number of the sample, from 0."""

    question: str
    sample: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A trajectory that is to be played."""

    key: Key
    task: Any


@dataclass(frozen=True, slots=True)
class Played:
    """One finished trajectory.

    ``tokens``: what the teacher generated, as its engine counted it (of an oracle: its texts in the student's tokens,
    or an estimate). ``ids``: the sampled tokens of each turn, where the engine gave any, in the ``vocabulary`` of that
    name.
    """

    key: Key
    finished: Finished
    tokens: int
    ids: tuple[tuple[int, ...], ...] = ()
    vocabulary: str = ""

    @property
    def calls(self) -> int:
        """Calls that were executed."""
        return sum(len(turn.calls) for turn in call_turns(self.finished))

    def number(self, name: str) -> float | None:
        """A number of the last turn's info, such as ``em``; ``reward`` is the environment's. None where it has none."""
        finished = self.finished
        value = finished.reward if name == "reward" else finished.info.get(name)
        golds = getattr(finished.task, "golden_answers", ())
        if name == "em" and value is None and golds and finished.answer is not None:
            rule = normalizer_for([finished.task])  # for an answer that the environment never saw
            value = exact_match(finished.answer, golds, normalizer=rule)
        return float(value) if isinstance(value, (bool, int, float)) else None

    def to_json(self, core: TurnCore[Any]) -> dict[str, Any]:
        """Everything that judging it later needs."""
        finished = self.finished
        state = None if finished.state is None else core.encode_state(finished.state)
        row: dict[str, Any] = {
            "question_id": self.key.question,
            "sample": self.key.sample,
            "question": getattr(finished.task, "question", None),
            "prompt": finished.prompt,
            "turns": [
                {"text": t.text, "action": t.action, "observation": t.observation, "info": thaw(t.info)}
                for t in finished.turns
            ],
            "status": finished.status,
            "answer": finished.answer,
            "reward": finished.reward,
            "tokens": self.tokens,
            "state": state,
        }
        return row | ({"ids": [list(turn) for turn in self.ids], "vocabulary": self.vocabulary} if self.ids else {})

    @staticmethod
    def from_json(row: Mapping[str, Any], *, task: Any, core: TurnCore[Any]) -> Played:
        """The inverse of :meth:`to_json`, for the task that it was played for.

        Raises ``DataError`` where the row is none, or another question has its name by now.
        """
        name = row.get("question_id")
        if row.get("question") != getattr(task, "question", None):
            raise DataError(
                f"question {name!r} reads {getattr(task, 'question', None)!r:.80}, but its trajectory was played for "
                f"{row.get('question')!r:.80}; the questions changed, so play them in another folder"
            )
        try:
            turns = tuple(
                FinishedTurn(turn["text"], turn["action"], turn["observation"], FrozenDict(turn["info"]))
                for turn in row["turns"]
            )
            state = None if row["state"] is None else core.decode_state(row["state"])
            info = turns[-1].info if turns else FrozenDict()
            finished = Finished(
                task, row["prompt"], turns, row["status"], row["answer"], float(row["reward"]), state, info
            )
            ids = tuple(tuple(turn) for turn in row.get("ids", ()))
            key = Key(row["question_id"], int(row["sample"]))
            return Played(key, finished, int(row["tokens"]), ids, row.get("vocabulary", ""))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"expected a trajectory of question {name!r}, found another row ({type(error).__name__}: {error})"
            ) from error


def played_tree(tree: Tree, slot: Slot, *, vocabulary: str) -> Played:
    """The trajectory of a tree with one leaf that did not fail. ``vocabulary`` '' : its ids are no tokens."""
    leaf = tree.leaves()[0]
    path = leaf.trajectory()
    finished = Finished(
        task=slot.task,
        prompt=tree.root.observation,
        turns=tuple(FinishedTurn(n.text, n.action, n.observation, n.info) for n in path),
        status="answered" if leaf.status == "answered" else "truncated",
        answer=leaf.info.get("answer"),
        reward=sum(n.step_reward for n in path),
        state=leaf.state,
        info=leaf.info,
    )
    ids = tuple(node.turn_ids for node in path) if vocabulary else ()
    return Played(slot.key, finished, sum(len(node.turn_ids) for node in path), ids, vocabulary)


def question_names(tasks: Sequence[Any]) -> list[str]:
    """A name for each task: its id, or its place from 0; ``id@place`` where several have the same."""
    ids = [str(getattr(task, "id", place)) for place, task in enumerate(tasks)]
    seen = Counter(ids)
    return [name if seen[name] == 1 else f"{name}@{place}" for place, name in enumerate(ids)]


def slots(tasks: Sequence[Any], samples: int) -> list[Slot]:
    """All trajectories that are to be played, question by question."""
    named = zip(question_names(tasks), tasks, strict=True)
    return [Slot(Key(name, sample), task) for name, task in named for sample in range(samples)]


def vocabulary(tokenizer: Tokenizer) -> str:
    """A short hash that two tokenizers share if ids mean the same to both."""
    known: Any = tokenizer  # its type does not say that it can be hashed
    return _vocabulary(known)


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer: Any) -> str:
    words: Any = getattr(tokenizer, "get_vocab", tokenizer.get_added_vocab)()
    probe = encode(tokenizer, "Find 12.5 % of it:\n<search> 北京 café's </search>\t")
    return hashlib.sha256(repr((sorted(words.items()), probe)).encode("utf-8", "replace")).hexdigest()[:16]
