"""Observations are cut in tokens, on a token boundary that is valid text, before the closing tag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import SearchQAEnv, TagGrammar
from turntree.envs.grammar import Observation
from turntree.envs.truncation import ObservationLimit, Tokenizer
from turntree.errors import ConfigError
from turntree.search_backend import Passage


class Bytes:
    """One token a byte: every emoji can be split."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Words:
    """Lower-cases and splits at spaces, so decoding is not the original; adds a token unless told not to."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [len(word) + 2 for word in text.lower().split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join("x" * (i - 2) for i in ids)


class Encoded:
    """Like the ``tokenizers`` library: encode gives an object with ids."""

    def encode(self, text: str) -> Encoded:
        self.ids = [ord(character) for character in text]
        return self

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


HEAD, TAIL = "\n\n<information>", "</information>\n\n"


@pytest.mark.parametrize("tokenizer", [Bytes(), Words(), Encoded()])
@given(body=st.text(max_size=80), limit=st.integers(40, 90))
def test_a_cut_observation_fits_and_keeps_its_frame(tokenizer: Tokenizer, body: str, limit: int) -> None:
    rule = ObservationLimit(limit, tokenizer)
    observation, cut = rule.cut(Observation(HEAD, body, TAIL))
    assert rule.fits(observation.text)
    assert (observation.head, observation.tail) == (HEAD, TAIL)
    assert body.startswith(observation.body)
    assert cut == (observation.body != body)
    if not cut:
        return
    longer = Observation(HEAD, body[: len(observation.body) + 1], TAIL)
    assert not rule.fits(longer.text) or isinstance(tokenizer, Words)


@pytest.mark.parametrize("room", range(1, 17))
def test_a15_an_emoji_at_the_cut_is_dropped_whole(room: int) -> None:
    frame = len((HEAD + TAIL).encode())
    observation, cut = ObservationLimit(frame + room, Bytes()).cut(Observation(HEAD, "中" * 2 + "👍" * 40, TAIL))
    assert cut
    assert "\ufffd" not in observation.body
    assert observation.body == ("中" * 2 + "👍" * 40)[: room // 3 if room < 6 else 2 + (room - 6) // 4]


def test_special_tokens_are_not_counted() -> None:
    assert ObservationLimit(2, Words()).fits("two words")


def test_the_environment_flags_a_cut(
    make_env: Callable[..., SearchQAEnv], backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_env(max_observation_tokens=1000, tokenizer=Bytes(), max_turns=6)
    env.reset(seed=0)
    *_, info = env.step("<search>红楼梦</search>")
    assert info["observation_truncated"] is False
    with pytest.raises(ConfigError, match="leaves no room"):
        make_env(max_observation_tokens=20, tokenizer=Bytes())
    limit = len((TagGrammar().correction("no_action") + TagGrammar().last_turn_notice()).encode())
    long = Passage("1", "t", "中👍" * 200)
    monkeypatch.setattr(backend, "search", lambda queries, k: [[long] for _ in queries])
    env = make_env(max_observation_tokens=limit, tokenizer=Bytes(), max_turns=2)
    env.reset(seed=0)
    observation, *_, info = env.step("<search>q</search>")
    assert info["observation_truncated"] is True
    assert observation.endswith("</information>\n\n" + TagGrammar().last_turn_notice())
    assert limit - 8 < len(observation.encode()) <= limit


def test_a_limit_needs_a_tokenizer(make_env: Callable[..., SearchQAEnv]) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        make_env(max_observation_tokens=100)
    with pytest.raises(ConfigError, match="at least 1"):
        make_env(max_observation_tokens=0, tokenizer=Bytes())


def test_the_limit_and_its_tokenizer_are_part_of_the_fingerprint(make_env: Callable[..., SearchQAEnv]) -> None:
    prints = {
        make_env(max_observation_tokens=500, tokenizer=tokenizer).core.fingerprint for tokenizer in (Bytes(), Encoded())
    }
    prints |= {make_env().core.fingerprint, make_env(max_observation_tokens=501, tokenizer=Bytes()).core.fingerprint}
    assert len(prints) == 4


def test_a_lone_surrogate_counts_as_the_replacement_character() -> None:
    rule = ObservationLimit(45, Bytes())
    assert rule.ids("\ud800") == rule.ids("\ufffd")
    observation, cut = rule.cut(Observation(HEAD, "x\ud800" * 40, TAIL))
    assert cut
    assert rule.fits(observation.text)
    assert observation.body.startswith("x\ud800x")
