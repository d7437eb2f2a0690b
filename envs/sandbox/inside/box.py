"""The walls: a root of its own with little in it, no capabilities, limits, a filter of system calls."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from turntree.envs.sandbox.inside import kernel, seccomp

__all__ = ["HOME", "build_root", "enter", "limit", "move_library", "seal"]

HOME = "/tmp"  # noqa: S108  # of the sandbox
"""The only folder in which the code inside can write."""

_USER = 1000
_HOST = "sandbox"


def build_root(plan: Mapping[str, Any]) -> None:
    """Replace the root of this process's mount namespace by one that holds what ``plan`` says, all of it read-only.

    ``binds``: (path outside, path inside); ``links``: (target, link); ``hidden``: folders inside that are shown empty.
    Needs full capabilities in a user namespace of its own; ends with none.
    """
    machine = seccomp.machine()
    kernel.mount("none", "/", "", kernel.MS_SLAVE | kernel.MS_REC)
    # Opened while this process is who it was outside: folders on the way may be closed to others.
    opened = [(os.open(source, os.O_PATH | os.O_CLOEXEC), target) for source, target in plan["binds"]]
    _become(_USER)
    root = _mount_point()
    kernel.mount("root", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for pointed, link in plan["links"]:
        os.makedirs(os.path.dirname(root + link), exist_ok=True)
        os.symlink(pointed, root + link)
    for source, target in opened:
        _place(source, root + target)
    for target in plan["hidden"]:
        if os.path.isdir(root + target):
            kernel.mount("hidden", root + target, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID, "size=4k,mode=555")
    os.makedirs(root + HOME, exist_ok=True)
    space = f"size={plan['disk_mb']}m,nr_inodes={plan['files']},mode=700"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("home", root + HOME, "tmpfs", flags, space)
    os.chdir(root)
    kernel.pivot_root(machine)
    kernel.read_only("/")
    with contextlib.suppress(OSError):
        socket.sethostname(_HOST)
    kernel.drop_capabilities(machine)
    kernel.no_new_privileges()


def _become(user: int) -> None:
    """Be ``user`` in this user namespace, keeping the capabilities in it."""
    with contextlib.suppress(OSError):
        os.setgroups([])  # where groups may not be set they stay, as they were outside
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _mount_point() -> str:
    """Any folder: what is below it is out of sight until the root is replaced, and then gone."""
    return next(path for path in ("/tmp", "/var", "/mnt", "/opt", "/srv") if os.path.isdir(path))  # noqa: S108


def _place(source: int, target: str) -> None:
    mode = os.stat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    kernel.bind(f"/proc/self/fd/{source}", target, device=stat.S_ISCHR(mode))
    os.close(source)


def move_library(prefix: str, library: str) -> None:
    """Import from where the library is shown, and say so: names of folders outside are nobody's business."""
    sys.path[:] = [path for path in (library, f"{library}/lib-dynload", "/packages") if os.path.isdir(path)]
    sys.path_importer_cache.clear()

    def moved(value: Any) -> Any:
        inside = isinstance(value, str) and value.startswith(prefix)
        return library + value[len(prefix) :] if inside else value

    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        for owner, names in ((module, ("__file__", "__cached__")), (spec, ("origin", "cached"))):
            for name in names:
                if isinstance(getattr(owner, name, None), str):
                    setattr(owner, name, moved(getattr(owner, name)))
        if isinstance(getattr(module, "__path__", None), list):  # where its submodules are looked for
            module.__path__[:] = map(moved, module.__path__)
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        setattr(sys, name, "/python")
    sys.executable, sys.argv, sys.orig_argv = "", [""], []


def limit(plan: Mapping[str, Any]) -> None:
    """Bound what one process may take; limits that are lower already stay."""
    megabyte = 2**20
    wanted = {
        "RLIMIT_AS": plan["memory_mb"] * megabyte,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": plan["disk_mb"] * megabyte,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": plan["processes"],
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_CPU": int(plan["cpu_s"] * 100 + 60),  # the supervisor's is tighter; this one needs nobody
    }
    for name, most in wanted.items():
        number = getattr(resource, name, None)
        if number is None:
            continue
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))


def enter(plan: Mapping[str, Any], home: str) -> tuple[int | None, Sequence[str]]:
    """Lock the door from inside: limits, Landlock, who is asked about processes. The supervisor's end of the latter if
    there is one, and which layers there are once :func:`seal` has been called too.
    """
    limit(plan)
    layers = ["rlimits"]
    if plan["landlock"] and kernel.restrict_files(home):
        layers.append("landlock")
    listener = None
    if plan["seccomp"]:
        layers.append("seccomp")
        if plan["notify"]:
            listener = seccomp.listen()
            layers.append("seccomp-notify")
    return listener, layers


def seal(plan: Mapping[str, Any]) -> None:
    """Filter all system calls: from now on no descriptor can be handed to anybody."""
    if plan["seccomp"]:
        seccomp.install(notify=bool(plan["notify"]))
