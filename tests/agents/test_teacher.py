from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from turntree.agents.teacher import Demonstration, Teacher, TurnWriter, trajectories
from turntree.envs.core import Action
from turntree.envs.grammar import AtpoGrammar, Grammar, HermesGrammar, ParsedTurn, TagGrammar
from turntree.envs.search_qa import Limits, SearchQACore
from turntree.envs.task import FrozenDict, Question
from turntree.envs.worlds import World, generate_world, lexicon
from turntree.errors import ConfigError, DataError, RetrievalError
from turntree.search_backend import BM25Backend, Passage


@pytest.fixture(scope="module")
def world() -> World:
    return generate_world("quickstart", seed=3, questions=240)


@pytest.fixture(scope="module")
def backend(world: World) -> BM25Backend:
    return BM25Backend.from_passages(world.passages)


@pytest.fixture(scope="module")
def core(backend: BM25Backend) -> SearchQACore:
    return SearchQACore(backend, limits=Limits(max_turns=4))


def mean_em(demonstrations: Sequence[Demonstration]) -> float:
    return sum(d.em for d in demonstrations) / len(demonstrations)


def searches(demonstrations: Sequence[Demonstration]) -> list[int]:
    return [len(d.turns) - 1 for d in demonstrations]


def test_a_careful_teacher_is_right_and_takes_every_gold_step(core: SearchQACore, world: World) -> None:
    played = trajectories(core, world.questions, teacher=Teacher(), seed=0)
    assert [d.question_id for d in played] == [q.id for q in world.questions]
    assert mean_em(played) == 1.0
    assert searches(played) == [q.metadata["hops"] for q in world.questions]
    for question, shown in zip(world.questions, played, strict=True):
        assert question.question in shown.prompt
        for step, turn in zip(question.metadata["steps"], shown.turns, strict=False):
            assert f"<search> {step['query']} </search>" in turn.text
            assert step["answer"] in turn.observation
        assert shown.turns[-1].observation == ""


def test_turns_are_valid_in_the_grammar(backend: BM25Backend, world: World) -> None:
    """The reward of a strict format: every demonstration has it, whatever its answer."""
    core = SearchQACore(backend, reward=lambda outcome: float(outcome.format_valid), grammar=TagGrammar("required"))
    played = trajectories(core, world.questions, teacher=Teacher(laziness=0.5, error=0.5), seed=0)
    assert all(d.reward == 1.0 for d in played)


def test_a_lazy_teacher_searches_once_and_answers_with_what_it_found(core: SearchQACore, world: World) -> None:
    played = trajectories(core, world.questions, teacher=Teacher(laziness=1.0), seed=0)
    assert set(searches(played)) == {1}
    for question, shown in zip(world.questions, played, strict=True):
        if question.metadata["type"] == "chain":
            found = question.metadata["steps"][0]["answer"]
            assert shown.turns[-1].text.endswith(f"<answer> {found} </answer>")
            assert shown.em == float(question.metadata["hops"] == 1)


def test_an_erring_teacher_is_wrong_on_chains_but_keeps_searching(core: SearchQACore, world: World) -> None:
    played = trajectories(core, world.questions, teacher=Teacher(error=1.0), seed=0)
    assert searches(played) == [q.metadata["hops"] for q in world.questions]
    chains = [d for q, d in zip(world.questions, played, strict=True) if q.metadata["type"] == "chain"]
    assert mean_em(chains) == 0.0


@pytest.mark.parametrize(("laziness", "error"), [(0.5, 0.0), (0.0, 0.2), (0.5, 0.2)])
def test_rates_follow_the_knobs(core: SearchQACore, world: World, laziness: float, error: float) -> None:
    """A chain of h hops is right with probability (1 - laziness)^(h-1) (1 - error)^h, up to lucky recoveries."""
    chains = [q for q in world.questions if q.metadata["type"] == "chain"]
    expected = [(1 - laziness) ** (q.metadata["hops"] - 1) * (1 - error) ** q.metadata["hops"] for q in chains]
    played = [d for s in range(4) for d in trajectories(core, chains, teacher=Teacher(laziness, error), seed=s)]
    assert mean_em(played) == pytest.approx(sum(expected) / len(expected), abs=0.06)


def test_demonstrations_depend_on_seed_and_question_only(core: SearchQACore, world: World) -> None:
    teacher = Teacher(laziness=0.4, error=0.3)
    played = trajectories(core, world.questions, teacher=teacher, seed=5)
    assert trajectories(core, world.questions, teacher=teacher, seed=5) == played
    assert trajectories(core, world.questions[::-7], teacher=teacher, seed=5) == played[::-7]
    assert trajectories(core, world.questions, teacher=teacher, seed=6) != played
    assert trajectories(core, [], teacher=teacher, seed=5) == []


def test_thoughts_use_known_words_only(core: SearchQACore, world: World) -> None:
    words, syllables = lexicon()
    for shown in trajectories(core, world.questions, teacher=Teacher(0.3, 0.3), seed=0):
        for turn in shown.turns:
            for word in turn.text.split():
                known = word in words or (word[:2] in syllables and word[2:] in syllables)
                assert known or word in {"<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>"}


@pytest.mark.parametrize("limits", [Limits(max_turns=1), Limits(max_turns=2), Limits(max_turns=6, max_searches=1)])
def test_it_answers_within_the_limits(backend: BM25Backend, world: World, limits: Limits) -> None:
    core = SearchQACore(backend, limits=limits)
    for shown in trajectories(core, world.questions[:60], teacher=Teacher(), seed=0):
        assert len(shown.turns) <= limits.searches + 1
        assert "<answer>" in shown.turns[-1].text


