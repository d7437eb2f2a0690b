"""One process a run folder: two that go on with the same run would take each other's lines and checkpoints away."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from turntree.errors import CheckpointError
from turntree.trainers.atomic import written
from turntree.trainers.distributed.ranks import ALONE, Ranks

__all__ = ["only_writer"]

_BUSY = (errno.EAGAIN, errno.EACCES)


@contextmanager
def only_writer(folder: Path, *, ranks: Ranks = ALONE) -> Iterator[None]:
    """Keep other processes out of ``folder``, which is made where there is none; ``ranks`` have it together.

    The lock ends with the block, or with the process however that ends. Raises :class:`CheckpointError` where another
    process has the folder. On a file system without locks nothing is kept out. Once at a time for a folder in this
    process.
    """
    with ExitStack() as held:
        ranks.main(lambda: held.enter_context(_locked(folder)))
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / ".lock"
    with written(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Not flock: a child process that outlives a killed parent must not hold the folder.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            os.close(descriptor)
            raise CheckpointError(
                f"another process works in {folder}; nothing was changed. Wait for it, stop it, or choose another "
                "folder (out=...)"
            ) from None
    try:
        yield
    finally:
        os.close(descriptor)
