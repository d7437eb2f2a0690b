"""Files of stores and indexes: JSON that appears whole or not at all, arrays that are mapped, one builder a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from turntree.errors import SearchIndexError

__all__ = ["append_array", "building", "cut", "holds_others", "map_array", "read_json", "write_array", "write_json"]


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that readers, and whoever comes after a crash, see the old one or the new one."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_json(path: Path, *, what: str) -> dict[str, Any]:
    """The object in a JSON file. Raises :class:`SearchIndexError` where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SearchIndexError(f"expected {what} at {path}, found {error.strerror or error}; build it first") from error
    except (ValueError, RecursionError) as error:
        raise SearchIndexError(f"{path}: expected {what}, found broken JSON ({error}); build it again") from error
    if not isinstance(value, dict):
        raise SearchIndexError(f"{path}: expected {what}, found a {type(value).__name__}; build it again")
    return value


def holds_others(folder: Path, state: str) -> bool:
    """Whether a folder holds more than a build leaves that was killed while it wrote its first file, ``state``."""
    return any(path.name != f"{state}.part" for path in folder.iterdir())


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an ``.npy`` file, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def map_array(path: Path) -> npt.NDArray[Any]:
    """A memory-mapped, read-only ``.npy`` file; pages are read when they are used and shared between processes.

    Raises :class:`SearchIndexError` where the file is missing, cut off, or something else.
    """
    try:
        header = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        raise SearchIndexError(f"expected an array at {path}, found {error!s:.160}; build the index again") from error
    if not isinstance(header, np.ndarray):
        raise SearchIndexError(f"expected an array at {path}, found a {type(header).__name__}; build the index again")
    return header.view(np.ndarray)


def append_array(file: Any, array: npt.NDArray[Any]) -> None:
    """Append the raw numbers of an array to an open binary file."""
    file.write(np.ascontiguousarray(array).data)


def cut(path: Path, size: int) -> None:
    """Give a file of a build that stopped the size it had at the last checkpoint.

    Raises :class:`SearchIndexError` where it is shorter: what was written before got lost.
    """
    path.touch()
    found = path.stat().st_size
    if found < size:
        raise SearchIndexError(
            f"{path}: expected at least {size} bytes from the build that stopped, found {found}; remove "
            f"{path.parent} and build again"
        )
    os.truncate(path, size)


@contextmanager
def _room(folder: Path) -> Iterator[None]:
    """A disk that is full, or turned read-only, while something is built."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO):
            raise
        raise SearchIndexError(
            f"cannot write in {folder}: {error.strerror}; what is there is kept: make room, and give the same command "
            "again, which goes on"
        ) from error


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Make the folder, and keep a second builder out of it. The lock ends with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file is there, or the folder above cannot be written
        raise SearchIndexError(f"expected a folder to write at {folder}, found {error}; choose another") from error
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SearchIndexError(f"another process is building in {folder}; wait for it, or stop it") from error
        with _room(folder):
            yield
    finally:
        os.close(handle)
