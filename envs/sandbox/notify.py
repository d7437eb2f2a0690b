"""Answers to the system calls that the filter asks about: new threads, new processes, signals to threads."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from turntree.envs.sandbox.inside import seccomp

__all__ = ["Gate"]

_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_ASKED, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_CONTINUE = 1
_CLONE_THREAD = 0x00010000
# What fork() of libc asks for beside the signal that tells the parent: ids written to memory.
_FORK_FLAGS = 0x00100000 | 0x00200000 | 0x01000000


@dataclass
class Gate:
    """The supervisor's end of a filter, for all processes of one sandbox.

    ``threads``: how many a process may have. ``may_fork``: the process that may fork once, as it was just asked to.
    ``spent``: seconds of this side's processor time that answers took; who asks a lot pays for it.
    """

    listener: int
    threads: int
    may_fork: int = 0
    spent: float = 0.0

    def answer(self) -> None:
        """Answer one question; who died in the meantime needs none."""
        start = time.thread_time()
        self._answer()
        self.spent += time.thread_time() - start

    def _answer(self) -> None:
        buffer = bytearray(_ASKED.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, buffer)
        except OSError:
            return
        id, pid, _, number, _, _, *arguments = _ASKED.unpack(buffer)
        allowed = self._allows(pid, number, arguments)
        reply = _ANSWER.pack(id, 0, 0, _CONTINUE) if allowed else _ANSWER.pack(id, 0, -errno.EPERM, 0)
        try:
            fcntl.ioctl(self.listener, _SEND, reply)
        except OSError:
            return

    def _allows(self, thread: int, number: int, arguments: list[int]) -> bool:
        kind = seccomp.machine()
        try:
            ids = _ids(thread)
            if number == seccomp.TGKILL[kind]:
                return arguments[0] & 0xFFFFFFFF == ids["NStgid"]
            if number != seccomp.CLONE[kind]:
                return False
            flags = arguments[0] & 0xFFFFFFFF
            if flags & _CLONE_THREAD:
                return len(os.listdir(f"/proc/{thread}/task")) < self.threads
            if flags & ~_FORK_FLAGS != signal.SIGCHLD or ids["Tgid"] != self.may_fork:
                return False
            self.may_fork = 0
            return True
        except (OSError, KeyError, ValueError):
            return False

    def close(self) -> None:
        os.close(self.listener)


def _ids(thread: int) -> dict[str, int]:
    """``Tgid``: the process of a thread; ``NStgid``: the same as the process itself knows it."""
    rows = (line.split() for line in Path(f"/proc/{thread}/status").read_text(encoding="ascii").splitlines())
    return {row[0][:-1]: int(row[-1]) for row in rows if row[0] in ("Tgid:", "NStgid:")}
