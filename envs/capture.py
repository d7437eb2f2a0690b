"""The state of live objects as data: handles stay where they are, and what cannot be copied is named by its path.

A capture is a pickle made and read in memory. Objects are copied by value, so that nothing which happens later
changes a capture. What is no state of an episode is left out and found again, by its path, in the environment that
the capture is put back into:

* locks, thread pools, functions, classes and modules that cannot be pickled: the environment keeps its own;
* files (their position is kept), sockets, databases in files, processes, threads: likewise, but a copy of the
  environment cannot share them, and a database in a file must not have been written to since;
* an SQLite database in memory is data: its content is captured and written back into the connection;
* attributes named in a class attribute ``__fork_ignore__ = ("cache", ...)`` of any object.

Generators, coroutines, cursors, weak references and whatever else cannot be pickled raise ``SnapshotError``.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, TypeAlias

import gymnasium
from gymnasium.utils import EzPickle

from turntree.envs import values
from turntree.errors import SnapshotError

__all__ = ["Capture", "Handle", "capture", "duplicate", "path_text"]

Kind = Literal["lock", "shared", "connection", "database", "ignored", "refused"]
Step: TypeAlias = tuple[Literal["layer", "attr", "item"], Any]
Path: TypeAlias = tuple[Step, ...]
Fields: TypeAlias = dict[str, Any]

CONFIGURATION = frozenset({
    "env", "spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs",
    "action_space", "observation_space", "_action_space", "_observation_space",
})  # fmt: skip
"""Attributes of an environment or wrapper that are set once: never part of its state."""

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
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, list, dict, tuple, set, frozenset, complex})


@dataclass(frozen=True, slots=True)
class Handle:
    """Something live that a capture leaves out: where it is, what it is, and the data that goes with it."""

    path: Path
    type_name: str
    kind: Kind
    data: Any = None


@dataclass(frozen=True, slots=True)
class Capture:
    """The captured fields of some layers of an environment, and an extra value. Immutable and picklable."""

    data: bytes
    handles: tuple[Handle, ...] = ()

    def load(self, layers: Sequence[Any]) -> tuple[dict[int, Fields], Any]:
        """The fields of each captured layer and the extra value, attached to the handles of ``layers``.

        Raises ``SnapshotError`` when one of the handles is not there.
        """
        found = [_find_handle(layers, handle) for handle in self.handles]
        for handle, live in zip(self.handles, found):
            _put_data(live, handle, path_text(handle.path, len(layers)))
        content: tuple[dict[int, Fields], Any] = _Reader(self.data, layers, found).load()
        return content

    def restore(self, layers: Sequence[Any]) -> Any:
        """Write the captured fields into ``layers``; returns the extra value."""
        fields, extra = self.load(layers)
        for index, taken in fields.items():
            state = vars(layers[index])
            for name in [name for name in state if name not in taken and name not in _kept(layers[index])]:
                del state[name]
            state.update(taken)
        return extra

    def describe(self) -> Any:
        """The content as JSON-able data for comparisons, whatever it holds."""
        return values.describe(self._read(), special=_ref_form)

    def to_json(self, depth: int) -> Any:
        """JSON-able data; raises ``SnapshotError`` naming what has no JSON form. ``depth``: the number of layers."""
        try:
            content = values.encode(self._read(), special=_ref_form)
        except SnapshotError as error:
            message = re.sub(r"^\[0\]\[(\d+)\]\['(\w+)'\]", lambda found: _field(found, depth), str(error))
            raise SnapshotError(message.replace("[1]", "the environment's own state", 1)) from error
        return {
            "values": content,
            "handles": [values.encode((h.path, h.type_name, h.kind, h.data)) for h in self.handles],
        }

    @staticmethod
    def from_json(data: Any) -> Capture:
        """The inverse of :meth:`to_json`; raises ``SnapshotError`` on anything else."""
        content = values.decode(data["values"], special=_Ref.of)
        buffer = io.BytesIO()
        _RefWriter(buffer, protocol=5).dump(content)
        return Capture(buffer.getvalue(), tuple(Handle(*values.decode(row)) for row in data["handles"]))

    def _read(self) -> Any:
        return _Reader(self.data, _Refs("layer"), _Refs("handle")).load()


def _field(found: re.Match[str], depth: int) -> str:
    return path_text((("layer", int(found[1])), ("attr", found[2])), depth)


@dataclass(frozen=True)
class _Ref:
    """Stands for a layer or a handle in content that is attached to no environment; ``member``: for its method."""

    kind: str
    index: int
    member: str = ""

    def __getattr__(self, name: str) -> _Ref:
        if name.startswith("__") and name not in ("__enter__", "__exit__"):
            raise AttributeError(name)
        return _Ref(self.kind, self.index, name)

    @staticmethod
    def of(kind: str, body: Any) -> _Ref:
        return _Ref(kind, *body) if isinstance(body, list) else _Ref(kind, body)


class _Refs(Sequence[_Ref]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getitem__(self, index: Any) -> Any:
        return _Ref(self.kind, index)

    def __len__(self) -> int:
        return sys.maxsize


def _ref_form(value: Any) -> Any:
    if not isinstance(value, _Ref):
        return None
    return {value.kind: [value.index, value.member] if value.member else value.index}


class _RefWriter(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return (obj.kind, obj.index) if isinstance(obj, _Ref) and not obj.member else None

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (_Ref(obj.kind, obj.index), obj.member)) if isinstance(obj, _Ref) else NotImplemented


def capture(layers: Sequence[Any], which: Sequence[int], *, extra: Any = None) -> Capture:
    """Capture the fields of ``layers[i]`` for ``i`` in ``which``, and ``extra``.

    ``layers``: an environment's wrappers, outermost first, and the environment itself. References between layers stay
    references. Raises ``SnapshotError`` naming the attribute that cannot be captured.
    """
    fields = {index: _state(layers[index]) for index in which}
    return _write(layers, (fields, extra))


def duplicate(layers: Sequence[Any]) -> list[Any]:
    """New objects in the same state, with locks of their own; raises ``SnapshotError`` naming what cannot be shared."""
    fields = {i: {k: v for k, v in vars(e).items() if k not in _shared(e)} for i, e in enumerate(layers)}
    taken = _write(layers, (fields, None))
    handles = [_second(_resolve(layers, handle.path), handle, len(layers)) for handle in taken.handles]
    twins = [object.__new__(type(layer)) for layer in layers]
    copied, _ = _Reader(taken.data, twins, handles).load()
    for index, twin in enumerate(twins):
        vars(twin).update({k: v for k, v in vars(layers[index]).items() if k in _shared(layers[index])})
        vars(twin).update(copied[index])
        if index + 1 < len(twins):
            twin.env = twins[index + 1]
    return twins


def path_text(path: Path, depth: int) -> str:
    """A path as an expression, ``env.unwrapped.session.lock``; ``depth``: the number of layers."""
    text = ""
    for kind, key in path:
        if kind == "layer":
            text = "env.unwrapped" if key == depth - 1 else "env" + ".env" * key
        else:
            text += f".{key}" if kind == "attr" else f"[{key!r}]"
    return text


# -- writing -------------------------------------------------------------------------------------------------


class _Ignored:
    """Stands for an attribute that its class lists in ``__fork_ignore__``."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name