def test_standard_worlds_with_comparisons() -> None:
    world = generate_world("standard", seed=0, entities=300, questions=100)
    core = SearchQACore(BM25Backend.from_passages(world.passages), limits=Limits(max_turns=5))
    assert mean_em(trajectories(core, world.questions, teacher=Teacher(), seed=0)) >= 0.97
    wrong = trajectories(core, world.questions, teacher=Teacher(laziness=1.0), seed=0)
    assert 0.0 < mean_em(wrong) < 0.5


class CallGrammar(TagGrammar):
    """Another way of writing turns: ``search: q`` and ``answer: a`` on a line of their own."""

    def write(self, thought: str, action: Action) -> str:
        return f"{thought}\n{action.kind}: {action.argument}"

    def parse(self, text: str) -> ParsedTurn:
        kind, _, argument = text.rpartition("\n")[2].partition(": ")
        return ParsedTurn(Action(kind, argument) if argument else Action("invalid", "no_action"))


def test_another_grammar_writes_its_own_turns(backend: BM25Backend, world: World) -> None:
    grammar = CallGrammar()
    assert isinstance(grammar, TurnWriter)
    core = SearchQACore(backend, grammar=grammar)
    (shown,) = trajectories(core, world.questions[:1], teacher=Teacher(), seed=0)
    assert shown.em == 1.0
    assert "search: " in shown.turns[0].text
    assert "<" not in shown.turns[0].text


def test_a_grammar_that_writes_no_turns_is_named(backend: BM25Backend, world: World) -> None:
    class Mute(TagGrammar):
        write = None  # type: ignore[assignment]

    assert not isinstance(Mute(), TurnWriter)
    with pytest.raises(ConfigError, match=r"Mute, which writes no turns; .* write\(thought, action\)"):
        trajectories(SearchQACore(backend, grammar=Mute()), world.questions[:1], teacher=Teacher(), seed=0)


def test_a_grammar_that_cannot_read_the_turns_is_named(backend: BM25Backend, world: World) -> None:
    class Deaf(TagGrammar):
        def parse(self, text: str) -> ParsedTurn:
            return ParsedTurn(Action("invalid", "no_action"))

    with pytest.raises(ConfigError, match=r"Deaf .* write\(thought, action\)"):
        trajectories(SearchQACore(backend, grammar=Deaf()), world.questions[:1], teacher=Teacher(), seed=0)


def test_thoughts_carry_what_was_found(core: SearchQACore, world: World) -> None:
    """A thought starts with the newest finding; the answer's thought is the last one."""
    for teacher in (Teacher(), Teacher(laziness=0.4)):
        played = trajectories(core, world.questions, teacher=teacher, seed=0)
        for question, shown in zip(world.questions, played, strict=True):
            path = question.metadata["steps"]
            thoughts = [turn.text.partition(" </think>")[0].removeprefix("<think> ") for turn in shown.turns]
            found = [f"{s['relation']} {s['answer']}" for s in path[: len(thoughts) - 1]]
            wanted = [f"find the {s['relation']} of {s['subject']}" for s in path[: len(thoughts) - 1]]
            later = [f"{f} . {w}" for f, w in zip(found, wanted[1:])]
            assert thoughts == [wanted[0], *later, found[-1]]


def test_an_erring_teachers_thoughts_carry_its_mistakes(core: SearchQACore, world: World) -> None:
    for shown in trajectories(core, world.questions, teacher=Teacher(error=1.0), seed=0):
        for turn, following in zip(shown.turns, shown.turns[1:]):
            asked = turn.text.partition("find the ")[2].partition(" of ")[0]
            assert following.text.startswith(f"<think> {asked} ")


def test_steps_may_lack_subject_and_relation(core: SearchQACore, world: World) -> None:
    question = world.questions[0]
    steps = [{k: s[k] for k in ("query", "supporting_id", "answer")} for s in question.metadata["steps"]]
    plain = Question(question.id, question.question, question.golden_answers, FrozenDict({"steps": steps}))
    (shown,) = trajectories(core, [plain], teacher=Teacher(), seed=0)
    assert shown.em == 1.0
    assert f"<think> find {steps[0]['query']} </think>" in shown.turns[0].text


@pytest.mark.parametrize("metadata", [{}, {"steps": []}, {"steps": "x"}, {"steps": [{"query": "q"}]}, {"steps": [1]}])
def test_questions_without_steps_are_refused(core: SearchQACore, metadata: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="question 'q'"):
        trajectories(core, [Question("q", "Who?", ("x",), FrozenDict(metadata))], teacher=Teacher(), seed=0)


def test_a_failing_search_is_an_error_not_a_demonstration(world: World) -> None:
    class Broken:
        fingerprint = "broken"

        def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
            return [["not a passage"] for _ in queries]  # type: ignore[list-item]

    core = SearchQACore(Broken())
    with pytest.raises(RetrievalError, match="bad_result"):
        trajectories(core, world.questions[:2], teacher=Teacher(), seed=0)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("knob", ["laziness", "error"])
def test_knobs_are_probabilities(knob: str, value: float) -> None:
    with pytest.raises(ConfigError, match=knob):
        Teacher(**{knob: value})


@pytest.mark.parametrize("grammar", [AtpoGrammar(), HermesGrammar(think="required"), HermesGrammar(answer="tool")])
def test_the_teacher_plays_in_every_grammar(backend: BM25Backend, world: World, grammar: Grammar) -> None:
    core = SearchQACore(backend, limits=Limits(max_turns=6), grammar=grammar, reward="atpo")
    played = trajectories(core, world.questions[:40], teacher=Teacher(), seed=0)
    assert [shown.reward for shown in played] == [1.0] * len(played)
    assert all(shown.em == 1 and len(shown.turns) > 1 for shown in played)
