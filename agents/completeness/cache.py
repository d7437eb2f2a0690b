"""Votes that were cast before, by content: in memory, and in an SQLite file where one is named."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from turntree.errors import ConfigError, DataError

__all__ = ["VoteCache"]

_CHUNK = 500


class VoteCache:
    """Verdicts by key, the ``size`` newest in memory; failures are never kept.

    ``path``: an SQLite file that several runs may share, also at the same time ('' : memory only). Raises
    ``ConfigError`` for a size below 0, ``DataError`` where the file cannot be used.
    """

    def __init__(self, path: str | Path = "", *, size: int = 100_000) -> None:
        if size < 0:
            raise ConfigError(f"cache_size={size}: expected the number of votes to keep in memory, at least 0")
        self.path = str(path)
        self.size = size
        self._memory: OrderedDict[str, bool] = OrderedDict()
        self._file: sqlite3.Connection | None = None
        if self.path:
            with self._named():
                self._file = sqlite3.connect(self.path, timeout=30)
                self._file.execute("CREATE TABLE IF NOT EXISTS votes (key TEXT PRIMARY KEY, complete INTEGER NOT NULL)")
                self._file.commit()

    def find(self, keys: Iterable[str]) -> dict[str, bool]:
        """Verdicts of those keys that are known."""
        wanted = list(dict.fromkeys(keys))
        found = {key: self._memory[key] for key in wanted if key in self._memory}
        missing = [key for key in wanted if key not in found]
        stored = self._stored(missing) if self._file is not None and missing else {}
        self._remember({**found, **stored})
        return {**found, **stored}

    def keep(self, votes: Mapping[str, bool]) -> None:
        """Remember verdicts."""
        self._remember(votes)
        if self._file is not None and votes:
            rows = [(key, int(vote)) for key, vote in votes.items()]
            with self._named(), self._file:
                self._file.executemany("INSERT OR REPLACE INTO votes VALUES (?, ?)", rows)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remember(self, votes: Mapping[str, bool]) -> None:
        for key, vote in votes.items():
            self._memory[key] = vote
            self._memory.move_to_end(key)
        while len(self._memory) > self.size:
            self._memory.popitem(last=False)

    def _stored(self, keys: list[str]) -> dict[str, bool]:
        found: dict[str, bool] = {}
        with self._named():
            for start in range(0, len(keys), _CHUNK):
                part = keys[start : start + _CHUNK]
                marks = ",".join("?" * len(part))
                query = f"SELECT key, complete FROM votes WHERE key IN ({marks})"  # noqa: S608  # marks are ?
                rows = self._file.execute(query, part).fetchall() if self._file is not None else []
                found.update((str(key), bool(vote)) for key, vote in rows)
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DataError(
                f"the cache of votes {self.path} cannot be used ({error}); expected an SQLite file of turntree or a "
                "path in a folder that exists and can be written"
            ) from error
