"""Report D17: a format reward fired on wrong formats by accident, and the policy collapsed into them.

Format is decided by the parser that the environment acts on, for any text at all, with a reason for every no.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs import SearchQAEnv
from turntree.envs.grammar import TagGrammar

WELL_FORMED = (
    "<think> I look it up. </think> <search> the mayor of the city </search>",
    "<think> There it is. </think> <answer> nobody </answer>",
)
PIECES = ("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>",
          " ", "x", "<", "/", ">", "\u200b", "é", "\n")  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> list[str]:
    """A transcript of a few turns with pieces put in, taken out and swapped."""
    turns = [draw(st.sampled_from(WELL_FORMED)) for _ in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(turns) - 1))
        text = turns[number]
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 9)))
        turns[number] = text[:start] + draw(st.sampled_from(PIECES)) + text[end:]
    return turns


@settings(max_examples=1000, deadline=None)
@given(mutated())
def test_d17_a_valid_format_is_one_that_the_environment_acted_on(turns: list[str]) -> None:
    env, done = ENV, False
    info: dict[str, Any] = {}
    env.reset(seed=0)
    read = []
    for text in turns:
        _, _, terminated, truncated, info = env.step(text)
        read.append(TagGrammar().parse(text).action.kind)
        assert info["action"] == read[-1], "one parser for acting and for judging"
        done = terminated or truncated
        if done:
            break
    if done:
        valid, reason = info["format_valid"], info["format_reason"]
        assert valid or reason, "every no has a reason"
        assert not (valid and "invalid" in read), "no turn of a valid episode was corrected"


ENV = SearchQAEnv()
