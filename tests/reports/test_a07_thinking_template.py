"""A07: a template that drops earlier thinking runs append-only: the trained row is the rollout's row."""

from __future__ import annotations

import pytest

from turntree.agents.dialogue import Dialogue, turn_budget
from turntree.agents.engines import Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer, decode
from turntree.errors import TemplateError


class ThinkingTokenizer(ByteTokenizer):
    """ChatML that removes the thinking of earlier turns, as Qwen3 does."""

    def apply_chat_template(self, conversation, **options):  # type: ignore[no-untyped-def]
        kept = [
            m if m["role"] == "user" else {**m, "content": m["content"].split("</think>")[-1].lstrip("\n")}
            for m in conversation
        ]
        return super().apply_chat_template(kept, **options)


def test_a07_row_length_is_the_rollout_length_and_the_budget_is_checked_on_it() -> None:
    tokenizer = ThinkingTokenizer()
    dialogue = Dialogue(tokenizer, style="chat")
    assert dialogue.report.rewrites == ("thinking",)
    with pytest.raises(TemplateError):
        Dialogue(tokenizer, style="chat", on_rewrite="refuse")
    engine = ScriptedEngine(lambda _, seed: f"<think>{'t' * 380}</think><search>{seed}</search>", tokenizer)
    prefix = Prefix(dialogue.prompt_ids("q"))
    turns = 0
    while room := turn_budget(len(prefix), max_turn_tokens=500, max_context_tokens=1024):
        request = Request(prefix, SamplingParams(room, stop=("</search>",)), seed=turns)
        turn = engine.generate([request])[0]
        turns += 1
        prefix = turn.continuation
        if turn.finish_reason == "length":
            break
        prefix = prefix.extend(dialogue.observation_ids("obs", after=turn.ids))
    assert len(prefix.token_ids()) == len(prefix) == 1024
    assert turns == 3
    assert decode(tokenizer, prefix.token_ids()).count("<think>") == 3
