"""What a launch file says: settings with their lines, and everything that was not a setting."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Launch", "Note", "Setting", "literal"]

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Setting:
    """One ``key=value``. ``unresolved`` says what in the value could not be found out, '' where all could."""

    key: str
    value: str
    line: int
    unresolved: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A line that is no setting: a command, an environment variable, something that was not understood."""

    line: int
    text: str
    why: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch file. ``program`` is the module or script that it starts, '' for a configuration file."""

    name: str
    program: str
    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]


def literal(text: str) -> Any:
    """A value as Hydra reads it: null, booleans, numbers and lists; anything else is a text, without its quotes."""
    text = text.strip()
    lower = text.lower()
    if lower in ("null", "none", "~"):
        return None
    if lower in ("true", "false"):
        return lower == "true"
    if _NUMBER.fullmatch(text):
        number = float(text)
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else number if math.isfinite(number) else text
    if text.startswith("[") and text.endswith("]"):
        return _items(text)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _items(text: str) -> list[Any]:
    try:
        return list(json.loads(text))
    except ValueError:
        inner = text[1:-1].strip()
        return [literal(part) for part in inner.split(",")] if inner else []
