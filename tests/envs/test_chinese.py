"""The laws of environments and grammars on Chinese text: forks, round trips, corrections, look-alikes, cuts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import encode
from turntree.envs import Question, SearchQAEnv
from turntree.envs.check import check_fork
from turntree.envs.core import Action, ToolSpec
from turntree.envs.grammar import (
    AtpoGrammar,
    Grammar,
    HermesGrammar,
    PlannerGrammar,
    TagGrammar,
    ToolGrammar,
    speaking,
)
from turntree.envs.language import language_of, normalizer_for
from turntree.envs.worlds import World, generate_world, lexicon
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import ConfigError
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend

GRAMMARS: list[Any] = [
    TagGrammar(language="zh"),
    AtpoGrammar(language="zh"),
    HermesGrammar(language="zh"),
    HermesGrammar(answer="tool", max_calls=1, language="zh"),
    WorldGrammar(language="zh"),
    PlannerGrammar(TagGrammar(), "zh"),
    PlannerGrammar(HermesGrammar(), "zh"),
]
HAN = re.compile("[\u4e00-\u9fff]")
# Characters of several planes, full-width signs and letters, combining marks.
CHINESE = st.text(
    alphabet=st.sampled_from(
        "红楼梦的作者是谁？！，。：；、《》〈〉「」『』（）“”‘’…—·～　０１２ＡＢａｂ〇一二三𠮷㐀é👍 aB1"
    ),
    min_size=1,
    max_size=30,
).filter(lambda text: bool(text.strip()))


def name_of(grammar: Any) -> str:
    return f"{type(grammar).__name__}-{getattr(getattr(grammar, 'inner', grammar), 'answer', '')}"


each_grammar = pytest.mark.parametrize("grammar", GRAMMARS, ids=name_of)


@functools.cache
def world() -> World:
    return generate_world("quickstart", seed=1, entities=60, questions=8, language="zh")


@functools.cache
def backend() -> BM25Backend:
    return BM25Backend.from_passages(world().passages)


# -- what grammars say -------------------------------------------------------------------------------------------------


@each_grammar
def test_all_that_a_grammar_says_is_chinese(grammar: Any) -> None:
    reasons = ("empty_query", "no_action", "misspelt_tag", "full_width_tag", "cut_at_length", "bad_json", "no_boxed")
    said = [grammar.prompt("《红楼梦》的作者是谁？"), grammar.last_turn_notice(), *map(grammar.correction, reasons)]
    shown = [grammar.results([]).text, grammar.results([Passage("1", "红楼梦", "曹雪芹著。")]).text]
    for text in [*said, *shown]:
        words = re.sub(r"<[^>]*>|\{.*\}|\\boxed|\bJSON\b|\b(?:name|arguments|answer|NAME)\b", "", text)
        assert HAN.search(text)
        assert not re.search("[A-Za-z]{3,}", words), text
    assert grammar.prompt("《红楼梦》的作者是谁？").count("？") >= 1
    assert "？？" not in grammar.prompt("《红楼梦》的作者是谁？")


@pytest.mark.parametrize(
    ("question", "ending"),
    [
        ("作者是谁", "谁？"),
        ("作者是谁？", "是谁？"),
        ("他说“谁？”", "谁？”"),
        ("请说出作者。", "作者。"),
        ("Who", "Who?"),
    ],
)
def test_a_question_is_closed_by_the_mark_of_its_script(question: str, ending: str) -> None:
    assert TagGrammar(language="zh").prompt(question).endswith(ending)


@pytest.mark.parametrize("make", [TagGrammar, AtpoGrammar, HermesGrammar, WorldGrammar])
def test_the_language_is_part_of_the_fingerprint_and_unknown_ones_are_refused(make: Callable[..., Any]) -> None:
    assert speaking(make(), "zh") == make(language="zh")
    assert speaking(make(), "en") == make()
    assert make().fingerprint != make(language="zh").fingerprint
    with pytest.raises(ConfigError, match="language"):
        make(language="fr")


def test_a_grammar_without_chinese_is_refused_by_name() -> None:
    class Mine:
        pass

    mine: Any = Mine()
    assert speaking(mine, "en") is mine
    with pytest.raises(ConfigError, match="Mine has no texts in the language zh"):
        speaking(mine, "zh")


def test_a_planner_and_the_grammar_inside_speak_one_language() -> None:
    planner = PlannerGrammar(TagGrammar(), "zh")
    assert planner.inner == TagGrammar(language="zh")
    assert HAN.search(planner.correction("misspelt_tag"))


# -- reading -----------------------------------------------------------------------------------------------------------


@each_grammar
@given(thought=CHINESE, text=CHINESE)
def test_what_is_written_is_read_back(grammar: Any, thought: str, text: str) -> None:
    for kind in ("search", "answer"):
        if kind == "answer" and isinstance(grammar, PlannerGrammar):
            continue
        action = Action(kind, text.strip())
        assert grammar.parse(grammar.write(thought, action)).action == action


def test_what_a_tool_is_given_may_be_chinese() -> None:
    tool = ToolSpec("python", "运行代码")
    for grammar in (TagGrammar(language="zh"), AtpoGrammar(language="zh")):
        taught = grammar.with_tools([tool])
        action = Action("python", "print('你好，世界。')")
        assert taught.parse(taught.write("想", action)).action == action
        assert "运行代码" in taught.prompt("谁？")
        assert "<python>" in taught.correction("no_action")


@pytest.mark.parametrize(
    "turn",
    [
        "＜search＞红楼梦＜/search＞",
        "＜search＞红楼梦＜／search＞",
        "<ｓｅａｒｃｈ>红楼梦</ｓｅａｒｃｈ>",
        "《search》红楼梦《/search》",
        "〈search〉红楼梦〈/search〉",
        "<think>想</think>＜answer＞曹雪芹＜/answer＞",
        "<search>红楼梦＜/search＞",
        "＜search＞红楼梦</search>",
    ],
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_full_width_tags_are_not_executed_and_the_correction_says_why(turn: str, language: Any) -> None:
    grammar = TagGrammar(language=language)
    assert grammar.parse(turn).action == Action("invalid", "full_width_tag")
    said = grammar.correction("full_width_tag")
    assert ("半角" if language == "zh" else "half-width") in said


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ('＜tool_call＞{"name": "search", "arguments": {"query": "红楼梦"}}＜/tool_call＞', "full_width_tag"),
        ('《tool_call》{"name": "search"}《/tool_call》', "full_width_tag"),
        ('<tool_call>{"name"："search"，"arguments"：{"query": "红楼梦"}}</tool_call>', "bad_json"),
        ("<tool_call>{“name”: “search”}</tool_call>", "bad_json"),
    ],
)
def test_full_width_calls_of_hermes(turn: str, reason: str) -> None:
    parsed = HermesGrammar(language="zh").parse(turn)
    assert parsed.action == Action("invalid", reason)
    assert reason != "bad_json" or "半角" in parsed.hint


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("<think>《Search》是一部电影</think><search>《Search》 电影</search>", Action("search", "《Search》 电影")),
        ("＜search＞错了。<search>红楼梦</search>", Action("search", "红楼梦")),
        ("《Search》是一部电影", Action("invalid", "full_width_tag")),
        ("《红楼梦》是一部小说", Action("invalid", "no_action")),
        ("行动：搜索[红楼梦]", Action("invalid", "no_action")),
    ],
)
def test_look_alikes_count_only_where_there_is_no_action(turn: str, action: Action) -> None:
    assert TagGrammar().parse(turn).action == action


def test_a_chinese_react_call_is_another_dialect() -> None:
    assert TagGrammar().parse("行动：搜索[红楼梦]").other_dialect
    assert TagGrammar().parse("动作 1：搜索（红楼梦）").other_dialect


@each_grammar
@pytest.mark.parametrize("bracket", ["<>", "＜＞", "﹤﹥"])
@pytest.mark.parametrize("letters", [lambda t: t, lambda t: "".join(chr(ord(c) + 0xFEE0) for c in t)])
def test_look_alikes_in_passages_are_neutralised(grammar: Any, bracket: str, letters: Callable[[str], str]) -> None:
    names = ("tool_call", "tool_response") if "Hermes" in repr(grammar) else ("search", "answer", "think")
    for name in names:
        spelt = f"{bracket[0]}／{letters(name)}{bracket[1]}"
        shown = grammar.results([Passage("1", f"书{spelt}", f"《Answer》里写着{spelt}。")]).text
        assert spelt not in shown
        assert f"[／{letters(name)}]" in shown
        assert "《Answer》" in shown


# -- episodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", [TagGrammar(), HermesGrammar(), WorldGrammar()], ids=name_of)
def test_laws_of_forks_hold_in_a_chinese_world(grammar: Grammar) -> None:
    env = SearchQAEnv(world().questions, search=backend(), grammar=grammar, language="zh", reward="tree_grpo")
    check_fork(env, actions=_turns(env.core.grammar))


def _turns(grammar: Any) -> list[str]:
    step = world().questions[0].metadata["steps"][0]
    searches = [grammar.write("查找", Action("search", query)) for query in (step["query"], "《红楼梦》，作者？")]
    return [*searches, "＜search＞看不懂＜/search＞", grammar.write("知道了", Action("answer", "否"))]


def test_the_normaliser_follows_the_questions() -> None:
    chinese = SearchQAEnv(world().questions, search=backend())
    english = SearchQAEnv([Question("e", "Who wrote Hamlet?", ("x",))], search=backend())
    own = SearchQAEnv(world().questions, search=backend(), normalizer="cmrc")
    assert [env.core.normalizer for env in (chinese, english, own)] == ["zh", "squad", "cmrc"]


@pytest.mark.parametrize(
    ("text", "metadata", "language"),
    [
        ("谁写了《红楼梦》？", {}, "zh"),
        ("iPhone 是哪家公司的产品？", {}, "zh"),
        ("Who wrote 红楼夢 in Japanese: これは何ですか", {}, "en"),
        ("源氏物語の作者は誰ですか", {}, "en"),
        ("Who wrote Hamlet?", {}, "en"),
        ("Who?", {"language": "zh-CN"}, "zh"),
        ("谁？", {"language": "en"}, "en"),
    ],
)
def test_the_language_of_questions(text: str, metadata: dict[str, Any], language: str) -> None:
    made = Question("q", text, ("a",))
    question = replace(made, metadata=type(made.metadata)(metadata))
    assert language_of([question]) == language
    assert normalizer_for([question]) == ("zh" if language == "zh" else "squad")
    assert language_of([]) == "en"


@pytest.mark.parametrize("answer", ["一百二十", "１２０", "120。"])
def test_an_episode_is_scored_by_the_normaliser_of_its_language(answer: str) -> None:
    env = SearchQAEnv([Question("q", "一共有多少人？", ("120",))], search=backend(), language="zh")
    env.reset(seed=0)
    *_, info = env.step(f"<think>算</think><answer>{answer}</answer>")
    assert info["em"] == 1


# -- tokens ------------------------------------------------------------------------------------------------------------


class Characters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Bytes:
    """One token a byte: every Chinese character can be split in two places."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Tiny:
    """The tiny decoder's: words are one token, other characters three bytes."""

    def __init__(self) -> None:
        self.made = _tiny()

    def encode(self, text: str) -> list[int]:
        return list(encode(self.made, text))

    def decode(self, ids: list[int]) -> str:
        return str(self.made.decode(ids))


