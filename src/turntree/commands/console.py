"""What every command says and how: progress bars, lines for people, words to go on after Ctrl-C."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from turntree.errors import ConfigError

__all__ = [
    "Stopped",
    "argument",
    "console",
    "free_path",
    "printable",
    "resumable",
    "resume_hint",
    "say",
    "say_json",
    "silent",
    "stage_bars",
]

console = Console(emoji=False)  # ":x:" in a path, an import path or JSON is no picture

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def say(text: str) -> None:
    """A line for people: never wrapped, and brackets in paths and overrides are no markup.

    What UTF-8 cannot say (half of a surrogate pair, from somebody's JSON) is escaped, as JSON escapes it; so is what a
    terminal would obey instead of showing it.
    """
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: control characters, and halves of surrogate pairs, as escapes."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", shown)


def say_json(value: Any) -> None:
    """A JSON document for a program."""
    say(json.dumps(value, indent=2, ensure_ascii=False))


class Stopped(KeyboardInterrupt):
    """Ctrl-C ended a command that can go on; the message says how."""


def resume_hint(command: str, overrides: Sequence[str]) -> str:
    kept = [o for o in overrides if not o.startswith("resume=")]
    return "go on with: " + shlex.join(["turntree", command, *kept, "resume=true"])


@contextmanager
def resumable(command: str, overrides: Sequence[str]) -> Iterator[None]:
    """Ctrl-C inside ends the command with the words to continue it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise stop if isinstance(stop, Stopped) else Stopped(f"stopped; {resume_hint(command, overrides)}") from None


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )


@contextmanager
def stage_bars(*, tabled: Sequence[str] = ()) -> Iterator[Callable[[str, int, int, str], None]]:
    """One progress bar a stage; piped output gets a line each time a tenth of a stage is done.

    ``tabled``: stages of which every step is a row of a table; those get no lines beside it.
    """
    with Progress(*_columns(), console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}
        tenths: dict[str, int] = {}

        def report(stage: str, done: int, total: int, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note="")
            bars.update(tasks[stage], completed=done, note=note)
            tenth = 10 * done // max(total, 1)
            if not console.is_terminal and stage not in tabled and tenths.get(stage) != tenth:
                tenths[stage] = tenth
                say(f"{stage}: {done}/{total} {note}")

        yield report


def silent(stage: str, done: int, total: int, note: str) -> None:
    """No progress: the output is for a program."""


def argument(text: str) -> tuple[str, Any]:
    """``key=value``, the value as JSON where it is some, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--arg {text!r} is not of the form key=value (such as --arg eps=1e-6)")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def free_path(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that is not there yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
