"""A sequence that forks share: appending leaves what was there as it is, and copies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["History"]

T = TypeVar("T")


class History(Generic[T]):
    """A persistent sequence: appending is O(1) and shares everything before, so forks share their past.

    Iterates oldest first. Equal when the items are equal. Pickles as a flat tuple, whatever its length.
    """

    __slots__ = ("_item", "_length", "_parent")
    _item: T
    _parent: History[T] | None
    _length: int

    def __init__(self, items: Iterable[T] = ()) -> None:
        tail: History[T] | None = None
        for item in items:
            tail = _link(tail, item)
        if tail is None:
            object.__setattr__(self, "_length", 0)
            object.__setattr__(self, "_parent", None)
        else:
            _fill(self, tail._parent, tail._item)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"History is immutable; cannot set {name!r}")

    def append(self, item: T) -> History[T]:
        """A history with one more item; this one is unchanged."""
        return _link(self if self._length else None, item)

    @property
    def last(self) -> T:
        """The newest item; raises ``IndexError`` when empty."""
        if not self._length:
            raise IndexError("the history is empty")
        return self._item

    def newest_first(self) -> Iterator[T]:
        """The items from the newest to the oldest, without building a list."""
        node: History[T] | None = self if self._length else None
        while node is not None:
            yield node._item
            node = node._parent

    def __iter__(self) -> Iterator[T]:
        return reversed(list(self.newest_first()))

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in _pairs(self, other))

    def __hash__(self) -> int:
        return hash((self._length, self._item if self._length else None))

    def __repr__(self) -> str:
        return f"History({list(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (tuple(self),))

    def __copy__(self) -> History[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> History[T]:
        return self


def _link(parent: History[T] | None, item: T) -> History[T]:
    node: History[T] = History.__new__(History)
    _fill(node, parent, item)
    return node


def _fill(node: History[T], parent: History[T] | None, item: T) -> None:
    object.__setattr__(node, "_item", item)
    object.__setattr__(node, "_parent", parent)
    object.__setattr__(node, "_length", 1 + (parent._length if parent is not None else 0))


def _pairs(left: History[Any], right: History[Any]) -> Iterator[tuple[Any, Any]]:
    """Items of two equally long histories, newest first, stopping where they begin to share their past."""
    a: History[Any] | None = left if len(left) else None
    b: History[Any] | None = right if len(right) else None
    while a is not None and b is not None and a is not b:
        yield a._item, b._item
        a, b = a._parent, b._parent
