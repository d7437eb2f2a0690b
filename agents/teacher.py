"""A scripted teacher: plays gold steps through the real environment, as lazily and as carelessly as it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from turntree.agents.scorer import Finished, FinishedTurn
from turntree.envs.core import Action, Pending, Step, ToolFailure, ToolResult
from turntree.envs.datasets import gold_steps
from turntree.envs.grammar.planner import DONE
from turntree.envs.metrics import Normalizer, exact_match
from turntree.envs.search_qa import SearchQACore, SearchQAState
from turntree.envs.task import Question
from turntree.envs.tools import execute
from turntree.envs.worlds.languages import name_pattern
from turntree.envs.worlds.speech import Language
from turntree.envs.worlds.stream import Stream
from turntree.errors import ConfigError, DataError, RetrievalError
from turntree.search_backend.passage import Passage

__all__ = ["Demonstration", "DemonstrationTurn", "Teacher", "TurnWriter", "play", "trajectories"]


@dataclass(frozen=True, slots=True)
class _Phrases:
    """What the teacher says in one language. ``near``: sentences of a passage end at one of these signs."""

    query: str
    found: str
    join: str
    find: str
    look_up: str
    compute: str
    result: str
    answer: str
    complete: str
    guesses: tuple[str, str]
    ends: str
    wanted: str


_PHRASES: dict[Language, _Phrases] = {
    "en": _Phrases(
        query="{x} {r}",
        found="{r} {o}",
        join=" . ",
        find="find the {r} of {x}",
        look_up="find {x}",
        compute="compute {x}",
        result="result",
        answer="the answer is {o}",
        complete="nothing is missing",
        guesses=("yes", "no"),
        ends=".",
        wanted=" {r} ",
    ),
    "zh": _Phrases(
        query="{x}的{r}",
        found="{r}是{o}",
        join="。",
        find="查找{x}的{r}",
        look_up="查找{x}",
        compute="计算{x}",
        result="结果",
        answer="答案是{o}",
        complete="不缺什么",
        guesses=("是", "否"),
        ends="。",
        wanted="{r}",
    ),
}


_NUMBERS = ("1", "2", "3")


@runtime_checkable
class TurnWriter(Protocol):
    """A grammar that can also write turns; ``TagGrammar`` and its subclasses do."""

    def write(self, thought: str, action: Action) -> str:
        """One turn that holds the thought and the action."""
        ...


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher's knobs, both probabilities.

    ``laziness``: before each search after the first, to skip all searches that remain and answer with what was found
    last (yes/no and comparison questions: with a guess). ``error``: in each step, to go wrong: to look up another
    relation of the question, or to take another name from the passage; later steps build on it. With both at 0
    the teacher answers correctly wherever the search finds the gold passages and the limits leave room.
    Under a planner's grammar it stops where it would have answered, and answers nothing.

    Where a step has ``options`` (relations that a vague word may mean), going wrong is to take one of the others. Where
    that finds nothing, which names nobody but the subject, the step is tried again without it.

    A thought holds what the last search gave and what is looked up next: ``mentor Kero Bapi . find the college of
    Kero Bapi``. Questions whose metadata say ``language: zh`` are played in Chinese.
    """

    laziness: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        for name in ("laziness", "error"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"teacher: expected {name} between 0 and 1, found {value!r}")


@dataclass(frozen=True, slots=True)
class DemonstrationTurn:
    """One turn of the teacher and what the environment answered (empty after the last)."""

    text: str
    observation: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One played episode as plain data. ``prompt`` is the environment's first observation."""

    question_id: str
    prompt: str
    turns: tuple[DemonstrationTurn, ...]
    reward: float
    em: float


def trajectories(
    core: SearchQACore, questions: Sequence[Question], *, teacher: Teacher, seed: int
) -> list[Demonstration]:
    """What :func:`play` gives, as plain data."""
    played = play(core, questions, teacher=teacher, seed=seed)
    return [_demonstration(finished, core.normalizer) for finished in played]


