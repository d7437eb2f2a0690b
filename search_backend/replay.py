"""A store of what searches found: recorded once, shared by branches and processes, replayed without the backend."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from turntree.errors import ConfigError, ReplayMissError, RetrievalError
from turntree.search_backend.client import check_queries
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["Mode", "ReplayBackend", "SearchStore"]

Mode = Literal["record", "replay", "readthrough"]
"""``record`` writes, ``replay`` only reads, ``readthrough`` does both."""

_APPLICATION = 0x74747273  # "ttrs", in the file's header
_VERSION = 1
_BUSY_S = 60.0
_MANY = 500
"""Keys of one statement: SQLite bounds the variables of each."""

_CURES = {
    "full": "; what it holds is whole: make room on its disk",
    "disk I/O": "; what it holds is whole: see whether its disk is full or broken",
    "readonly": "; mend the permissions of the file and its folder, or replay it (search.store_mode=replay)",
    "malformed": "; restore the file, or name another and record it again",
    "unable to open": "; its folder must be there and be writable",
}
"""What to do, by words of SQLite's messages."""

_INHERITED: list[sqlite3.Connection | None] = []
"""Connections of a parent process: never used, and never closed, which would meddle with the parent's locks."""

_SCHEMA = """
CREATE TABLE passages (hash BLOB PRIMARY KEY, id TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE answers (
    key BLOB PRIMARY KEY, fingerprint TEXT NOT NULL, query TEXT NOT NULL, k INTEGER NOT NULL,
    found TEXT NOT NULL, session TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX answers_by_fingerprint ON answers (fingerprint);
CREATE TABLE sources (fingerprint TEXT PRIMARY KEY, source TEXT NOT NULL) WITHOUT ROWID;
"""


