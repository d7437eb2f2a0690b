"""Observations within a limit in tokens: documents are cut before the closing tag, never silently."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from turntree.envs.grammar import Observation
from turntree.errors import ConfigError

__all__ = ["ObservationLimit", "Tokenizer"]

# Half of a UTF-16 pair: JSON files can hold it, tokenizers read U+FFFD instead.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBE = "The quick brown fox, 1984: café, 红楼梦 👍 <information></information>\n"


class Tokenizer(Protocol):
    """Whatever counts tokens; Hugging Face tokenizers fit."""

    def encode(self, text: str, /) -> Any: ...

    def decode(self, ids: Sequence[int], /) -> str: ...


class ObservationLimit:
    """Cuts observations to at most ``max_tokens`` tokens of ``tokenizer`` (special tokens are not added).

    The cut lands on a token boundary whose decoding is valid text: a character that would be split is dropped whole.
    """

    def __init__(self, max_tokens: int, tokenizer: Tokenizer) -> None:
        if max_tokens < 1:
            raise ConfigError(f"max_observation_tokens: expected at least 1, found {max_tokens}")
        self.max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._encode_options = _accepted(tokenizer.encode, _PROBE, {"add_special_tokens": False})
        ids = self.ids(_PROBE)
        self._decode_options = _accepted(
            tokenizer.decode, ids, {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        )
        probe = f"{max_tokens}:{ids}"
        self.fingerprint = hashlib.sha256(probe.encode()).hexdigest()[:12]

    def ids(self, text: str) -> list[int]:
        """Token ids of ``text`` alone."""
        found = self._tokenizer.encode(_LONE_SURROGATE.sub("\ufffd", text), **self._encode_options)
        return [int(i) for i in getattr(found, "ids", found)]

    def fits(self, text: str) -> bool:
        """Whether ``text`` is within the limit."""
        return len(self.ids(text)) <= self.max_tokens

    def require(self, text: str, *, what: str) -> None:
        """Raise ``ConfigError`` unless a text that cannot be cut is within the limit."""
        if not self.fits(text):
            raise ConfigError(
                f"max_observation_tokens={self.max_tokens} leaves no room: {what} alone takes {len(self.ids(text))} "
                "tokens; raise the limit"
            )

    def cut(self, observation: Observation, *, share: int | None = None) -> tuple[Observation, bool]:
        """The observation within the limit (or a ``share`` of it), and whether its body had to be shortened."""
        limit = self.max_tokens if share is None else share
        if len(self.ids(observation.text)) <= limit:
            return observation, False
        ids = self.ids(observation.body)
        room = min(len(ids), limit - len(self.ids(observation.head + observation.tail)))
        while room > 0:
            shorter = replace(observation, body=self._prefix(observation.body, ids, room))
            excess = len(self.ids(shorter.text)) - limit
            if excess <= 0:
                return shorter, True
            room -= excess
        return replace(observation, body=""), True

    def cut_all(self, observations: Sequence[Observation]) -> tuple[tuple[Observation, ...], bool]:
        """The results of one turn, which are shown on lines of their own, within the limit together.

        Each is cut to the same share, as large as can be; whether any body had to be shortened.
        """
        if self.fits(_joined(observations)):
            return tuple(observations), False
        low, high = 1, self.max_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(_joined([self.cut(part, share=middle)[0] for part in observations])):
                low = middle
            else:
                high = middle - 1
        return tuple(self.cut(part, share=low)[0] for part in observations), True

    def _prefix(self, body: str, ids: Sequence[int], count: int) -> str:
        """The text of the first ``count`` tokens, or of a few less where they end inside a character."""
        for size in range(count, max(count - 8, 0), -1):
            text = self._tokenizer.decode(list(ids[:size]), **self._decode_options)
            if body.startswith(text) and not (text == "" and body):
                return text
        return self._longest_fitting(body, count)

    def _longest_fitting(self, body: str, count: int) -> str:
        """For tokenizers whose decoding is not the original text: the longest prefix of at most ``count`` tokens."""
        low, high = 0, len(body)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self.ids(body[:middle])) <= count else (low, middle - 1)
        return body[:low]


def _joined(observations: Sequence[Observation]) -> str:
    return "\n".join(observation.text for observation in observations)


def _accepted(function: Any, argument: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The ``options`` if the function takes them, else none: tokenizers differ in what they can be told."""
    try:
        function(argument, **options)
    except TypeError:
        return {}
    return options
