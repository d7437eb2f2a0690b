"""Chinese worlds: the same laws as the English ones, read off the texts alone, and played by the teacher."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.teacher import Teacher, trajectories
from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import decode, encode
from turntree.envs.language import language_of
from turntree.envs.metrics import exact_match
from turntree.envs.search_qa import Limits, SearchQACore
from turntree.envs.task import Question
from turntree.envs.worlds import World, generate_world, lexicon, load_world, name_words
from turntree.envs.worlds.chinese import CHINESE, CHINESE_STYLES
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.envs.worlds.languages import name_pattern
from turntree.envs.worlds.schema import RELATIONS, SHARES, YEARS
from turntree.envs.worlds.styles import STYLES, Frames
from turntree.errors import ConfigError
from turntree.search_backend import BM25Backend

# Of the three files of generate_world("quickstart", seed=11, split="test", questions=60, language="zh").
GOLDEN = "9b6c1af55c0249b9c467e94b421e2027f25997701087860024287f4d048b5f5c"
STYLES_ZH: Any = ("short", "dated", "prose")


@pytest.fixture(scope="module")
def quick() -> World:
    return generate_world("quickstart", seed=1, questions=400, language="zh")


@pytest.fixture(scope="module")
def standard() -> World:
    return generate_world("standard", seed=1, split="test", questions=300, language="zh")


@pytest.fixture(scope="module")
def code() -> World:
    return generate_world("code", seed=1, questions=300, language="zh")


@pytest.fixture(params=["quick", "standard", "code"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


def searches(question: Question) -> list[dict[str, str]]:
    return [dict(s) for s in question.metadata["steps"] if "supporting_id" in s]


def test_bytes_are_golden_and_load_back(tmp_path: Path) -> None:
    world = generate_world("quickstart", seed=11, split="test", questions=60, language="zh")
    folder = world.save(tmp_path)
    files = ("corpus.jsonl", "questions.jsonl", "meta.json")
    assert hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest() == GOLDEN
    assert load_world(folder) == world
    assert json.loads((folder / "meta.json").read_text(encoding="utf-8"))["config"]["language"] == "zh"


def test_an_unknown_language_is_refused() -> None:
    wrong: Any = "fr"
    with pytest.raises(ConfigError, match="expected a language"):
        generate_world("quickstart", seed=0, language=wrong)


def test_everything_of_the_schema_has_a_chinese_word_of_its_own() -> None:
    keys = [r.word for r in RELATIONS]
    for table in (CHINESE.relations, CHINESE.sentences, CHINESE.paraphrases):
        assert list(table) == keys
        assert len(set(table.values())) == len(keys)
    assert list(CHINESE.kinds) == list(CHINESE.one) == list(CHINESE.years) == list(SHARES) == list(YEARS)
    spoken = [*CHINESE.relations.values(), *CHINESE.years.values()]
    assert len(set(spoken)) == len(spoken)
    for key in keys:
        assert {"{s}", "{o}", "{r}"} == set(re.findall(r"\{.\}", CHINESE.sentences[key]))
        assert re.findall(r"\{.\}", CHINESE.paraphrases[key]) == ["{x}"]


@pytest.mark.parametrize("style", STYLES_ZH)
def test_styles_have_what_the_english_ones_have(style: Any) -> None:
    mine, english = CHINESE_STYLES[style], STYLES[style]
    assert (mine.prose, mine.shared_names, bool(mine.opening), bool(mine.year)) == (
        *(english.prose, english.shared_names, bool(english.opening), bool(english.year)),
    )
    for templates in ("train", "test"):
        found, other = mine.frames[templates], english.frames[templates]
        assert bool(found.comparison) == bool(other.comparison)
        assert found.code.keys() == other.code.keys()
    train, test = (_frames(mine.frames[t]) for t in ("train", "test"))
    assert train.isdisjoint(test)


def _frames(frames: Frames) -> set[str]:
    return {
        *frames.who,
        *frames.what,
        *frames.yes_no,
        *frames.comparison,
        *(f for c in frames.code.values() for f in c),
    }


def test_the_passage_of_each_step_states_its_answer_about_its_subject(world: World) -> None:
    passages = {p.id: p for p in world.passages}
    for question in world.questions:
        assert question.metadata["language"] == "zh"
        for step in searches(question):
            passage = passages[step["supporting_id"]]
            assert passage.title == step["subject"]
            assert step["answer"] in passage.text
            assert step["relation"] in passage.text
            assert step["query"] == f"{step['subject']}的{step['relation']}"


def test_texts_are_chinese_with_full_width_signs(world: World) -> None:
    for text in (*(p.text for p in world.passages), *(q.question for q in world.questions)):
        assert text[-1] in "。？"
        assert not set(",.?!:()") & set(text)
    assert language_of(world.questions) == "zh"


def test_prose_mixes_scripts_numerals_and_titles(standard: World) -> None:
    text = "".join(p.text for p in standard.passages)
    assert re.search(r"《[^》]+》", text)
    assert re.search(r"（又名[A-Z][a-z]+ [A-Z][a-z]+）", text)
    years = re.findall(r"(\d{4})年（([〇一二三四五六七八九]{4})年）", text)
    assert len(years) == 3000
    assert all(exact_match(f"{a}年", f"{b}年", normalizer="zh") for a, b in years[:200])


def test_answers_by_kind(world: World) -> None:
    seen = Counter[str]()
    for question in world.questions:
        kind = question.metadata["type"]
        steps = question.metadata["steps"]
        if kind == "yes_no":
            half = len(steps) // 2
            assert question.golden_answers[0] == ("是" if steps[half - 1]["answer"] == steps[-1]["answer"] else "否")
            seen[question.golden_answers[0]] += 1
        elif kind == "chain":
            assert question.golden_answers[0] == steps[-1]["answer"]
        elif kind == "code":
            assert steps[-1]["tool"] == "python"
            assert question.golden_answers[0] == steps[-1]["answer"] == str(_computed(steps[-1]["query"]))
            assert all(answer.rstrip("年岁") == steps[-1]["answer"] for answer in question.golden_answers)
    assert abs(seen["是"] - seen["否"]) <= 2


def _computed(code: str) -> int:
    left, sign, right = code.split()
    return int(left) + int(right) * (1 if sign == "+" else -1)


def test_the_oracle_answers_everything(world: World) -> None:
    core = SearchQACore(BM25Backend.from_passages(world.passages), limits=Limits(max_turns=6), normalizer="zh")
    questions = [q for q in world.questions if q.metadata["type"] != "code"]
    played = trajectories(core, questions, teacher=Teacher(), seed=0)
    wrong = [p for p in played if p.em != 1]
    assert len(wrong) <= len(played) // 50
    assert all(text.isascii() is False for p in played for text in (t.text for t in p.turns))


def test_a_careless_teacher_slips_into_other_names_of_the_world(standard: World) -> None:
    core = SearchQACore(BM25Backend.from_passages(standard.passages), limits=Limits(max_turns=6))
    played = trajectories(core, standard.questions[:60], teacher=Teacher(error=0.8), seed=0)
    titles = {p.title for p in standard.passages}
    answers = {re.findall(r"<answer> (.*) </answer>", p.turns[-1].text)[0] for p in played}
    assert len(answers - {"是", "否"} - titles) <= len(answers) // 4
    assert sum(p.em for p in played) < len(played) / 2


@pytest.mark.parametrize("segmenter", ["bigrams", "jieba"])
@pytest.mark.parametrize(("name", "k", "share"), [("quick", 1, 0.98), ("standard", 3, 0.98)])
def test_bm25_finds_the_gold_passages(
    request: pytest.FixtureRequest, segmenter: str, name: str, k: int, share: float
) -> None:
    if segmenter == "jieba":
        pytest.importorskip("jieba")
    world: World = request.getfixturevalue(name)
    backend = BM25Backend.from_passages(world.passages, segmenter=segmenter)
    gold = [s for q in world.questions for s in searches(q)]
    found = backend.search([s["query"] for s in gold], k=k)
    hits = sum(s["supporting_id"] in [p.id for p in f] for s, f in zip(gold, found, strict=True))
    assert hits >= share * len(gold)


def test_splits_never_share_a_name() -> None:
    one = generate_world("standard", seed=1, questions=0, language="zh")
    two = generate_world("standard", seed=2, split="test", questions=0, language="zh")
    left, right = ({p.title for p in world.passages} for world in (one, two))
    assert left.isdisjoint(right)


def test_names_and_aliases_are_unique(standard: World) -> None:
    owners: dict[str, set[str]] = {}
    for question in standard.questions:
        if question.metadata["type"] in ("chain", "comparison"):
            for answer in question.golden_answers:
                owners.setdefault(answer.casefold(), set()).add(question.golden_answers[0])
    assert all(len(names) == 1 for names in owners.values())


def test_names_are_recognised(standard: World) -> None:
    pattern = name_pattern("zh")
    for passage in standard.passages[:500]:
        assert pattern.findall(f"以前的雇主是{passage.title}。") == [passage.title]


def test_the_tiny_tokenizer_has_tokens_for_all_of_it(code: World, quick: World) -> None:
    """No text of a short world falls back to bytes, and a name's words are one token each."""
    grammar = WorldGrammar(language="zh")
    words, syllables = lexicon("dated", "zh")
    assert not {c for w in words for c in w} & set(syllables)
    tokenizer = build_tokenizer([*words, *grammar.words(), *name_words("zh")], syllables)
    texts = [t for w in (code, quick) for p in w.passages for t in (p.title, p.text)]
    texts += [t for w in (code, quick) for q in w.questions for t in (q.question, *q.golden_answers)]
    texts += [grammar.last_turn_notice(), grammar.correction("x"), grammar.results([]).text, "计算1905 + 1820"]
    for text in texts:
        ids = encode(tokenizer, text)
        assert decode(tokenizer, ids) == text
        assert "�" not in "".join(decode(tokenizer, [i]) for i in ids), text
    title = quick.passages[0].title
    assert len(encode(tokenizer, title)) == 2
    assert len(encode(tokenizer, f"{title}的导师是{title}。")) == 8
