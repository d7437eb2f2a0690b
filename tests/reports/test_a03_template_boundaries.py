"""A03: the newline after ``<|im_end|>`` is in the training row, as an environment token."""

from __future__ import annotations

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.tokenizer import ByteTokenizer, encode


@pytest.mark.parametrize("sampled_end", [True, False])
def test_a03_incremental_ids_equal_the_template_of_the_finished_conversation(sampled_end: bool) -> None:
    tokenizer = ByteTokenizer()
    dialogue = Dialogue(tokenizer, style="chat")
    users, turns = ["q", "obs é", "obs 中"], ["<search>a</search>", "<search>b</search>", "<answer>c</answer>"]
    ids, mask = list(dialogue.prompt_ids(users[0])), [0] * len(dialogue.prompt_ids(users[0]))
    for i, text in enumerate(turns):
        turn = encode(tokenizer, text + ("<|im_end|>" if sampled_end else ""), allow_special=True)
        added = dialogue.observation_ids(users[i + 1], after=turn) if i < 2 else ()
        ids += [*turn, *added]
        mask += [1] * len(turn) + [0] * len(added)
    messages = []
    for user, text in zip(users, turns, strict=True):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": text}]
    finished = encode(tokenizer, tokenizer.apply_chat_template(messages), allow_special=True)
    assert tuple(ids) == finished[: len(ids)]
    assert finished[len(ids) :] == encode(tokenizer, "\n" if sampled_end else "<|im_end|>\n", allow_special=True)
    end = tokenizer.eos_token_id
    assert [m for i, m in zip(ids, mask, strict=True) if i == end] == ([0, 1, 0, 1, 0, 1] if sampled_end else [0] * 5)
    assert all(mask[k + 1] == 0 for k, i in enumerate(ids[:-1]) if i == end)
