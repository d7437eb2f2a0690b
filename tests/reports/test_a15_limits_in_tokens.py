"""A15: an observation limit counts tokens and never splits a character."""

from __future__ import annotations

import pytest

from turntree.agents.dialogue import cut_text
from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import ByteTokenizer, Tokenizer, encode


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), build_tokenizer(["中中"])])
@pytest.mark.parametrize("text", ["中" * 40, "中中中中中🤗 and more text", "a" * 15 + "🤗b"])
def test_a15_cut_at_sixteen_tokens(tokenizer: Tokenizer, text: str) -> None:
    cut, truncated = cut_text(tokenizer, text, 16)
    assert len(encode(tokenizer, cut)) <= 16
    assert text.startswith(cut)
    assert "\ufffd" not in cut
    assert truncated == (len(encode(tokenizer, text)) > 16)
    if isinstance(tokenizer, ByteTokenizer):
        assert truncated
        assert len(cut.encode()) > 12
