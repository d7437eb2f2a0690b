"""Where a turn ends: stop strings found in token ids."""

from __future__ import annotations

from collections.abc import Sequence

from turntree.agents.tokenizer import Tokenizer, decode

__all__ = ["find_stop", "tokens_to_stop"]


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The end of the stop string that completes first in ``text``, and that string; None when there is none.

    Of two that complete at the same character the longer one is named.
    """
    found: tuple[int, int, str] | None = None
    for stop in stops:
        if stop and (at := text.find(stop)) >= 0:
            here = (at + len(stop), -len(stop), stop)
            found = here if found is None else min(found, here)
    return None if found is None else (found[0], found[2])


def tokens_to_stop(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], *, text: str | None = None
) -> tuple[int, str] | None:
    """How many of ``ids`` it takes to complete a stop string, and that string; None when none is completed.

    The completing token counts whole, even when the string ends inside it. ``text``: of all ``ids``, where the caller
    has decoded them.
    """
    if not stops:
        return None
    match = find_stop(decode(tokenizer, ids) if text is None else text, stops)
    if match is None:
        return None
    low, high = 1, len(ids)
    if find_stop(decode(tokenizer, ids[:-1]), stops) is None:  # nearly always: an engine stops at the stop string
        return high, match[1]
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if find_stop(decode(tokenizer, ids[:middle]), stops) is None:
            low = middle + 1
        else:
            high = middle
    match = find_stop(decode(tokenizer, ids[:low]), stops)
    return None if match is None else (low, match[1])
