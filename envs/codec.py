"""Immutable values to JSON-able data and back, by their type hints: what states of tasks are stored with.

A value is None, a bool, number or text, an enum member, a frozen dataclass, a tuple, a frozenset, a ``FrozenDict`` or a
``History`` of such values. Nothing else is accepted: what can be changed in place would tie forks together.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from turntree.envs.snapshot import History
from turntree.envs.task import FrozenDict, freeze, thaw
from turntree.errors import SnapshotError

__all__ = ["check_value", "decode", "encode"]

_CURES = {
    list: "use a tuple",
    dict: "use a FrozenDict",
    set: "use a frozenset",
    bytearray: "use a text",
    bytes: "use a text",
}


def check_value(value: Any, *, where: str) -> None:
    """Raise ``SnapshotError`` that names the first part of ``value`` that is no immutable value (see the module)."""
    if value is None or isinstance(value, (bool, int, str, enum.Enum)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SnapshotError(f"{where}: expected a finite number, found {value}; JSON has no word for it")
        return
    for name, part in _parts(value, where):
        check_value(part, where=f"{where}{name}")


def _parts(value: Any, where: str) -> list[tuple[str, Any]]:
    """The parts of a compound value, each with what leads to it."""
    if isinstance(value, (tuple, History)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, frozenset):
        return [("{}", part) for part in value]
    if isinstance(value, FrozenDict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise SnapshotError(
                f"{where}: {type(value).__name__} can be changed in place; declare it @dataclass(frozen=True)"
            )
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    cure = next((cure for kind, cure in _CURES.items() if isinstance(value, kind)), "")
    raise SnapshotError(
        f"{where}: expected an immutable value, found {type(value).__name__} ({value!r:.60}); "
        + (cure or "keep plain values in the state (texts, numbers, tuples, frozen dataclasses), no live objects")
    )


def encode(value: Any) -> Any:
    """JSON-able data of a value that :func:`check_value` accepts; the inverse is :func:`decode` with its type."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, History)):
        return [encode(part) for part in value]
    if isinstance(value, frozenset):
        return sorted((encode(part) for part in value), key=repr)
    return thaw(value) if isinstance(value, FrozenDict) else value


def decode(kind: Any, data: Any, *, where: str = "state") -> Any:
    """The value of type ``kind`` that ``data`` was encoded from. Raises ``SnapshotError`` that names the place."""
    kind, arguments = _resolved(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return freeze(data)
    if kind in (Union, types.UnionType):
        return _decode_union(arguments, data, where)
    if kind is Literal:
        return _expect(data, data in arguments, where, f"one of {list(arguments)}")
    if kind is tuple:
        return _decode_tuple(arguments, _expect(data, isinstance(data, list), where, "a list"), where)
    if kind in (frozenset, History):
        (inner,) = arguments or (Any,)
        items = _expect(data, isinstance(data, list), where, "a list")
        return kind(decode(inner, item, where=f"{where}[{i}]") for i, item in enumerate(items))
    if kind in (FrozenDict, Mapping):
        return FrozenDict(_expect(data, isinstance(data, Mapping), where, "an object"))
    if kind in (None, type(None)):
        return _expect(data, data is None, where, "null")
    return _decode_plain(kind, data, where)


def _resolved(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    origin = get_origin(kind)
    return (origin, get_args(kind)) if origin is not None else (kind, ())


def _decode_plain(kind: Any, data: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[_expect(data, data in kind.__members__, where, f"one of {list(kind.__members__)}")]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints: dict[str, Any] = _hints(kind)
        _expect(data, isinstance(data, Mapping) and set(data) == set(hints), where, f"an object with {list(hints)}")
        return kind(**{name: decode(hint, data[name], where=f"{where}.{name}") for name, hint in hints.items()})
    if kind is float:
        _expect(data, isinstance(data, (int, float)) and not isinstance(data, bool), where, "a number")
        return float(data)
    fits = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    return _expect(data, fits, where, getattr(kind, "__name__", str(kind)))


def _decode_tuple(arguments: tuple[Any, ...], data: list[Any], where: str) -> tuple[Any, ...]:
    kinds = arguments
    if not arguments:
        kinds = (Any,) * len(data)
    elif len(arguments) == 2 and arguments[1] is Ellipsis:
        kinds = (arguments[0],) * len(data)
    _expect(data, len(kinds) == len(data), where, f"{len(kinds)} items")
    return tuple(decode(kind, item, where=f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data)))


def _decode_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return decode(kind, data, where=where)
        except SnapshotError:
            continue
    raise SnapshotError(f"{where}: expected one of {[str(kind) for kind in kinds]}, found {data!r:.80}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _expect(data: Any, fits: bool, where: str, what: str) -> Any:
    if not fits:
        raise SnapshotError(f"{where}: expected {what}, found {data!r:.80}")
    return data
