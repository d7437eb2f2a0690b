"""System calls that Python has no function for: namespaces, mounts, capabilities, Landlock, process attributes."""

from __future__ import annotations

import ctypes
import os
import struct

__all__ = [
    "NAMESPACES",
    "KernelError",
    "bind",
    "drop_capabilities",
    "landlock_abi",
    "mount",
    "no_new_privileges",
    "pivot_root",
    "read_only",
    "restrict_files",
    "syscall",
    "unmount",
    "unshare",
    "without_address_randomisation",
]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

#: Flags of unshare(2), by the names that ``lsns`` prints.
NAMESPACES = {
    "user": 0x10000000,
    "mnt": 0x00020000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
}

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 32, 4096, 16384, 1 << 19
# Flags of statvfs(3) that a remount in a user namespace must repeat, and what mount(2) calls them.
_KEPT = ((1, MS_RDONLY), (2, MS_NOSUID), (4, MS_NODEV), (8, MS_NOEXEC), (1024, 1024), (2048, 2048), (4096, 1 << 21))
_MNT_DETACH = 2
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 24, 47, 4
_ADDR_NO_RANDOMIZE = 0x0040000
_CALLS = {
    "x86_64": {"pivot_root": 155, "capset": 126},
    "aarch64": {"pivot_root": 41, "capset": 91},
}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446


class KernelError(OSError):
    """A system call failed; the message names it."""


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise KernelError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: int | bytes | None, what: str = "") -> int:
    """Any system call by its number; raises :class:`KernelError`."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *converted), what or f"system call {number}")


def _prctl(option: int, *arguments: int, what: str) -> int:
    padded = [*arguments, 0, 0, 0, 0][:4]
    return _check(_libc.prctl(option, *(ctypes.c_ulong(a) for a in padded)), what)


def unshare(*names: str) -> None:
    """Leave the namespaces of these names for new ones."""
    flags = 0
    for name in names:
        flags |= NAMESPACES[name]
    _check(_libc.unshare(flags), f"unshare({', '.join(names)})")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [os.fsencode(part) if part else None for part in (source, target, kind)]
    data = options.encode() if options else None
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {kind or source} on {target}")


def bind(source: str, target: str, *, device: bool = False) -> None:
    """Show a file or folder at ``target`` too, read-only and without set-user-id; without devices unless it is one."""
    mount(source, target, "", MS_BIND | MS_REC)
    read_only(target, MS_NOSUID if device else MS_NOSUID | MS_NODEV)


def read_only(target: str, more: int = MS_NOSUID | MS_NODEV) -> None:
    """Make a mount read-only, keeping what a user namespace may not take away."""
    flags = os.statvfs(target).f_flag
    kept = sum(ours for theirs, ours in _KEPT if flags & theirs)
    mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | more | kept)


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def pivot_root(machine: str) -> None:
    """Make the current folder, a mount, the root of everything, and take the old root away."""
    syscall(_CALLS[machine]["pivot_root"], b".", b".", what="pivot_root")
    unmount(".")
    os.chdir("/")


def drop_capabilities(machine: str) -> None:
    """Give up every capability, for this process and all that come from it."""
    _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # the kernel knows no more of them, or this process may not
    header = struct.pack("Ii", 0x20080522, 0)
    syscall(_CALLS[machine]["capset"], header, bytes(24), what="capset")


def no_new_privileges() -> None:
    """Set-user-id programs and file capabilities no longer give anything; needed for seccomp and Landlock."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")


def without_address_randomisation() -> bool:
    """Ask that programs started from here lie at fixed addresses; whether that was not so yet."""
    before = _libc.personality(0xFFFFFFFF)
    if before < 0 or before & _ADDR_NO_RANDOMIZE:
        return False
    return bool(_libc.personality(before | _ADDR_NO_RANDOMIZE) >= 0)


def landlock_abi() -> int:
    """Version of the kernel's Landlock, 0 without it."""
    try:
        return syscall(_LANDLOCK_CREATE, None, 0, 1, what="landlock")
    except KernelError:
        return 0


def restrict_files(writable: str) -> bool:
    """Landlock: read anywhere, write and make files below ``writable`` only, no TCP; whether the kernel has it."""
    abi = landlock_abi()
    if abi < 1:
        return False
    files = (1 << 13) - 1
    files |= (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    attributes = struct.pack("QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = syscall(_LANDLOCK_CREATE, attributes, size, 0, what="landlock_create_ruleset")
    read = 1 << 2 | 1 << 3
    forbidden = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 15  # programs, devices, sockets, ioctls of devices
    for path, access in (("/", read), (writable, files & ~forbidden)):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access, folder)
        syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0, what="landlock_add_rule")
        os.close(folder)
    no_new_privileges()
    syscall(_LANDLOCK_RESTRICT, ruleset, 0, what="landlock_restrict_self")
    os.close(ruleset)
    return True
