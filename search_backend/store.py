"""A corpus on disk: any number of passages, read at random by row or id, in memory that does not grow with them."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from turntree.errors import DataError, SearchIndexError
from turntree.search_backend.files import (
    append_array,
    building,
    cut,
    holds_others,
    map_array,
    read_json,
    write_array,
    write_json,
)
from turntree.search_backend.keys import KeyTable, key_hash, write_keys
from turntree.search_backend.layouts import Place, read_passages, unit
from turntree.search_backend.passage import Passage

__all__ = ["CorpusStore", "Progress", "corpus_fingerprint", "is_store", "quiet", "scored_passages"]

Progress = Callable[[str, int, int, str], None]
"""``progress(stage, done, total, note)``; a total of 0 is unknown."""

_FORMAT = 1
_CHUNK = 4096  # passages between two checkpoints; part of the fingerprint's definition
_META, _STATE = "store.json", "building.json"
_META_PARTS = ("passages", "bytes", "fingerprint", "first_id", "source")
_RECORDS, _ENDS, _PARTS, _HASHES = "records.bin", "ends.bin", "parts.bin", "hashes.bin"


def quiet(stage: str, done: int, total: int, note: str) -> None:
    """No progress."""


def is_store(folder: str | Path) -> bool:
    """Whether there is a finished store."""
    return (Path(folder) / _META).is_file()


class CorpusStore(Sequence[Passage]):
    """A sequence of passages on disk.

    ``store[row]`` reads one passage at its place, ``store.row(id)`` finds a row, iteration reads in order; the
    memory used does not depend on the number of passages. Safe to share between threads and forks; pickling carries
    the path. Make one with :meth:`build` or :meth:`open`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        meta = read_json(self.folder / _META, what="a corpus store")
        if meta.get("format") != _FORMAT:
            raise SearchIndexError(
                f"{self.folder}: expected a corpus store of format {_FORMAT}, found {meta.get('format')!r}; build it "
                f"again with this version of turntree"
            )
        lost = [name for name in _META_PARTS if name not in meta]
        if lost:
            raise SearchIndexError(
                f"{self.folder / _META}: expected a corpus store, found it without {lost[0]!r}; build it again"
            )
        self._count: int = meta["passages"]
        self._first: int | None = meta["first_id"]
        self.fingerprint: str = meta["fingerprint"]
        self.text_bytes: int = meta["bytes"]
        self.source: dict[str, Any] = meta["source"]
        self._file = os.open(self._checked(_RECORDS, self.text_bytes), os.O_RDONLY)
        self._ends = map_array(self.folder / "ends.npy")
        self._parts = map_array(self.folder / "parts.npy")
        if len(self._ends) != self._count or len(self._parts) != self._count:
            raise SearchIndexError(
                f"{self.folder}: expected {self._count} passages, found {len(self._ends)}; rebuild it"
            )
        self._keys = None if self._first is not None else KeyTable(self.folder, "ids")

    @classmethod
    def open(cls, folder: str | Path) -> CorpusStore:
        """Open a finished store. Raises :class:`SearchIndexError` for anything else, a part of one included."""
        return cls(folder)

    @classmethod
    def build(cls, source: str | Path, out: str | Path, *, progress: Progress = quiet) -> CorpusStore:
        """Write a corpus file (see :func:`load_corpus` for layouts) to the folder ``out`` and open it.

        A build that was stopped, even by kill -9, goes on where it was and gives the same bytes; one that is
        finished is opened. Ids must be unique, titles need not be.

        Raises :class:`DataError` naming file and line for what cannot be read, :class:`SearchIndexError` where
        ``out`` holds another corpus.
        """
        folder = Path(out)
        with building(folder):
            _Builder(Path(source), folder, progress).run()
        return cls(folder)

    @classmethod
    def from_passages(cls, passages: Iterable[Passage], out: str | Path) -> CorpusStore:
        """Write passages that are already there; not resumable."""
        folder = Path(out)
        with building(folder):
            if any(folder.iterdir()):
                raise SearchIndexError(f"expected an empty or new folder, found files in {folder}; choose another")
            _Builder(None, folder, quiet).write((Place(i), p) for i, p in enumerate(passages, start=1))
        return cls(folder)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, row: int) -> Passage: ...

    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...

    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            rows = range(*row.indices(self._count))
            return list(self._read(rows.start, rows.stop)) if rows.step == 1 else [self[i] for i in rows]
        if not -self._count <= row < self._count:
            raise IndexError(f"expected a row below {self._count}, found {row}")
        at = int(row) % self._count
        return next(self._read(at, at + 1))

    def __iter__(self) -> Iterator[Passage]:
        for start in range(0, self._count, _CHUNK):
            yield from self._read(start, min(start + _CHUNK, self._count))

    def __contains__(self, passage: object) -> bool:
        if not isinstance(passage, Passage):
            return False
        row = self.find(passage.id)
        return row is not None and self[row] == passage

    def __reduce__(self) -> tuple[Any, ...]:
        return (CorpusStore, (str(self.folder.absolute()),))

    def __del__(self) -> None:
        file, self._file = getattr(self, "_file", -1), -1
        if file >= 0:
            os.close(file)

    def row(self, id: str) -> int:
        """The row of an id. Raises :class:`DataError` where no passage has it."""
        row = self.find(id)
        if row is None:
            raise DataError(f"{self.folder}: expected an id of this corpus, found {id!r}")
        return row

    def find(self, id: str) -> int | None:
        """The row of an id, or None."""
        if self._keys is None:
            number = _canonical(id)
            row = -1 if number is None or self._first is None else number - self._first
            return row if 0 <= row < self._count else None
        return next((row for row in self._keys.candidates(_encode(id)) if self._id(row) == id), None)

    def scored(self, rows: npt.ArrayLike, scores: Iterable[float]) -> list[Passage]:
        """The passages of rows in any order (integers from 0, [n]), each with its score: a search's results.

        Raises ``IndexError`` for a row that the store does not have.
        """
        at = np.asarray(rows, dtype=np.int64)
        if at.size and not 0 <= at.min() <= at.max() < self._count:  # the rows before are looked at: -1 would pass
            raise IndexError(f"expected rows from 0 to {self._count - 1}, found {at.min()} to {at.max()}")
        starts = np.where(at > 0, self._ends[at - 1], 0).astype(np.int64)
        sizes = self._ends[at].astype(np.int64) - starts
        found = []
        for start, size, (id, title), score in zip(
            starts.tolist(), sizes.tolist(), self._parts[at].tolist(), scores, strict=True
        ):
            data, head = self._bytes(start, start + size), id + title
            if data.isascii():  # decoded at once: characters are bytes
                text = data.decode("ascii")
                found.append(Passage(text[:id], text[id:head], text[head:], score))
            else:
                found.append(Passage(_decode(data[:id]), _decode(data[id:head]), _decode(data[head:]), score))
        return found

    def _id(self, row: int) -> str:
        start = int(self._ends[row - 1]) if row else 0
        return _decode(self._bytes(start, start + int(self._parts[row, 0])))

    def _read(self, start: int, stop: int) -> Iterator[Passage]:
        """Passages of rows that follow each other: one read of the file."""
        if start >= stop:
            return
        begin = int(self._ends[start - 1]) if start else 0
        ends: list[int] = self._ends[start:stop].tolist()
        data = self._bytes(begin, ends[-1])
        at = 0
        for end, (id, title) in zip(ends, self._parts[start:stop].tolist()):
            stop_at = end - begin
            text = _decode(data[at + id + title : stop_at])
            yield Passage(_decode(data[at : at + id]), _decode(data[at + id : at + id + title]), text)
            at = stop_at

    def _bytes(self, start: int, end: int) -> bytes:
        """Read at a place: without a shared position, so threads and forks do not disturb each other."""
        if not 0 <= start <= end <= self.text_bytes:
            raise SearchIndexError(
                f"{self.folder / 'ends.npy'}: expected passages within {self.text_bytes} bytes, found one from {start} "
                f"to {end}; build the store again"
            )
        data = os.pread(self._file, end - start, start)
        while len(data) < end - start:  # a single read stops at 2 GiB
            more = os.pread(self._file, end - start - len(data), start + len(data))
            if not more:
                raise SearchIndexError(
                    f"{self.folder / _RECORDS}: expected {end} bytes, found fewer; rebuild the store"
                )
            data += more
        return data

    def _checked(self, name: str, size: int) -> Path:
        path = self.folder / name
        found = path.stat().st_size if path.is_file() else -1
        if found != size:
            what = "no file" if found < 0 else f"{found} bytes"
            raise SearchIndexError(f"{path}: expected {size} bytes, found {what}; build the store again")
        return path


