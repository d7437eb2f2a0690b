"""Texts become the ids that the tokenizer's own ``encode`` gives, by whatever way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import encode

WORDS = ["born", "city", "</search>", "<|im_end|>", "<|endoftext|>", " ", "\n", "é", "红楼梦"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["born", "city"], ["ka", "lo"])


@given(texts=st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=8), special=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_are_those_of_the_tokenizers_own_encode(tokenizer: Any, texts: list[str], special: bool) -> None:
    text = "".join(texts)
    expected = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special) if text else []
    assert list(encode(tokenizer, text, allow_special=special)) == expected


def test_truncation_and_padding_that_somebody_left_on_change_nothing(tokenizer: Any) -> None:
    whole = encode(tokenizer, "born city born city")
    tokenizer("born city", truncation=True, max_length=1, padding="max_length")
    assert encode(tokenizer, "born city born city") == whole
    assert encode(tokenizer, "born") == whole[:1]


def test_a_tokenizer_with_an_encode_of_its_own_is_asked(tokenizer: Any) -> None:
    class Own(type(tokenizer)):  # type: ignore[misc]
        def encode(self, *_: Any, **__: Any) -> list[int]:
            return [7]

    own = Own(tokenizer_object=tokenizer._tokenizer)
    assert encode(own, "born") == (7,)
