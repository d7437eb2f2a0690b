"""The layouts that corpora are published in: which one a file is in, and its passages one by one in constant memory."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from turntree.errors import DataError, MissingExtraError
from turntree.search_backend.passage import Passage
from turntree.search_backend.rows import parse_contents, passage_of, string_at

__all__ = ["Layout", "Place", "compressed_bytes", "detect_layout", "read_passages", "unit"]

Layout = Literal["jsonl", "json_list", "json_dict", "tsv", "parquet"]
"""Layouts of corpus files."""

_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
_HEAD = 1 << 20  # bytes of the file that its layout is told from
_LARGEST_ENTRY = 1 << 26  # characters; past this an entry of a JSON document counts as broken
_SIGN = re.compile(r"\S")
_TSV_COLUMNS = ("id", "text", "title")  # of DPR's psgs_w100.tsv, with its header or without


@dataclass(frozen=True, slots=True)
class Place:
    """How far a source was read: lines, entries or rows so far, and bytes of the (decompressed) file."""

    number: int = 0
    offset: int = 0


def read_passages(path: Path, start: Place | None = None) -> Iterator[tuple[Place, Passage]]:
    """Passages in file order, each with the place that reading goes on from after it.

    The file may be gzipped (whatever its name), start with a byte-order mark and hold blank lines. See
    ``docs/search.md`` for the layouts. Raises :class:`DataError`, naming file and line (or entry, or row), for
    anything else; ids are not compared here.
    """
    start = start or Place()
    read: dict[Layout, Callable[[Path, Place], Iterator[tuple[Place, Passage]]]] = {
        "jsonl": _read_jsonl,
        "json_list": _read_document,
        "json_dict": _read_document,
        "tsv": _read_tsv,
        "parquet": _read_parquet,
    }
    place = start
    try:
        for place, passage in read[detect_layout(path)](path, start):
            yield place, passage
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}, after line {place.number}: expected a complete gzip file, found {error}; fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"expected a readable corpus at {path}, found {error}; check the path") from error


def detect_layout(path: Path) -> Layout:
    """The layout, from the file's first bytes. Raises :class:`DataError` where it cannot be read at all."""
    try:
        with _open(path) as file:
            head = file.read(_HEAD)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return "jsonl"  # the reader meets the same, and says after which line
    except OSError as error:
        raise DataError(f"expected a readable corpus at {path}, found {error}; check the path") from error
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return "json_list"
    if text.startswith(b"{"):
        return _object_layout(text, whole=len(head) < _HEAD)
    return "tsv" if b"\t" in text.partition(b"\n")[0] else "jsonl"


def unit(path: Path) -> str:
    """What :attr:`Place.number` counts in a file: ``line``, ``entry`` or ``row``."""
    layout = detect_layout(path)
    return "row" if layout == "parquet" else "entry" if layout in ("json_list", "json_dict") else "line"


def _object_layout(text: bytes, *, whole: bool) -> Layout:
    """One object a line, or one object in all, whose keys are titles or ids?"""
    line, newline, rest = text.partition(b"\n")
    if line.strip() == b"{":
        # A row on several lines (as jq prints it) is no document from title to text: the reader of rows refuses it.
        return "jsonl" if _starts_a_row(b"{" + rest) else "json_dict"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        # A line longer than the head: an entry of a row comes first in a row, a title (or id) in a document.
        return "json_dict" if not newline and not whole and not _starts_a_row(line) else "jsonl"
    fields = {"id", "_id", "docid", "text", "contents", "title"} & row.keys()
    alone = whole and not rest.strip()
    return "json_dict" if alone and not fields and len(row) > 0 else "jsonl"


def _starts_a_row(line: bytes) -> bool:
    key = line[1:200].decode(errors="replace").lstrip().partition(":")[0].strip().strip('"')
    return key in ("id", "_id", "docid", "text", "contents", "title", "metadata")


def compressed_bytes(path: Path) -> bool:
    """Whether the file is gzipped."""
    with path.open("rb") as file:
        return file.read(2) == _GZIP_MAGIC


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if compressed_bytes(path) else path.open("rb")


def _lines(path: Path, start: Place) -> Iterator[tuple[Place, str]]:
    """Lines that are not blank, from ``start`` on, with the place after each."""
    number, offset = start.number, start.offset
    with _open(path) as file:
        if offset:
            file.seek(offset)
        for line in file:
            number += 1
            offset += len(line)
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                where = f"{path}, line {number}"
                raise DataError(f"{where}: expected UTF-8 text, found {error}; convert the file to UTF-8") from error
            if text and not text.isspace():
                yield Place(number, offset), text


def _read_jsonl(path: Path, start: Place) -> Iterator[tuple[Place, Passage]]:
    for place, text in _lines(path, start):
        where = f"{path}, line {place.number}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: expected one JSON object, found {text.strip()[:60]!r} ({error})") from error
        yield place, passage_of(row, where)


# -- tab-separated --------------------------------------------------------------------------------------------


