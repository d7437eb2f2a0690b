"""C03: one documented grammar for nested, doubled, unclosed, upper-case and spaced tags."""

from __future__ import annotations

import pytest

from turntree.envs import Action, TagGrammar, grammar


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("<answer>maybe <answer>Paris</answer></answer>", Action("answer", "Paris")),
        ("<think>or <answer>Rome</answer>?</think><answer>Paris</answer>", Action("answer", "Paris")),
        ("<answer>Paris</answer><answer>Rome</answer>", Action("answer", "Paris")),
        ("<answer>Paris", Action("invalid", "unclosed_answer")),
        ("<ANSWER>Paris</ANSWER>", Action("invalid", "misspelt_tag")),
        ("< answer >Paris< /answer >", Action("invalid", "misspelt_tag")),
    ],
)
def test_c03_tags_are_read_by_one_table(turn: str, action: Action) -> None:
    assert TagGrammar().parse(turn).action == action


def test_c03_every_reason_code_is_documented() -> None:
    turns = [
        "<answer>a<search>b</answer>", "<answer>a", "a</answer>", "<Answer>", "<answer></answer>", "a", "",
        "<search>a", "a</search>", "<search> </search>", "<think><answer>a</answer></think>",
    ]  # fmt: skip
    codes = {TagGrammar().parse(turn).action.argument for turn in turns}
    assert len(codes) == len(turns)
    assert all(f"``{code}``" in (grammar.__doc__ or "") for code in codes)