def scored_passages(passages: Sequence[Passage], rows: Sequence[int], scores: Sequence[float]) -> list[Passage]:
    """Passages of a corpus in memory or on disk, in the order of ``rows``, with their scores."""
    if isinstance(passages, CorpusStore):
        return passages.scored(rows, scores)
    chosen = ((passages[row], score) for row, score in zip(rows, scores, strict=True))
    return [Passage(p.id, p.title, p.text, score) for p, score in chosen]


# -- fingerprint ----------------------------------------------------------------------------------------------


def corpus_fingerprint(passages: Iterable[Passage]) -> str:
    """Hash of ids, titles and texts in order: 32 hexadecimal digits, equal to that of a store of these passages."""
    state, rows = b"", 0
    remaining = iter(passages)
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        block = _Block.of(chunk)
        state, rows = block.chained(state), rows + len(chunk)
    return _finish(state, rows)


def _finish(state: bytes, rows: int) -> str:
    return hashlib.sha256(b"turntree corpus %d %d " % (_FORMAT, rows) + state).hexdigest()[:32]


@dataclass(frozen=True)
class _Block:
    """Some passages as they lie on disk. ``lengths``: int32 [rows, 3], bytes of id, title and text."""

    records: bytes
    lengths: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, passages: Sequence[Passage]) -> _Block:
        fields = [(_encode(p.id), _encode(p.title), _encode(p.text)) for p in passages]
        lengths = np.array([[len(part) for part in row] for row in fields], dtype="<u4").reshape(-1, 3)
        return cls(b"".join(itertools.chain.from_iterable(fields)), lengths)

    def chained(self, state: bytes) -> bytes:
        """The fingerprint's state after this block."""
        own = hashlib.sha256(self.lengths.tobytes())
        own.update(self.records)
        return hashlib.sha256(state + own.digest()).digest()


