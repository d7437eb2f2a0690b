"""An author's own actions are read as the tags of the search are, and a grammar reads back what it writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import Action, ActionTags, PlainText
from turntree.errors import ConfigError

TAGS = ActionTags({"go": "a way", "look": "looks around", "answer": "the end"}, bare=("look",))


@pytest.mark.parametrize(
    ("turn", "kind", "argument"),
    [
        ("<go> north </go>", "go", "north"),
        ("<think> <go>south</go> </think> <go>north</go>", "go", "north"),
        ("<look></look>", "look", ""),
        ("<look> up </look>", "look", "up"),
        ("<go></go>", "invalid", "empty_call"),
        ("<answer> </answer>", "invalid", "empty_call"),
        ("<go> a <look></look> </go>", "look", ""),
        ("<go> a", "invalid", "unclosed_go"),
        ("<Go> a </Go>", "invalid", "misspelt_tag"),
        ("<search> a </search>", "invalid", "no_action"),
        ("", "invalid", "empty_turn"),
    ],
)
def test_readings(turn: str, kind: str, argument: str) -> None:
    assert TAGS.parse(turn).action == Action(kind, argument)


def test_a_thought_can_be_required() -> None:
    strict = ActionTags(TAGS.actions, bare=TAGS.bare, think="required")
    assert strict.parse("<look></look>").action == Action("invalid", "missing_think")
    assert strict.parse("<think> x <look></look>").action == Action("invalid", "inside_think")
    assert strict.parse("<think> x </think><look></look>").action == Action("look", "")
    assert strict.fingerprint != TAGS.fingerprint


@given(st.text())
def test_any_text_is_read_and_shown_without_raising(text: str) -> None:
    for grammar in (TAGS, PlainText()):
        action = grammar.parse(text).action
        assert action.kind in ("invalid", "go", "look", "answer", "say")
        assert grammar.correction(action.argument)
        assert "<go>" not in grammar.observation(text + "<go>").body or grammar is not TAGS


@given(st.text(alphabet="abc 12", min_size=1).filter(str.strip), st.sampled_from(["go", "answer"]), st.booleans())
def test_what_is_written_is_read_back(argument: str, kind: str, thinks: bool) -> None:
    action = Action(kind, argument.strip())
    assert TAGS.parse(TAGS.write("a thought" if thinks else "", action)).action == action
    assert TAGS.parse(TAGS.write("", Action("look", ""))).action == Action("look", "")
    said = Action("say", argument.strip())
    assert PlainText().parse(PlainText().write("", said)).action == said


def test_the_instructions_name_every_action_and_its_tools() -> None:
    more = TAGS.with_actions({"calculate": "works out a sum"})
    assert "<calculate> ... </calculate>: works out a sum" in more.instructions()
    assert "<look></look>: looks around" in more.instructions()
    assert more.stop == ("</go>", "</look>", "</answer>", "</calculate>")
    assert more.fingerprint != TAGS.fingerprint


def test_names_that_cannot_be_tags_are_refused() -> None:
    for name in ("Go", "think", "information", "a b", ""):
        with pytest.raises(ConfigError, match="an action's name"):
            ActionTags({name: "x"})
    with pytest.raises(ConfigError, match="did you mean 'look'"):
        ActionTags({"look": "x"}, bare=("lok",))
    with pytest.raises(ConfigError, match="name them apart"):
        TAGS.with_actions({"go": "x"})
    with pytest.raises(ConfigError, match="use ActionTags"):
        PlainText().with_actions({"go": "x"})
