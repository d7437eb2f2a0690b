"""Names and import paths given by a user, resolved with errors that help."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from turntree.errors import ConfigError, TurnTreeError

__all__ = ["check_arguments", "construct", "import_object", "reject_unknown", "resolve"]


def reject_unknown(given: Iterable[str], known: Iterable[str], *, what: str) -> None:
    """Raise ``ConfigError`` for the first of ``given`` that is not ``known``, with the nearest valid name."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise ConfigError(f"unknown {what} {name!r}{_suggestion(str(name), names)}; valid: {', '.join(names)}")


def import_object(path: str, *, what: str) -> Any:
    """The object at an import path ``package.module:name``; ``ConfigError`` says which part could not be found.

    ``what`` is the option that the path was given by.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{what}={path}: expected an import path of the form package.module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may fail in any way
        name = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        cure = "; install it or put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{what}={path}: cannot import module {module_name!r}: {name}{error}{cure}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        hint = _suggestion(attribute, [n for n in dir(module) if not n.startswith("_")])
        raise ConfigError(f"{what}={path}: module {module_name!r} has no {attribute!r}{hint}") from None


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


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], *, what: str) -> None:
    """Raise ``ConfigError`` for arguments that ``function`` does not take, before anything was done with them."""
    if not callable(function):
        raise ConfigError(f"{what}: expected something that can be called, found {function!r:.100}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # built-in functions may have no signature
        return
    try:
        signature.bind_partial(**arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no arguments"
        raise ConfigError(f"{what}: {getattr(function, '__qualname__', function)} {error}; it takes {takes}") from None


def construct(factory: Callable[..., Any], arguments: Mapping[str, Any], *, what: str) -> Any:
    """Call a class or factory. Whatever it cannot do with ``arguments`` is a ``ConfigError`` that begins with ``what``.

    Errors of turntree other than ``ConfigError`` (a corpus that cannot be read) pass through.
    """
    try:
        return factory(**arguments)
    except Exception as error:
        if isinstance(error, TurnTreeError) and not isinstance(error, ConfigError):
            raise
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        given = f" with {dict(arguments)}" if arguments else ""
        name = f"the class {factory.__qualname__}" if isinstance(factory, type) else "the factory"
        raise ConfigError(f"{what}: {name} could not be called{given}: {kind}{error}") from error


def _suggestion(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
