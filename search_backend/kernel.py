"""The inner loop of BM25 search, compiled by numba. Import it where numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["best_rows"]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled, outside the interpreter's lock, and kept beside this file where that can be written."""
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # nowhere to keep it
        compiled = numba.njit(nogil=True)(function)
    return compiled


def _worse_than(score: Any, row: Any, other_score: Any, other_row: Any) -> Any:
    return score < other_score or (score == other_score and row > other_row)


_worse = _compiled(_worse_than)


def _push_onto(scores: Any, rows: Any, size: int, score: Any, row: Any) -> int:
    """Offer a row to a heap of the best rows, whose root is the worst of them; returns its new size."""
    if size < len(rows):
        at = size
        while at > 0 and _worse(score, row, scores[(at - 1) // 2], rows[(at - 1) // 2]):
            up = (at - 1) // 2
            scores[at], rows[at] = scores[up], rows[up]
            at = up
        scores[at], rows[at] = score, row
        return size + 1
    if not _worse(scores[0], rows[0], score, row):
        return size
    at = 0
    while 2 * at + 1 < size:
        down = 2 * at + 1
        if down + 1 < size and _worse(scores[down + 1], rows[down + 1], scores[down], rows[down]):
            down += 1
        if _worse(score, row, scores[down], rows[down]):
            break
        scores[at], rows[at] = scores[down], rows[down]
        at = down
    scores[at], rows[at] = score, row
    return size


_push = _compiled(_push_onto)


def _sort_descending(scores: Any, rows: Any, size: int) -> None:
    """Best first. Few rows, mostly: insertion sort."""
    for i in range(1, size):
        score, row, at = scores[i], rows[i], i
        while at > 0 and _worse(scores[at - 1], rows[at - 1], score, row):
            scores[at], rows[at] = scores[at - 1], rows[at - 1]
            at -= 1
        scores[at], rows[at] = score, row


_sort = _compiled(_sort_descending)


def _best_rows(
    data: Any, indices: Any, indptr: Any, terms: Any, starts: Any, begin: int, end: int, buffer: Any, rows: Any,
    scores: Any, counts: Any,
) -> None:  # fmt: skip
    """Fill ``rows``, ``scores`` [queries, k] and ``counts`` [queries] of the queries from ``begin`` to ``end``.

    ``terms[starts[q] : starts[q + 1]]`` are query ``q``'s; ``buffer`` float32 [passages] holds zeros, before and
    after. Best first, equal scores in row order.
    """
    for q in range(begin, end):
        # Views are made once: one a passage would cost more than the scoring.
        best_scores, best, words = scores[q], rows[q], terms[starts[q] : starts[q + 1]]
        touched = 0
        for t in words:
            touched += indptr[t + 1] - indptr[t]
            for j in range(indptr[t], indptr[t + 1]):
                buffer[indices[j]] += data[j]
        size, worst = 0, buffer.dtype.type(0.0)
        if 8 * touched < len(buffer):  # few postings: only the rows that they name are looked at
            for t in words:
                for j in range(indptr[t], indptr[t + 1]):
                    row = indices[j]
                    score = buffer[row]
                    buffer[row] = 0.0  # seen
                    if score > 0.0 and score >= worst:
                        size = _push(best_scores, best, size, score, row)
                        worst = best_scores[0] if size == len(best) else worst
        else:  # in order, so that an equal score is never better
            for row in range(len(buffer)):
                if buffer[row] > worst:
                    size = _push(best_scores, best, size, buffer[row], row)
                    worst = best_scores[0] if size == len(best) else worst
            buffer[:] = 0.0
        _sort(best_scores, best, size)
        counts[q] = size


best_rows: Callable[..., None] = _compiled(_best_rows)
"""The compiled kernel: best rows of a batch of queries."""