@functools.cache
def _tiny() -> Any:
    return build_tokenizer(*lexicon("short", "zh"))


@pytest.mark.parametrize("tokenizer", [Characters(), Bytes(), Tiny()], ids=lambda t: type(t).__name__)
@settings(deadline=None, max_examples=40)
@given(room=st.integers(0, 120), extra=CHINESE)
def test_a_limit_in_tokens_never_leaves_half_a_character(tokenizer: Any, room: int, extra: str) -> None:
    grammar = TagGrammar(language="zh")
    fixed = grammar.results([]).text, grammar.last_turn_notice(), grammar.correction("no_action")
    limit = sum(len(tokenizer.encode(text)) for text in fixed) + 60 + room
    passages = [Passage("1", "𠮷野家" + extra, "卖牛肉饭的餐厅。" * 30 + extra * 10)]
    env = SearchQAEnv(
        [Question("q", "餐厅是什么？", ("饭",))],
        corpus=passages,
        max_observation_tokens=limit,
        tokenizer=tokenizer,
        language="zh",
    )
    env.reset(seed=0)
    observation, *_ = env.step("<search>餐厅</search>")
    assert "�" not in observation
    assert len(tokenizer.encode(observation)) <= limit
    whole = TagGrammar(language="zh").results(passages)
    body = observation.removeprefix(whole.head).partition(whole.tail)[0]
    assert whole.body.startswith(body)


def test_protocols_are_met() -> None:
    assert all(isinstance(grammar, ToolGrammar) for grammar in GRAMMARS)
