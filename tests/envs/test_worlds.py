from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs.metrics import exact_match
from turntree.envs.task import Question
from turntree.envs.worlds import PROFILES, World, WorldConfig, generate_world, lexicon, load_world, name_words
from turntree.envs.worlds.names import LONG, SHORT, SPLIT_CLASSES, NameInventory, draw_pairs
from turntree.envs.worlds.schema import RELATIONS, SHARES
from turntree.envs.worlds.stream import Stream
from turntree.envs.worlds.styles import STYLES, Frames
from turntree.errors import ConfigError, DataError
from turntree.search_backend import BM25Backend

# Of the three files of generate_world(profile, seed=11, ...) below. A change means that every published world changes.
GOLDEN = {
    "quickstart": "17f45772683b85e1f5937876e3284d49a46004ae7004ed0f184c4824c9f6f856",
    "standard": "c2a707cd03fb9a520ad8865c8c4ec86ee9e23e2137b6a426cc9b8aab999399f9",
}


@pytest.fixture(scope="module")
def quick() -> World:
    return generate_world("quickstart", seed=1)


@pytest.fixture(scope="module")
def standard() -> World:
    return generate_world("standard", seed=1)


@pytest.fixture(params=["quick", "standard"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


def digest(folder: Path) -> str:
    files = ("corpus.jsonl", "questions.jsonl", "meta.json")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()


def steps(question: Question) -> list[dict[str, str]]:
    return [dict(s) for s in question.metadata["steps"]]


# -- the same bytes everywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", GOLDEN)
def test_worlds_are_byte_identical_golden(profile: str, tmp_path: Path) -> None:
    world = generate_world(profile, seed=11, split="test", questions=60)
    assert digest(world.save(tmp_path)) == GOLDEN[profile]


def test_hash_seed_and_process_do_not_matter(tmp_path: Path) -> None:
    code = "import sys; from turntree.envs.worlds import generate_world as g; g('quickstart', seed=3).save(sys.argv[1])"
    for name in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": name}
        subprocess.run([sys.executable, "-c", code, tmp_path / name], check=True, env=environment)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_stream_draws_are_pinned_golden() -> None:
    stream = Stream("a", 1)
    assert [stream.below(100) for _ in range(8)] == [63, 39, 8, 5, 62, 34, 98, 10]


@given(st.lists(st.integers(), max_size=30), st.integers())
def test_shuffles_are_permutations(items: list[int], seed: int) -> None:
    shuffled = list(items)
    Stream(seed).shuffle(shuffled)
    assert Counter(shuffled) == Counter(items)


def test_saved_world_loads_back(quick: World, tmp_path: Path) -> None:
    assert load_world(quick.save(tmp_path / "w")) == quick


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"meta\.json"):
        load_world(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="format 1"):
        load_world(tmp_path)


def test_seed_changes_the_world_and_size_of_the_question_set_does_not(quick: World) -> None:
    assert generate_world("quickstart", seed=2).passages != quick.passages
    fewer = generate_world("quickstart", seed=1, questions=10)
    assert fewer.passages == quick.passages
    assert len(fewer.questions) == 10


# -- facts, re-derived from the texts alone ----------------------------------------------------------------------------

_VARIANTS = [
    (r.word, template)
    for r in RELATIONS
    for template in (r.sentence, "The {r} of {s} is {o}.", "The {r} of {s} is {o} .")
]

# (title, relation) -> (id of the passage that states it, object)
Table = dict[tuple[str, str], set[tuple[str, str]]]


def stated(world: World) -> Table:
    """What the passages state, read by an own parser."""
    facts: Table = {}
    for passage in world.passages:
        for word, year in re.findall(r"Its (\w+ year) is (\d+)\.", passage.text):
            facts.setdefault((passage.title, word), set()).add((passage.id, year))
        for sentence in re.split(r"(?<=\.) ", passage.text):
            for word, template in (v for v in _VARIANTS if v[0] in sentence):
                pattern = re.escape(template).replace(r"\{s\}", re.escape(passage.title))
                pattern = pattern.replace(r"\{r\}", word).replace(r"\{o\}", r"(.+\w)")
                if match := re.fullmatch(pattern, sentence):
                    facts.setdefault((passage.title, word), set()).add((passage.id, match[1]))
    return facts


@pytest.fixture(scope="module")
def tables(quick: World, standard: World) -> dict[int, Table]:
    return {id(quick): stated(quick), id(standard): stated(standard)}


def test_the_whole_world_states_every_gold_step_once(world: World, tables: dict[int, Table]) -> None:
    facts = tables[id(world)]
    for question in world.questions:
        for step in steps(question):
            assert facts[step["subject"], step["relation"]] == {(step["supporting_id"], step["answer"])}, question
            assert step["query"] == f"{step['subject']} {step['relation']}"


def test_quickstart_tells_one_thing_a_passage(quick: World, tables: dict[int, Table]) -> None:
    told = Counter(id for found in tables[id(quick)].values() for id, _ in found)
    assert set(told.values()) == {1}
    assert all(p.text.count(".") == 1 and p.title in p.text for p in quick.passages)
    # Three relations and a decoy for each entity.
    assert set(Counter(p.title for p in quick.passages).values()) == {4}
    assert len(told) == 3 * 180


def chains(question: Question) -> list[list[dict[str, str]]]:
    """The gold steps cut where one does not continue from the answer before it."""
    out: list[list[dict[str, str]]] = []
    for step in steps(question):
        if (
            out
            and out[-1][-1]["answer"] == step["subject"]
            and not (question.metadata["type"] != "chain" and len(out[-1]) == question.metadata["hops"] // 2)
        ):
            out[-1].append(step)
        else:
            out.append([step])
    return out


def test_answers_follow_from_the_steps(world: World) -> None:
    for question in world.questions:
        parts = chains(question)
        ends = [part[-1]["answer"] for part in parts]
        if question.metadata["type"] == "chain":
            assert ends == [question.golden_answers[0]]
        elif question.metadata["type"] == "yes_no":
            assert question.golden_answers == (("yes",) if ends[0] == ends[1] else ("no",))
        else:
            earlier = min(parts, key=lambda part: int(part[-1]["answer"]))
            assert ends[0] != ends[1]
            assert earlier[-1]["subject"] == question.golden_answers[0]


def test_names_and_aliases_are_unique(world: World) -> None:
    titles = {p.title for p in world.passages}
    config = world.meta["config"]
    assert len({t.casefold() for t in titles}) == len(titles) == config["entities"] * (100 + config["lectures"]) // 100
    answers = {q.golden_answers for q in world.questions if len(q.golden_answers[0]) > 3}
    owners: dict[str, set[str]] = {}
    for group in answers:
        for answer in group:
            owners.setdefault(answer.casefold(), set()).add(group[0])
    assert all(len(names) == 1 for names in owners.values())
    assert any(len(group) > 1 for group in answers)


def test_aliases_count_as_right(quick: World) -> None:
    question = next(q for q in quick.questions if q.metadata["type"] == "chain")
    assert len(question.golden_answers) == 2
    assert all(exact_match(f"The {a}.", question.golden_answers) == 1.0 for a in question.golden_answers)


def test_chains_cannot_be_answered_early(world: World) -> None:
    """The answer stands in no passage about an earlier hop and not in the question; no entity comes twice."""
    texts: dict[str, str] = {}
    for passage in world.passages:
        texts[passage.title] = f"{texts.get(passage.title, '')} {passage.text}"
    for question in world.questions:
        if question.metadata["type"] != "chain":
            continue
        gold, path = question.golden_answers[0], steps(question)
        assert all(gold not in texts[s["subject"]] for s in path[:-1])
        assert f" {gold} " not in re.sub(r"([.?,])", r" \1 ", f" {question.question} ")
        assert len({s["subject"] for s in path} | {gold}) == len(path) + 1


# -- shape -------------------------------------------------------------------------------------------------------


def test_schema_has_enough_types_and_relations() -> None:
    assert len(SHARES) >= 7
    assert sum(SHARES.values()) == 100
    assert len(RELATIONS) >= 13
    assert len({r.word for r in RELATIONS}) == len(RELATIONS)
    assert {r.subject for r in RELATIONS} == {r.object for r in RELATIONS} | {"film", "book", "team"} == set(SHARES)


def test_question_mix(world: World) -> None:
    config = world.meta["config"]
    counts = Counter((q.metadata["type"], q.metadata["hops"]) for q in world.questions)
    total = sum(weight for _, _, weight in config["mix"])
    assert counts == {(k, h): config["questions"] * w // total for k, h, w in config["mix"]}
    yes_no = Counter(q.golden_answers[0] for q in world.questions if q.metadata["type"] == "yes_no")
    assert yes_no["yes"] == yes_no["no"]
    assert len({q.id for q in world.questions}) == len({q.question for q in world.questions}) == config["questions"]
    for question in world.questions:
        assert len(steps(question)) == question.metadata["hops"]
        supporting = dict.fromkeys(s["supporting_id"] for s in steps(question))
        assert question.metadata["supporting_ids"] == tuple(supporting)


def test_standard_has_all_kinds_and_hops(standard: World) -> None:
    assert len(standard.passages) >= 3000
    assert {q.metadata["type"] for q in standard.questions} == {"chain", "comparison", "yes_no"}
    assert {q.metadata["hops"] for q in standard.questions} == {1, 2, 3, 4}


def test_hard_negatives_are_there(quick: World, standard: World) -> None:
    for side in (0, 1):
        shared = Counter(t.split()[side] for t in {p.title for p in quick.passages})
        assert sum(n for n in shared.values() if n > 1) > 100
    titles = [p.title for p in standard.passages]
    assert sum(f"{t} Academy" in titles or f"{t} Lecture" in titles for t in titles) > 100


def test_decoys_of_quickstart_are_near_duplicates_or_mentions(quick: World, tables: dict[int, Table]) -> None:
    facts = tables[id(quick)]
    stating = {id for found in facts.values() for id, _ in found}
    decoys = Counter[str]()
    for passage in (p for p in quick.passages if p.id not in stating):
        former = re.fullmatch(r"The former (\w+) of (\w+ \w+) is (\w+ \w+) \.", passage.text)
        mention = re.fullmatch(r"(\w+ \w+) is often seen with (\w+ \w+) \.", passage.text)
        decoys["former" if former else "mention" if mention else "other"] += 1
        if former:
            ((_, now),) = facts[passage.title, former[1]]
            assert former[2] == passage.title
            assert former[3] != now
        if mention:
            assert mention[1] == passage.title != mention[2]
    assert decoys["other"] == 0
    assert decoys["former"] > 60
    assert decoys["mention"] > 60


def test_quickstart_texts_are_short_and_closed(quick: World) -> None:
    words, syllables = lexicon()
    assert len(words) <= 200
    assert words == sorted(set(words))
    assert syllables == sorted(set(syllables))
    assert {w.lower() for w in words}.isdisjoint({s.lower() for s in syllables})
    test = generate_world("quickstart", seed=9, split="test", questions=200)
    for made in (quick, test):
        texts = [t for p in made.passages for t in (p.title, p.text)]
        texts += [t for q in made.questions for t in (q.question, *q.golden_answers)]
        assert max(len(t.split()) for t in texts) <= 35
        for word in {w for t in texts for w in t.split()} - set(words):
            assert len(word) == 4
            assert word[:2] in syllables
            assert word[2:] in syllables


def test_name_words_are_all_words_of_names(quick: World) -> None:
    words = name_words()
    assert words == sorted(set(words))
    assert len(words) == 2 * 200
    assert {w.casefold() for w in words}.isdisjoint({w.casefold() for w in lexicon()[0]})
    syllables = set(lexicon()[1])
    assert all({word[:2], word[2:]} <= syllables for word in words)
    split_worlds = [generate_world("quickstart", seed=2, split=s, questions=0) for s in SPLIT_CLASSES]
    assert {w for made in (quick, *split_worlds) for p in made.passages for w in p.title.split()} <= set(words)


@pytest.mark.parametrize("entities", [180, 2500])
@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_passages_come_first_in_quickstart(split: Any, entities: int) -> None:
    for seed in range(3 if entities == 180 else 1):
        world = generate_world("quickstart", seed=seed, split=split, entities=entities, questions=400)
        assert hit_rate(world, k=1) >= 0.98


def test_gold_passages_are_among_three_in_standard(standard: World) -> None:
    assert hit_rate(standard, k=3) >= 0.99


def hit_rate(world: World, *, k: int) -> float:
    gold = [s for q in world.questions for s in steps(q)]
    found = BM25Backend.from_passages(world.passages).search([s["query"] for s in gold], k=k)
    return sum(s["supporting_id"] in [p.id for p in f] for s, f in zip(gold, found, strict=True)) / len(gold)


# -- splits ------------------------------------------------------------------------------------------------------


SPLITS = st.sampled_from(["train", "dev", "test"])


def names(world: World) -> set[str]:
    """Titles, and the two name words of each, whatever stands around them."""
    known = {w for side in STYLES[world.meta["config"]["style"]].inventory.words() for w in side}
    out = {p.title for p in world.passages}
    return out | {" ".join(w for w in p.title.split() if w in known) for p in world.passages}


@pytest.mark.parametrize(("split", "most"), [("train", 12_000), ("dev", 4000), ("test", 4000)])
def test_names_run_out_at_half_of_a_splits_pairs(split: Any, most: int) -> None:
    firsts, seconds = SHORT.words()
    pairs = draw_pairs(SHORT, most, split=split, stream=Stream(0))
    assert len(set(pairs)) == most
    classes = {(firsts.index(first) + seconds.index(second)) % 5 for first, second in pairs}
    assert classes == set(SPLIT_CLASSES[split])
    with pytest.raises(ConfigError, match=f"at most {most} entities, found {most + 1}"):
        draw_pairs(SHORT, most + 1, split=split, stream=Stream(0))


@given(st.sampled_from([SHORT, LONG]), st.integers(60, 3000), SPLITS, st.integers())
@settings(max_examples=25, deadline=None)
def test_names_are_different_and_share_words(inventory: NameInventory, n: int, split: Any, seed: int) -> None:
    pairs = draw_pairs(inventory, n, split=split, stream=Stream(seed))
    assert len(set(pairs)) == n
    for side in (0, 1):
        assert len({pair[side] for pair in pairs}) <= 4 * n**0.5 + 1 < n


@given(st.integers(), st.integers(), SPLITS, SPLITS)
@settings(max_examples=25, deadline=None)
def test_names_of_different_splits_never_coincide(seed: int, other: int, left: Any, right: Any) -> None:
    one = generate_world("quickstart", seed=seed, split=left, questions=0)
    two = generate_world("quickstart", seed=other, split=right, questions=0)
    if left != right:
        assert names(one).isdisjoint(names(two))


def test_names_of_standard_splits_are_disjoint_and_share_words(standard: World) -> None:
    test = generate_world("standard", seed=1, split="test", questions=0)
    assert names(standard).isdisjoint(names(test))
    assert {w for n in names(standard) for w in n.split()} & {w for n in names(test) for w in n.split()}


def frames(style: Any, templates: Any) -> set[str]:
    found: Frames = STYLES[style].frames[templates]
    return {*found.who, *found.what, *found.yes_no, *found.comparison}


@pytest.mark.parametrize("style", STYLES)
def test_test_templates_are_held_out(style: Any) -> None:
    assert frames(style, "train").isdisjoint(frames(style, "test"))


def test_quickstart_test_templates_use_words_seen_in_training() -> None:
    seen, held_out = ({w for f in frames("short", t) for w in f.split()} for t in ("train", "test"))
    assert held_out <= seen


def test_templates_follow_the_split_unless_given() -> None:
    kwargs: dict[str, Any] = {"seed": 4, "questions": 50}
    test = generate_world("quickstart", split="test", **kwargs)
    assert test == generate_world("quickstart", split="test", templates="test", **kwargs)
    known = generate_world("quickstart", split="test", templates="train", **kwargs)
    assert known.passages == test.passages
    assert [steps(q) for q in known.questions] == [steps(q) for q in test.questions]
    assert all(a.question != b.question for a, b in zip(known.questions, test.questions, strict=True))


# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"profile": "huge"}, "expected a profile"),
        ({"split": "valid"}, "expected a split"),
        ({"templates": "dev"}, "expected templates"),
        ({"entities": 20}, "at least 60 entities"),
        ({"entities": 100_000}, "expected at most"),
        ({"questions": 100_000}, "seems to hold only"),
        ({"questions": -1}, "questions >= 0"),
    ],
)
def test_bad_arguments_are_config_errors(kwargs: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"profile": "quickstart", "seed": 0} | kwargs
    with pytest.raises(ConfigError, match=message):
        generate_world(**arguments)


@pytest.mark.parametrize(
    ("style", "mix", "message"),
    [
        ("short", (("comparison", 2, 1),), "no dates"),
        ("prose", (("yes_no", 3, 1),), "even number of hops"),
        ("prose", (("chain", 0, 1),), "at least one hop"),
        ("prose", (("chain", 1, 0),), "positive weights"),
        ("prose", (("riddle", 1, 1),), "kind"),
        ("verse", (("chain", 1, 1),), "style"),
    ],
)
def test_bad_configs_are_config_errors(style: Any, mix: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_world(WorldConfig(profile="own", style=style, entities=100, questions=4, mix=mix), seed=0)


@pytest.mark.parametrize("style", ["short", "prose"])
@pytest.mark.parametrize("entities", [60, 61, 250])
def test_own_sizes_work(style: Any, entities: int) -> None:
    mix: Any = (("chain", 2, 1), ("yes_no", 2, 1))
    config = WorldConfig(profile="own", style=style, entities=entities, questions=30, mix=mix)
    for seed in range(4):
        world = generate_world(config, seed=seed, split="test")
        assert len({p.title for p in world.passages}) == entities
        assert len(world.passages) == entities * (4 if style == "short" else 1)
        assert len(world.questions) == 30


def test_profiles_are_the_promised_sizes() -> None:
    assert (PROFILES["quickstart"].entities, PROFILES["standard"].entities) == (180, 3000)