def _read_tsv(path: Path, start: Place) -> Iterator[tuple[Place, Passage]]:
    place, line = next(_lines(path, Place()))
    columns = _header(line)
    header = columns is not None
    columns = columns or _TSV_COLUMNS[: len(line.split("\t"))]
    if not header and len(columns) < 2:
        raise DataError(f"{path}, line 1: expected {len(_TSV_COLUMNS)} columns separated by tabs, found {line[:60]!r}")
    begin = place if header and start == Place() else start
    for place, text in _lines(path, begin):
        where = f"{path}, line {place.number}"
        values = _split(text.rstrip("\r\n"), len(columns))
        if values is None:
            raise DataError(
                f"{where}: expected the tab-separated columns {list(columns)}, found {text.rstrip()[:60]!r}"
            )
        yield place, passage_of(dict(zip(columns, values)), where)


def _header(line: str) -> tuple[str, ...] | None:
    names = tuple(name.strip().strip('"').lower() for name in line.rstrip("\r\n").split("\t"))
    named = {"id", "_id", "docid"} & set(names) and {"text", "contents"} & set(names)
    return names if named else None


def _split(line: str, columns: int) -> list[str] | None:
    """The fields of a line: quoted as CSV where that works out, else as they stand."""
    plain = line.split("\t")
    if not any(value.startswith('"') for value in plain):
        return plain if len(plain) == columns else None
    try:
        quoted = next(csv.reader([line], delimiter="\t", strict=True), [])
    except csv.Error:  # a field that begins with a quote but is not quoted
        quoted = []
    return next((fields for fields in (quoted, plain) if len(fields) == columns), None)


# -- one JSON document ----------------------------------------------------------------------------------------


def _read_document(path: Path, start: Place) -> Iterator[tuple[Place, Passage]]:
    """A list or an object in one document. Going on reads it from its beginning: such files are small."""
    for number, (key, value) in enumerate(itertools.islice(_entries(path), start.number, None), start.number + 1):
        yield Place(number), _entry(key, value, number, f"{path}, entry {number}")


def _entry(key: str | None, value: Any, number: int, where: str) -> Passage:
    """HippoRAG's lists of ``{title, text, idx}`` and of texts, and its objects of title to text or sentences."""
    if key is None:
        if isinstance(value, str):
            title, text = parse_contents(value)
            return passage_of({"id": number - 1, "title": title, "text": text}, where)
        return passage_of(value, where, default_id=str(number - 1))
    if isinstance(value, dict):
        return passage_of({"id": key, **value}, where)
    if isinstance(value, list):
        value = " ".join(string_at({"text": part}, "text", where).strip() for part in value)
    return passage_of({"id": key, "title": key, "text": value}, where)


def _entries(path: Path) -> Iterator[tuple[str | None, Any]]:
    with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
        text = _Text(file, path)
        opening = text.take()
        closing = {"[": "]", "{": "}"}[opening]
        more = text.peek() != closing
        if not more:
            text.take()
        while more:
            if opening == "[":
                yield None, text.value()
            else:
                key = text.value()
                if not isinstance(key, str) or text.take() != ":":
                    raise text.broken('"title": text')
                yield key, text.value()
            if text.peek() not in (",", closing):
                raise text.broken(f"a comma or {closing}")
            more = text.take() == ","
        text.end()


class _Text:
    """A JSON document that is decoded value by value, a part of the file at a time."""

    def __init__(self, file: io.TextIOWrapper, path: Path) -> None:
        self._file, self._path = file, path
        self._buffer, self._at, self._line = "", 0, 1
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is no white space."""
        if not (char := self._next()):
            raise self.broken("the end of the JSON document")
        return char

    def end(self) -> None:
        """Raise where something follows: it would be lost without a word."""
        if self._next():
            raise self.broken("nothing after the end of the JSON document")

    def _next(self) -> str:
        """The next character that is no white space, '' at the end of the file."""
        while True:
            found = _SIGN.search(self._buffer, self._at)
            at = len(self._buffer) if found is None else found.start()
            self._line += self._buffer.count("\n", self._at, at)
            self._at = at
            if found is not None or not self._more(_HEAD):
                return found[0] if found is not None else ""

    def take(self) -> str:
        char = self.peek()
        self._at += 1
        return char

    def value(self) -> Any:
        self.peek()
        wanted = _HEAD
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except RecursionError as error:
                raise self.broken("a JSON value that is not nested so deeply") from error
            except ValueError as error:
                if len(self._buffer) - self._at > _LARGEST_ENTRY or not self._more(wanted):
                    raise self.broken(f"a JSON value ({error})") from error
                wanted *= 2
            else:
                self._line += self._buffer.count("\n", self._at, end)
                self._at = end
                return value

    def broken(self, expected: str) -> DataError:
        found = self._buffer[self._at : self._at + 60]
        return DataError(f"{self._path}, line {self._line}: expected {expected}, found {found!r}; the file is damaged")

    def _more(self, count: int) -> bool:
        try:
            part = self._file.read(count)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._path}, after line {self._line}: expected UTF-8 text, found {error}; convert it to UTF-8"
            ) from error
        self._buffer, self._at = self._buffer[self._at :] + part, 0
        return bool(part)


# -- parquet --------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, start: Place) -> Iterator[tuple[Place, Passage]]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"{path} is a parquet file: pip install 'turntree[parquet]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                if number + batch.num_rows <= start.number:
                    number += batch.num_rows
                    continue
                for row in batch.to_pylist():
                    number += 1
                    if number > start.number:
                        yield Place(number), passage_of(row, f"{path}, row {number}")
    except (pyarrow.lib.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise DataError(
            f"{path}, after row {number}: expected a parquet file, found {error}; fetch it again"
        ) from error
