"""Seeds that name what they are for, so that no draw depends on the order in which work happens."""

from __future__ import annotations

import functools
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

__all__ = ["SeedPart", "derive_rng", "derive_seed"]

SeedPart: TypeAlias = "int | str | tuple[SeedPart, ...]"
"""What a seed is derived from."""


@functools.lru_cache(maxsize=4096)  # the same prompts, places and uses come again and again
def _encode(part: SeedPart) -> bytes:
    # Every part carries its type and length: ("ab", "c") and ("a", "bc"), or 1 and "1", never collide.
    if isinstance(part, tuple):
        return _tuple(part)
    if isinstance(part, str):
        text = part.encode("utf-8", "surrogatepass")
        return b"s%d:%b" % (len(text), text)
    return b"i%d;" % int(part)


def _tuple(parts: tuple[SeedPart, ...]) -> bytes:
    return b"t%d:%b" % (len(parts), b"".join([_encode(part) for part in parts]))


def derive_seed(*parts: SeedPart) -> int:
    """A seed in ``[0, 2**63)`` that depends on ``parts`` only: equal on any machine, process and run."""
    return int.from_bytes(blake2b(_tuple(parts), digest_size=8).digest(), "big") >> 1


def derive_rng(*parts: SeedPart) -> np.random.Generator:
    """An own generator seeded with :func:`derive_seed`."""
    return np.random.default_rng(derive_seed(*parts))