def play(core: SearchQACore, questions: Sequence[Question], *, teacher: Teacher, seed: int) -> list[Finished]:
    """Play every question, searches batched over all of them; the result keeps the order of ``questions``.

    An episode depends on ``seed``, the question's id and the environment only. The metadata of each question needs
    ``steps`` (``query``, ``supporting_id``, ``answer``; generated worlds have them); a step with ``tool`` calls that
    one with its ``query``. Raises :class:`DataError` where there are none or no such tool, :class:`RetrievalError`
    where a call fails for good, and :class:`ConfigError` when the grammar cannot read the teacher's turns.
    """
    episodes = [_Episode(question, core, teacher, seed) for question in questions]
    while playing := [e for e in episodes if not e.done]:
        outcomes = [(episode, core.act(episode.state, episode.next_turn())) for episode in playing]
        pending = [(episode, out) for episode, out in outcomes if isinstance(out, Pending)]
        _search(core, pending)
        for episode, out in outcomes:
            if isinstance(out, Step):
                episode.advance(out, ())
    return [episode.finished() for episode in episodes]


def _demonstration(finished: Finished, normalizer: Normalizer) -> Demonstration:
    turns = tuple(DemonstrationTurn(turn.text, turn.observation) for turn in finished.turns)
    found = finished.info.get("em")
    # A planner's episode has no answer to compare: what its teacher would have answered is.
    golds = finished.task.golden_answers
    em = exact_match(finished.answer, golds, normalizer=normalizer) if found is None else float(found)
    return Demonstration(finished.task.id, finished.prompt, turns, finished.reward, em)


def _search(core: SearchQACore, pending: Sequence[tuple[_Episode, Pending[SearchQAState]]]) -> None:
    """Answer all searches of one round at once."""
    calls = [call for _, out in pending for call in out.calls]
    results = iter(_require(r) for r in execute(core.tools, calls))
    for episode, out in pending:
        mine = [next(results) for _ in out.calls]
        passages = tuple(p for result in mine if not isinstance(result.value, str) for p in result.value)
        printed = "\n".join(result.value for result in mine if isinstance(result.value, str))
        episode.advance(core.resolve(episode.state, out, mine), passages, printed)


def _require(outcome: ToolResult | ToolFailure) -> ToolResult:
    if isinstance(outcome, ToolFailure):
        raise RetrievalError(f"a search of the teacher failed ({outcome.kind}: {outcome.message}); see to the backend")
    return outcome


