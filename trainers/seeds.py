"""Seeds that name what they are for, so that no draw depends on the order in which work happens."""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

import numpy as np

__all__ = ["SeedPart", "derive_rng", "derive_seed"]

SeedPart: TypeAlias = "int | str | tuple[SeedPart, ...]"
"""What a seed is derived from."""


def _encode(part: SeedPart) -> bytes:
    # Every part carries its type and length: ("ab", "c") and ("a", "bc"), or 1 and "1", never collide.
    if isinstance(part, tuple):
        body = b"".join(map(_encode, part))
        return b"t%d:%b" % (len(part), body)
    if isinstance(part, str):
        text = part.encode("utf-8", "surrogatepass")
        return b"s%d:%b" % (len(text), text)
    return b"i%d;" % int(part)


def derive_seed(*parts: SeedPart) -> int:
    """A seed in ``[0, 2**63)`` that depends on ``parts`` only: equal on any machine, process and run."""
    return int.from_bytes(blake2b(_encode(parts), digest_size=8).digest(), "big") >> 1


def derive_rng(*parts: SeedPart) -> np.random.Generator:
    """An own generator seeded with :func:`derive_seed`."""
    return np.random.default_rng(derive_seed(*parts))
