"""Intersections, counts, unanswerable and stale questions, inverse facts: what they mean, read off the texts alone."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.teacher import Teacher, trajectories
from turntree.envs.datasets import load_questions
from turntree.envs.metrics import exact_match
from turntree.envs.search_qa import Limits, SearchQACore
from turntree.envs.task import Question
from turntree.envs.worlds import PROFILES, World, WorldConfig, generate_world, load_world
from turntree.envs.worlds.facts import Facts, make_facts
from turntree.envs.worlds.forms import Kind
from turntree.envs.worlds.names import LONG, draw_pairs
from turntree.envs.worlds.profiles import WorldConfig as Config
from turntree.envs.worlds.schema import RELATIONS
from turntree.envs.worlds.speech import ENGLISH
from turntree.envs.worlds.stream import Stream
from turntree.envs.worlds.variations import vary
from turntree.envs.worlds.world import _entities
from turntree.errors import ConfigError
from turntree.search_backend import BM25Backend

NEW: tuple[Kind, ...] = ("intersection", "count", "unanswerable", "stale")


@pytest.fixture(scope="module")
def english() -> World:
    return generate_world("varied", seed=1, entities=1000, questions=400)


@pytest.fixture(scope="module")
def chinese() -> World:
    return generate_world("varied", seed=1, entities=1000, questions=400, split="test", language="zh")


@pytest.fixture(params=["english", "chinese"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


def of(world: World, kind: str) -> list[Question]:
    return [q for q in world.questions if q.metadata["type"] == kind]


def texts(world: World) -> dict[str, str]:
    return {p.id: f"{p.title}\n{p.text}" for p in world.passages}


def test_there_are_questions_of_every_kind(world: World) -> None:
    counts = Counter((q.metadata["type"], q.metadata["hops"]) for q in world.questions)
    assert counts == {(kind, hops): 4 * weight for kind, hops, weight in PROFILES["varied"].mix}
    assert len({q.question for q in world.questions}) == len(world.questions)
    for question in world.questions:
        steps = question.metadata["steps"]
        ids = [i for s in steps for i in s.get("supporting_ids", (s["supporting_id"],))]
        assert question.metadata["supporting_ids"] == tuple(dict.fromkeys(ids))
        assert len(steps) == question.metadata["hops"]


def telling(world: World, word: str, end: str) -> set[str]:
    """Who has ``end`` as their ``word``, by an own reading of the English passages; dated ones count when newest."""
    (sentence,) = [r.sentence for r in RELATIONS if r.word == word]
    plain = ("The {r} of {s} is {o}.", "{o} is the {r} of {s}.", sentence)
    patterns = [
        re.escape(t).replace(r"\{r\}", word).replace(r"\{o\}", re.escape(end)).replace(r"\{s\}", "([A-Z][^.]*?)")
        for t in plain
    ]
    newest: dict[str, tuple[int, str]] = {}
    found: set[str] = set()
    for passage in world.passages:
        if word not in passage.text:
            continue
        if dated := re.fullmatch(rf"As of (\d+), the {word} of (.+) is (.+)\.", passage.text):
            newest[dated[2]] = max(newest.get(dated[2], (0, "")), (int(dated[1]), dated[3]))
            continue
        for line in re.split(r"(?<=\.) ", passage.text):
            found |= {match[1] for pattern in patterns if (match := re.fullmatch(pattern, line))}
    return found | {subject for subject, (_, now) in newest.items() if now == end}


def test_an_intersection_is_the_only_one_that_fits_both(world: World) -> None:
    told = texts(world)
    for question in of(world, "intersection"):
        first, second, *rest = question.metadata["steps"]
        meant = first["answer"]
        assert meant == second["subject"]
        assert first["subject"] in question.question
        assert second["answer"] in question.question
        assert meant not in question.question
        for step, other in ((first, first["subject"]), (second, second["answer"])):
            assert meant in told[step["supporting_id"]]
            assert other in told[step["supporting_id"]]
        assert question.golden_answers[0] == (rest[-1]["answer"] if rest else meant)
        if world.meta["config"].get("language") is None:
            fits = [telling(world, first["relation"], first["subject"])]
            fits.append(telling(world, second["relation"], second["answer"]))
            assert fits[0] & fits[1] == {meant}
            assert max(map(len, fits)) > 1


def test_a_count_is_the_number_of_passages_that_tell_it(english: World, chinese: World) -> None:
    for world in (english, chinese):
        told = texts(world)
        for question in of(world, "count"):
            last = question.metadata["steps"][-1]
            assert question.golden_answers[0] == str(len(last["parts"]))
            assert len(last["supporting_ids"]) == len(last["parts"]) <= 3
            for id, name in zip(last["supporting_ids"], last["parts"], strict=True):
                assert {name in told[id], last["subject"] in told[id]} == {True}
        assert len({q.golden_answers[0] for q in of(world, "count")}) > 1
    for question in of(english, "count"):
        last = question.metadata["steps"][-1]
        assert telling(english, last["relation"], last["subject"]) == set(last["parts"])
    assert exact_match("two", ("2", *ENGLISH.counts[2])) == 1


def test_nothing_tells_what_is_unanswerable(english: World, chinese: World) -> None:
    for world, refusal in ((english, "unknown"), (chinese, "不知道")):
        told = texts(world)
        for question in of(world, "unanswerable"):
            last = question.metadata["steps"][-1]
            assert question.golden_answers[0] == last["answer"] == refusal
            assert last["missing"] is True
            assert last["subject"] in told[last["supporting_id"]]
    for question in of(english, "unanswerable"):
        last = question.metadata["steps"][-1]
        subject, relation = last["subject"], last["relation"]
        about = " ".join(p.text for p in english.passages if p.title == subject)
        assert f"The {relation} of {subject} is" not in about
        assert f"former {relation}" in about
        assert not any(f"is the {relation} of {subject}." in p.text for p in english.passages)
    assert exact_match("I don't know.", of(english, "unanswerable")[0].golden_answers) == 1


def test_stale_facts_are_told_apart_by_their_dates(english: World) -> None:
    asked = Counter[str]()
    for question in of(english, "stale"):
        last = question.metadata["steps"][-1]
        subject, relation, year = last["subject"], last["relation"], question.metadata["year"]
        sentence = re.compile(rf"As of (\d+), the {relation} of {re.escape(subject)} is (.+)\.")
        dated = sorted((int(m[1]), m[2], p.id) for p in english.passages if (m := sentence.fullmatch(p.text)))
        (since, old, old_id), (changed, new, new_id) = dated
        assert old != new
        if year is not None:
            assert str(year) in question.question
            assert year >= since
        is_old = year is not None and year < changed
        assert (last["answer"], last["supporting_id"]) == ((old, old_id) if is_old else (new, new_id))
        assert question.golden_answers[0] == last["answer"]
        asked["now" if year is None else "old" if is_old else "new"] += 1
    assert min(asked.values()) >= 5
    assert len(asked) == 3


def test_inverse_facts_stand_with_their_object(english: World) -> None:
    titles = {p.id: p.title for p in english.passages}
    told = texts(english)
    turned = 0
    for question in of(english, "chain"):
        for step in question.metadata["steps"]:
            if titles[step["supporting_id"]] != step["subject"]:
                assert titles[step["supporting_id"]] == step["answer"]
                assert (
                    f"{step['answer']} is the {step['relation']} of {step['subject']}." in told[step["supporting_id"]]
                )
                turned += 1
    steps = sum(q.metadata["hops"] for q in of(english, "chain"))
    assert 0.08 < turned / steps < 0.25


def test_the_oracle_plays_every_kind(world: World) -> None:
    """It fails only where its searches do not find the passages."""
    language = "zh" if world.meta["config"].get("language") else "en"
    search = BM25Backend.from_passages(world.passages)
    core = SearchQACore(search, limits=Limits(max_turns=6), normalizer="zh" if language == "zh" else "squad")
    played = trajectories(core, world.questions, teacher=Teacher(), seed=0)
    scored: dict[bool, list[float]] = {True: [], False: []}
    for question, demonstration in zip(world.questions, played, strict=True):
        steps = question.metadata["steps"]
        found = search.search([s["query"] for s in steps], k=3)
        complete = all(
            set(s.get("supporting_ids", (s["supporting_id"],))) <= {p.id for p in top}
            for s, top in zip(steps, found, strict=True)
        )
        scored[complete].append(demonstration.em)
    assert scored[True]
    assert set(scored[True]) == {1.0}
    careless = trajectories(core, world.questions[:80], teacher=Teacher(error=1.0, laziness=0.3), seed=0)
    assert sum(d.em for d in careless) < 30


def test_kinds_survive_files(english: World, tmp_path: Any) -> None:
    folder = english.save(tmp_path)
    assert load_world(folder) == english
    assert load_questions(folder / "questions.jsonl") == english.questions


@pytest.mark.parametrize(
    ("style", "kind", "extra", "message"),
    [
        ("short", "intersection", {}, "no intersection questions"),
        ("dated", "count", {}, "no count questions"),
        ("prose", "unanswerable", {}, "set withheld"),
        ("prose", "stale", {}, "set stale"),
        ("short", "chain", {"stale": 10}, "no outdated values"),
        ("short", "chain", {"inverse": 10}, "no outdated values and no inverse"),
        ("prose", "chain", {"asides": 10}, "no asides"),
        ("prose", "chain", {"withheld": 101}, "percentages"),
        ("vague", "yes_no", {}, "chain questions only"),
    ],
)
def test_styles_refuse_what_they_cannot_tell(style: Any, kind: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorldConfig(profile="own", style=style, entities=100, questions=4, mix=((kind, 2, 1),), **extra)


def test_an_intersection_needs_two_hops() -> None:
    config = WorldConfig(profile="own", style="prose", entities=100, questions=4, mix=(("intersection", 1, 1),))
    with pytest.raises(ConfigError, match="at least two hops"):
        generate_world(config, seed=0)


# -- variations of the facts ---------------------------------------------------------------------------------------

PERCENT = st.integers(0, 60)


def facts_of(seed: int) -> Facts:
    config = Config(profile="own", style="prose", entities=90, questions=0, mix=(("chain", 1, 1),))
    return make_facts(_entities(config, "train", Stream("names", seed)), stream=Stream("facts", seed))


@given(st.integers(0, 50), PERCENT, PERCENT, PERCENT, PERCENT)
@settings(max_examples=30, deadline=None)
def test_variations_change_what_they_say(seed: int, inverse: int, withheld: int, stale: int, asides: int) -> None:
    facts = facts_of(seed)
    varied = vary(facts, inverse=inverse, withheld=withheld, stale=stale, asides=asides, stream=Stream("v", seed))
    assert len(varied.lost) == 90 * withheld // 100
    assert len(varied.past) == 90 * stale // 100
    for subject, objects in enumerate(facts.objects):
        lost = varied.lost.get(subject)
        assert varied.objects[subject] == {w: o for w, o in objects.items() if not lost or w != lost[0]}
        assert not lost or objects[lost[0]] == lost[1]
    for subject, past in varied.past.items():
        now = varied.objects[subject][past.word]
        assert past.object != now
        assert facts.entities[past.object].kind == facts.entities[now].kind
        assert past.since < past.changed
        assert varied.object_in(subject, past.word) == varied.object_in(subject, past.word, past.changed) == now
        assert varied.object_in(subject, past.word, past.changed - 1) == past.object
    told = {(s, w) for s, objects in enumerate(varied.objects) for w in objects}
    assert varied.inverse | varied.asides <= told
    assert not varied.inverse & {(s, past.word) for s, past in varied.past.items()}
    if not (inverse or withheld or stale or asides):
        assert varied == facts


def test_names_are_enough_for_the_largest_profile() -> None:
    assert len(draw_pairs(LONG, 3000, split="test", stream=Stream(0))) == 3000
