"""From a string to its number, on disk: sorted 64-bit hashes, memory-mapped, so that millions cost no memory."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from turntree.search_backend.files import map_array, write_array

__all__ = ["KeyTable", "key_hash", "write_keys"]


def key_hash(key: bytes) -> int:
    """64 bits that stand for the key; whoever looks it up compares the key itself afterwards."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def write_keys(folder: Path, name: str, hashes: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Write the table of keys 0, 1, ... with these hashes; returns the pairs of numbers whose hashes are equal."""
    order = np.argsort(hashes, kind="stable").astype(np.uint32)
    ordered = hashes[order]
    write_array(folder / f"{name}_hashes.npy", ordered)
    write_array(folder / f"{name}_numbers.npy", order)
    equal = np.flatnonzero(ordered[1:] == ordered[:-1])
    return [(int(order[i]), int(order[i + 1])) for i in equal]


class KeyTable:
    """A table that :func:`write_keys` wrote."""

    def __init__(self, folder: Path, name: str) -> None:
        self._hashes = map_array(folder / f"{name}_hashes.npy")
        self._numbers = map_array(folder / f"{name}_numbers.npy")

    def __len__(self) -> int:
        return len(self._hashes)

    def candidates(self, key: bytes) -> Iterator[int]:
        """Numbers of the keys with this key's hash: hardly ever more than one, and maybe not the key's own."""
        wanted = np.uint64(key_hash(key))
        at = int(np.searchsorted(self._hashes, wanted))
        while at < len(self._hashes) and self._hashes[at] == wanted:
            yield int(self._numbers[at])
            at += 1
