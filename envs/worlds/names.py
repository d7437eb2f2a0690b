"""Names of two made-up words, partitioned so that worlds of different splits can never share one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from turntree.envs.worlds.stream import Stream
from turntree.errors import ConfigError

__all__ = ["LONG", "SHORT", "SPLIT_CLASSES", "NameInventory", "Split", "draw_pairs"]

Split = Literal["train", "dev", "test"]
"""Parts of a world, which share no name."""

_CLASSES = 5
# A name is a pair (i, j) of word numbers; (i + j) mod 5 decides the split it belongs to, whatever the seed.
SPLIT_CLASSES: dict[Split, tuple[int, ...]] = {"train": (0, 1, 2), "dev": (3,), "test": (4,)}


@dataclass(frozen=True, slots=True)
class NameInventory:
    """Syllables of names. A word is a start, a middle (may be empty) and an end; the pieces are those of ``syllables``.

    Words whose piece numbers add up to an even number are first words, the others second words, so that no two
    names hold the same words in another order. ``roman`` writes syllables of another script in Latin letters.
    """

    starts: tuple[str, ...]
    middles: tuple[str, ...]
    ends: tuple[str, ...]
    roman: Mapping[str, str] = field(default_factory=dict)

    @property
    def syllables(self) -> tuple[str, ...]:
        return tuple(s for s in (*self.starts, *self.middles, *self.ends) if s)

    def latin(self, word: str) -> str:
        """A word of names in Latin letters; syllables of other scripts are one character each."""
        return "".join(self.roman[syllable] for syllable in word).capitalize() if self.roman else word

    def words(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All first words and all second words."""
        sides: tuple[list[str], list[str]] = ([], [])
        for i, start in enumerate(self.starts):
            for j, middle in enumerate(self.middles):
                for k, end in enumerate(self.ends):
                    sides[(i + j + k) % 2].append(start + middle + end)
        return tuple(sides[0]), tuple(sides[1])


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Every syllable has two letters, so a name splits into known pieces in one way only. Starts and ends use different
# vowels: they stay different when a tokenizer lower-cases.
SHORT = NameInventory(
    starts=_split("Ba Da Fa Ga Ka La Ma Na Pa Ra Sa Ta Va Za Ke Le Ne Re Te Ve"),
    middles=("",),
    ends=_split("bi di gi ki li mi ni pi ri si bo ko lo mo ro bu du ku lu nu"),
)
LONG = NameInventory(
    starts=_split("""Bal Bren Cor Dal Del Dor Fal Fen Gar Gil Hal Har Jor Kal Kel Lor Mar Mel Mor Nal Nor Or Pel Quin
    Ral Ros Sel Tal Tor Val Vor Wil Yar Zel"""),
    middles=_split("a e i o an en in on ar el"),
    ends=_split("bek dra dorn gan kas len mir nath rick ska thas ton vald via wen zur"),
)
"""Syllables of the names of large worlds."""


def draw_pairs(inventory: NameInventory, n: int, *, split: Split, stream: Stream) -> list[tuple[str, str]]:
    """``n`` different (first word, second word) pairs of the split.

    They come from about ``4 sqrt(n)`` words a side, of all for many names, so that names share a first or second word.
    Raises :class:`ConfigError` when the inventory is too small for ``n``.
    """
    firsts, seconds = inventory.words()
    side = min(len(firsts), len(seconds))
    # Half of the split's pairs at the most: names stay a choice, and drawing them stays quick.
    most = side * side * len(SPLIT_CLASSES[split]) // (2 * _CLASSES)
    if n > most:
        raise ConfigError(f"expected at most {most} entities, found {n}; ask for fewer, or use style 'prose'")
    pool = min(side, max(16, math.isqrt(16 * n)))
    rows = stream.sample(range(len(firsts)), pool)
    columns = stream.sample(range(len(seconds)), pool)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < n:
        i, j = stream.pick(rows), stream.pick(columns)
        if (i + j) % _CLASSES in SPLIT_CLASSES[split]:
            pairs[i, j] = None
    return [(firsts[i], seconds[j]) for i, j in pairs]
