"""Trajectories of which it is known whether their calls are complete: from a file, or played on a generated world."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turntree.agents.completeness.calls import call_turns
from turntree.agents.completeness.checkers import Ballot, RuleChecker
from turntree.agents.scorer import Failed, Finished, FinishedTurn
from turntree.agents.teacher import Teacher, trajectories
from turntree.envs.core import Step, ToolResult
from turntree.envs.limits import Limits
from turntree.envs.search_code_qa import python_tool
from turntree.envs.search_qa import SearchQACore, SearchQAState
from turntree.envs.task import FrozenDict, Question
from turntree.envs.tools import execute
from turntree.envs.worlds import load_world
from turntree.errors import ConfigError, DataError, RetrievalError
from turntree.search_backend.bm25 import BM25Backend
from turntree.trainers.atomic import atomic_file

__all__ = ["Labelled", "labelled_row", "read_labelled", "replay", "save_rows", "world_trajectories"]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A finished trajectory and whether its calls are complete."""

    finished: Finished
    label: bool


def read_labelled(path: str | Path) -> list[Labelled]:
    """JSON Lines with ``question`` (a FlashRAG row), ``turns`` (each ``calls`` and ``result``), ``answer``, ``label``.

    Each call is ``{"tool", "argument"}``, texts both; a turn may have ``retrieved``, the ids of passages in its result;
    ``answer`` may be missing; the label is 0 or 1. Raises ``DataError`` that names the row.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # U+2028 is text, no line
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the labelled trajectories {path}: {error}") from error
    found = [_labelled(line, where=f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{path}: expected labelled trajectories, one JSON object a line, found none")
    return found


def _labelled(line: str, *, where: str) -> Labelled:
    try:
        row = json.loads(line)
        if row["label"] not in (0, 1):
            raise ValueError(f"label is {row['label']!r}, expected 0 or 1")
        question = Question.from_json(row["question"])
        turns = tuple(_turn(turn) for turn in _listed(row["turns"], "turns"))
        answer = row.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise ValueError(f"answer is {answer!r:.80}, expected a text or null")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        lacks = isinstance(error, KeyError)
        raise DataError(
            f"{where}: expected an object with question, turns and label, found {line!r:.120} "
            f"({f'{error} is missing' if lacks else f'{type(error).__name__}: {error}'})"
        ) from error
    status: Literal["answered", "truncated"] = "truncated" if answer is None else "answered"
    return Labelled(Finished(question, question.question, turns, status, answer, 0.0), bool(row["label"]))


def _turn(row: Mapping[str, Any]) -> FinishedTurn:
    calls = [
        {name: _text(call[name], f"{name} of a call") for name in ("tool", "argument")}
        for call in _listed(row["calls"], "calls")
    ]
    shown = [{"id": _id(i)} for i in _listed(row.get("retrieved", []), "retrieved")]
    info = {"calls": calls, "retrieved": shown}
    result = _text(row.get("result", ""), "result")
    return FinishedTurn("", calls[0]["tool"] if calls else "none", result, FrozenDict(info))


def _listed(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r:.80}, expected a list")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {name} is {value!r:.80}, expected a text")
    return value


def _id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"retrieved holds {value!r:.80}, expected the id of a passage")
    return str(value)


def labelled_row(labelled: Labelled) -> dict[str, Any]:
    """The inverse of :func:`_labelled`, as far as checkers look."""
    finished = labelled.finished
    turns = [
        {
            "calls": [{"tool": call.tool, "argument": call.argument} for call in turn.calls],
            "result": turn.result,
            "retrieved": list(turn.retrieved),
        }
        for turn in call_turns(finished)
    ]
    return {
        "question": finished.task.to_json(),
        "turns": turns,
        "answer": finished.answer,
        "label": int(labelled.label),
    }


def world_trajectories(
    world: str | Path, *, questions: int | None = None, laziness: float = 0.3, error: float = 0.15, seed: int = 0
) -> list[Labelled]:
    """The teacher's trajectories on a generated world, with its laziness and error, labelled by the gold steps.

    Complete: the passage of every gold step was shown. A teacher may stop early, follow a wrong trail, guess a right
    answer without looking, or find everything and still answer wrongly. Raises ``DataError`` without gold steps.
    """
    if questions is not None and questions < 1:
        raise ConfigError(f"questions={questions}: expected a number of questions to play, at least 1")
    loaded = load_world(world)
    asked = loaded.questions[:questions]
    turns = max((len(q.metadata.get("steps", ())) for q in asked), default=0) + 2
    computes = any("tool" in step for question in asked for step in question.metadata.get("steps", ()))
    tools = {"python": python_tool()} if computes else {}
    core = SearchQACore(BM25Backend.from_passages(loaded.passages), limits=Limits(max_turns=turns), tools=tools)
    demos = trajectories(core, asked, teacher=Teacher(laziness=laziness, error=error), seed=seed)
    played = [replay(core, q, [turn.text for turn in demo.turns], seed=seed) for q, demo in zip(asked, demos)]
    return [Labelled(finished, _holds_every_step(finished)) for finished in played]


def _holds_every_step(finished: Finished) -> bool:
    (vote,) = RuleChecker("steps").vote([Ballot(finished, 0)])
    if isinstance(vote, Failed):
        raise DataError(f"question {finished.task.id!r}: its gold steps cannot be checked: {vote.kind}")
    return vote.complete


def replay(core: SearchQACore, question: Question, texts: Sequence[str], *, seed: int = 0) -> Finished:
    """The trajectory of an agent that writes ``texts``, one a turn, played again.

    Raises ``DataError`` where the episode does not end with the last of them, ``RetrievalError`` where a call fails.
    """
    state, prompt = core.initial(question, seed=seed)
    turns: list[FinishedTurn] = []
    reward = 0.0
    for number, text in enumerate(texts, 1):
        step = _play(core, state, text)
        state, reward = step.state, reward + step.reward
        turns.append(FinishedTurn(text, str(step.info["action"]), step.observation, step.info))
        if not step.done:
            continue
        if number < len(texts):
            break
        status: Literal["answered", "truncated"] = "answered" if step.terminated else "truncated"
        return Finished(question, prompt, tuple(turns), status, step.info.get("answer"), reward, state, step.info)
    raise DataError(
        f"question {question.id!r}: expected an episode that ends with turn {len(texts)}, found one that "
        f"{'goes on' if len(turns) == len(texts) else f'ended with turn {len(turns)}'}"
    )


def _play(core: SearchQACore, state: SearchQAState, text: str) -> Step[SearchQAState]:
    step = core.act(state, text)
    if isinstance(step, Step):
        return step
    results = execute(core.tools, step.calls)
    failed = next((r for r in results if not isinstance(r, ToolResult)), None)
    if failed is not None:
        raise RetrievalError(f"a call failed while a trajectory was played again: {failed}")
    return core.resolve(state, step, [r for r in results if isinstance(r, ToolResult)])


def save_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines, which :func:`read_labelled` reads again."""
    with atomic_file(Path(path)) as handle:
        for row in rows:
            handle.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