# -- build ----------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What a build needs to go on: place in the source, sizes of its files, the fingerprint so far.

    ``first``: the first id while ids are consecutive integers (which need no table), else None.
    """

    source: dict[str, Any] | None
    number: int = 0
    offset: int = 0
    rows: int = 0
    bytes: int = 0
    chain: str = ""
    first: int | None = None


class _Builder:
    def __init__(self, source: Path | None, folder: Path, progress: Progress) -> None:
        self._path, self._folder, self._progress = source, folder, progress

    def run(self) -> None:
        assert self._path is not None
        source = _identity(self._path)
        if is_store(self._folder):
            self._expect(read_json(self._folder / _META, what="a corpus store").get("source"), source)
            self._tidy()
            return
        resumed = (self._folder / _STATE).is_file()
        state = _State(source)
        if resumed:
            state = self._resumed()
            self._expect(state.source, source)
        elif holds_others(self._folder, _STATE):
            raise SearchIndexError(f"expected an empty or new folder, found files in {self._folder}; choose another")
        else:
            write_json(self._folder / _STATE, asdict(state))  # before any other file: a kill is known as one
        self.write(read_passages(self._path, Place(state.number, state.offset)), state)

    def _resumed(self) -> _State:
        path = self._folder / _STATE
        try:
            return _State(**read_json(path, what="the state of a build"))
        except TypeError as error:
            raise SearchIndexError(
                f"{path}: expected the state of a build, found another object ({error}); remove {self._folder} and "
                "build again"
            ) from error

    def _expect(self, found: Any, source: dict[str, Any]) -> None:
        if found != source:
            raise SearchIndexError(
                f"{self._folder}: expected the corpus {source}, found a store of {found}; choose another folder, or "
                f"remove this one (--replace of turntree index build)"
            )

    def write(self, rows: Iterable[tuple[Place, Passage]], state: _State | None = None) -> None:
        state = state or _State(None)
        sizes = {_RECORDS: state.bytes, _ENDS: 8 * state.rows, _PARTS: 8 * state.rows, _HASHES: 8 * state.rows}
        for name, size in sizes.items():
            cut(self._folder / name, size)
        remaining = iter(rows)
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            self._append(chunk, state)
            self._report(state)
        self._finish(state)

    def _append(self, chunk: list[tuple[Place, Passage]], state: _State) -> None:
        passages = [passage for _, passage in chunk]
        block = _Block.of(passages)
        ends = state.bytes + np.cumsum(block.lengths.sum(axis=1, dtype=np.uint64), dtype=np.uint64)
        hashes = np.array([key_hash(_encode(p.id)) for p in passages], dtype=np.uint64)
        for name, data in (
            (_RECORDS, np.frombuffer(block.records, dtype=np.uint8)),
            (_ENDS, ends.astype("<u8")),
            (_PARTS, block.lengths[:, :2]),
            (_HASHES, hashes.astype("<u8")),
        ):
            with (self._folder / name).open("ab") as file:
                append_array(file, data)
        first = _canonical(passages[0].id) if state.rows == 0 else state.first
        if first is not None and any(p.id != str(first + state.rows + i) for i, p in enumerate(passages)):
            first = None
        state.first = first
        state.rows += len(passages)
        state.bytes += len(block.records)
        state.chain = block.chained(bytes.fromhex(state.chain)).hex()
        state.number, state.offset = chunk[-1][0].number, chunk[-1][0].offset
        write_json(self._folder / _STATE, asdict(state))

    def _report(self, state: _State) -> None:
        size = (state.source or {}).get("bytes", 0)
        plain = state.offset and size and not (state.source or {}).get("gzip")
        done, total = (state.offset >> 20, size >> 20) if plain else (state.rows, 0)
        self._progress("corpus", done, total, f"{state.rows} passages")

    def _finish(self, state: _State) -> None:
        folder = self._folder
        write_array(folder / "ends.npy", _raw(folder / _ENDS, "<u8"))
        write_array(folder / "parts.npy", _raw(folder / _PARTS, "<u4").reshape(-1, 2))
        if state.first is None:
            equal = write_keys(folder, "ids", _raw(folder / _HASHES, "<u8"))
            self._refuse_duplicates(equal)
        meta = {
            "format": _FORMAT,
            "passages": state.rows,
            "bytes": state.bytes,
            "fingerprint": _finish(bytes.fromhex(state.chain), state.rows),
            "first_id": state.first,
            "source": state.source,
        }
        with (folder / _RECORDS).open("rb") as file:
            os.fsync(file.fileno())
        write_json(folder / _META, meta)
        self._tidy()

    def _tidy(self) -> None:
        for name in (_ENDS, _PARTS, _HASHES, _STATE):
            (self._folder / name).unlink(missing_ok=True)

    def _refuse_duplicates(self, equal: list[tuple[int, int]]) -> None:
        ends, parts = map_array(self._folder / "ends.npy"), map_array(self._folder / "parts.npy")
        with (self._folder / _RECORDS).open("rb") as file:

            def id_of(row: int) -> bytes:
                file.seek(int(ends[row - 1]) if row else 0)
                return file.read(int(parts[row, 0]))

            pair = next(((a, b) for a, b in sorted(equal, key=lambda p: p[1]) if id_of(a) == id_of(b)), None)
            if pair is None:
                return
            id = _decode(id_of(pair[0]))
        first, again = self._lines(pair)
        where = unit(self._path) if self._path is not None else "passage"
        raise DataError(
            f"{self._path or 'the corpus'}, {where} {again}: expected unique ids, found id {id!r} again (first on "
            f"{where} {first}); make the ids unique, and remove {self._folder} before the next build (or give turntree "
            "index build --replace)"
        )

    def _lines(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Where rows stand in the source: read again, which only a broken corpus costs."""
        if self._path is None:
            return rows[0] + 1, rows[1] + 1
        numbers = [place.number for place, _ in itertools.islice(read_passages(self._path), max(rows) + 1)]
        return numbers[rows[0]], numbers[rows[1]]


def _raw(path: Path, kind: str) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.zeros(0, dtype=kind)


def _identity(path: Path) -> dict[str, Any]:
    """What tells one source from another without reading it all: size, and a hash of its two ends."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(1 << 20)
            file.seek(max(0, size - (1 << 20)))
            digest = hashlib.sha256(head + file.read()).hexdigest()[:16]
    except OSError as error:
        raise DataError(f"expected a readable corpus at {path}, found {error}; check the path") from error
    return {"name": path.name, "bytes": size, "ends": digest, "gzip": head.startswith(b"\x1f\x8b")}


def _canonical(id: str) -> int | None:
    """The integer that an id spells, if ``str`` gives the id back."""
    return int(id) if id.isascii() and id.isdigit() and (id == "0" or id[0] != "0") and len(id) < 19 else None


def _encode(text: str) -> bytes:
    # JSON files hold lone surrogates ("\ud800"), which must come back as they were.
    return text.encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise SearchIndexError(
            f"expected UTF-8 text in a corpus store, found {error}; build the store again"
        ) from error
