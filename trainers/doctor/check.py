"""What the doctor says: one line a thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from turntree.trainers.config import RunConfig

__all__ = ["Check", "Level", "as_json", "lines"]

Level = Literal["ok", "note", "fail"]
"""``fail``: a run would not start or not end; ``note``: it would, with something worth knowing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line. ``fail``: the configured run cannot work; ``note``: it can, but something is missing or slow."""

    name: str
    level: Level
    found: str
    means: str
    do: str = ""


def lines(checks: list[Check]) -> Iterator[str]:
    """The checks for people, one line each: what was found, what it means, what to do."""
    width = max(len(c.name) for c in checks)
    for c in checks:
        mark = "FAIL" if c.level == "fail" else c.level
        text = f"{c.found}: {c.means}{f' -> {c.do}' if c.do else ''}"
        yield f"{mark:4}  {c.name:{width}}  {' '.join(text.split())}"


def as_json(checks: list[Check], config: RunConfig) -> dict[str, Any]:
    """All checks as plain JSON; ``ok`` says whether the configured run can work."""
    rows = [{"name": c.name, "level": c.level, "found": c.found, "means": c.means, "do": c.do} for c in checks]
    return {"ok": all(c.level != "fail" for c in checks), "engine": config.engine.name, "checks": rows}
