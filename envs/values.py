"""Values of any environment: compared, digested, and written as JSON without loss."""

from __future__ import annotations

import base64
import hashlib
import math
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from turntree.errors import SnapshotError

__all__ = ["decode", "describe", "difference", "digest", "encode", "rebuild_generator"]

Unknown: TypeAlias = Callable[["_Encoder", Any, str], Any]

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


# -- JSON ----------------------------------------------------------------------------------------------------


def encode(value: Any, *, special: Callable[[Any], Any] | None = None, where: str = "") -> Any:
    """``value`` as JSON-able data from which :func:`decode` builds an equal value: keys, tuples and sharing kept.

    Numbers, texts, bytes, containers of the standard library, numpy arrays, scalars and generators. ``special`` may
    give the JSON form of other objects, or None. Raises ``SnapshotError`` naming the path (after ``where``) and the
    type of what has no such form.
    """
    return _Encoder(special, _refuse).encode(value, where)


def describe(value: Any, *, special: Callable[[Any], Any] | None = None) -> Any:
    """Like :func:`encode`, but an object of another type becomes its type's name and its attributes."""
    return _Encoder(special, _open).encode(value, "")


def decode(data: Any, *, special: Callable[[str, Any], Any] | None = None) -> Any:
    """The inverse of :func:`encode`; raises ``SnapshotError`` on anything else."""
    try:
        return _Decoder(special).decode(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"expected a value written by turntree, found {data!r:.100} ({error})") from error


