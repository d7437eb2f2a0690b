"""Snapshots are values; so is what they are made of: a shared history and a counter-based random stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from turntree.envs.core import TurnCore
from turntree.envs.history import History
from turntree.envs.task import EMPTY, FrozenDict, thaw
from turntree.errors import SnapshotError

__all__ = ["FORMAT_VERSION", "History", "RandomStream", "Snapshot"]

FORMAT_VERSION = 1
"""Version of the snapshot format; raised when the meaning of a field changes."""


@dataclass(frozen=True, slots=True)
class RandomStream:
    """A random stream as a value: the ``position``-th draw from a ``seed``, for randomness inside a state."""

    seed: int
    position: int = 0

    def draw(self) -> tuple[np.random.Generator, RandomStream]:
        """A generator for this position, and the stream that follows."""
        return np.random.default_rng([self.seed, self.position]), RandomStream(self.seed, self.position + 1)

    def to_json(self) -> list[int]:
        return [self.seed, self.position]

    @staticmethod
    def from_json(data: Iterable[int]) -> RandomStream:
        """The inverse of :meth:`to_json`; raises ``ValueError`` or ``TypeError`` on anything else."""
        seed, position = data
        if not isinstance(seed, int) or not isinstance(position, int) or min(seed, position) < 0:
            raise ValueError(f"expected a seed and a position that are not negative, found {[seed, position]!r:.80}")
        return RandomStream(seed, position)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole state of an environment as an immutable value.

    It holds the core's own state by reference (taking one is O(1) in the length of the episode), the last
    observation and info, whether the episode is over, the random state of the environment, the format version and
    the fingerprint of the environment it belongs to. No live handles: it can be pickled, and written as JSON.
    """

    fingerprint: str
    state: Any
    observation: str
    info: FrozenDict = EMPTY
    done: bool = False
    np_random: FrozenDict = EMPTY
    version: int = FORMAT_VERSION

    FIELDS: ClassVar[tuple[str, ...]] = ("version", "fingerprint", "state", "observation", "info", "done", "np_random")

    def check(self, fingerprint: str) -> None:
        """Raise ``SnapshotError`` unless this snapshot can be restored into an environment with ``fingerprint``."""
        _check_version(self.version)
        _check_fingerprint(self.fingerprint, fingerprint)

    def to_json(self, core: TurnCore[Any]) -> dict[str, Any]:
        """JSON-able data; ``core`` encodes the state. :meth:`from_json` gives an equal snapshot back."""
        self.check(core.fingerprint)
        return {
            "version": self.version,
            "fingerprint": self.fingerprint,
            "state": core.encode_state(self.state),
            "observation": self.observation,
            "info": thaw(self.info),
            "done": self.done,
            "np_random": thaw(self.np_random),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], core: TurnCore[Any]) -> Snapshot:
        """The inverse of :meth:`to_json`. Raises ``SnapshotError`` on another version, environment or shape.

        What is read must be what was written: a state that the core would write differently is refused, never bent.
        """
        if not isinstance(data, Mapping):
            raise SnapshotError(f"expected a snapshot as a JSON object, found {type(data).__name__}")
        _check_version(data.get("version"))
        missing = [name for name in Snapshot.FIELDS if name not in data]
        if missing:
            raise SnapshotError(f"the snapshot lacks {', '.join(missing)}; it was cut off or is something else")
        _check_fingerprint(data["fingerprint"], core.fingerprint)
        for name, kind in _KINDS.items():
            if not isinstance(data[name], kind):
                raise SnapshotError(f"the snapshot's {name}: expected {_WORDS[kind]}, found {data[name]!r:.80}")
        try:
            state = core.decode_state(data["state"])
            again = core.encode_state(state)
            if again != data["state"] and json.dumps(again) != json.dumps(data["state"]):
                raise ValueError("it would be written differently than it was found: it was changed or damaged")
            return Snapshot(
                fingerprint=data["fingerprint"],
                state=state,
                observation=data["observation"],
                info=FrozenDict(data["info"]),
                done=data["done"],
                np_random=FrozenDict(data["np_random"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SnapshotError(
                f"expected a snapshot of this environment, found something that cannot be read "
                f"({type(error).__name__}: {error})"
            ) from error


_KINDS: dict[str, type] = {"observation": str, "info": Mapping, "done": bool, "np_random": Mapping}
_WORDS: dict[type, str] = {str: "a text", Mapping: "an object", bool: "true or false"}


def _check_fingerprint(found: object, expected: str) -> None:
    if found != expected:
        raise SnapshotError(
            f"the snapshot belongs to an environment with fingerprint {found!r}, but this one has {expected!r}: "
            "limits, grammar, reward, tools or corpus differ. Restore it into an environment that was built with the "
            "same arguments"
        )


def _check_version(version: object) -> None:
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise SnapshotError(
            f"expected snapshot format version {FORMAT_VERSION}, found {version!r}; take the snapshot again with "
            "this version of turntree, or restore it with the version that wrote it"
        )
