"""Reads passage corpora: one JSON object a line, in the layouts that people publish them in."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from turntree.errors import DataError
from turntree.search_backend.passage import Passage

__all__ = ["load_corpus", "parse_contents", "render_contents", "save_corpus"]

_ID_KEYS = ("id", "_id", "docid")
_EXPECTED = '{"id", "contents"} or {"id", "title", "text"}'
_GZIP_MAGIC = b"\x1f\x8b"


def load_corpus(path: str | Path) -> list[Passage]:
    """Read a corpus in file order.

    Accepted rows: ``{"id", "contents": "\\"Title\\"\\ntext"}`` (wiki-18), ``{"id", "title", "text"}`` and
    ``{"id", "text"}``; the id may be called ``_id`` or ``docid`` and may be an integer. The file may be
    gzipped (whatever its name), start with a byte-order mark and hold blank lines.

    Raises :class:`DataError` with the file and line number for a corrupt line, a missing key or a duplicate id.
    """
    passages: list[Passage] = []
    seen: dict[str, int] = {}
    for number, row in _rows(Path(path)):
        passage = _passage(row, f"{path}, line {number}")
        first = seen.setdefault(passage.id, number)
        if first != number:
            raise DataError(
                f"{path}, line {number}: expected unique ids, found id {passage.id!r} again "
                f"(first on line {first}); make the ids unique"
            )
        passages.append(passage)
    return passages


def save_corpus(path: str | Path, passages: Sequence[Passage]) -> None:
    """Write passages in the wiki-18 layout, LF line ends, so that :func:`load_corpus` gives them back.

    Titles hold no line breaks; raises :class:`DataError` for one that does.
    """
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for passage in passages:
            row = {"id": passage.id, "contents": render_contents(passage.title, passage.text)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


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


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and JSON objects of the lines that are not blank."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if text := _decode(line, f"{path}, line {number}").strip():
                    yield number, _parse(text, f"{path}, line {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}, after line {number}: expected a complete gzip file, found {error}; fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"expected a readable corpus at {path}, found {error}; check the path") from error


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        magic = file.read(2)
    return cast("IO[bytes]", gzip.open(path, "rb")) if magic == _GZIP_MAGIC else path.open("rb")


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8 text, found {error}; convert the file to UTF-8") from error


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: expected one JSON object, found {text[:60]!r} ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object {_EXPECTED}, found a {type(row).__name__}")
    return row


def _passage(row: dict[str, Any], where: str) -> Passage:
    key = next((k for k in _ID_KEYS if k in row), None)
    if key is None or not ("contents" in row or "text" in row):
        raise DataError(f"{where}: expected {_EXPECTED}, found the keys {sorted(row)}")
    title, text = (
        parse_contents(_string(row, "contents", where))
        if "contents" in row
        else (_string(row, "title", where).strip(), _string(row, "text", where).strip())
    )
    if not title and not text:
        raise DataError(f"{where}: expected a title or a text, found neither; remove the row")
    return Passage(id=_identifier(row[key], where), title=title, text=text)


def _string(row: dict[str, Any], key: str, where: str) -> str:
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
