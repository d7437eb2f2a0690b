"""The reward of RLTR (arXiv 2508.19598): completeness votes and rule penalties, as pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from turntree.agents.completeness.calls import call_key, call_turns
from turntree.agents.scorer import Finished
from turntree.envs.loading import reject_unknown
from turntree.errors import ConfigError

__all__ = ["BAD_ARGUMENTS", "Penalties", "Penalty", "completeness", "total_reward", "violations", "whole"]

BAD_ARGUMENTS = ("bad_arguments", "bad_call", "bad_json", "empty_call", "empty_query")
"""Reason codes of the grammars for a call that was not executed because of what the tool was to be given."""


def completeness(votes: Sequence[bool], *, majority: bool = False) -> float:
    """``R_comp = (1/N) sum_i gamma_i`` over the valid votes; with ``majority`` 1, 0, or 0.5 where they are even.

    The order of the votes does not matter. Raises ``ConfigError`` without votes: no vote is no 0.
    """
    if not votes:
        raise ConfigError("expected at least one valid vote, found none; a checker that failed gives no reward")
    mean = sum(map(bool, votes)) / len(votes)
    return (1.0 + (mean > 0.5) - (mean < 0.5)) / 2 if majority else mean


def total_reward(r_comp: float, r_rule: float, *, legal: bool, illegal: float = -1.0) -> float:
    """``R_total``: ``illegal`` for an illegal format, else ``R_comp + R_rule`` with ``R_rule <= 0``."""
    return r_comp + r_rule if legal else illegal


@dataclass(frozen=True, slots=True)
class Penalty:
    """``size`` for each violation, together at most ``cap``; both are amounts, so at least 0."""

    size: float
    cap: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.size) and self.size >= 0) or not self.cap >= 0:
            raise ConfigError(
                f"a penalty takes a size and a cap of at least 0, found {self.size:g} and {self.cap:g}; it is "
                "subtracted, so leave the minus out"
            )

    def __call__(self, count: int) -> float:
        """The part of ``R_rule``, in ``[-cap, 0]``."""
        return -min(self.size * count, self.cap) + 0.0  # never -0.0


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rules behind ``R_rule``, whose sum is never below ``floor``.

    ``repeated``: a call that was executed before, see :func:`call_key`. ``bad_argument``: a call that could not be
    executed because of its argument (``BAD_ARGUMENTS``), or whose argument has more than ``max_argument`` characters.
    ``unknown_tool``: a call of a tool that there is not. Sizes are not in the paper's public text; -0.1 each is ours.
    """

    repeated: Penalty = Penalty(0.1, cap=0.3)
    bad_argument: Penalty = Penalty(0.1, cap=0.3)
    unknown_tool: Penalty = Penalty(0.1, cap=0.3)
    floor: float = -0.5
    max_argument: int | None = 1000

    def __post_init__(self) -> None:
        if not self.floor <= 0:
            raise ConfigError(f"penalties.floor={self.floor}: expected a sum of at most 0 (such as -0.5)")
        if self.max_argument is not None and self.max_argument < 1:
            raise ConfigError(
                f"penalties.max_argument={self.max_argument}: expected characters, at least 1 (null: any)"
            )

    @staticmethod
    def of(given: Penalties | Mapping[str, Any] | None) -> Penalties:
        """From a configuration: each rule a number (its size, cap as it is) or ``{size, cap}``.

        Raises ``ConfigError`` for other keys and values.
        """
        if given is None or isinstance(given, Penalties):
            return given or Penalties()
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"penalties={given!r:.100}: expected rules with their sizes, such as penalties.repeated=0.1"
            )
        base = Penalties()
        reject_unknown(given, [f.name for f in fields(Penalties)], what="rule of penalties")
        return Penalties(**{name: _read(name, value, getattr(base, name)) for name, value in given.items()})

    def parts(self, counts: Mapping[str, int]) -> dict[str, float]:
        """``rule`` (the sum, at least ``floor``) and ``rule_<name>`` of each rule, all at most 0."""
        each = {f"rule_{name}": getattr(self, name)(counts.get(name, 0)) for name in _RULES}
        return {"rule": max(self.floor, sum(each.values())), **each}


_RULES = ("repeated", "bad_argument", "unknown_tool")


def _read(name: str, value: Any, base: Any) -> Any:
    if isinstance(base, Penalty) and not isinstance(value, Penalty):
        given = value if isinstance(value, Mapping) else {"size": value}
        reject_unknown(given, ("size", "cap"), what=f"key of penalties.{name}")
        numbers = {key: _number(f"penalties.{name}.{key}", number) for key, number in given.items()}
        return Penalty(**{"size": base.size, "cap": base.cap, **numbers})
    if name == "max_argument":
        return value if value is None else whole("penalties.max_argument", value)
    return _number(f"penalties.{name}", value) if name == "floor" else value


def whole(name: str, value: Any) -> int:
    """``value`` if it is a whole number. Raises ``ConfigError`` naming the option."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r:.100}: expected a whole number")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r:.100}: expected a number")
    return float(value)


def violations(finished: Finished, *, max_argument: int | None = None) -> dict[str, int]:
    """How often each rule of :class:`Penalties` was broken."""
    calls = [call for turn in call_turns(finished) for call in turn.calls]
    reasons = Counter(str(turn.info.get("invalid_reason", "")) for turn in finished.turns)
    long = sum(max_argument is not None and len(call.argument) > max_argument for call in calls)
    return {
        "repeated": len(calls) - len({call_key(call) for call in calls}),
        "bad_argument": long + sum(reasons[reason] for reason in BAD_ARGUMENTS),
        "unknown_tool": reasons["unknown_tool"],
    }
