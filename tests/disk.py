"""Disks that are too small: a tmpfs of a few megabytes, and a file that takes what is left of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["SmallDisk", "small_disk"]


class SmallDisk:
    """A mounted disk. ``fill`` leaves so many bytes free; ``free`` gives all of them back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, leaving: int = 0) -> None:
        """Take all but ``leaving`` bytes (whole pages)."""
        stat = os.statvfs(self.folder)
        with contextlib.suppress(OSError), self._filler.open("ab") as file:
            file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - leaving)))

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink(missing_ok=True)

    def read_only(self, on: bool) -> None:
        """Turn it read-only, or back."""
        subprocess.run(["mount", "-o", f"remount,{'ro' if on else 'rw'}", self.folder], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of ``size`` at ``folder``; the test is skipped where none can be mounted."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.decode(errors='replace').strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
