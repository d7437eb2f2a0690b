"""Kept trajectories as the student sees them: in its tokens, with a loss on the turns that it shall write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.envs.core import TurnCore
from turntree.envs.grammar import Grammar, reading_tools
from turntree.envs.search_qa import SearchQACore
from turntree.envs.tools import tool_spec
from turntree.errors import DataError
from turntree.trainers.agent import agent_grammar
from turntree.trainers.coldstart.played import vocabulary
from turntree.trainers.config import RunConfig
from turntree.trainers.plugins import load_env
from turntree.trainers.sft import TaughtTurn, taught_group
from turntree.trainers.task import QUESTION_ANSWERING, build_task, question_tools
from turntree.trainers.tree import Group

__all__ = ["Lessons", "Student", "lessons"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Student:
    """What decides how a trajectory is written for the student, and whether it can be.

    ``grammar``: reads its turns; None where the task reads turns in a way of its own. ``vocabulary``: of its tokens.
    """

    dialogue: Dialogue
    stops: tuple[str, ...]
    grammar: Grammar | None
    max_context_tokens: int
    max_turn_tokens: int
    vocabulary: str

    @staticmethod
    def of(config: RunConfig, dialogue: Dialogue) -> Student:
        """The student of a configuration. For question answering neither questions nor corpus are needed."""
        if config.env.id not in QUESTION_ANSWERING:
            return Student.of_core(build_task(config, dialogue.tokenizer).core, dialogue, config)
        own, _, loaded = load_env(config.env)
        tools = question_tools(config.env, loaded)
        grammar = reading_tools(agent_grammar(config, own), [tool_spec(name, tool) for name, tool in tools.items()])
        return Student._made(tuple(grammar.stop), grammar, dialogue, config)

    @staticmethod
    def of_core(core: TurnCore[Any], dialogue: Dialogue, config: RunConfig) -> Student:
        """The student of an environment that is there already."""
        grammar = core.grammar if isinstance(core, SearchQACore) else None
        return Student._made(tuple(core.stop), grammar, dialogue, config)

    @staticmethod
    def _made(stops: tuple[str, ...], grammar: Grammar | None, dialogue: Dialogue, config: RunConfig) -> Student:
        limits = config.sampling
        words = vocabulary(dialogue.tokenizer)
        return Student(dialogue, stops, grammar, limits.max_context_tokens, limits.max_turn_tokens, words)

    def group(self, row: Mapping[str, Any], *, uid: str) -> Group:
        """A kept row as a group of one leaf.

        Sampled tokens of the student's own vocabulary are taken as they are; texts are tokenised turn by turn, each
        with what ends it: a stop string, else the end-of-turn token. Turns that the environment did not execute are
        context: the student sees them and does not learn them.

        Raises ``DataError`` where the student's grammar does not read a turn as the teacher meant it, where nothing is
        left to learn from, and where the trajectory is longer than the context.
        """
        own = row.get("vocabulary", "") == self.vocabulary
        last = len(row["turns"]) - 1
        turns = [
            TaughtTurn(
                tuple(turn["ids"]) if own and turn.get("ids") else self.dialogue.written_ids(turn["text"], self.stops),
                turn["observation"] if number < last else "",
                turn["text"],
                self._learnt(turn, number, uid),
            )
            for number, turn in enumerate(row["turns"])
        ]
        # What follows the last turn that is learnt teaches nothing and costs tokens.
        while turns and not turns[-1].learnt:
            turns.pop()
        if not turns:
            raise DataError(
                f"demonstration {uid}: no turn of it was executed, so there is nothing to learn from; leave such "
                "ones out (sft.unfit=drop), or keep better ones (coldstart.min_score, coldstart.filters.format)"
            )
        return taught_group(row["prompt"], turns, self.dialogue, uid=uid, max_tokens=self.max_context_tokens)

    def _learnt(self, turn: Mapping[str, Any], number: int, uid: str) -> bool:
        meant = turn.get("action")
        if meant == "invalid" or not turn["text"]:
            return False
        if self.grammar is None:
            return True
        read = self.grammar.parse(turn["text"]).action
        if read.kind == "invalid" or (meant in ("search", "answer") and read.kind != meant):
            raise DataError(
                f"demonstration {uid}, turn {number + 1}: the student's grammar {type(self.grammar).__name__} reads "
                f"{turn['text']!r:.120} as {read.kind} ({read.argument!r:.40}), the teacher meant "
                f"{meant or 'an action'}; set env.grammar to the one that it was played in, or sft.unfit=drop"
            )
        return True


@dataclass(frozen=True, slots=True)
class Lessons:
    """What is learnt from, row by row, and why other rows are not: (row, reason)."""

    rows: tuple[Mapping[str, Any], ...]
    groups: tuple[Group, ...]
    dropped: tuple[tuple[Mapping[str, Any], str], ...] = ()


def lessons(
    rows: Sequence[Mapping[str, Any]],
    student: Student,
    *,
    drop: bool = False,
    uid: Callable[[Mapping[str, Any]], str] = lambda row: str(row["question_id"]),
    empty: bool = False,
) -> Lessons:
    """One group a row, in order.

    Raises ``DataError`` for the first row that does not fit, unless ``drop``, and where none is left, unless ``empty``.
    """
    kept: list[tuple[Mapping[str, Any], Group]] = []
    dropped: list[tuple[Mapping[str, Any], str]] = []
    for row in rows:
        try:
            kept.append((row, student.group(row, uid=uid(row))))
        except DataError as error:
            if not drop:
                raise
            dropped.append((row, str(error)))
    if not kept and not empty:
        first = f"; the first one: {dropped[0][1]}" if dropped else ""
        raise DataError(f"expected at least one trajectory to learn from, found {len(rows)} of which none fits{first}")
    _warn_long([group for _, group in kept], student)
    return Lessons(tuple(row for row, _ in kept), tuple(group for _, group in kept), tuple(dropped))


def _warn_long(groups: Sequence[Group], student: Student) -> None:
    nodes = [node for group in groups for tree in group.trees for node in tree.root.walk()]
    long = sum(len(node.turn_ids) > student.max_turn_tokens for node in nodes)
    if long:
        _log.warning(
            "%d of the turns to learn are longer than sampling.max_turn_tokens=%d: the student would be cut off there",
            long,
            student.max_turn_tokens,
        )
