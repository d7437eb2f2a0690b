"""Names and import paths given by a user, resolved with errors that help."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from turntree.errors import ConfigError

__all__ = ["import_object", "reject_unknown", "resolve"]


def reject_unknown(given: Iterable[str], known: Iterable[str], *, what: str) -> None:
    """Raise ``ConfigError`` for the first of ``given`` that is not ``known``, with the nearest valid name."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise ConfigError(f"unknown {what} {name!r}{_suggestion(str(name), names)}; valid: {', '.join(names)}")


def import_object(path: str, *, what: str) -> Any:
    """The object at an import path ``package.module:name``; ``ConfigError`` says which part could not be found."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{what}: expected an import path like 'package.module:name', found {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{what}: cannot import module {module_name!r} of {path!r}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        hint = _suggestion(attribute, [n for n in dir(module) if not n.startswith("_")])
        raise ConfigError(f"{what}: module {module_name!r} has no {attribute!r}{hint}") from None


def resolve(value: str, named: Mapping[str, Any], *, what: str) -> Any:
    """One of the ``named`` objects, or the object at an import path (anything that contains a colon)."""
    if ":" in value:
        return import_object(value, what=what)
    if value in named:
        return named[value]
    names = sorted(named)
    raise ConfigError(
        f"unknown {what} {value!r}{_suggestion(value, names)}; valid: {', '.join(names)}, "
        "or an import path 'package.module:name'"
    )


def _suggestion(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
