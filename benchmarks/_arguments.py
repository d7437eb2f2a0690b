"""Arguments of the algorithm benchmarks, refused where they are read and not after an hour of work."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from turntree.errors import ConfigError

__all__ = ["check_json", "different", "positive", "whole"]


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least ``least``."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, found {text!r}")
        return found

    return read


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return found


def different(option: str, values: Sequence[Hashable] | None) -> None:
    """Raises ``ConfigError`` for a value that is given twice."""
    twice = sorted({str(v) for v in values or () if list(values or ()).count(v) > 1})
    if twice:
        raise ConfigError(f"{option}: expected each value once, found {', '.join(twice)} twice; leave one out")


def check_json(path: Path | None) -> None:
    """Whether the file of figures can be written in the end. Raises ``ConfigError``."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--json {path}: expected a file that can be written, found {error.strerror}; choose another one"
        ) from error