class _Encoder:
    """One walk; what can be changed and is met twice becomes a reference to the first time."""

    def __init__(self, special: Callable[[Any], Any] | None, unknown: Unknown) -> None:
        self.special = special
        self.unknown = unknown
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []

    def encode(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) in (tuple, frozenset, bytes, complex):
            return self.immutable(value, where)
        if self.special is not None and (found := self.special(value)) is not None:
            return found
        if isinstance(value, np.generic):
            return {"scalar": [value.dtype.str, _text(value.tobytes())]}
        if id(value) in self.numbers:
            return {"ref": self.numbers[id(value)]}
        self.numbers[id(value)] = len(self.alive)
        self.alive.append(value)
        return self.mutable(value, where)

    def immutable(self, value: Any, where: str) -> Any:
        if type(value) is bytes:
            return {"bytes": _text(value)}
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        return {type(value).__name__: self.items(value, where)}

    def mutable(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is list:
            return {"list": self.items(value, where)}
        if kind in (dict, OrderedDict):
            rows = [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return {"dict" if kind is dict else "ordered": rows}
        if kind is set:
            return {"set": self.items(value, where)}
        if kind is deque:
            return {"deque": [value.maxlen, *self.items(value, where)]}
        if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
            return {"array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
        if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
            return {"random": _random_state(value)}
        return self.unknown(self, value, where)

    def items(self, values: Any, where: str) -> list[Any]:
        if isinstance(values, (set, frozenset)):
            values = sorted(values, key=repr)
        return [self.encode(item, f"{where}[{index}]") for index, item in enumerate(values)]


def _refuse(encoder: _Encoder, value: Any, where: str) -> Any:
    raise SnapshotError(
        f"{where or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which has no JSON form; "
        "keep the snapshot as an object (it can be pickled), or store plain numbers, texts, containers and arrays there"
    )


def _open(encoder: _Encoder, value: Any, where: str) -> Any:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    fields = getattr(value, "__dict__", None)
    if fields is None:
        return {"object": [name, _pickled_digest(value)]}
    return {"object": [name, {key: encoder.encode(item, f"{where}.{key}") for key, item in fields.items()}]}


class _Decoder:
    def __init__(self, special: Callable[[str, Any], Any] | None) -> None:
        self.special = special
        self.seen: list[Any] = []

    def decode(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ((tag, body),) = data.items()
        if tag == "ref":
            return self.seen[body]
        if tag in ("list", "dict", "ordered", "set", "deque", "array", "random"):
            return self.mutable(tag, body)
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([self.decode(item) for item in body])
        if tag == "float":
            return float(body)
        if tag == "bytes":
            return base64.b64decode(body)
        if tag == "complex":
            return complex(*body)
        if tag == "scalar":
            return np.frombuffer(base64.b64decode(body[1]), dtype=np.dtype(body[0]))[0]
        if self.special is None:
            raise ValueError(f"unknown tag {tag!r}")
        return self.special(tag, body)

    def mutable(self, tag: str, body: Any) -> Any:
        empty: Any
        if tag == "array":
            flat = np.frombuffer(base64.b64decode(body[2]), dtype=np.dtype(body[0])).copy()
            empty = flat.reshape(body[1])
        elif tag == "random":
            empty = rebuild_generator(body)
        else:
            empty = {"list": list, "dict": dict, "ordered": OrderedDict, "set": set}.get(tag, deque)()
            empty = deque(maxlen=body[0]) if tag == "deque" else empty
        self.seen.append(empty)
        if tag in ("list", "deque"):
            empty.extend(self.decode(item) for item in (body[1:] if tag == "deque" else body))
        elif tag == "set":
            empty.update(self.decode(item) for item in body)
        elif tag in ("dict", "ordered"):
            for key, item in body:
                name = self.decode(key)
                empty[name] = self.decode(item)
        return empty


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _random_state(value: Any) -> Any:
    """The state of a generator as nested plain data, arrays as lists."""
    if isinstance(value, random.Random):
        version, numbers, gauss = value.getstate()
        return ["Random", [version, list(numbers), gauss]]
    if isinstance(value, np.random.RandomState):
        return ["RandomState", _plain(value.get_state(legacy=False))]
    return ["Generator", _plain(value.bit_generator.state)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def rebuild_generator(data: Any) -> Any:
    """The generator whose state :func:`encode` wrote."""
    kind, state = data
    if kind == "Random":
        stream = random.Random()
        stream.setstate((state[0], tuple(state[1]), state[2]))
        return stream
    if kind == "RandomState":
        legacy = np.random.RandomState()
        legacy.set_state(state)
        return legacy
    bits = getattr(np.random, state["bit_generator"], None)
    if not (isinstance(bits, type) and issubclass(bits, np.random.BitGenerator)):
        raise ValueError(f"unknown bit generator {state['bit_generator']!r}")
    generator = np.random.Generator(bits(0))
    generator.bit_generator.state = state
    return generator


# -- comparing -----------------------------------------------------------------------------------------------


def digest(value: Any) -> bytes:
    """16 bytes that are equal for equal observations and differ for different ones."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher, value)
    return hasher.digest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, (str, bytes, int, float, complex)):
        hasher.update(f"{type(value).__name__}:{value!r};".encode("utf-8", "surrogatepass"))
    elif isinstance(value, (tuple, list)):
        hasher.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, Mapping):
        hasher.update(f"map{len(value)}".encode())
        for key in value:
            _feed(hasher, key)
            _feed(hasher, value[key])
    else:
        hasher.update(_pickled_digest(value).encode())


def _pickled_digest(value: Any) -> str:
    try:
        return hashlib.blake2b(pickle.dumps(value), digest_size=16).hexdigest()
    except (TypeError, AttributeError, pickle.PicklingError):
        return type(value).__qualname__


def difference(expected: Any, found: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two values differ, as ``(path, expected, found)``; None when they are equal."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return _mapping_difference(expected, found, path)
    if isinstance(expected, (list, tuple, deque)) and type(expected) is type(found):
        for index, (left, right) in enumerate(zip(expected, found)):
            if (at := difference(left, right, f"{path}[{index}]")) is not None:
                return at
        return None if len(expected) == len(found) else (f"len({path})" if path else "len", len(expected), len(found))
    return None if _same(expected, found) else (path, expected, found)


def _mapping_difference(expected: Any, found: Any, path: str) -> tuple[str, Any, Any] | None:
    for key in expected:
        if key not in found:
            return f"{path}[{key!r}]", expected[key], _NOTHING
        if (at := difference(expected[key], found[key], f"{path}[{key!r}]")) is not None:
            return at
    extra = [key for key in found if key not in expected]
    return (f"{path}[{extra[0]!r}]", _NOTHING, found[extra[0]]) if extra else None


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, np.ndarray) or isinstance(found, np.ndarray):
        left, right = np.asarray(expected), np.asarray(found)
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
    if isinstance(expected, (float, np.floating)) and isinstance(found, (float, np.floating)):
        return bool(expected == found or (expected != expected and found != found))
    try:
        return bool(expected == found)
    except (TypeError, ValueError):
        return expected is found
