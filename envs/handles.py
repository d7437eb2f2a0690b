"""Live objects that no data stands for: what they are, where an environment has them, how a copy gets its own."""

from __future__ import annotations

import functools
import io
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, TypeAlias

from turntree.errors import SnapshotError

__all__ = [
    "Handle",
    "Ignored",
    "Kind",
    "Path",
    "find_handle",
    "find_paths",
    "get_data",
    "kind_of",
    "path_text",
    "put_data",
    "resolve",
    "second",
    "type_name",
]

Kind = Literal["lock", "shared", "connection", "database", "ignored", "refused"]
"""What a live object is, and so what becomes of it in a copy."""
Step: TypeAlias = tuple[Literal["layer", "attr", "item"], Any]
Path: TypeAlias = tuple[Step, ...]
"""The way to an object: a layer, then attributes and items."""

_KINDS: dict[tuple[str, str], Kind] = {
    ("_thread", "lock"): "lock",
    ("_thread", "RLock"): "lock",
    ("_thread", "_local"): "shared",
    ("builtins", "module"): "shared",
    ("concurrent.futures._base", "Executor"): "shared",
    ("multiprocessing.pool", "Pool"): "shared",
    ("_io", "TextIOWrapper"): "connection",
    ("_io", "_RawIOBase"): "connection",
    ("_io", "BufferedReader"): "connection",
    ("_io", "BufferedWriter"): "connection",
    ("_io", "BufferedRandom"): "connection",
    ("_io", "BufferedRWPair"): "connection",
    ("_socket", "socket"): "connection",
    ("sqlite3", "Connection"): "database",
    ("subprocess", "Popen"): "connection",
    ("threading", "Thread"): "connection",
    ("multiprocessing.process", "BaseProcess"): "connection",
    ("multiprocessing.connection", "_ConnectionBase"): "connection",
    ("mmap", "mmap"): "connection",
    ("builtins", "generator"): "refused",
    ("builtins", "coroutine"): "refused",
    ("builtins", "async_generator"): "refused",
    ("builtins", "frame"): "refused",
    ("sqlite3", "Cursor"): "refused",
    ("builtins", "ReferenceType"): "refused",
    ("weakref", "ReferenceType"): "refused",
}


@dataclass(frozen=True, slots=True)
class Handle:
    """Something live that a capture leaves out: where it is, what it is, and the data that goes with it."""

    path: Path
    type_name: str
    kind: Kind
    data: Any = None