class _Writer(pickle.Pickler):
    """A pickler that leaves out layers and handles, and remembers what it saw last."""

    def __init__(self, file: io.BytesIO, layers: Sequence[Any]) -> None:
        super().__init__(file, protocol=5)
        self.layers = {id(layer): index for index, layer in enumerate(layers)}
        self.handles: list[tuple[Any, Kind]] = []
        self.numbers: dict[int, int] = {}
        self.last: Any = None

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return None
        self.last = obj
        layer = self.layers.get(id(obj))
        if layer is not None:
            return ("layer", layer)
        found = _kind(obj)
        if found is None:
            return None
        if found == "refused":
            raise TypeError(f"cannot capture {kind.__name__!r} object")
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.handles)
            self.handles.append((obj, found))
        return ("handle", self.numbers[id(obj)])

    def reducer_override(self, obj: Any) -> Any:
        ignored = getattr(type(obj), "__fork_ignore__", ())
        if not ignored and not isinstance(obj, (gymnasium.Env, EzPickle)):
            return NotImplemented
        # EzPickle would build the object anew, without its state.
        state = {k: _Ignored(obj, k) if k in ignored else v for k, v in vars(obj).items()}
        return copyreg.__newobj__, (type(obj),), state, None, None, _set_state  # type: ignore[attr-defined]


