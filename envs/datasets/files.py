"""Rows of a question file, whatever it is called: JSON Lines, JSON, parquet, CSV or TSV, gzipped or not.

The container is told by the first bytes and the first line, never by the extension: JSON Lines are published as
``.json``, tab-separated files as ``.csv``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from turntree.envs.datasets.fields import QUESTION_KEYS, decoded_list, find
from turntree.errors import DataError, MissingExtraError

__all__ = ["Row", "file_stem", "read_rows"]

_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_DOCUMENT_KEYS = ("data", "Data", "questions", "examples")
_KNOWN = "JSON Lines, JSON, parquet, or CSV/TSV with a header"


@dataclass(frozen=True, slots=True)
class Row:
    """One record. ``where`` is its place for messages; ``number`` its line (JSON Lines, CSV) or index, from 1."""

    where: str
    number: int
    data: Mapping[str, Any]


def file_stem(path: Path) -> str:
    """The file's name without what says how it is packed: ``dev.jsonl.gz`` gives ``dev``."""
    name = path.name
    for suffix in (".gz", ".jsonl", ".json", ".parquet", ".tsv", ".csv"):
        name = name.removesuffix(suffix)
    return name or path.name


def read_rows(path: Path) -> tuple[str, Iterator[Row]]:
    """The container (``jsonl``, ``json``, ``parquet``, ``csv``, ``tsv``) and its rows, lazily where it allows that.

    Raises :class:`DataError` naming file and line for anything else, and for what is cut off or not UTF-8.
    """
    with _readable(path), _opened(path) as file:
        head = file.read(4)
        first = _first_line(file, head) if head not in (b"", _PARQUET) else b""
    if head == _PARQUET:
        return "parquet", _parquet_rows(path)
    if not head:
        raise DataError(f"{path}: expected questions, found an empty file")
    if b"\x00" in first:
        _refuse(path, 1, first)
    text = _text(first, f"{path}, line 1").strip()
    if not text.startswith(("{", "[")):
        return _delimited(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "json", _document_rows(path)
    if isinstance(value, list) or (isinstance(value, dict) and _is_document(value)):
        return "json", _document_rows(path)
    return "jsonl", _json_lines(path)


def _first_line(file: IO[bytes], head: bytes) -> bytes:
    """The first line that is not blank; ``head`` was read already."""
    line = head if b"\n" in head else head + file.readline(1 << 26)
    if line.strip(b"\xef\xbb\xbf \t\r\n"):
        return line
    return next((later for later in file if later.strip()), line)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a complete gzip file, found {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"expected a readable question file at {path}, found {error}; check the path") from error


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        magic = file.read(2)
    return cast("IO[bytes]", gzip.open(path, "rb")) if magic == _GZIP else path.open("rb")


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8 text, found {error}; convert the file to UTF-8") from error


def _refuse(path: Path, line: int, found: bytes) -> NoReturn:
    raise DataError(f"{path}, line {line}: expected {_KNOWN}, found {found[:60]!r}; convert the file")


# JSON -----------------------------------------------------------------------------------------------------------------


def _json_lines(path: Path) -> Iterator[Row]:
    with _readable(path), _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            text = _text(line, where).strip()
            if not text:
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: expected one JSON object a line, found {text[:60]!r} ({error})") from error
            yield _row(value, where, number)


def _document_rows(path: Path) -> Iterator[Row]:
    """Rows of one JSON value: a list, an object that holds the list, or an object of rows by id."""
    with _readable(path), _opened(path) as file:
        text = _text(file.read(), str(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise DataError(
            f"{path}, line {line}: expected {_KNOWN}, found broken JSON ({error}); repair or fetch the file"
        ) from error
    if isinstance(value, dict):
        key = next((k for k in _DOCUMENT_KEYS if isinstance(value.get(k), list)), None)
        value = value[key] if key else _rows_by_id(value, path)
    for number, item in enumerate(value, start=1):
        where = f"{path}, row {number}"
        yield _row(item, where, number)


def _rows_by_id(value: Mapping[str, Any], path: Path) -> list[Any]:
    if find(value, QUESTION_KEYS) is not None:  # a file of one row, on several lines
        return [value]
    if value and all(isinstance(v, dict) and find(v, QUESTION_KEYS) is not None for v in value.values()):
        return [{"id": key, **row} for key, row in value.items()]
    raise DataError(
        f"{path}: expected a list of rows, an object with a list under one of {list(_DOCUMENT_KEYS)}, or rows by id, "
        f"found an object with the keys {sorted(value)[:12]}; convert the file"
    )


def _is_document(value: Mapping[str, Any]) -> bool:
    if any(isinstance(value.get(key), list) for key in _DOCUMENT_KEYS):
        return True
    return bool(value) and all(isinstance(v, dict) and find(v, QUESTION_KEYS) is not None for v in value.values())


def _row(value: Any, where: str, number: int) -> Row:
    if not isinstance(value, dict):
        inner = f" of rows with the keys {sorted(value[0])}" if _is_table(value) else ""
        raise DataError(f"{where}: expected a JSON object, found a {type(value).__name__}{inner}; convert the file")
    return Row(where, number, value)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


# Parquet --------------------------------------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs pyarrow: pip install 'turntree[parquet]'") from error
    number = 0
    try:
        with _opened(path) as packed:
            source = path if packed.name == str(path) and _magic(path) == _PARQUET else io.BytesIO(packed.read())
        with pyarrow.parquet.ParquetFile(source) as table:
            for batch in table.iter_batches(batch_size=1024):
                for data in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", number, data)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{path}: expected a complete parquet file, found {error}; fetch it again") from error


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


# CSV ------------------------------------------------------------------------------------------------------------------


def _delimited(path: Path) -> tuple[str, Iterator[Row]]:
    records = _records(path)
    try:
        first_line, first = next(records)
    except StopIteration:
        raise DataError(f"{path}: expected at least one question, found blank lines only") from None
    kind = "tsv" if _delimiter(path) == "\t" else "csv"
    if find(dict.fromkeys(first, ""), QUESTION_KEYS) is not None:
        return kind, _headed(path, first, records)
    if len(first) == 2 and decoded_list(first[1], f"{path}, line {first_line}") is not None:
        # NQ and TriviaQA as DPR publishes them: question, list of answers, no header.
        return kind, _headed(path, ["question", "answers"], chain([(first_line, first)], records))
    _refuse(path, first_line, "\t".join(first).encode())


def _headed(path: Path, header: list[str], records: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    repeated = sorted({name for name in header if header.count(name) > 1 and name})
    if repeated:
        raise DataError(f"{path}: expected columns of different names, found {repeated} twice; rename them")
    for line, cells in records:
        where = f"{path}, line {line}"
        if len(cells) != len(header):
            raise DataError(
                f"{where}: expected {len(header)} columns {header[:8]}, found {len(cells)}; check quotes and delimiters"
            )
        # An empty cell is a missing value, and an unnamed column is an index that some library wrote.
        yield Row(where, line, {name: cell for name, cell in zip(header, cells) if name and cell != ""})


def _delimiter(path: Path) -> str:
    with _readable(path), _opened(path) as file:
        first = _text(_first_line(file, file.read(4)), f"{path}, line 1")
    return "\t" if "\t" in first else ";" if first.count(";") > first.count(",") else ","


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers (of a record's last line) and cells; blank lines are skipped."""
    line = 0
    with _readable(path), _opened(path) as file:
        try:
            reader = csv.reader(
                io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=_delimiter(path), strict=True
            )
            for cells in reader:
                line = reader.line_num
                if any(cells):
                    yield line, cells
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, after line {line}: expected {_KNOWN}, found {error}; check quotes and encoding"
            ) from error
