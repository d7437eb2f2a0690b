"""The text space holds every string and samples reproducibly."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import pytest
from gymnasium.spaces import Text
from gymnasium.vector import utils as vector_utils
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import UnicodeText

# Gymnasium's annotations of these know arrays only.
create_shared_memory: Any = vector_utils.create_shared_memory
read_from_shared_memory: Any = vector_utils.read_from_shared_memory
write_to_shared_memory: Any = vector_utils.write_to_shared_memory


@given(st.text())
def test_every_string_is_contained(text: str) -> None:
    assert UnicodeText().contains(text)
    assert text * 1000 in UnicodeText()


@pytest.mark.parametrize("value", [None, 1, b"x", ["x"]])
def test_nothing_else_is_contained(value: object) -> None:
    assert not UnicodeText().contains(value)


def test_samples_are_reproducible_and_varied() -> None:
    space, twin = UnicodeText(examples=["<search>q</search>"], seed=5), UnicodeText(examples=["<search>q</search>"])
    twin.seed(5)
    samples = [space.sample() for _ in range(200)]
    assert samples == [twin.sample() for _ in range(200)]
    assert all(isinstance(sample, str) and sample in space for sample in samples)
    assert 60 < samples.count("<search>q</search>") < 140
    joined = "".join(samples)
    assert any(character > "\u4e00" for character in joined)
    assert "\n" in joined
    assert space.sample(mask=(3, None)) in space


def test_a_copy_draws_on_its_own() -> None:
    space = UnicodeText(examples=("a",), seed=3)
    twin = copy.deepcopy(space)
    expected = [twin.sample() for _ in range(20)]
    assert [space.sample() for _ in range(20)] == expected
    assert twin == space


def test_equality_and_repr() -> None:
    assert isinstance(UnicodeText(), Text)
    assert UnicodeText() == UnicodeText(seed=3)
    assert UnicodeText(examples="a") != UnicodeText()
    assert UnicodeText() != Text(5)
    assert repr(UnicodeText()) == "UnicodeText()"


@given(st.lists(st.text(), min_size=3, max_size=3))
def test_shared_memory_round_trip(texts: list[str]) -> None:
    space = UnicodeText()
    memory = create_shared_memory(space, n=3, ctx=multiprocessing.get_context("spawn"))
    live = read_from_shared_memory(space, memory, n=3)
    for index, text in enumerate(texts):
        write_to_shared_memory(space, index, text, memory)
    assert copy.deepcopy(live) == tuple(live) == tuple(texts)


def test_a_text_beyond_the_shared_memory_says_what_to_do() -> None:
    space = UnicodeText()
    memory = create_shared_memory(space, n=1)
    with pytest.raises(ValueError, match="shared_memory=False"):
        write_to_shared_memory(space, 0, "x" * (space.max_length + 1), memory)