class _Reader(pickle.Unpickler):
    """Reads what a :class:`_Writer` of this process, or of one that this process trusts, wrote."""

    def __init__(self, data: bytes, layers: Sequence[Any], handles: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.sources = {"layer": layers, "handle": handles}

    def persistent_load(self, pid: Any) -> Any:
        return self.sources[pid[0]][pid[1]]


def _write(layers: Sequence[Any], value: Any) -> Capture:
    buffer = io.BytesIO()
    writer = _Writer(buffer, layers)
    try:
        writer.dump(value)
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError, NotImplementedError) as error:
        raise _refusal(layers, writer.last, error) from error
    paths = _paths(layers, [obj for obj, _ in writer.handles])
    handles = (_handle(obj, kind, path) for (obj, kind), path in zip(writer.handles, paths))
    return Capture(buffer.getvalue(), tuple(handles))


def _set_state(obj: Any, state: Fields) -> None:
    vars(obj).update(state)


def _state(layer: Any) -> Fields:
    kept = _kept(layer)
    return {name: value for name, value in vars(layer).items() if name not in kept}


def _kept(layer: Any) -> frozenset[str]:
    """Names of a layer's attributes that are not part of its state."""
    return CONFIGURATION.union(getattr(type(layer), "__fork_ignore__", ()))


def _shared(layer: Any) -> frozenset[str]:
    """Names of a layer's attributes that copies share."""
    return frozenset({"env", "spec", "_cached_spec", *getattr(type(layer), "__fork_ignore__", ())})


def _refusal(layers: Sequence[Any], culprit: Any, error: Exception) -> SnapshotError:
    path = _paths(layers, [culprit])[0] if culprit is not None else ()
    where = path_text(path, len(layers)) if path else "something inside the environment"
    return SnapshotError(
        f"{where} is a {_type_name(culprit)}, which cannot be captured as data ({error}). Give the environment "
        "get_state() and set_state(state), or list the attribute in __fork_ignore__ of its class if it is no state of "
        "an episode, or use Forkable(env, how='replay')"
    )


def _handle(obj: Any, kind: Kind, path: Path) -> Handle:
    return Handle(path, _type_name(obj.owner if kind == "ignored" else obj), kind, _get_data(obj, kind))


# -- kinds ---------------------------------------------------------------------------------------------------


def _kind(obj: Any) -> Kind | None:
    if isinstance(obj, (FunctionType, type)):
        return None if _importable(obj) else "shared"
    return _kind_of_type(type(obj))  # type: ignore[arg-type]  # mypy takes a type[Any] for not hashable


@functools.lru_cache(maxsize=4096)
def _kind_of_type(cls: type) -> Kind | None:
    if cls is _Ignored:
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


def _type_name(obj: Any) -> str:
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


# -- paths ---------------------------------------------------------------------------------------------------


def _paths(layers: Sequence[Any], wanted: Sequence[Any]) -> list[Path]:
    """The shortest path to each object, or an empty one; breadth first over everything that the layers hold."""
    missing = {id(obj.owner if isinstance(obj, _Ignored) else obj) for obj in wanted}
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
    if isinstance(obj, _Ignored):
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


def _resolve(layers: Sequence[Any], path: Path) -> Any:
    """What stands at ``path``; raises ``LookupError`` or ``AttributeError``."""
    if not path:
        raise LookupError("a handle without a path")
    obj: Any = None
    for kind, key in path:
        obj = layers[key] if kind == "layer" else getattr(obj, key) if kind == "attr" else obj[key]
    return obj


# -- handles -------------------------------------------------------------------------------------------------


def _find_handle(layers: Sequence[Any], handle: Handle) -> Any:
    where = path_text(handle.path, len(layers)) or "somewhere inside"
    try:
        live = _resolve(layers, handle.path)
    except (LookupError, AttributeError, TypeError) as error:
        raise SnapshotError(
            f"the snapshot left out {where} ({handle.type_name}), and this environment has nothing there to attach "
            "instead; open such handles in __init__, or list the attribute in __fork_ignore__ of its class"
        ) from error
    if handle.kind != "ignored" and _type_name(live) != handle.type_name:
        raise SnapshotError(
            f"expected {where} to be a {handle.type_name}, as where the snapshot was taken, found a {_type_name(live)}"
        )
    return live


def _second(live: Any, handle: Handle, depth: int) -> Any:
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


def _get_data(obj: Any, kind: Kind) -> Any:
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


def _put_data(live: Any, handle: Handle, where: str) -> None:
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
