"""Environments of other libraries as tasks of this one. Each module imports its library when a task is made."""

from __future__ import annotations

import importlib
from typing import Any

from turntree.errors import ConfigError

__all__ = ["library"]


def library(name: str, *, install: str) -> Any:
    """A module that is no dependency of turntree. Raises ``ConfigError`` that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {name!r}: {error}; pip install {install!r}") from error
