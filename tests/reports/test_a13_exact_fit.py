"""A13: an observation that fills the rest of the context exactly is kept; only the next turn finds no room."""

from __future__ import annotations

from turntree.agents.dialogue import Dialogue, cut_text, turn_budget
from turntree.agents.engines import Prefix
from turntree.agents.tokenizer import ByteTokenizer


def test_a13_two_sampled_and_two_observation_tokens_fit_a_budget_of_four() -> None:
    dialogue = Dialogue(ByteTokenizer())
    context = Prefix([1]).extend([101, 102])
    text, truncated = cut_text(dialogue.tokenizer, "ab", 1 + 4 - len(context))
    assert (text, truncated) == ("ab", False)
    after = context.extend(dialogue.observation_ids(text, after=context.ids))
    assert after.token_ids() == [1, 101, 102, 97, 98]
    assert turn_budget(len(context), max_turn_tokens=9, max_context_tokens=5) == 2
    assert turn_budget(len(after), max_turn_tokens=9, max_context_tokens=5) == 0
