"""Tasks are values: what an episode is about, immutable and shareable between forks."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turntree.envs.history import History

__all__ = ["EMPTY", "FrozenDict", "Question", "freeze", "thaw"]


class FrozenDict(Mapping[str, Any]):
    """A read-only, hashable-by-value, picklable mapping (``types.MappingProxyType`` cannot be pickled)."""

    __slots__ = ("_data",)
    _data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        frozen = {str(k): v if type(v) in _PLAIN else freeze(v) for k, v in data.items()} if data else {}
        object.__setattr__(self, "_data", frozen)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"FrozenDict is read-only; cannot set {name!r}")

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    # Mapping has these two as well; they are asked for in every turn, and go by way of __getitem__ there.
    def get(self, key: str, default: Any = None) -> Any:
        return self._data.get(key, default)

    def items(self) -> ItemsView[str, Any]:
        return self._data.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __hash__(self) -> int:
        return hash(frozenset(self._data.items()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenDict):
            return self._data == other._data
        return NotImplemented

    def __repr__(self) -> str:
        return f"FrozenDict({self._data!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (thaw(self),))


EMPTY = FrozenDict()
"""What values are made with that have nothing to say: one for all, it cannot change."""

#: The one key of the JSON form of a :class:`History`, which is no list: it is shared by what grows from it.
_HISTORY = "$history"

# Most values. Here and below: telling them by their type is many times quicker than asking whether they are mappings.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def freeze(value: Any) -> Any:
    """Turn nested dicts and lists into :class:`FrozenDict` and tuples; other values pass through.

    What :func:`thaw` made of a :class:`History` is one again.
    """
    kind = type(value)
    if kind in _PLAIN or kind is FrozenDict:
        return value
    if kind is tuple or kind is list:
        return tuple(freeze(v) for v in value)
    if isinstance(value, Mapping):
        return History(freeze(v) for v in value[_HISTORY]) if value.keys() == {_HISTORY} else FrozenDict(value)
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    return value


def thaw(value: Any) -> Any:
    """The plain JSON-able form of a frozen value: dicts and lists."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is FrozenDict:
        return {k: thaw(v) for k, v in value._data.items()}
    if kind is tuple or kind is list:
        return [thaw(v) for v in value]
    if isinstance(value, History):
        return {_HISTORY: [thaw(v) for v in value]}
    if isinstance(value, Mapping):
        return {k: thaw(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(v) for v in value]
    return value


@dataclass(frozen=True, slots=True)
class Question:
    """One question with every acceptable answer.

    ``metadata`` may carry ``hops``, ``type``, ``supporting_ids`` and, for generated worlds, ``steps``: the ordered
    gold steps, each ``{"query": str, "supporting_id": str, "answer": str}``.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    metadata: FrozenDict = EMPTY

    def __deepcopy__(self, memo: dict[int, Any]) -> Question:
        """Itself: Gymnasium copies the arguments that an environment is made of, thousands of questions among them."""
        return self

    def to_json(self) -> dict[str, Any]:
        """FlashRAG's row: ``id, question, golden_answers, metadata``."""
        return {
            "id": self.id,
            "question": self.question,
            "golden_answers": list(self.golden_answers),
            "metadata": thaw(self.metadata),
        }

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Question:
        """The inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``AttributeError`` for another row."""
        asked, golds = row["question"], row["golden_answers"]
        if not isinstance(asked, str):
            raise TypeError(f"question is {asked!r:.80}, expected a text")
        if not isinstance(golds, (list, tuple)) or not all(isinstance(gold, str) for gold in golds):
            raise TypeError(f"golden_answers is {golds!r:.80}, expected a list of texts")
        return Question(
            id=str(row["id"]),
            question=asked,
            golden_answers=tuple(golds),
            metadata=FrozenDict(row.get("metadata") or {}),
        )
