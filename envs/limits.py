"""The limits of a question-answering episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from turntree.envs.loading import reject_unknown
from turntree.errors import ConfigError

__all__ = ["Limits", "OnLength"]

OnLength = Literal["end", "correct"]
"""What a turn that reaches its limit does: end the episode, or get a correction."""


@dataclass(frozen=True)
class Limits:
    """The limits of an episode; part of the environment's fingerprint.

    ``max_turns``: model turns in all, the answer's included. ``max_searches``: executed searches (None: one a turn,
    the last turn excepted). ``top_k``: passages a search. ``on_length``: a turn cut at its length limit ends the
    episode, or gets one correction (a second cut in a row ends it). ``max_observation_tokens``: tokens of one
    observation.
    """

    max_turns: int = 4
    max_searches: int | None = None
    top_k: int = 3
    on_length: OnLength = "end"
    max_observation_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_searches", 0), ("top_k", 1), ("max_observation_tokens", 1)):
            value = getattr(self, name)
            if value is None and name in ("max_searches", "max_observation_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: expected an integer of at least {least}, found {value!r}")
        reject_unknown([self.on_length], get_args(OnLength), what="on_length setting")

    @property
    def searches(self) -> int:
        """How many searches can be executed at most."""
        most = self.max_turns - 1
        return most if self.max_searches is None else min(most, self.max_searches)

    def searches_left(self, *, turns: int, searches: int) -> int:
        """How many searches can still be executed after ``turns`` turns and ``searches`` searches."""
        return 0 if turns + 1 >= self.max_turns else self.searches - searches
