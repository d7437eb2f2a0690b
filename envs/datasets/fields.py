"""Fields of a row: which one is the question, which are the answers, and what their values mean."""

from __future__ import annotations

import ast
import io
import json
import math
import tokenize
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from turntree.errors import DataError

__all__ = [
    "ALIAS_KEYS",
    "ANSWER_KEYS",
    "ID_KEYS",
    "QUESTION_KEYS",
    "answer_texts",
    "decoded_list",
    "find",
    "row_id",
]

QUESTION_KEYS = ("question", "query", "query_text", "question_text", "prompt")
"""Fields that hold the question, in the order in which they are looked for."""
ANSWER_KEYS = ("golden_answers", "gold_answers", "answers", "answer", "possible_answers", "ground_truth")
"""Names of answers, the first one that a row has counts; case and spaces in names do not matter."""
ALIAS_KEYS = ("answer_aliases", "answer_alias", "aliases")
"""Further answers beside the first of ``ANSWER_KEYS``."""
ID_KEYS = ("id", "_id", "qid", "question_id", "questionid", "query_id", "uid")
"""Fields that hold the question's id, in the order in which they are looked for."""

_LISTS = {"golden_answers", "gold_answers", "answers", "possible_answers", "answer_aliases", "answer_alias", "aliases"}
_TRIVIA = ("value", "aliases", "humananswers", "human_answers", "normalizedvalue", "normalized_value")
_TRIVIA_ALIASES = ("normalizedaliases", "normalized_aliases")


def find(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The key of ``row`` that is the first of ``names`` with a value, as it is spelt there; None if there is none."""
    folded: dict[str, str] = {}
    for spelt in row:
        folded.setdefault(spelt.strip().lower().replace(" ", "_").replace("-", "_"), spelt)
    for name in names:
        key: str | None = name if name in row else folded.get(name)
        if key is not None and row[key] is not None:
            return key
    return None


def row_id(value: object, where: str) -> str:
    """An id as text. Raises ``DataError`` for anything but a non-empty string or an integer."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{where}: expected a non-empty string or integer id, found {value!r:.60}")
    return str(value)


def answer_texts(value: object, where: str, *, key: str) -> tuple[str, ...]:
    """Answers as strings, in order, without blanks and repeats; numbers are written out.

    Takes a text, a number, a list of them, a list inside a string (``possible_answers`` of PopQA), SQuAD's
    ``{"text": [...]}`` or list of ``{"text"}``, TriviaQA's ``{"Value", "Aliases", ...}`` and verl's ``{"target"}``. An
    empty result means that there is no answer. Raises ``DataError`` for any other value.
    """
    texts = [text for item in _items(value, where, key.lower()) for text in [_text(item, where, key)] if text.strip()]
    return tuple(dict.fromkeys(texts))


def _items(value: object, where: str, key: str) -> list[object]:
    if isinstance(value, str):
        found = decoded_list(value, where)
        if found is not None and (key in _LISTS or all(isinstance(item, str) for item in found)):
            return found
        if found is None and key in _LISTS and value.lstrip()[:1] == "[":
            raise DataError(f"{where}: expected a list of answers under {key!r}, found {value!r:.60}; fix the row")
        return [value]
    if isinstance(value, Mapping):
        return _object_items(value, where, key)
    if isinstance(value, (list, tuple)):
        parts = (_items(item, where, key) if isinstance(item, Mapping) else [item] for item in value)
        return [item for part in parts for item in part]
    return [value]


def _object_items(value: Mapping[str, Any], where: str, key: str) -> list[object]:
    lower = {name.lower(): item for name, item in value.items()}
    for inner in ("target", "text"):
        if lower.get(inner) is not None:
            return _items(lower[inner], where, "answers")
    if lower.get("value") is not None:
        named = [lower[name] for name in (*_TRIVIA, *_TRIVIA_ALIASES) if lower.get(name) is not None]
        return [found for item in named for found in _items(item, where, "answers")]
    raise DataError(
        f"{where}: expected a list of answers under {key!r}, found an object with the keys {sorted(value)[:8]}; "
        "expected one of 'target', 'text', 'value' in it"
    )


def _text(item: object, where: str, key: str) -> str:
    finite = not isinstance(item, float) or math.isfinite(item)
    if isinstance(item, bool) or not isinstance(item, (str, int, float)) or not finite:
        raise DataError(
            f"{where}: expected a list of answers under {key!r} (texts or numbers), found {item!r:.60}; "
            "fix or remove the row"
        )
    return str(item)


def decoded_list(text: str, where: str) -> list[object] | None:
    """A list written into a string, as JSON or as Python prints it; None for any other text.

    Raises ``DataError`` for numpy's print of a list, ``['a' 'b']``: Python would read it as one text, ``ab``.
    """
    text = text.strip()
    if text.startswith("array(") or not (text.startswith("[") and text.endswith("]")):
        if text.startswith("array(["):
            raise DataError(f"{where}: expected a list of texts, found numpy's {text[:40]!r}; write it as JSON")
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _python_list(text, where)
    return value if isinstance(value, list) else None


def _python_list(text: str, where: str) -> object:
    try:
        value = ast.literal_eval(text)
        strings = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (ValueError, SyntaxError, tokenize.TokenError, MemoryError, RecursionError):
        return None
    if any(a.type == b.type == tokenize.STRING for a, b in pairwise(strings)):
        raise DataError(f"{where}: expected commas between the texts of a list, found {text[:60]!r}; write it as JSON")
    return value
