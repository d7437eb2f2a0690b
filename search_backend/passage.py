"""What a search returns, and the protocol of whatever can search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["Passage", "SearchBackend"]


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved passage.

    ``score`` is the backend's own relevance (higher is better; its scale is the backend's), or None.
    """

    id: str
    title: str
    text: str
    score: float | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Passage:
        """Itself: Gymnasium copies the arguments that an environment is made of, a corpus among them."""
        return self


@runtime_checkable
class SearchBackend(Protocol):
    """Anything that finds passages for a batch of queries."""

    @property
    def fingerprint(self) -> str:
        """A short stable hash of corpus and settings: equal fingerprints give equal results."""
        ...

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """Find up to ``k`` passages for each query, best first; one list per query, in the same order.

        An empty list means that nothing matched. Failures raise :class:`turntree.errors.RetrievalError`;
        they are never an empty result.
        """
        ...
