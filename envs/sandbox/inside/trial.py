"""What the kernel grants, found by asking for it in processes that end at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from turntree.envs.sandbox.inside import kernel, seccomp

__all__ = ["main", "trials"]


def trials() -> dict[str, str]:
    """Layer to what went wrong with it, empty for nothing."""
    found = {f"{name} namespace": _tried(_unshare(name)) for name in kernel.NAMESPACES}
    if not seccomp.supported():
        found["seccomp"] = f"there is no table of system calls for {seccomp.machine()}"
    else:
        found["seccomp"] = _tried(_filtered)
    found["seccomp-notify"] = "" if seccomp.has_notifications() else "needs Linux 5.5 or newer"
    found["landlock"] = "" if kernel.landlock_abi() else "the kernel has it switched off, or is older than 5.13"
    return found


def _unshare(name: str) -> Callable[[], None]:
    return lambda: kernel.unshare("user", name)


def _filtered() -> None:
    seccomp.install(notify=False)
    try:
        os.fork()
    except PermissionError:
        return
    raise OSError("a filter that refuses new processes did not")


def _tried(attempt: Callable[[], None]) -> str:
    """The error of an attempt in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        told = b""
        try:
            attempt()
        except BaseException as error:
            told = str(error).encode() or type(error).__name__.encode()
        os.write(writing, told or b"ok")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return "" if told == b"ok" else told.decode() or "the process ended"


def main() -> None:
    """Print the trials as JSON."""
    print(json.dumps(trials()))
