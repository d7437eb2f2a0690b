"""The system call filter of the code inside: a list of what Python needs, everything else is refused.

The numbers are those of the kernel's tables (``asm/unistd_64.h`` and ``asm-generic/unistd.h``).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable

from turntree.envs.sandbox.inside.kernel import KernelError, no_new_privileges, syscall

__all__ = ["CLONE", "TGKILL", "has_notifications", "install", "listen", "machine", "supported"]

# name: (x86_64, aarch64); 0 where the machine has no such call.
_ALLOWED = {
    "files": """read:0:63 write:1:64 close:3:57 fstat:5:80 stat:4:0 lstat:6:0 newfstatat:262:79 statx:332:291 lseek:8:62
        pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 access:21:0 faccessat:269:48
        faccessat2:439:439 dup:32:23 dup2:33:0 dup3:292:24 fsync:74:82 fdatasync:75:83
        truncate:76:45 ftruncate:77:46 getdents:78:0 getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:0
        renameat:264:38 renameat2:316:276 mkdir:83:0 mkdirat:258:34 rmdir:84:0 creat:85:0 link:86:0 linkat:265:37
        unlink:87:0 unlinkat:263:35 symlink:88:0 symlinkat:266:36 readlink:89:0 readlinkat:267:78 chmod:90:0
        fchmod:91:52 fchmodat:268:53 umask:95:166 utimensat:280:88 utime:132:0 utimes:235:0 futimesat:261:0 open:2:0
        openat:257:56 close_range:436:436 copy_file_range:326:285 sendfile:40:71 fallocate:285:47 fadvise64:221:223
        statfs:137:43 fstatfs:138:44""",
    "memory": """mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 madvise:28:233 mincore:27:232 msync:26:227
        mremap:25:216""",
    "waiting": """poll:7:0 ppoll:271:73 select:23:0 pselect6:270:72 epoll_create:213:0 epoll_create1:291:20
        epoll_ctl:233:21 epoll_wait:232:0 epoll_pwait:281:22 eventfd:284:0 eventfd2:290:19 pipe:22:0 pipe2:293:59
        nanosleep:35:101 clock_nanosleep:230:115 pause:34:0 futex:202:98 futex_waitv:449:449 sched_yield:24:124
        wait4:61:260 waitid:247:95 restart_syscall:219:128""",
    "signals": """rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
        rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 setitimer:38:103 getitimer:36:102
        alarm:37:0""",
    "itself": """getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 getgid:104:176 geteuid:107:175
        getegid:108:177 getresuid:118:148 getresgid:120:150 getpgrp:111:0 getpgid:121:155 getsid:124:156
        getgroups:115:158 getrlimit:97:163 setrlimit:160:164 getrusage:98:165 times:100:153 sysinfo:99:179 uname:63:160
        sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
        sched_get_priority_min:147:126 getcpu:309:168 gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114
        time:201:0 set_robust_list:273:99 get_robust_list:274:100 set_tid_address:218:96 rseq:334:293 arch_prctl:158:0
        membarrier:324:283 getrandom:318:278 exit:60:93 exit_group:231:94""",
    # Not sendmsg: descriptors on their way are counted for the user of all sandboxes, so one could use up those of all.
    "channel": """recvmsg:47:212 sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockname:51:204
        getpeername:52:205""",
}
# Allowed for some values of one argument: name -> (numbers, argument, values).
_ARGUMENTS = {
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # terminal?, size, bytes, (non-)blocking
    "prctl": ((157, 167), 0, (15, 16, 0x53564D41)),  # the name of a thread, the name of memory
    "prlimit64": ((302, 261), 0, (0,)),  # of this process only
    # Copies, flags and locks; not who gets signals (F_SETOWN, F_SETSIG), leases, watches, or larger pipes.
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)),
    # Kind, error and sizes; not the process at the other end (SO_PEERPIDFD), nor programs in the kernel (filters).
    "getsockopt": ((55, 209), 2, (2, 3, 4, 7, 8, 30, 38, 39)),
    "setsockopt": ((54, 208), 2, (2, 7, 8)),
    "socketpair": ((53, 199), 0, (1,)),  # AF_UNIX: asyncio wakes itself up through one
}
#: Asked of the supervisor: new threads and processes, and signals to threads.
CLONE, TGKILL = {"x86_64": 56, "aarch64": 220}, {"x86_64": 234, "aarch64": 131}
# Said to be missing, so that libc takes the older way: clone3, openat2.
_MISSING = (435, 437)

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_ALLOW, _ERRNO, _KILL, _NOTIFY = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_CLONE_THREAD = 0x00010000
_NR, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_SET_FILTER, _ACTION_AVAILABLE, _NEW_LISTENER = 1, 2, 8
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_Instruction = tuple[int, int, int, int]


def machine() -> str:
    """The processor as :data:`CLONE` knows it, or a name that it does not know."""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def supported() -> bool:
    """Whether there is a table of system calls for this processor."""
    return machine() in _ARCH


def has_notifications() -> bool:
    """Whether the kernel can ask a supervisor about system calls."""
    try:
        syscall(_SECCOMP[machine()], _ACTION_AVAILABLE, 0, struct.pack("I", _NOTIFY), what="seccomp")
    except (KernelError, KeyError):
        return False
    return True


def listen() -> int:
    """From now on new threads, new processes and signals to threads of this process wait for a supervisor; its end."""
    kind = machine()
    asked = [(_EQUAL, 1, 0, CLONE[kind]), (_EQUAL, 0, 1, TGKILL[kind]), (_RETURN, 0, 0, _NOTIFY)]
    return _filter([*_beginning(kind), *asked, (_RETURN, 0, 0, _ALLOW)], _NEW_LISTENER)


def install(*, notify: bool) -> None:
    """Filter the system calls of this process from now on.

    With ``notify`` there is a supervisor (:func:`listen`) whose word goes for new threads, new processes and signals
    to threads; without it threads are allowed (a resource limit bounds them) and processes are refused.
    """
    _filter(_program(machine(), notify=notify), 0)


def _filter(instructions: Iterable[_Instruction], flags: int) -> int:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    no_new_privileges()
    return syscall(_SECCOMP[machine()], _SET_FILTER, flags, program, what="seccomp filter")


def _numbers(kind: str) -> list[int]:
    column = 1 if kind == "x86_64" else 2
    entries = (entry.split(":") for group in _ALLOWED.values() for entry in group.split())
    # read is number 0 of x86_64; a zero means "none" on aarch64 and for none of x86_64's other calls.
    return sorted(int(e[column]) for e in entries if kind == "x86_64" or e[column] != "0")


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbouring numbers as (first, last)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        elif not found or number > found[-1][1]:
            found.append((number, number))
    return found


def _beginning(kind: str) -> list[_Instruction]:
    """Calls of another processor's kind end the process; the number is loaded then."""
    return [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _ARCH[kind]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]


