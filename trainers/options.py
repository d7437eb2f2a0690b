"""Fields of configurations: defaults with one-line docs, and the checks that sections share."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import field
from typing import Any

from turntree.errors import ConfigError

__all__ = ["at_least", "did_you_mean", "finite", "one_of", "opt"]


def opt(default: Any, doc: str) -> Any:
    """A field with a default and a one-line doc."""
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: default.copy(), metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless the option's value is one of those."""
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} is not known; expected one of {list(allowed)}.{did_you_mean(value, allowed)}"
        )


def finite(prefix: str, section: Any) -> None:
    """Refuse nan and inf in every number of a section: nan passes or fails comparisons silently."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}.{f.name}={value}: expected a finite number")


def at_least(name: str, value: float | None, minimum: float) -> None:
    """Raise ``ConfigError`` if the option's value is below the minimum."""
    if value is not None and not value >= minimum:
        raise ConfigError(f"{name}={value} is out of range; expected a value >= {minimum}")
