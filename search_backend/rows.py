"""One row of a corpus: its keys, its id, its title and text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from turntree.errors import DataError
from turntree.search_backend.passage import Passage

__all__ = ["json_line", "parse_contents", "passage_of", "render_contents", "string_at"]

_ID_KEYS = ("id", "_id", "docid")
_EXPECTED = '{"id", "contents"} or {"id", "title", "text"}'


def json_line(row: Any) -> str:
    """One line of JSON Lines, line end included, that UTF-8 can hold: a lone surrogate is escaped."""
    line = json.dumps(row, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(row)
    return f"{line}\n"


def parse_contents(contents: str) -> tuple[str, str]:
    """Split a wiki-18 ``contents`` string into title and text.

    The title is the first line without its quotes, doubled quotes inside it undone; title lines without quotes are
    taken as they are. A single unquoted line is a text without a title.
    """
    line, newline, text = contents.partition("\n")
    line = line.strip()
    quoted = len(line) >= 2 and line[0] == line[-1] == '"'
    if not newline and not quoted:
        return "", line
    title = line[1:-1] if quoted else line
    return title.replace('""', '"').strip(), text.strip()


def render_contents(title: str, text: str) -> str:
    """The inverse of :func:`parse_contents`."""
    if "\n" in title:
        raise DataError(f"expected a title on one line, found {title!r}; remove the line break")
    doubled = title.replace('"', '""')
    return f'"{doubled}"\n{text}'


def passage_of(row: Any, where: str, *, default_id: str | None = None) -> Passage:
    """The passage of a row; ``where`` stands in front of messages.

    ``default_id``: for rows of lists, which have an ``idx`` or nothing in the place of an id.
    Raises :class:`DataError`.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected a JSON object {_EXPECTED}, found a {type(row).__name__}")
    key = next((k for k in _ID_KEYS if k in row), None)
    if key is None and default_id is not None and "idx" in row:
        key = "idx"
    if (key is None and default_id is None) or not ("contents" in row or "text" in row):
        raise DataError(f"{where}: expected {_EXPECTED}, found the keys {sorted(row)}")
    named = string_at(row, "title", where).strip()
    if "contents" in row:
        head, text = parse_contents(string_at(row, "contents", where))
        title = head or named
    else:
        title, text = named, string_at(row, "text", where).strip()
    if not title and not text:
        raise DataError(f"{where}: expected a title or a text, found neither; remove the row")
    value = default_id if key is None else row[key]
    return Passage(id=_identifier(value, where), title=title, text=text)


def string_at(row: Mapping[str, Any], key: str, where: str) -> str:
    """The string under ``key``; empty where there is none. Raises :class:`DataError` for anything else."""
    value = row.get(key, "")
    if value is None and key == "title":
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a string under {key!r}, found {value!r:.60}")
    return value


def _identifier(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{where}: expected a non-empty string or integer id, found {value!r:.60}")
    return str(value)
