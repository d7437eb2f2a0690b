"""What this machine has for an index: memory, disk, cores. Figures are those of the process's own limits."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

__all__ = ["available_memory", "cores", "free_disk", "human_bytes", "parse_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be had now: what the system calls available, or less where a container limits the process."""
    system = _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None:
        limit, used = (_number(_CGROUP / "memory" / f"memory.{n}_in_bytes") for n in ("limit", "usage"))
    return system if limit is None else max(0, min(system, limit - (used or 0)))


def free_disk(path: Path) -> int:
    """Bytes free where ``path`` lies or will lie."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def human_bytes(count: float) -> str:
    """``12.3 GB``; decimal units."""
    unit = next((u for u in ("TB", "GB", "MB", "KB") if count >= _UNITS[u]), "B")
    return f"{count / _UNITS[unit]:.3g} {unit}"


def parse_bytes(text: str) -> int:
    """Bytes from ``8GB``, ``500 MB`` or a plain number. Raises :class:`ValueError` for anything else."""
    number = text.strip().rstrip("BbKkMmGgTtIi ")
    unit = text.strip()[len(number) :].strip().upper().replace("I", "")
    unit = f"{unit}B" if unit in ("K", "M", "G", "T") else unit
    try:
        size = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        size = 0.0
    if not 0 < size < math.inf:
        raise ValueError(f"expected a size such as 8GB or 500MB, found {text!r}")
    return int(size)


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or "max"
        return None
