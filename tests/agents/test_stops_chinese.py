"""Where a turn ends in Chinese text: byte tokens, character tokens, and tokens that reach over a stop string."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.stops import find_stop, tokens_to_stop
from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import decode, encode

STOPS = ("</search>", "</answer>", "。", "</搜索>", "”）")
TEXT = st.text(alphabet=st.sampled_from("红楼梦查询<>/ab 。，”）𠮷👍</"), max_size=20)


@functools.cache
def tokenizer(kind: str) -> Any:
    """``bytes``: each Chinese character is three tokens; ``characters``: one; ``merged``: tokens hold stop strings."""
    characters = list("红楼梦查询。，”）搜索")
    merged = ["红楼梦", "。红", "梦。", "询</搜索", "”）红", "索>梦"]
    return build_tokenizer({"bytes": [], "characters": characters, "merged": [*characters, *merged]}[kind])


@pytest.mark.parametrize("kind", ["bytes", "characters", "merged"])
@settings(deadline=None, max_examples=60)
@given(before=TEXT, stop=st.sampled_from(STOPS), after=TEXT)
def test_the_token_that_completes_a_stop_string_is_the_last(kind: str, before: str, stop: str, after: str) -> None:
    made = tokenizer(kind)
    text = before + stop + after
    ids = encode(made, text)
    assert decode(made, ids) == text
    found = tokens_to_stop(made, ids, STOPS)
    assert found is not None
    count, completed = found
    assert completed in STOPS
    assert completed in decode(made, ids[:count])
    assert find_stop(decode(made, ids[: count - 1]), STOPS) is None
    # What the environment reads is cut at the stop string, whatever the last token brings along.
    end = find_stop(text, STOPS)
    assert end is not None
    assert decode(made, ids[:count]).startswith(text[: end[0]])


@pytest.mark.parametrize("kind", ["bytes", "characters", "merged"])
@settings(deadline=None, max_examples=60)
@given(text=TEXT)
def test_ids_in_are_ids_out(kind: str, text: str) -> None:
    made = tokenizer(kind)
    ids = encode(made, text)
    assert decode(made, ids) == text
    assert encode(made, decode(made, ids)) == ids
