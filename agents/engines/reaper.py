"""Ending our processes when this one is killed: SIGKILL leaves it no time to do so itself."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Reaper"]

_GRACE_S = 5.0

# Runs alone, so it imports nothing of ours. It reads until the other end of its standard input is closed: by a release,
# which says so first, or because the process that holds it is gone.
_PROGRAM = """
import os, signal, sys, time

def alive(pid, start):
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return not start or started(pid) == start

def started(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            return handle.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""

if sys.stdin.buffer.read() == b"released":
    sys.exit()
kept = [(int(pid), start) for pid, _, start in (word.partition(":") for word in sys.argv[2:])]
end = time.monotonic() + float(sys.argv[1])
for sign in (signal.SIGTERM, signal.SIGKILL):
    for pid, start in kept:
        if alive(pid, start):
            os.kill(pid, sign)
    while sign == signal.SIGTERM and any(alive(*one) for one in kept) and time.monotonic() < end:
        time.sleep(0.05)
"""


class Reaper:
    """Ends ``pids`` (SIGTERM, then SIGKILL after ``grace_s``) as soon as this process is gone, however it went.

    A small process of its own waits for that; Ctrl-C does not reach it. A number that another process has got since is
    left alone where ``/proc`` tells when a process was started (Linux).
    """

    def __init__(self, pids: Iterable[int], *, grace_s: float = _GRACE_S) -> None:
        marks = [f"{pid}:{_started(pid)}" for pid in pids]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, str(grace_s), *marks],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """The processes have ended, or may live on. A second call does nothing."""
        with contextlib.suppress(ValueError, OSError):  # released before, or gone
            self._process.communicate(b"released", timeout=10)


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