class SearchStore:
    """Answers by (fingerprint, query, k) in one SQLite file, for any number of threads and processes.

    Passages are kept once, whatever answers they are in; scores as exact doubles. Each write is one transaction: a
    process that is killed at any moment leaves what it had finished and nothing else. The file must be on a local disk
    (write-ahead logging needs shared memory). Raises ``ConfigError`` for a file that is something else.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        if not create and not self.path.is_file():
            raise ConfigError(f"no store of searches at {self.path}: record one first (search.store_mode=record)")
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = os.getpid()
        with self._locked():
            self._connect()

    def close(self) -> None:
        """Close the file; it is opened again where it is needed."""
        with self._locked():
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (SearchStore, (self.path,))

    def get(
        self, fingerprint: str, queries: Sequence[str], k: int, *, session: str | None = None
    ) -> dict[str, list[Passage]]:
        """The stored answers of ``queries``; of one ``session`` only, where it is given."""
        keys = {_key(fingerprint, query, k): query for query in queries}
        with self._locked():
            rows = self._select("SELECT key, found, session FROM answers WHERE key IN ({})", list(keys))
            answers = {keys[key]: _found(found) for key, found, of in rows if session in (None, of)}
            hashes = list(dict.fromkeys(bytes.fromhex(h) for found in answers.values() for h, _ in found))
            rows = self._select("SELECT hash, id, title, text FROM passages WHERE hash IN ({})", hashes)
            passages = {h.hex(): _passage(h, name, title, text) for h, name, title, text in rows}
            return {q: [replace(passages[h], score=score) for h, score in found] for q, found in answers.items()}

    def put(
        self, fingerprint: str, answers: Mapping[str, Sequence[Passage]], k: int, *, session: str = "", source: str = ""
    ) -> None:
        """Store answers. One of another session is replaced, one of the same session stays as it is."""
        rows: list[tuple[Any, ...]] = []
        passages: dict[bytes, Passage] = {}
        for query, found in answers.items():
            hashed = [(_hash(passage), passage) for passage in found]
            passages.update(hashed)
            text = json.dumps([[h.hex(), None if p.score is None else float(p.score)] for h, p in hashed])
            rows.append((_key(fingerprint, query, k), fingerprint, query, k, text, session))
        with self._locked(), self._writing() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO passages VALUES (?, ?, ?, ?)",
                [(h, *map(_written, (p.id, p.title, p.text))) for h, p in passages.items()],
            )
            connection.executemany(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "found = excluded.found, session = excluded.session WHERE session <> excluded.session",
                rows,
            )
            connection.execute("INSERT OR REPLACE INTO sources VALUES (?, ?)", (fingerprint, source))

    def fingerprints(self) -> dict[str, str]:
        """What the answers are from: fingerprint -> source, as it was given when they were stored."""
        with self._locked():
            return dict(self._connect().execute("SELECT fingerprint, source FROM sources ORDER BY 1").fetchall())

    def __len__(self) -> int:
        with self._locked():
            return int(self._connect().execute("SELECT COUNT(*) FROM answers").fetchone()[0])

    def _select(self, statement: str, keys: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
        connection = self._connect()
        for first in range(0, len(keys), _MANY):
            part = keys[first : first + _MANY]
            yield from connection.execute(statement.format(",".join("?" * len(part))), part)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        connection = self._connect()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk ends it by itself
                connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread at a time; neither a connection nor a lock that a thread holds is carried over a fork."""
        if self._process != os.getpid():
            _INHERITED.append(self._connection)
            self._process, self._connection, self._lock = os.getpid(), None, threading.RLock()
        with self._lock, _told(self.path):
            yield

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open(self.path)
        return self._connection


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    deadline = time.monotonic() + _BUSY_S
    while True:  # SQLite does not wait for the lock that a change of the journal's kind needs
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = NORMAL")
    if _marks(connection) == (_APPLICATION, _VERSION):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        marks = _marks(connection)  # another process may have been first
        empty = not connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if marks == (0, 0) and empty:
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        elif marks != (_APPLICATION, _VERSION):
            what = f"version {marks[1]} of it" if marks[0] == _APPLICATION else "another database"
            raise ConfigError(f"{path}: expected a store of searches (version {_VERSION}), found {what}; name another")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _marks(connection: sqlite3.Connection) -> tuple[int, int]:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    return application, connection.execute("PRAGMA user_version").fetchone()[0]


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """SQLite's errors, typed and with the file's name."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if "not a database" in str(error):
            raise ConfigError(f"{path}: expected a store of searches, found another file; name another") from error
        cure = next((cure for word, cure in _CURES.items() if word in str(error)), "")
        raise RetrievalError(f"the store of searches {path} failed: {error}{cure}") from error
    except (sqlite3.Error, KeyError, ValueError) as error:  # the last two: rows that this module did not write
        raise RetrievalError(f"the store of searches {path} failed: {error}") from error


def _key(fingerprint: str, query: str, k: int) -> bytes:
    return hashlib.sha256(json.dumps([fingerprint, query, int(k)]).encode()).digest()


def _hash(passage: Passage) -> bytes:
    return hashlib.sha256(json.dumps([passage.id, passage.title, passage.text]).encode()).digest()


def _found(text: str) -> list[tuple[str, float | None]]:
    """Hash and score of each passage of an answer. Raises ``ValueError`` for what this module did not write."""
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError(f"expected the passages of an answer, found {text[:60]!r}")
    for each in found:
        if not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], str)):
            raise ValueError(f"expected a passage's hash and score, found {each!r:.60}")
        if each[1] is not None and not isinstance(each[1], float):
            raise ValueError(f"expected a score, found {each[1]!r:.60}")
    return [(name, score) for name, score in found]


def _passage(hashed: bytes, id: str | bytes, title: str | bytes, text: str | bytes) -> Passage:
    """A stored passage. Raises ``ValueError`` where it is not the one that was stored: the file is damaged."""
    passage = Passage(_read(id), _read(title), _read(text))
    if _hash(passage) != hashed:
        raise ValueError(f"the passage {passage.id!r:.60} is damaged; restore the file, or record it again")
    return passage


def _written(text: str) -> str | bytes:
    """What SQLite keeps: text, or bytes where a corpus has half of a surrogate pair, which its text cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _read(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")


class ReplayBackend:
    """A backend with a store in front of it; a :class:`SearchBackend` with the same fingerprint.

    - ``readthrough``: what is stored is not asked again, by any process; what is not is asked and stored.
    - ``record``: as ``readthrough``, but answers of earlier sessions are asked anew. A session is this object with its
      pickled copies, so branches of a run share results, and a replay gives exactly what the run saw.
    - ``replay``: never asks. A query that is not stored raises :class:`~turntree.errors.ReplayMissError`.

    ``backend`` may be None in mode ``replay``; the fingerprint is then ``fingerprint``, else the only one that the
    store has from ``source``, else its only one. ``source`` says in the store what the answers are from. ``stats``:
    queries found (``hits``), asked (``asked``) and missing (``misses``).
    """

    def __init__(
        self,
        store: SearchStore | str | Path,
        backend: SearchBackend | None = None,
        *,
        mode: Mode = "readthrough",
        fingerprint: str = "",
        source: str = "",
        session: str = "",
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"mode={mode!r}: expected one of {', '.join(get_args(Mode))}")
        if backend is None and mode != "replay":
            raise ConfigError(f"mode={mode!r} needs a backend to ask; only replay does without one")
        self.store = store if isinstance(store, SearchStore) else SearchStore(store, create=mode != "replay")
        self.backend, self.mode, self.source = backend, mode, source
        self.session = session or uuid.uuid4().hex
        self.stats = {"hits": 0, "asked": 0, "misses": 0}
        self._lock = threading.Lock()
        self._fingerprint = fingerprint or ("" if backend is not None else self._stored_fingerprint())

    @property
    def fingerprint(self) -> str:
        """That of the backend whose answers these are."""
        if self._fingerprint:
            return self._fingerprint
        assert self.backend is not None
        return self.backend.fingerprint

    @property
    def in_flight(self) -> int:
        """Searches that may run at the same time, from several threads, as the backend declares; 0 without one."""
        return int(getattr(self.backend, "in_flight", 0))

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """As the backend's; equal queries are looked up, and asked, once.

        Raises :class:`ReplayMissError`, or what the backend raises.
        """
        check_queries(queries, k)
        unique = list(dict.fromkeys(queries))
        fingerprint = self.fingerprint
        session = self.session if self.mode == "record" else None
        found = self.store.get(fingerprint, unique, k, session=session)
        missing = [query for query in unique if query not in found]
        self._count(hits=len(found), misses=len(missing))
        if missing:
            found |= self._ask(fingerprint, missing, k, session)
        return [list(found[query]) for query in queries]

    def close(self) -> None:
        """Close the store, and the backend where it can be closed."""
        self.store.close()
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _ask(self, fingerprint: str, queries: Sequence[str], k: int, session: str | None) -> dict[str, list[Passage]]:
        if self.mode == "replay" or self.backend is None:
            others = f", nor to {len(queries) - 1} others" if len(queries) > 1 else ""
            raise ReplayMissError(
                f"the store {self.store.path} has no answer of {fingerprint} to the query {queries[0]!r} with k={k}"
                f"{others}; it has {len(self.store)} answers ({self._described()}). Record it with "
                "search.store_mode=readthrough, or use the settings (top_k, seed, model) that were recorded"
            )
        lists = self.backend.search(queries, k=k)
        if len(lists) != len(queries):
            raise RetrievalError(f"expected {len(queries)} lists of passages from the backend, found {len(lists)}")
        answers = dict(zip(queries, lists, strict=True))
        self.store.put(fingerprint, answers, k, session=session or "", source=self.source)
        self._count(asked=len(queries))
        # What is stored counts: another process may have been first, and a replay gives that.
        return {**answers, **self.store.get(fingerprint, queries, k)}

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self.stats[name] += count

    def _stored_fingerprint(self) -> str:
        known = self.store.fingerprints()
        if not known:
            raise ConfigError(f"{self.store.path} holds no answers yet: record some first (search.store_mode=record)")
        mine = [found for found, source in known.items() if self.source and source == self.source] or list(known)
        if len(mine) != 1:
            raise ConfigError(
                f"{self.store.path} holds answers of {len(mine)} fingerprints ({self._described()}): expected one; say "
                "which with search.store_fingerprint"
            )
        return mine[0]

    def _described(self) -> str:
        known = self.store.fingerprints()
        return ", ".join(f"{found} from {source or 'an unnamed backend'}" for found, source in known.items()) or "none"
