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
import io
import pickle
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
from gymnasium.utils import EzPickle

from turntree.envs import values
from turntree.envs.handles import (
    Handle,
    Ignored,
    Kind,
    Path,
    find_handle,
    find_paths,
    get_data,
    kind_of,
    path_text,
    put_data,
    resolve,
    second,
    type_name,
)
from turntree.errors import SnapshotError

__all__ = ["Capture", "Handle", "capture", "duplicate", "path_text"]

Fields: TypeAlias = dict[str, Any]

CONFIGURATION = frozenset({
    "env", "spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs",
    "action_space", "observation_space", "_action_space", "_observation_space",
})  # fmt: skip
"""Attributes of an environment or wrapper that are set once: never part of its state."""

_PLAIN = frozenset({str, int, float, bool, type(None), bytes, list, dict, tuple, set, frozenset, complex})


@dataclass(frozen=True, slots=True)
class Capture:
    """The captured fields of some layers of an environment, and an extra value. Immutable and picklable."""

    data: bytes
    handles: tuple[Handle, ...] = ()

    def load(self, layers: Sequence[Any]) -> tuple[dict[int, Fields], Any]:
        """The fields of each captured layer and the extra value, attached to the handles of ``layers``.

        Raises ``SnapshotError`` when one of the handles is not there.
        """
        found = [find_handle(layers, handle) for handle in self.handles]
        for handle, live in zip(self.handles, found):
            put_data(live, handle, path_text(handle.path, len(layers)))
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
    handles = [second(resolve(layers, handle.path), handle, len(layers)) for handle in taken.handles]
    twins = [object.__new__(type(layer)) for layer in layers]
    copied, _ = _Reader(taken.data, twins, handles).load()
    for index, twin in enumerate(twins):
        vars(twin).update({k: v for k, v in vars(layers[index]).items() if k in _shared(layers[index])})
        vars(twin).update(copied[index])
        if index + 1 < len(twins):
            twin.env = twins[index + 1]
    return twins


# -- writing -------------------------------------------------------------------------------------------------


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
        found = kind_of(obj)
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
        state = {k: Ignored(obj, k) if k in ignored else v for k, v in vars(obj).items()}
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
    paths = find_paths(layers, [obj for obj, _ in writer.handles])
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
    path = find_paths(layers, [culprit])[0] if culprit is not None else ()
    where = path_text(path, len(layers)) if path else "something inside the environment"
    return SnapshotError(
        f"{where} is a {type_name(culprit)}, which cannot be captured as data ({error}). Give the environment "
        "get_state() and set_state(state), or list the attribute in __fork_ignore__ of its class if it is no state of "
        "an episode, or use Forkable(env, how='replay')"
    )


def _handle(obj: Any, kind: Kind, path: Path) -> Handle:
    return Handle(path, type_name(obj.owner if kind == "ignored" else obj), kind, get_data(obj, kind))