@dataclass
class _Episode:
    """One question being played.

    ``beliefs`` maps gold answers of steps to what the teacher took for them; ``finding`` is the newest of these with
    its relation; ``tried`` are options of this step that found nothing.
    """

    question: Question
    core: SearchQACore
    teacher: Teacher
    seed: int
    beliefs: dict[str, str] = field(default_factory=dict)
    turns: list[FinishedTurn] = field(default_factory=list)
    searched: int = 0
    answering: bool = False
    text: str = ""
    finding: str = ""
    answer: str | None = None
    lookup: _Lookup | None = None
    tried: tuple[str, ...] = ()
    last: Step[SearchQAState] | None = None

    def __post_init__(self) -> None:
        self.steps = _gold_steps(self.question)
        self.language: Language = "zh" if self.question.metadata.get("language") == "zh" else "en"
        self.say = _PHRASES[self.language]
        self.state, self.prompt = self.core.initial(self.question, seed=self.seed)
        # Two streams, so that one knob's setting does not shift the other's draws.
        self.lazy = Stream("teacher-lazy", self.seed, self.question.id)
        self.slip = Stream("teacher-slip", self.seed, self.question.id)

    @property
    def done(self) -> bool:
        return self.last is not None and self.last.done

    def next_turn(self) -> str:
        """What the teacher writes now."""
        self.answering = self.answering or self._stops_searching()
        if self.answering:
            self.answer = self._answer()
            ending = (
                (DONE, self.say.complete)
                if self.core.deferred
                else (Action("answer", self.answer), self.say.answer.format(o=self.answer))
            )
            self.text = _write(self.core, self.finding or ending[1], ending[0])
        else:
            self.lookup = self._next_lookup()
            planned = self._planned(self.lookup)
            thought = f"{self.finding}{self.say.join}{planned}" if self.finding else planned
            self.text = _write(self.core, thought, Action(self.lookup.tool, self.lookup.query))
        return self.text

    def advance(self, step: Step[SearchQAState], found: Sequence[Passage], printed: str = "") -> None:
        """Take in what the environment answered."""
        action = str(step.info.get("action", ""))
        self.turns.append(FinishedTurn(self.text, action, step.observation, step.info))
        self.state, self.last = step.state, step
        if not self.answering and self.lookup is not None:
            gold = self.steps[self.searched]["answer"]
            if self.lookup.tool == "search":
                belief = self._read(self.lookup, gold, found)
                if belief == self.lookup.subject and self._untried():
                    self.tried = (*self.tried, self.lookup.relation)
                    self.finding = ""
                    return
                self.beliefs[gold], self.tried = belief, ()
            else:
                self.beliefs[gold] = printed.strip().rpartition("\n")[2]
            relation, belief = self.lookup.relation, self.beliefs[gold]
            self.finding = self.say.found.format(r=relation, o=belief) if relation else belief
            self.searched += 1

    def finished(self) -> Finished:
        """The episode, once it is over."""
        last = self.last
        if last is None or not last.done:
            raise DataError(f"question {self.question.id!r}: expected a finished episode, found one still being played")
        status: Literal["answered", "truncated"] = "answered" if last.terminated else "truncated"
        answer = self.answer if self.core.deferred else last.info.get("answer")
        turns = tuple(self.turns)
        return Finished(self.question, self.prompt, turns, status, answer, last.reward, last.state, last.info)

    def _stops_searching(self) -> bool:
        if self.searched >= len(self.steps) or self.state.turns + 1 >= self.core.limits.max_turns:
            return True
        searches = self.steps[self.searched].get("tool", "search") == "search"
        if searches and self.state.searches >= self.core.limits.searches:
            return True
        return self.searched > 0 and self.lazy.chance(self.teacher.laziness)

    def _next_lookup(self) -> _Lookup:
        step = self.steps[self.searched]
        slipped = self.slip.chance(self.teacher.error)
        tool = step.get("tool", "search")
        if tool != "search":
            if tool not in self.core.tools:
                raise DataError(
                    f"question {self.question.id!r}: a gold step calls the tool {tool!r}, but the environment has "
                    f"{', '.join(self.core.tools)}; use turntree/SearchCodeQA-v0, or give it the tool"
                )
            return _Lookup(self._believe(step["query"]), subject="", relation=self.say.result, slipped=False, tool=tool)
        if "relation" not in step or "subject" not in step:
            query = self._believe(step["query"])
            return _Lookup(query, subject=query, relation="", slipped=slipped)
        subject, relation = self._believe(step["subject"]), step["relation"]
        if options := self._untried():
            wrong = [option for option in options if option != relation]
            slipped = bool(wrong) and (slipped or relation not in options)
            relation = self.slip.pick(wrong) if slipped else relation
        else:
            others = sorted({s["relation"] for s in self.steps if "relation" in s} - {relation})
            if slipped and others and self.slip.chance(0.5):
                relation = self.slip.pick(others)
        return _Lookup(
            self.say.query.format(x=subject, r=relation), subject=subject, relation=relation, slipped=slipped
        )

    def _untried(self) -> list[str]:
        """What the vague word of this step may still mean; nothing where it has none."""
        return [option for option in self.steps[self.searched].get("options", ()) if option not in self.tried]

    def _planned(self, lookup: _Lookup) -> str:
        """The next call as a thought."""
        if lookup.tool != "search":
            return self.say.compute.format(x=lookup.query)
        template = self.say.find if lookup.relation else self.say.look_up
        return template.format(x=lookup.subject, r=lookup.relation)

    def _believe(self, text: str) -> str:
        """The text with gold answers replaced by what the teacher took for them."""
        for gold, belief in self.beliefs.items():
            text = text.replace(gold, belief)
        return text

    def _read(self, lookup: _Lookup, gold: str, found: Sequence[Passage]) -> str:
        """The step's answer as the teacher reads it.

        The gold answer, unless it slips or is on a wrong trail; then a name that the first passage gives for the
        relation, or any other name in it, or the subject itself where there is none.
        """
        if not lookup.slipped and self._tells(self.steps[self.searched], gold, found):
            return gold
        text = found[0].text if found else ""
        wanted = self.say.wanted.format(r=lookup.relation)
        near = [s for s in text.split(self.say.ends) if wanted in f" {s} "]
        for part in (*near, text):
            found_names: list[str] = name_pattern(self.language).findall(part)
            if names := [n for n in found_names if n not in (gold, lookup.subject)]:
                return self.slip.pick(names)
        return lookup.subject

    @staticmethod
    def _tells(step: Mapping[str, Any], gold: str, found: Sequence[Passage]) -> bool:
        """Whether all that the answer consists of was found; or the passage that should tell it, but does not."""
        if step.get("missing"):
            return any(p.id == step.get("supporting_id") for p in found)
        texts = [f"{p.title}\n{p.text}" for p in found]
        return all(any(part in text for text in texts) for part in step.get("parts", (gold,)))

    def _answer(self) -> str:
        """The right answer after a clean run; otherwise what was found last, or a guess."""
        clean = self.searched == len(self.steps) and all(gold == belief for gold, belief in self.beliefs.items())
        if clean:
            return self.question.golden_answers[0]
        kind = self.question.metadata.get("type")
        if kind == "yes_no":
            return self.slip.pick(self.say.guesses)
        if kind == "count":
            return self.slip.pick(_NUMBERS)
        if kind == "intersection" and len(self.beliefs) == 2:
            return next(iter(self.beliefs.values()))  # the second belief is a name of the question
        if kind == "comparison" or not self.beliefs:
            return self.slip.pick([self._believe(s.get("subject", s["query"])) for s in self.steps])
        return list(self.beliefs.values())[-1]


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One search: what is asked of whom, and whether the teacher slips over it. Or a call of another ``tool``."""

    query: str
    subject: str
    relation: str
    slipped: bool
    tool: str = "search"


def _gold_steps(question: Question) -> tuple[Mapping[str, Any], ...]:
    steps = gold_steps(question.question, question.golden_answers, question.metadata)
    if not steps:
        raise DataError(
            f"question {question.id!r}: expected metadata that tell the way to the answer ('steps' of a generated "
            f"world, 'decomposition', 'evidences' or 'supporting_titles'), found {sorted(question.metadata)}; let an "
            "engine play (coldstart.teacher=engine), or take a set with gold steps"
        )
    for step in steps:
        if not isinstance(step, Mapping) or not {"query", "answer"} <= step.keys():
            raise DataError(f"question {question.id!r}: expected steps with 'query' and 'answer', found {step!r:.60}")
    return steps


def _write(core: SearchQACore, thought: str, action: Action) -> str:
    """One turn in the grammar's own way, checked by reading it back."""
    grammar = core.grammar
    if not isinstance(grammar, TurnWriter):
        raise ConfigError(
            f"the teacher cannot play in the grammar {type(grammar).__name__}, which writes no turns; "
            "give it a method write(thought, action)"
        )
    text = grammar.write(thought, action)
    if (read := grammar.parse(text).action) != action:
        raise ConfigError(
            f"the grammar {type(grammar).__name__} reads the teacher's turn {text!r} as {read}, expected {action}; "
            "its write(thought, action) must write turns as it reads them"
        )
    return text
