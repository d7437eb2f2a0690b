"""A scripted teacher on four questions, with and without accidents."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Generation, Request, SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.scorer import Finished, FinishedTurn
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.search_qa import Limits as EnvLimits
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import FrozenDict, Question
from turntree.search_backend import BM25Backend
from turntree.search_backend.passage import Passage
from turntree.trainers.coldstart import Key, Played
from turntree.trainers.coldstart import job as job_module
from turntree.trainers.coldstart.filters import load_filters
from turntree.trainers.coldstart.job import Plan, Selection, make
from turntree.trainers.coldstart.played import slots
from turntree.trainers.coldstart.teachers import Seat
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.rollout import Limits
from turntree.trainers.task import Task

PASSAGES = [Passage(f"p{i}", name, f"The home of {name} is {home}.") for i, (name, home) in enumerate(
    [("Ava", "Oslo"), ("Bo", "Lima"), ("Cy", "Bonn"), ("Dee", "Rome")])]  # fmt: skip
QUESTIONS = tuple(
    Question(f"q{i}", f"Where does {p.title} live?", (p.text.split()[-1].rstrip("."),),
             FrozenDict({"supporting_ids": [p.id]}))
    for i, p in enumerate(PASSAGES)
)  # fmt: skip


def script(context: str, seed: int) -> str:
    """Searches, repeats itself, errs or answers, as context and seed say."""
    draw = zlib.crc32(f"{context}{seed}".encode()) % 8
    name = context.split("Where does ")[-1].split()[0]
    if context.count("</search>") <= 2 and draw < 4:  # the prompt names the tag once
        return f"<think> look </think> <search> home of {name} </search>"
    if draw == 4:
        return "I do not know what to do."
    found = context.rsplit("is ", 1)[-1].split(".")[0] if "<information>Doc" in context else "Nowhere"
    return f"<think> done </think> <answer> {found if draw != 5 else 'Paris'} </answer>"


class Stop(BaseException):
    """The process ends here."""


class Accident(ScriptedEngine):
    """Ends the process when request number ``at`` is asked for (0: never)."""

    def __init__(self, at: int = 0, **faults: Any) -> None:
        super().__init__(script, **faults)
        self.at = at

    def as_completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation]]:
        for i, request in enumerate(requests):
            if self.at and len(self.requests) + 1 == self.at:
                raise Stop
            yield i, self.generate([request])[0]


@pytest.fixture(scope="session")
def core() -> SearchQACore:
    return SearchQACore(BM25Backend.from_passages(PASSAGES), limits=EnvLimits(max_turns=4, top_k=1))


@functools.lru_cache
def composed(*overrides: str) -> RunConfig:
    return compose(overrides)


@pytest.fixture
def plan(core: SearchQACore) -> Callable[..., Plan]:
    """``plan(*overrides)``: four questions, an engine as teacher."""

    def made(*overrides: str) -> Plan:
        config = composed("coldstart.teacher=engine", "model.path=scripted", *overrides)
        task = Task(QUESTIONS, core, "questions")
        asked = QUESTIONS[: config.coldstart.questions]
        return Plan(config, task, tuple(slots(asked, config.coldstart.samples)), load_filters(config.coldstart.filters))

    return made


@pytest.fixture
def played_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Selection]:
    """``played_by(engine, plan, folder)``: the whole job with that engine as teacher."""

    def run(engine: ScriptedEngine, plan: Plan, folder: Path) -> Selection:
        @contextmanager
        def seat(config: Any, core: SearchQACore, *, spent: Any) -> Iterator[Seat]:
            del config, spent
            dialogue = Dialogue(ByteTokenizer(), style="inline")
            limits = Limits(max_turn_tokens=200, max_context_tokens=4000, max_concurrent_trees=3)
            yield Seat(engine, dialogue, SamplingParams(200, stop=tuple(core.stop)), limits, seed=7, vocabulary="bytes")

        monkeypatch.setattr(job_module, "open_seat", seat)
        return make(plan, folder)

    return run


def trajectory(
    *texts: str,
    sample: int = 0,
    name: str = "q",
    question: str = "Who?",
    calls: Sequence[tuple[str, str]] = (),
    tokens: int = 1,
    reward: float = 0.0,
    **info: Any,
) -> Played:
    """A trajectory that made ``calls`` in its first turns; the last turn has ``info``."""
    turns = []
    for i, text in enumerate(texts):
        own: dict[str, Any] = (
            {"action": calls[i][0], "argument": calls[i][1]} if i < len(calls) else {"action": "answer"}
        )
        if i + 1 == len(texts):
            own |= info
        turns.append(FinishedTurn(text, own["action"], "seen" if i < len(calls) else "", FrozenDict(own)))
    task = Question(name, question, ("gold",))
    status: Literal["answered", "truncated"] = "answered" if info.get("answer", "x") is not None else "truncated"
    finished = Finished(task, question, tuple(turns), status, info.get("answer"), reward, None, turns[-1].info)
    return Played(Key(name, sample), finished, tokens)
