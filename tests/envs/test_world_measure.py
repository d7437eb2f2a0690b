"""How hard the profiles are, by the library's own BM25; the bounds are those that the docs promise."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from turntree.agents.teacher import Teacher, trajectories
from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import decode, encode
from turntree.cli import cli
from turntree.envs.search_qa import Limits, SearchQACore
from turntree.envs.task import FrozenDict, Question
from turntree.envs.worlds import PROFILES, World, generate_world, lexicon, name_words
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.envs.worlds.measure import difficulty, uncertainty
from turntree.envs.worlds.schema import RELATIONS, VAGUE, relation
from turntree.envs.worlds.speech import ENGLISH
from turntree.errors import DataError
from turntree.search_backend import BM25Backend, Passage


def test_difficulty_counts_what_is_found_golden() -> None:
    passages = [
        Passage("a", "Low", "Low is by Dillon"),
        Passage("b", "Dillon", "born 1987"),
        Passage("c", "Rain", "wet"),
    ]
    steps = [
        {"query": "Low by", "supporting_id": "a", "answer": "Dillon"},
        {"query": "rain", "supporting_id": "b", "answer": "1987"},
    ]

    def question(text: str, rows: list[dict[str, str]], hops: int) -> Question:
        ids = [row["supporting_id"] for row in rows]
        return Question(text, text, ("x",), FrozenDict({"steps": rows, "supporting_ids": ids, "hops": hops}))

    found = difficulty([question("Low", steps[:1], 1), question("Low born", steps, 2)], passages, k=1)
    assert (found.one_search, found.all_steps) == (0.5, 0.5)
    assert found.gold_steps == pytest.approx(2 / 3)
    assert found.by_hops["2"] == FrozenDict({"questions": 1, "one_search": 0.0, "all_steps": 0.0})
    # With k=3 one query finds both passages of the second question.
    assert difficulty([question("Low born", steps, 2)], passages).one_search == 1


@pytest.mark.parametrize("questions", [[], [Question("q", "Who?", ("me",))]])
def test_sets_without_gold_steps_are_refused(questions: list[Question]) -> None:
    with pytest.raises(DataError, match=r"to measure|gold 'steps'"):
        difficulty(questions, [Passage("a", "t", "x")])


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_musique_is_as_hard_as_the_real_set(seed: int, split: Any) -> None:
    world = generate_world("musique", seed=seed, split=split, questions=400)
    found = difficulty(world.questions, world.passages, k=3)
    assert 0.05 <= found.one_search <= 0.35
    assert 0.60 <= found.gold_steps <= 0.96
    assert {q.metadata["hops"] for q in world.questions} == {2, 3, 4}
    assert max(Counter(p.title for p in world.passages).values()) >= 3


def test_musique_in_chinese_is_as_hard() -> None:
    world = generate_world("musique", seed=1, questions=400, language="zh")
    found = difficulty(world.questions, world.passages, k=3)
    assert 0.05 <= found.one_search <= 0.35
    assert 0.60 <= found.gold_steps <= 0.96


def test_musique_words_test_questions_otherwise() -> None:
    kwargs: dict[str, Any] = {"seed": 4, "split": "test", "questions": 100}
    held_out, known = (generate_world("musique", templates=t, **kwargs) for t in ("test", "train"))
    assert held_out.passages == known.passages
    starts = [{" ".join(q.question.split()[:2]) for q in w.questions} for w in (held_out, known)]
    assert starts[0].isdisjoint(starts[1])
    assert all(a.golden_answers == b.golden_answers for a, b in zip(held_out.questions, known.questions, strict=True))


# -- uncertain -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uncertain() -> World:
    return generate_world("uncertain", seed=1, questions=400)


@pytest.mark.parametrize(("seed", "language"), [(1, "en"), (2, "en"), (3, "en"), (1, "zh")])
def test_three_turns_or_more_are_uncertain(seed: int, language: Any) -> None:
    world = generate_world("uncertain", seed=seed, split="test", questions=150, language=language)
    found = uncertainty(world.questions, world.passages, noise=0.6)
    assert found.fewest >= 3
    assert found.options == 8
    assert found.dead_ends == pytest.approx(5 / 7)
    assert found.nothing == pytest.approx(2 / 7)
    expected = -0.4 * math.log(0.4) - 0.6 * math.log(0.6 / 7)
    assert found.entropy == pytest.approx([expected] * 4)
    assert found.success <= 0.1
    # The right search is always found: what is uncertain is the policy's own choice.
    assert difficulty(world.questions, world.passages, k=1).gold_steps >= 0.99
    assert uncertainty(world.questions, world.passages, noise=0.0).success == pytest.approx(1)


def test_success_is_what_the_noisy_oracle_reaches(uncertain: World) -> None:
    core = SearchQACore(
        BM25Backend.from_passages(uncertain.passages), grammar=WorldGrammar(), limits=Limits(max_turns=12, top_k=1)
    )
    questions = uncertain.questions[:200]
    for noise in (0.3, 0.6):
        played = trajectories(core, questions, teacher=Teacher(error=noise), seed=0)
        mean = sum(d.em for d in played) / len(played)
        predicted = uncertainty(questions, uncertain.passages, noise=noise, retries=7).success
        assert abs(mean - predicted) <= 3 * math.sqrt(predicted * (1 - predicted) / len(played)) + 1e-9


def test_a_search_that_found_nothing_is_tried_again_without_it(uncertain: World) -> None:
    core = SearchQACore(
        BM25Backend.from_passages(uncertain.passages), grammar=WorldGrammar(), limits=Limits(max_turns=12, top_k=1)
    )
    again = 0
    for played in trajectories(core, uncertain.questions[:100], teacher=Teacher(error=0.6), seed=1):
        for before, after in zip(played.turns, played.turns[1:]):
            if "Nothing is known" in before.observation:
                asked = [re.findall(r"<search> (\w+ \w+) (\w+) </search>", turn.text) for turn in (before, after)]
                assert asked[0][0][0] == asked[1][0][0]
                assert asked[0][0][1] != asked[1][0][1]
                again += 1
    assert again > 20


def test_which_relation_is_meant_follows_from_the_type(uncertain: World) -> None:
    assert all(len({relation(w).subject for w in words}) == len(words) == 8 for words in VAGUE.values())
    assert {w for words in VAGUE.values() for w in words} == {r.word for r in RELATIONS} - {"college"}
    assert set(VAGUE) == set(ENGLISH.vague)
    for question in uncertain.questions:
        words = re.findall("|".join(VAGUE), question.question)
        meant = [s["relation"] for s in question.metadata["steps"]]
        assert all(r in VAGUE[w] for r, w in zip(meant, words[::-1], strict=True))
        kind = relation(question.metadata["steps"][0]["relation"]).subject
        assert f"the {kind} " in question.question
        assert not any(f" {s['relation']} " in question.question for s in question.metadata["steps"])


def test_names_have_several_senses(uncertain: World) -> None:
    kinds: dict[str, set[str]] = {}
    for passage in uncertain.passages:
        if match := re.fullmatch(r"The (\w+) of (\w+ \w+) is .*", passage.text):
            kinds.setdefault(match[2], set()).add(relation(match[1]).subject)
    assert len(kinds) < PROFILES["uncertain"].entities
    assert sum(len(found) > 1 for found in kinds.values()) == len(kinds)


def test_worlds_without_options_are_refused() -> None:
    world = generate_world("quickstart", seed=1, questions=5)
    with pytest.raises(DataError, match="options"):
        uncertainty(world.questions, world.passages)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_tiny_tokenizer_knows_all_words(language: Any) -> None:
    world = generate_world("uncertain", seed=2, questions=100, language=language)
    words, syllables = lexicon("vague", language)
    said = WorldGrammar(language=language).words()
    tokenizer = build_tokenizer([*words, *said, *name_words(language)], syllables)
    texts = [p.text for p in world.passages[::20]] + [q.question for q in world.questions]
    for text in texts:
        ids = encode(tokenizer, text)
        assert decode(tokenizer, ids).split() == text.split()
        if language == "en":
            assert len(ids) == len(text.split())


def test_the_command_prints_the_measures(tmp_path: Path) -> None:
    arguments = ["world", "--out", str(tmp_path / "w"), "--profile", "uncertain", "--questions", "50", "--measure"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "uncertain turns a question: 3.3" in result.output
    assert "entropy by turn 1.84" in result.output