class Ignored:
    """Stands for an attribute that its class lists in ``__fork_ignore__``."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name


def path_text(path: Path, depth: int) -> str:
    """A path as an expression, ``env.unwrapped.session.lock``; ``depth``: the number of layers."""
    text = ""
    for kind, key in path:
        if kind == "layer":
            text = "env.unwrapped" if key == depth - 1 else "env" + ".env" * key
        else:
            text += f".{key}" if kind == "attr" else f"[{key!r}]"
    return text


# -- kinds ---------------------------------------------------------------------------------------------------


def kind_of(obj: Any) -> Kind | None:
    """What a live object is; None for one that is data."""
    if isinstance(obj, (FunctionType, type)):
        return None if _importable(obj) else "shared"
    return _kind_of_type(type(obj))  # type: ignore[arg-type]  # mypy takes a type[Any] for not hashable


@functools.lru_cache(maxsize=4096)
def _kind_of_type(cls: type) -> Kind | None:
    if cls is Ignored:
        return "ignored"
    if cls.__module__.partition(".")[0] == "pygame":
        return "shared"
    for base in cls.__mro__:
        kind = _KINDS.get((base.__module__, base.__qualname__))
        if kind is not None and not issubclass(cls, (io.BytesIO, io.StringIO)):
            return kind
    return None


def _importable(obj: Any) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def type_name(obj: Any) -> str:
    """The type of an object, with its module unless it is built in."""
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


# -- paths ---------------------------------------------------------------------------------------------------


def find_paths(layers: Sequence[Any], wanted: Sequence[Any]) -> list[Path]:
    """The shortest path to each object, or an empty one; breadth first over everything that the layers hold."""
    missing = {id(obj.owner if isinstance(obj, Ignored) else obj) for obj in wanted}
    found: dict[int, Path] = {}
    queue: deque[tuple[Any, Path]] = deque((layer, (("layer", index),)) for index, layer in enumerate(layers))
    seen = {id(layer) for layer in layers}
    keep = []  # what is only made on the way must live on, or its identity would be used again
    while queue and missing:
        obj, path = queue.popleft()
        if id(obj) in missing:
            missing.discard(id(obj))
            found[id(obj)] = path
        for step, child in _children(obj):
            if type(child) not in (str, int, float, bool, type(None), bytes) and id(child) not in seen:
                seen.add(id(child))
                keep.append(child)
                queue.append((child, (*path, step)))
    return [_path_of(obj, found) for obj in wanted]


def _path_of(obj: Any, found: Mapping[int, Path]) -> Path:
    if isinstance(obj, Ignored):
        path = found.get(id(obj.owner), ())
        return (*path, ("attr", obj.name)) if path else ()
    return found.get(id(obj), ())


def _children(obj: Any) -> Iterator[tuple[tuple[Any, Any], Any]]:
    if isinstance(obj, dict):
        yield from ((("item", key), value) for key, value in list(obj.items()))
    elif isinstance(obj, (list, tuple, deque)):
        yield from ((("item", index), value) for index, value in enumerate(obj))
    if isinstance(obj, (type, ModuleType, FunctionType)):
        return
    for name in _attributes(obj):
        if name not in ("spec", "_cached_spec") and (value := getattr(obj, name, None)) is not None:
            yield ("attr", name), value


def _attributes(obj: Any) -> Iterator[str]:
    yield from list(getattr(obj, "__dict__", ()))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
    if isinstance(obj, functools.partial):
        yield from ("func", "args", "keywords")
    elif isinstance(obj, MethodType):
        yield from ("__self__", "__func__")
    elif isinstance(obj, BuiltinMethodType):
        yield "__self__"
    yield from ("default_factory",) if hasattr(obj, "default_factory") else ()
    if not _importable(type(obj)):
        yield "__class__"


def resolve(layers: Sequence[Any], path: Path) -> Any:
    """What stands at ``path``; raises ``LookupError`` or ``AttributeError``."""
    if not path:
        raise LookupError("a handle without a path")
    obj: Any = None
    for kind, key in path:
        obj = layers[key] if kind == "layer" else getattr(obj, key) if kind == "attr" else obj[key]
    return obj


# -- handles -------------------------------------------------------------------------------------------------


def find_handle(layers: Sequence[Any], handle: Handle) -> Any:
    """The live object of ``layers`` that stands where ``handle`` says. Raises ``SnapshotError`` where there is none."""
    where = path_text(handle.path, len(layers)) or "somewhere inside"
    try:
        live = resolve(layers, handle.path)
    except (LookupError, AttributeError, TypeError) as error:
        raise SnapshotError(
            f"the snapshot left out {where} ({handle.type_name}), and this environment has nothing there to attach "
            "instead; open such handles in __init__, or list the attribute in __fork_ignore__ of its class"
        ) from error
    if handle.kind != "ignored" and type_name(live) != handle.type_name:
        raise SnapshotError(
            f"expected {where} to be a {handle.type_name}, as where the snapshot was taken, found a {type_name(live)}"
        )
    return live


def second(live: Any, handle: Handle, depth: int) -> Any:
    """What a copy of the environment has in place of ``live``."""
    if handle.kind == "lock":
        return threading.RLock() if handle.type_name.endswith("RLock") else threading.Lock()
    if handle.kind == "database" and isinstance(handle.data, bytes):
        return _second_database(live, handle.data, path_text(handle.path, depth))
    if handle.kind in ("connection", "database"):
        raise SnapshotError(
            f"{path_text(handle.path, depth)} is a {handle.type_name} that a copy of the environment cannot share. "
            "Register the environment, so that a fork is made anew from its spec; or list the attribute in "
            "__fork_ignore__ of its class if sharing it is safe"
        )
    return live


def _second_database(live: Any, content: bytes, where: str) -> Any:
    twin = _from_content(content, isolation_level=live.isolation_level)
    own = _functions(live) - _functions(twin)
    if own:
        raise SnapshotError(
            f"{where} has SQL functions of its own ({', '.join(sorted(own))}), which a copy of the connection lacks. "
            "Register the environment, so that a fork is made anew from its spec"
        )
    twin.row_factory, twin.text_factory = live.row_factory, live.text_factory
    return twin


def _from_content(content: bytes, *, isolation_level: Any = "") -> Any:
    import sqlite3

    connection = sqlite3.connect(":memory:", isolation_level=isolation_level, check_same_thread=False)
    with closing(sqlite3.connect(":memory:")) as source:
        source.deserialize(content)
        source.backup(connection)
    return connection


def _functions(connection: Any) -> set[str]:
    return {name for (name,) in _rows(connection, "SELECT name FROM pragma_function_list")}


def _rows(connection: Any, query: str) -> list[Any]:
    cursor = connection.cursor()
    cursor.row_factory = None
    rows: list[Any] = cursor.execute(query).fetchall()
    return rows


def get_data(obj: Any, kind: Kind) -> Any:
    """What a snapshot keeps of a live object: a database's content or writes, a file's position; else None."""
    if kind == "database":
        return obj.serialize() if _in_memory(obj) else obj.total_changes
    if kind == "connection" and isinstance(obj, io.IOBase):
        try:
            return obj.tell()
        except (OSError, ValueError):
            return None
    return None


def _in_memory(connection: Any) -> bool:
    return not any(file for _, name, file in _rows(connection, "PRAGMA database_list") if name == "main")


def put_data(live: Any, handle: Handle, where: str) -> None:
    """Give a live object what :func:`get_data` kept. Raises ``SnapshotError``, naming ``where``, if it cannot be."""
    if handle.data is None:
        return
    if handle.kind != "database":
        live.seek(handle.data)
    elif isinstance(handle.data, bytes):
        _write_back(live, handle.data, where)
    elif live.total_changes != handle.data:
        raise SnapshotError(
            f"{where} is a database in a file, whose content is no part of a snapshot, and it does not stand where the "
            f"snapshot was taken: expected {handle.data} changed rows, found {live.total_changes}. Keep it in memory, "
            "use Forkable(env, how='replay'), or give the environment get_state() and set_state(state)"
        )


def _write_back(live: Any, content: bytes, where: str) -> None:
    """By a backup, since after ``deserialize`` what the connection serializes would lack open transactions."""
    import sqlite3

    live.rollback()
    with closing(_from_content(content)) as source:
        try:
            source.backup(live)
        except sqlite3.OperationalError as error:
            raise SnapshotError(
                f"{where} cannot be written back ({error}): a query of it is still open; read it to its end first"
            ) from error
