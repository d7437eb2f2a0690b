"""An append-only file of finished trajectories: what was written stays, whenever the process dies."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turntree.errors import CheckpointError, DataError
from turntree.trainers.append import AppendFile, json_line
from turntree.trainers.atomic import atomic_file, sync_folder, write_json
from turntree.trainers.checkpoint import check_fingerprint
from turntree.trainers.coldstart.played import Key

__all__ = ["AppendFile", "Journal", "json_line"]

SCHEMA = 1


class Journal:
    """The trajectories in ``folder``, each once; one process at a time.

    ``trajectories.jsonl`` holds them in the order in which they ended, and in the order of the questions once
    :meth:`settle` was called. ``journal.json`` holds what they depend on.

    Raises ``CheckpointError`` where another process writes the folder, or what is there was made in another way.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Not flock: a child process that outlives a killed parent must not hold the folder.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(f"another process plays in {folder}; wait for it, or choose another folder") from None
        try:
            self._check(fingerprint)
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _check(self, fingerprint: Mapping[str, Any]) -> None:
        path = self.folder / "journal.json"
        if not path.is_file():
            if (self.folder / "trajectories.jsonl").is_file():
                raise CheckpointError(f"{path} is missing, so nobody knows how the trajectories beside it were made")
            write_json(path, {"schema": SCHEMA, "fingerprint": dict(fingerprint)})
            return
        try:
            saved = json.loads(path.read_bytes())
            schema, made = saved["schema"], saved["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); choose another folder") from error
        if schema != SCHEMA:
            raise CheckpointError(f"{path} has schema {schema}, this version reads {SCHEMA}")
        check_fingerprint(made, fingerprint, source=self.folder)

    def _open(self) -> None:
        self._file = AppendFile(self.folder / "trajectories.jsonl")
        self._places: dict[Key, tuple[int, int]] = {}
        for offset, length, row in self._file.lines():
            try:
                self._places.setdefault(Key(str(row["question_id"]), int(row["sample"])), (offset, length))
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file.path} holds a row that is no trajectory ({error!r}); delete it"
                ) from error

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, key: Key, row: Mapping[str, Any]) -> None:
        """Add a trajectory. Raises ``DataError`` for one that is there."""
        if key in self._places:
            raise DataError(f"trajectory {key.sample} of question {key.question!r} was played already")
        self._places[key] = self._file.append(row)

    def read(self, key: Key) -> dict[str, Any]:
        """The row of a trajectory."""
        return self._file.read(*self._places[key])

    def settle(self, order: Iterable[Key]) -> None:
        """Put the trajectories into ``order``, whatever the order they ended in; others follow by name and sample."""
        wanted = [key for key in dict.fromkeys(order) if key in self._places]
        given = set(wanted)
        wanted += sorted(key for key in self._places if key not in given)
        if wanted == sorted(self._places, key=lambda key: self._places[key]):
            self._file.sync()
            sync_folder(self.folder)
            return
        with atomic_file(self._file.path) as file:
            for key in wanted:
                file.write(self._file.raw(*self._places[key]))
        self._file.close()
        self._open()

    def close(self) -> None:
        """Let go of the folder."""
        self._file.close()
        os.close(self._lock)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
