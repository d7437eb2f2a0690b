"""A text space that holds every string: Gymnasium's ``Text`` knows a fixed alphabet only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import ModuleType
from typing import Any, overload

import numpy as np
from gymnasium.spaces import Text
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from numpy.typing import NDArray

__all__ = ["UnicodeText"]

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!-'\n<>/éüßçñ中文红楼梦作者是谁？。👍🌲"
_SHARED_CHARACTERS = 1 << 17


class UnicodeText(Text):
    """Every ``str``: any script, emoji, newlines, any length, the empty string too.

    ``sample()`` draws short texts from an alphabet that mixes scripts; with ``examples`` half of the draws are one of
    those, so that random play reaches more than malformed turns. Two spaces with equal examples are equal.
    """

    def __init__(self, *, examples: Sequence[str] = (), seed: int | np.random.Generator | None = None) -> None:
        self.examples = tuple(examples)
        super().__init__(max_length=_SHARED_CHARACTERS, min_length=0, charset=_ALPHABET, seed=seed)

    def sample(
        self,
        mask: tuple[int | None, NDArray[np.int8] | None] | None = None,
        probability: tuple[int | None, NDArray[np.float64] | None] | None = None,
    ) -> str:
        """A random text of at most 48 characters, or an example; reproducible after ``seed()``."""
        if mask is not None or probability is not None:
            return super().sample(mask, probability)
        if self.examples and self.np_random.random() < 0.5:
            return self.examples[int(self.np_random.integers(len(self.examples)))]
        length = int(self.np_random.integers(0, 49))
        picks = self.np_random.integers(len(self.character_list), size=length)
        return "".join(self.character_list[int(i)] for i in picks)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string."""
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> UnicodeText:
        """A space with a random state of its own; everything else never changes and is shared."""
        twin = copy.copy(self)
        twin._np_random = copy.deepcopy(self._np_random)
        return twin

    def __repr__(self) -> str:
        return f"UnicodeText(examples={self.examples!r})" if self.examples else "UnicodeText()"

    def __eq__(self, other: object, /) -> bool:
        return isinstance(other, UnicodeText) and self.examples == other.examples


# AsyncVectorEnv moves observations through shared memory. Gymnasium's handlers for Text write positions in its
# alphabet and read them once, when the memory is made; ours write the length, then code points, and read when copied.


class _SharedTexts(Sequence[str]):
    """The texts that are in shared memory now; a (deep) copy is a plain tuple of them."""

    def __init__(self, rows: NDArray[np.int32]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        row = self._rows[index]
        return "".join(map(chr, row[1 : 1 + row[0]].tolist()))

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)


@create_shared_memory.register(UnicodeText)
def _create(space: UnicodeText, n: int = 1, ctx: ModuleType | None = None) -> Any:
    import multiprocessing

    return (ctx or multiprocessing).Array("i", n * (space.max_length + 1))


@read_from_shared_memory.register(UnicodeText)
def _read(space: UnicodeText, shared_memory: Any, n: int = 1) -> Any:
    return _SharedTexts(np.frombuffer(shared_memory.get_obj(), dtype=np.int32).reshape(n, space.max_length + 1))


@write_to_shared_memory.register(UnicodeText)
def _write(space: UnicodeText, index: int, value: str, shared_memory: Any) -> None:
    if len(value) > space.max_length:
        raise ValueError(
            f"a text of {len(value)} characters does not fit into the shared memory of a vector environment "
            f"({space.max_length}); make it with shared_memory=False"
        )
    rows = np.frombuffer(shared_memory.get_obj(), dtype=np.int32).reshape(-1, space.max_length + 1)
    rows[index, 0] = len(value)
    rows[index, 1 : 1 + len(value)] = [ord(character) for character in value]
