"""A random stream whose draws are the same on every machine and Python version."""

from __future__ import annotations

import hashlib
from collections.abc import MutableSequence, Sequence
from random import Random
from typing import TypeVar

__all__ = ["Stream"]

T = TypeVar("T")


class Stream:
    """Integer draws from the Mersenne Twister, seeded from a text.

    Only ``Random.getrandbits`` is used: its values are fixed, while ``choice``, ``shuffle`` and numpy's generators may
    change between versions. Seeds pass through SHA-256, never through ``hash``.
    """

    def __init__(self, *key: object) -> None:
        digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
        self._bits = Random(int.from_bytes(digest, "big")).getrandbits

    def below(self, n: int) -> int:
        """A uniform integer of ``[0, n)``, by rejection."""
        if n < 1:
            raise ValueError(f"expected n >= 1 to draw below, found {n}")
        width = n.bit_length()
        while (value := self._bits(width)) >= n:
            pass
        return value

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._bits(53) < probability * 2**53

    def pick(self, items: Sequence[T]) -> T:
        """One item, uniformly."""
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Shuffle in place (Fisher-Yates)."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """``n`` different items in random order."""
        pool = list(items)
        self.shuffle(pool)
        return pool[:n]
