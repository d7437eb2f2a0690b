"""C07: an engine that cuts the stop string off is understood, and the log says so."""

from __future__ import annotations

import logging

import pytest

from turntree.envs import Action, TagGrammar
from turntree.envs.grammar.base import _warn_restored, complete_turn


def test_c07_a_stripped_closing_tag_is_put_back_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_restored.cache_clear()
    with caplog.at_level(logging.WARNING, logger="turntree.envs.grammar"):
        texts = [complete_turn("<search>foo", "</search>") for _ in range(3)]
    assert texts == ["<search>foo</search>"] * 3
    assert TagGrammar().parse(texts[0]).action == Action("search", "foo")
    (record,) = caplog.records
    assert "'</search>'" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "stop"), [("<search>foo</search>", "</search>"), ("<search>foo</search>\n", "</search>"), ("foo", None)]
)
def test_c07_a_complete_turn_is_left_alone(text: str, stop: str | None) -> None:
    assert complete_turn(text, stop) == text
