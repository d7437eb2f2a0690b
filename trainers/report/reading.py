"""A turn's text taken apart for showing it; training never reads text."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["TurnParts", "read_turn"]

_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_TAG = re.compile(r"<(search|answer|python)>(.*?)(?:</\1>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TurnParts:
    """Kind of action, its argument and the thought before it; what is not there is ``""``."""

    kind: str
    argument: str
    thought: str


def read_turn(text: str, action: str) -> TurnParts:
    """The parts of a turn. ``action`` is the environment's own word for what the turn asked for."""
    thought = _THINK.search(text)
    rest = _THINK.sub("", text)
    tag = _TAG.search(rest)
    kind = action.partition("(")[0].strip()
    if tag is None:
        return TurnParts(kind, "", (thought[1] if thought else rest).strip())
    before = thought[1] if thought else rest[: tag.start()]
    return TurnParts(kind, tag[2].strip(), before.strip())