def _program(kind: str, *, notify: bool) -> list[_Instruction]:
    """Blocks that each decide about some calls or fall through to the next; jumps never leave their block."""
    refuse, allow = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    code = _beginning(kind)
    if kind == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), refuse]
    for first, last in _ranges(_numbers(kind)):
        if first == last:
            code += [(_EQUAL, 0, 1, first), allow]
        else:
            code += [(_AT_LEAST, 0, 2, first), (_ABOVE, 1, 0, last), allow]
    column = 0 if kind == "x86_64" else 1
    for numbers, argument, values in _ARGUMENTS.values():
        checks: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)]
        for value in values:
            checks += [(_EQUAL, 0, 1, value), allow]
        code += [(_EQUAL, 0, len(checks) + 1, numbers[column]), *checks, refuse]
    for number in _MISSING:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    if notify:  # the strictest filter decides, and to ask is stricter than to allow
        code += [(_EQUAL, 1, 0, CLONE[kind]), (_EQUAL, 0, 1, TGKILL[kind]), allow]
    else:
        code += [(_EQUAL, 0, 1, TGKILL[kind]), allow]
        code += [(_EQUAL, 0, 4, CLONE[kind]), (_LOAD, 0, 0, _ARGUMENTS_AT), (_BIT, 0, 1, _CLONE_THREAD), allow, refuse]
    return [*code, refuse]
