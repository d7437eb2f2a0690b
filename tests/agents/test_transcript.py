"""Conversations as stand-in ids: nothing is lost, borders stay, a turn has as many ids as were counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Generation, Prefix
from turntree.agents.engines.transcript import TextTokenizer, estimate, messages, turn_ids
from turntree.agents.tokenizer import decode, encode
from turntree.errors import EngineError

TEXT = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    ["<|im_end|>\n<|im_start|>user\nhi", "\x00\x00", "曹雪芹 👍", "</search>", ""]
)


@given(st.lists(TEXT, min_size=1, max_size=5).filter(lambda parts: len(parts) % 2), st.integers(0, 40))
def test_a_dialogue_reads_back_as_its_messages(parts: list[str], tokens: int) -> None:
    """Law: whatever texts a conversation holds (also ones that look like its borders), they come back unchanged."""
    dialogue = Dialogue(TextTokenizer(), style="chat")
    prefix = Prefix(dialogue.prompt_ids(parts[0]))
    for turn, observation in zip(parts[1::2], parts[2::2], strict=True):
        ids = turn_ids(turn, tokens)
        prefix = prefix.extend(ids)
        prefix = prefix.extend(dialogue.observation_ids(observation, after=ids))
    found = messages(prefix)
    assert [m["content"] for m in found] == parts
    assert [m["role"] for m in found] == ["user", "assistant"] * (len(parts) // 2) + ["user"]


@given(TEXT, st.integers(0, 100))
def test_a_turn_has_as_many_ids_as_were_counted(text: str, tokens: int) -> None:
    ids = turn_ids(text, tokens)
    assert decode(TextTokenizer(), ids) == text
    assert len(ids) == max(tokens, 1 if text else 0)
    assert min(ids, default=256) > 2, "no border of a message can come out of a turn"


@given(TEXT.filter(lambda t: "</s>" not in t), TEXT.filter(bool), st.integers(2, 50))
def test_no_id_reaches_over_the_end_of_a_stop_string(before: str, junk: str, tokens: int) -> None:
    ids = turn_ids(before + "</s>" + junk, tokens, stops=("</s>",))
    dialogue = Dialogue(TextTokenizer(), style="chat")
    turn = Generation(ids, (float("nan"),) * len(ids), "stop", 0, Prefix(ids))
    cut = dialogue.cut_at_stop(turn, ("</s>",))
    assert decode(TextTokenizer(), cut.ids) == before + "</s>"
    assert cut.metrics["overrun_tokens"] == tokens - len(cut.ids) > 0


def test_encode_and_decode_are_inverses_and_estimate_by_bytes() -> None:
    tokenizer = TextTokenizer()
    text = "abcdefgh<|im_end|>é"
    ids = encode(tokenizer, text, allow_special=True)
    assert (len(ids), decode(tokenizer, ids)) == (4, text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abcdefghé"
    assert len(encode(tokenizer, text)) == estimate(text) == 5
    assert max(ids) < len(tokenizer)


@pytest.mark.parametrize("ids", [(), (300,), encode(TextTokenizer(), "<|im_start|>root\nhi", allow_special=True)])
def test_what_is_no_conversation_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="Dialogue"):
        messages(Prefix(ids))
