"""Filters, each by what it keeps and what it drops, in several languages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.coldstart.conftest import trajectory
from turntree.errors import ConfigError
from turntree.trainers.coldstart.filters import load_filters, scripts


def said(given: dict[str, Any], *args: Any, **kwargs: Any) -> str:
    (rule,) = load_filters(given).values()
    return rule(trajectory(*args, **kwargs))


@pytest.mark.parametrize(
    ("allow", "question", "text", "kept"),
    [
        ("same", "Where is Oslo?", "<think> find Oslo </think> <answer> Oslo </answer>", True),
        ("same", "Where is Oslo?", "<think> 我需要找到这个城市在哪里 </think> <answer> Oslo </answer>", False),
        ("same", "奥斯陆在哪里？", "<think> 我需要查找奥斯陆 </think> <answer> 挪威 </answer>", True),
        ("same", "奥斯陆在哪里？", "<think> I have to look for the city </think> <answer> 挪威 </answer>", False),
        ("same", "奥斯陆 (Oslo) 在哪里？", "<think> 查找 Oslo 的所在国家 </think> <answer> 挪威 </answer>", True),
        ("zh", "Who?", "<think> 查找ＡＢＣ公司的创始人 </think>", True),
        (["en", "zh"], "Who?", "<think> find it, 然后回答 </think>", True),
        ("en", "Who?", "<think> Кто это был </think>", False),
        ("ru", "Кто?", "<think> Кто это был </think> <answer> Иван </answer>", True),
        ("ja", "誰？", "<think> これは東京です </think>", True),
        ("zh", "谁？", "<think> これはとてもおもしろいですね </think>", False),
        ("ko", "누구?", "<think> 서울은 수도입니다 </think>", True),
        ("ar", "من؟", "<think> من هو الكاتب </think>", True),
        ("hi", "कौन?", "<think> यह दिल्ली है </think>", True),
        ("en", "Who?", "<think> 12 + 7 = 19 </think> <answer> 19 </answer>", True),
    ],
)
def test_language(allow: Any, question: str, text: str, kept: bool) -> None:
    assert (said({"language": {"allow": allow}}, text, question=question) == "") is kept


def test_language_leaves_the_arguments_of_calls_out_unless_told() -> None:
    call = '{"name": "search", "arguments": {"query": "李清照 生平"}}'
    text = f"<think> find her </think>\n<tool_call>\n{call}\n</tool_call>"
    plain = "<think> find her </think> <search> 李清照 生平 </search>"
    for one in (text, plain):
        calls = [("search", "李清照 生平")]
        assert said({"language": {"allow": "en"}}, one, "<answer> Song </answer>", calls=calls) == ""
        assert "cjk" in said({"language": {"allow": "en", "calls": True}}, one, "", calls=calls)


def test_scripts_count_words_of_letters_and_characters_of_chinese() -> None:
    assert scripts("Two words, 三个字 and ３Ａ") == {"LATIN": 4, "CJK": 3}
    assert scripts("café naïve") == {"LATIN": 2}, "marks belong to their letters"
    assert not scripts("12.5 % !?")


def test_length() -> None:
    one: dict[str, Any] = {"calls": [("search", "a")], "tokens": 30}
    assert said({"length": {"max_tokens": 30, "min_turns": 2, "max_calls": 1}}, "a", "b", **one) == ""
    assert said({"length": {"max_tokens": 29}}, "a", "b", **one) == "30 tokens, at most 29 are allowed"
    assert said({"length": {"min_turns": 3}}, "a", "b", **one) == "2 turns, at least 3 are needed"
    assert said({"length": {"min_calls": 2}}, "a", "b", **one) == "1 calls, at least 2 are needed"


def test_duplicate_calls_are_compared_as_the_reward_does() -> None:
    calls = [("search", "Ava's home?"), ("search", " ava's  home")]
    assert said({"duplicate_calls": True}, "a", "b", "c", calls=calls).startswith("1 calls repeat")
    assert said({"duplicate_calls": {"most": 1}}, "a", "b", "c", calls=calls) == ""
    assert said({"duplicate_calls": True}, "a", "b", calls=[("search", "x"), ("python", "x")]) == ""


def test_format_and_answered() -> None:
    bad = {"format_valid": False, "format_reason": "corrected:no_action"}
    assert said({"format": True}, "a", format_valid=True) == ""
    assert said({"format": True}, "a", **bad) == "illegal format: corrected:no_action"
    assert said({"format": {"corrections": 0}}, "a", **bad) == "", "no turn of it was corrected"
    assert said({"answered": True}, "a", answer="x") == ""
    assert said({"answered": True}, "a", answer=None, stop_reason="turns") == "no answer: ended by turns"


def short(played: Any, *, most: int = 1) -> str | None:
    return None if len(played.finished.turns) <= most else "long"


def unsure(played: Any) -> bool:
    return True


def broken(played: Any) -> str:
    return str(1 / 0)


HERE = "tests.trainers.coldstart.test_filters"


def test_filters_of_a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "own_filters", sys.modules[__name__])
    assert said({"mine": "own_filters:short"}, "a", "b") == "long"
    assert said({"mine": {"path": "own_filters:short", "args": {"most": 2}}}, "a", "b") == ""
    with pytest.raises(ConfigError, match=r"coldstart\.filters\.mine.*the reason, found True"):
        said({"mine": "own_filters:unsure"}, "a")
    with pytest.raises(ConfigError, match=r"coldstart\.filters\.mine failed on sample 0 of question 'q'.*ZeroDivision"):
        said({"mine": "own_filters:broken"}, "a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lenght": True}, "did you mean 'length'"),
        ({"length": {"max_token": 3}}, r"coldstart\.filters\.length.*max_token"),
        ({"length": {"max_tokens": "many"}}, r"length\.max_tokens='many'"),
        ({"length": 3}, r"expected true, false, or its arguments"),
        ({"language": {"allow": "english"}}, "unknown language in"),
        ({"length": {"max_tokens": True}}, r"length\.max_tokens=True: expected a number"),
        ({"length": {"max_turns": -1}}, r"length\.max_turns=-1 is out of range"),
        ({"duplicate_calls": {"most": -1}}, r"most=-1 is out of range"),
        ({"format": {"corrections": -1}}, r"corrections=-1 is out of range"),
        ({"language": {"min_share": 2}}, r"min_share=2 is out of range; expected a value >= 0 and <= 1"),
        ({"language": {"min_share": float("nan")}}, r"min_share=nan"),
        ({"language": {"allow": []}}, r"allow=\[\]: expected a language"),
        ({"language": {"allow": 5}}, r"allow=5: expected a language"),
        ({"language": {"calls": 1}}, r"calls=1: expected true or false"),
        ({"mine": "os:getcwd"}, "of Python's library"),
        ({"mine": "turntree.errors:__doc__"}, "something that can be called"),
        ({"mine": {"path": "os.path:join", "arg": 1}}, "did you mean 'args'"),
        ({"mine": "nowhere_at_all:f"}, "cannot import module"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_filters(given)


def test_what_is_switched_off_is_gone() -> None:
    assert list(load_filters({"length": None, "format": False, "answered": True, "language": {}})) == [
        "answered",
        "language",
    ]
