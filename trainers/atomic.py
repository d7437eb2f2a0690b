"""Files that are either whole or not there: write beside, flush to disk, rename."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from turntree.errors import CheckpointError

__all__ = ["atomic_file", "sync_file", "sync_folder", "write_json", "written"]


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Around the writing of ``path``: a full or read-only disk is a ``CheckpointError`` that says how to go on."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; what was finished before is whole. Make room, or mend "
            "what it says, and go on with resume=true"
        ) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under ``path`` only when the block ends without an exception.

    A reader sees the old content or the new one, never a part. The hidden temporary file has a fixed name, so what a
    killed process left behind is overwritten by the next try. One writer a path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as readable JSON, atomically. Non-finite numbers raise ``ValueError``: they are not JSON."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_file(path) as handle:
        handle.write(text.encode())


def sync_file(path: Path) -> None:
    """Wait until a file that somebody else wrote is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder (a rename, a new file) are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
