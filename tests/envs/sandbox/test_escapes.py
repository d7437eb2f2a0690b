"""What code may try: to get out, to take everything, to hang, to lie. Each attempt is real code in a real sandbox."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.core import ToolCall, ToolResult
from turntree.envs.sandbox import PythonTool, probe

pytestmark = pytest.mark.skipif(bool(probe().missing), reason=f"no isolation here: {probe().missing}")

_DENIED = r"PermissionError|Operation not permitted|BlockingIOError|Resource temporarily unavailable"
_ABSENT = r"FileNotFoundError|No such file"
_STOPPED = r"^error: the (code used more|code took longer|interpreter ended)"


@dataclass
class Host:
    """Things outside that must not be reached: a file, a variable, two servers, a process."""

    folder: Path
    secret: str = field(default_factory=lambda: f"canary-{secrets.token_hex(8)}")
    reached: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.file = self.folder / "secret.txt"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self.folder.chmod(0o777)
        self.process = subprocess.Popen(["sleep", "600"])
        self.tcp, self.unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
        self.name = f"turntree-{secrets.token_hex(4)}"
        self.unix.bind(f"\0{self.name}")
        self.unix.listen()
        for server in (self.tcp, self.unix):
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        self.before = self.state()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                server.accept()
            except OSError:
                return
            self.reached.append(str(server.getsockname()))

    def state(self) -> Any:
        status = self.file.stat()
        return (
            self.file.read_text(),
            status.st_mtime_ns,
            status.st_mode,
            status.st_uid,
            sorted(os.listdir(self.folder)),
        )

    def values(self) -> dict[str, Any]:
        return {
            "FILE": str(self.file),
            "FOLDER": str(self.folder),
            "PORT": self.tcp.getsockname()[1],
            "NAME": self.name,
            "PID": self.process.pid,
            "OURS": os.getpid(),
            "REPO": str(Path(__file__).parents[3]),
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for server in (self.tcp, self.unix):
            server.shutdown(socket.SHUT_RDWR)
            server.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with pytest.MonkeyPatch.context() as patch:
        made = Host(tmp_path_factory.mktemp("host"))
        patch.setenv("TURNTREE_SECRET", made.secret)
        yield made
        made.close()


@pytest.fixture(scope="module")
def tool(host: Host) -> Iterator[PythonTool]:
    made = PythonTool(cpu_s=0.6, wall_s=20, memory_mb=200, disk_mb=4, threads=6, output_chars=600)
    yield made
    made.pool.close()


@pytest.fixture(scope="module")
def quick(host: Host) -> Iterator[PythonTool]:
    """For what sleeps: a short time by the clock."""
    made = PythonTool(cpu_s=5, wall_s=0.4)
    yield made
    made.pool.close()


def run(tool: PythonTool, code: str, memory: Any = None) -> ToolResult:
    (outcome,) = tool.run([ToolCall("python", code, memory)])
    assert isinstance(outcome, ToolResult), outcome
    return outcome


# name: (code, what the result must match)
GET_OUT = {
    "passwd": ("open('/etc/passwd').read()", _ABSENT),
    "shadow": ("open('/etc/shadow').read()", _ABSENT),
    "host file": ("open({FILE!r}).read()", _ABSENT),
    "host file by parents": ("open('/tmp/' + '../' * 20 + {FILE!r}).read()", _ABSENT),
    "write host file": ("open({FILE!r}, 'w').write('gone')", _ABSENT),
    "repository": ("import os\nos.listdir({REPO!r})", _ABSENT),
    "work": ("import os\nos.listdir('/work')", _ABSENT),
    "root listing": (
        "import os\n"
        "set(os.listdir('/')) - {{'dev', 'etc', 'lib', 'lib32', 'lib64', 'libx32', 'python', 'tmp', 'usr'}}",
        r"^set\(\)",
    ),
    "environ": ("import os\ndict(os.environ)", r"^\{'HOME': '/tmp'"),
    "proc self environ": ("open('/proc/self/environ', 'rb').read()", _ABSENT),
    "proc 1 environ": ("open('/proc/1/environ', 'rb').read()", _ABSENT),
    "proc of all": ("import glob\nglob.glob('/proc/*/environ')", r"^\[\]"),
    "sys": ("import os\nos.listdir('/sys')", _ABSENT),
    "block device": ("open('/dev/vda', 'rb').read(10)", _ABSENT),
    "device folder": ("import os\nos.listdir('/dev')", r"^\['null'\]"),
    "write outside": ("open('/new', 'w')", _DENIED + "|Read-only"),
    "write library": ("open('/python/lib/evil.py', 'w')", _DENIED + "|Read-only"),
    "write stdlib": ("import os\nopen(os.path.dirname(os.__file__) + '/os.py', 'a')", _DENIED + "|Read-only"),
    "symlink": ("import os\nos.symlink({FILE!r}, 'link')\nopen('link').read()", _ABSENT),
    "symlink to root": ("import os\nos.symlink('/', 'r')\nopen('r/etc/passwd')", _ABSENT),
    "hardlink": ("import os\nos.link('/python', 'link')", _DENIED + "|OSError|Invalid cross-device"),
    "mknod": ("import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))", _DENIED),
    "inherited descriptors": (
        "import os\nfound = []\nfor fd in range(3, 200):\n    try:\n        os.fstat(fd); found.append(fd)\n"
        "    except OSError:\n        pass\nfound",
        r"^\[3, 4\]",
    ),
    "packages of the host": ("import turntree.envs.worlds", "ModuleNotFoundError"),
    "numpy of the host": ("import numpy", "ModuleNotFoundError"),
    "site packages": (
        "import sys\nlib = '/lib/python3.11/site-packages'\nsys.path += [{REPO!r} + '/.venv' + lib, '/python' + lib]\n"
        "import gymnasium",
        "ModuleNotFoundError",
    ),
    "os.system": ("import os\nos.system('id > /tmp/out')\nos.listdir('/tmp')", r"^\[\]"),
    "subprocess": ("import subprocess\nsubprocess.run(['id'], capture_output=True)", _DENIED),
    "shell": ("import subprocess\nsubprocess.getoutput('cat /etc/passwd')", _DENIED),
    "exec": ("import os\nos.execv('/python/bin/python', ['x'])", _DENIED + "|" + _ABSENT),
    "posix_spawn": ("import os\nos.posix_spawn('/usr/bin/id', ['id'], {{}})", _DENIED + "|" + _ABSENT),
    "multiprocessing": ("import multiprocessing as m\nm.get_context('fork').Process(target=print).start()", _DENIED),
    "pty": ("import pty\npty.fork()", _DENIED + "|out of pty devices"),
    "tcp": ("import socket\nsocket.create_connection(('127.0.0.1', {PORT}), timeout=1)", _DENIED),
    "udp": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", _DENIED),
    "inet6": ("import socket\nsocket.socket(socket.AF_INET6)", _DENIED),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{NAME}')", _DENIED),
    "netlink": ("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)", _DENIED),
    "packet socket": ("import socket\nsocket.socket(17, socket.SOCK_RAW)", _DENIED),
    "vsock": ("import socket\nsocket.socket(40, socket.SOCK_STREAM)", _DENIED),
    "url": (
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{PORT}', timeout=1)",
        "URLError|Permission|gaierror",
    ),
    "kill the supervisor": ("import os\nos.kill({OURS}, 9)", _DENIED),
    "kill a process": ("import os\nos.kill({PID}, 9)", _DENIED),
    "kill everything": ("import os\nos.kill(-1, 9)", _DENIED),
    "kill the keeper": ("import os\nos.kill(1, 9)", _DENIED),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", _DENIED),
    "kill the group": ("import os\nos.killpg(0, 9)", _DENIED),
    "pidfd": ("import os\nos.pidfd_open({PID})", _DENIED),
    "ptrace": ("import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)", r"^-1"),
    "read other memory": ("import ctypes\nctypes.CDLL(None).process_vm_readv(1, None, 0, None, 0, 0)", r"^-1"),
    "mount": ("import ctypes\nctypes.CDLL(None).mount(b'none', b'/tmp', b'proc', 0, None)", r"^-1"),
    "umount": ("import ctypes\nctypes.CDLL(None).umount2(b'/tmp', 2)", r"^-1"),
    "unshare": ("import ctypes\nctypes.CDLL(None).unshare(0x10000000)", r"^-1"),
    "setns": ("import ctypes\nctypes.CDLL(None).setns(3, 0)", r"^-1"),
    "clone": ("import ctypes\nctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0)", r"^-1"),
    "vfork": ("import ctypes\nctypes.CDLL(None).syscall(58)", r"^-1"),
    "clone3": ("import ctypes\nctypes.CDLL(None).syscall(435, ctypes.create_string_buffer(88), 88)", r"^-1"),
    "32 bit calls": ("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)", r"^-1"),
    "chroot": ("import os\nos.mkdir('x')\nos.chroot('x')", _DENIED),
    "setuid": ("import os\nos.setuid(0)", _DENIED),
    "setgroups": ("import os\nos.setgroups([0])", _DENIED),
    "capabilities": ("import ctypes\nb = ctypes.create_string_buffer\nctypes.CDLL(None).capset(b(8), b(24))", r"^-1"),
    "bpf": ("import ctypes\nctypes.CDLL(None).syscall(321, 0, 0, 0)", r"^-1"),
    "io_uring": ("import ctypes\nctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))", r"^-1"),
    "keyring": ("import ctypes\nctypes.CDLL(None).syscall(250, 0, -3, 0, 0, 0)", r"^-1"),
    "perf": ("import ctypes\nctypes.CDLL(None).syscall(298, None, 0, -1, -1, 0)", r"^-1"),
    "own filter off": ("import ctypes\nctypes.CDLL(None).prctl(22, 0, 0, 0, 0)", r"^-1"),
    "own library": ("open('x.so', 'wb').write(b'\\x7fELF')\nimport ctypes\nctypes.CDLL('/tmp/x.so')", "OSError"),
    "priority": ("import os\nos.nice(-5)", _DENIED + "|AttributeError"),
    "clock": ("import time\ntime.clock_settime(0, 0)", _DENIED),
    "host name": ("import socket\nsocket.sethostname('x')", _DENIED),
    "shared memory": (
        "from multiprocessing import shared_memory as s\ns.SharedMemory(create=True, size=100)",
        _ABSENT + "|" + _DENIED,
    ),
    "message queue": ("import ctypes\nctypes.CDLL(None).msgget(1, 0o1666)", r"^-1"),
    "raise limits": ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError|" + _DENIED),
    "limits of others": ("import resource as r\nr.prlimit(1, r.RLIMIT_CPU, (1, 1))", _DENIED),
    "pickle": (
        "import pickle\nclass X:\n    def __reduce__(s): return (__import__('os').system, ('echo x > /tmp/out',))\n"
        "pickle.loads(pickle.dumps(X()))\n"
        "import os\nos.listdir('/tmp')", r"^\[\]"),
    "descriptors in flight": (
        "import socket, array\na, b = socket.socketpair()\na.sendmsg([b'x'], [(1, 1, array.array('i', [3]))])",
        _DENIED,
    ),
    "who gets signals": ("import fcntl\nfcntl.fcntl(3, fcntl.F_SETOWN, 1)", _DENIED),
    "which signal": ("import fcntl\nfcntl.fcntl(3, 10, 9)", _DENIED),
    "watch a folder": ("import fcntl, os\nfcntl.fcntl(os.open('/python', 0), fcntl.F_NOTIFY, 4)", _DENIED),
    "lock a file of the host": ("import fcntl, os\nfcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_EX)", _DENIED),
    "larger pipes": ("import fcntl, os\nfcntl.fcntl(os.pipe()[1], 1031, 1 << 20)", _DENIED),
    "who is at the other end": ("import socket\nsocket.socketpair()[0].getsockopt(1, 77)", _DENIED),
    "names of who writes": ("import socket\nsocket.socketpair()[0].setsockopt(1, 76, 1)", _DENIED),
    "program for a socket": ("import socket\nsocket.socketpair()[0].setsockopt(1, 26, bytes(16))", _DENIED),
    "handles of files": ("import ctypes\nctypes.CDLL(None).syscall(304, 3, bytes(200), 0)", r"^-1"),
    "descriptor of another": ("import ctypes\nctypes.CDLL(None).syscall(438, 3, 0, 0)", r"^-1"),
    "faults in user space": ("import ctypes\nctypes.CDLL(None).syscall(323, 0)", r"^-1"),
    "execveat": ("import ctypes\nctypes.CDLL(None).syscall(322, -100, b'/dev/null', 0, 0, 0)", r"^-1"),
    "secret memory": ("import ctypes\nctypes.CDLL(None).syscall(447, 0)", r"^-1"),
    "new mount calls": ("import ctypes\nctypes.CDLL(None).syscall(430, b'tmpfs', 0)", r"^-1"),
    "clone of files": ("import ctypes\nctypes.CDLL(None).syscall(56, 0x400 | 17, 0, 0, 0, 0)", r"^-1"),
    "clone into the parent": ("import ctypes\nctypes.CDLL(None).syscall(56, 0x8000 | 17, 0, 0, 0, 0)", r"^-1"),
    "interrupt of 32 bits": (
        "import ctypes, mmap, platform, os\nif platform.machine() != 'x86_64': os._exit(0)\n"
        "m = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()", _STOPPED),
    "who am i": ("import os\nos.getuid(), os.geteuid(), os.getgroups()", r"^\(1000, 1000, \[.*\]\)"),
}  # fmt: skip

LIE = {
    "stdin": ("input()", "EOFError"),
    "forged result": (
        "import socket, json\ns = socket.socket(fileno=3)\ns.send(json.dumps(dict(did='run')).encode())\n"
        "s.detach()\nprint('after')",
        ".*",
    ),
    "forged nonsense": ("import os\nos.write(3, b'nonsense')", _STOPPED),
    "forged huge message": ("import os\nos.write(3, b'x' * 150000)", _STOPPED + "|OSError"),
    "close the channel": ("import os\nos.close(3)\n1", _STOPPED),
    "close everything": ("import os\nos.closerange(0, 100)\n1", _STOPPED),
    "close the output": ("import os\nos.close(1); os.close(2); os.close(4)\nprint('x')", "^$|Bad file|error"),
    "read the channel": ("import os\nos.set_blocking(3, False)\nos.read(3, 100)", "BlockingIOError"),
    "exit": ("import os\nos._exit(0)", _STOPPED),
    "sys.exit": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "abort": ("import os\nos.abort()", _STOPPED),
    "segfault": ("import ctypes\nctypes.string_at(0)", _STOPPED),
    "faulthandler": ("import faulthandler\nfaulthandler._sigsegv()", _STOPPED),
    "builtins": ("import builtins\nbuiltins.len = builtins.str = builtins.open = None\n2 + 2", "^4$|" + _STOPPED),
    "builtins gone": ("import builtins\nbuiltins.__dict__.clear()", ".*"),
    "sys.modules": ("import sys\nsys.modules.clear()\n2 + 2", "^4$|" + _STOPPED),
    "os functions": ("import os\nos.write = os.read = os.fork = lambda *a: 1 / 0\nprint('still')", "^still$"),
    "stdout": ("import sys\nsys.stdout = None\nprint('x')\n5", "^5$"),
    "bad repr": ("class X:\n    def __repr__(s): raise SystemExit\nX()", "SystemExit"),
    "bad exception": ("class X(Exception):\n    def __str__(s): raise KeyboardInterrupt\nraise X", "X"),
    "trace": ("import sys\nsys.settrace(lambda *a: 1 / 0)\nx = 1", ".*"),
    "atexit": ("import atexit\natexit.register(lambda: [0 for _ in iter(int, 1)])\n1", "^1$"),
    "raise signal": ("import signal\nsignal.raise_signal(9)", _STOPPED),
    "bad destructor": ("class X:\n    def __del__(s): raise SystemExit\nX()\n1", "1$"),
    "bad collection": ("import gc\ngc.callbacks.append(lambda *a: 1 / 0)\n1", "^1\n"),
    "name": ("import os, sys\nsys.argv, sys.executable, os.getcwd()", r"^\(\[''\], '', '/tmp'\)"),
}  # fmt: skip

TAKE = {
    "memory": ("x = bytearray(10**10)", "MemoryError"),
    "memory by steps": ("x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError"),
    "files": ("for i in range(10**5): open(str(i), 'w').close()", "No space left"),
    "disk": ("with open('big', 'wb') as f:\n    for _ in range(100): f.write(bytes(10**6))", "OSError|" + _STOPPED),
    "sparse file": ("open('s', 'wb').truncate(10**12)", "OSError|File too large|" + _STOPPED),
    "memory files": ("import os\nos.memfd_create('x')", _DENIED),
    "descriptors": ("import os\nx = [os.open('/dev/null', 0) for _ in range(10**4)]", "Too many open files"),
    "threads": (
        "import threading\nx = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(100)]\n"
        "for t in x: t.start()",
        "can't start new thread",
    ),
    "fork bomb": (
        "import os\ndenied = 0\nfor _ in range(200):\n    try:\n        os.fork()\n    except OSError:\n"
        "        denied += 1\ndenied",
        "^200$",
    ),
    "daemon": ("import os\nif os.fork() == 0:\n    os.setsid()", _DENIED),
    "output": ("print('x' * 10**7)", r"characters left out"),
    "output of C": ("import os\nfor _ in range(100): os.write(1, b'y' * 10**5)", r"characters left out"),
    "value": ("'z' * 10**6", r"characters left out"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "no recursion limit": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "MemoryError|" + _STOPPED),
    "recursion in C": ("x = []\nfor _ in range(10**5): x = [x]\nrepr(x)", "RecursionError|" + _STOPPED),
    "nested source": ("eval('(' * 10**4 + ')' * 10**4)", "MemoryError|SyntaxError|RecursionError|" + _STOPPED),
    "yaml bomb": ("x = ['x'] * 10\nfor _ in range(30): x = [x] * 10\nlen(str(x))", "MemoryError|" + _STOPPED),
    "sockets": ("import socket\nx = [socket.socketpair() for _ in range(10**4)]", "Too many open files"),
    "mappings": ("import mmap\nx = [mmap.mmap(-1, 4096) for _ in range(10**6)]", "OSError|MemoryError"),
    "compressed": (
        "import zlib\nd = zlib.compress(bytes(10**7))\nfor _ in range(9): d = zlib.compress(zlib.decompress(d) * 10)",
        "MemoryError|" + _STOPPED,
    ),
    "many digits": ("str(7 ** 10**5)", "ValueError"),
}  # fmt: skip

HANG = {
    "loop": "while True: pass",
    "huge power": "x = 9 ** 9 ** 9",
    "regex": "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
    "ignored signals": (
        "import signal\nfor s in (1, 2, 3, 14, 15, 24):\n    signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    ),
    "caught exceptions": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "destructor": "class X:\n    def __del__(s):\n        while True: pass\nX()\nNone",
    "hanging repr": "class X:\n    def __repr__(s):\n        while True: pass\nX()",
    "busy thread": "import threading as t\ndef f():\n    while True: pass\nx = t.Thread(target=f)\nx.start(); x.join()",
    "endless output": "while True: print('x' * 1000)",
    "all digits": "import sys\nsys.set_int_max_str_digits(0)\nlen(str(7 ** (3 * 10**6)))",
    "collection": "import gc\ngc.callbacks.append(lambda *a: [0 for _ in iter(int, 1)])\n1",
    "questions": "import signal\nsignal.signal(10, lambda *a: None)\nwhile True: signal.raise_signal(10)",
    "alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nwhile True: pass",
}

WAIT = {
    "pipe": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "event": "import threading\nthreading.Event().wait()",
    "pause": "import signal\nsignal.pause()",
    "lock": "import threading\nl = threading.Lock(); l.acquire(); l.acquire()",
    "stop itself": "import signal\nsignal.raise_signal(signal.SIGSTOP)",
    "read the channel": "import os\nos.read(3, 10)",
}


@pytest.fixture(scope="module")
def beside(tool: PythonTool) -> ToolResult:
    """An episode that goes on beside the attempts."""
    return run(tool, "kept = [1, 2]")


# Those of each kind that run every time; the others run with the slow tests.
EVERY_TIME = {
    "passwd", "host file", "write host file", "root listing", "environ", "proc of all", "write stdlib", "symlink",
    "inherited descriptors", "site packages", "subprocess", "exec", "tcp", "unix socket", "netlink", "kill a process",
    "kill everything", "ptrace", "mount", "unshare", "clone", "chroot", "setuid", "io_uring", "pickle",
    "stdin", "forged result", "forged nonsense", "close everything", "close the output", "exit", "segfault",
    "builtins gone", "sys.modules", "os functions", "atexit",
    "memory", "files", "disk", "sparse file", "threads", "fork bomb", "output of C", "recursion", "recursion in C",
}  # fmt: skip


def attempts(table: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow) for name in table]


def unharmed(host: Host) -> None:
    assert host.state() == host.before
    assert host.process.poll() is None
    assert host.reached == []


def check(tool: PythonTool, host: Host, beside: ToolResult, code: str, expected: str) -> None:
    """The attempt gives what it may, an episode beside it goes on, the host is as it was."""
    result = run(tool, code, None)
    assert re.search(expected, result.value, re.DOTALL), result.value
    assert host.secret not in result.value
    assert "root:" not in result.value
    again = run(tool, "1 + 1", result.memory)
    assert again.value == "2" or result.memory is not None, again.value
    assert run(tool, "kept", beside.memory).value == "[1, 2]"
    unharmed(host)


def filled(host: Host, code: str) -> str:
    return code.format(**host.values())


@pytest.mark.parametrize("name", attempts(GET_OUT))
def test_nothing_gets_out(name: str, tool: PythonTool, host: Host, beside: ToolResult) -> None:
    code, expected = GET_OUT[name]
    check(tool, host, beside, filled(host, code), expected)


@pytest.mark.parametrize("name", attempts(LIE))
def test_what_lies_or_breaks_harms_itself_only(name: str, tool: PythonTool, host: Host, beside: ToolResult) -> None:
    check(tool, host, beside, *LIE[name])


@pytest.mark.parametrize("name", attempts(TAKE))
def test_what_takes_everything_gets_its_share(name: str, tool: PythonTool, host: Host, beside: ToolResult) -> None:
    check(tool, host, beside, *TAKE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HANG)
def test_what_never_ends_is_stopped(name: str, tool: PythonTool, host: Host, beside: ToolResult) -> None:
    check(tool, host, beside, HANG[name], "^error: the (code used more than 0.6 s|interpreter ended)")


def test_a_loop_is_stopped(tool: PythonTool, host: Host, beside: ToolResult) -> None:
    check(tool, host, beside, HANG["ignored signals"], "^error: the code used more than 0.6 seconds")


@pytest.mark.slow
@pytest.mark.parametrize("name", WAIT)
def test_what_waits_for_ever_is_stopped(name: str, quick: PythonTool, host: Host) -> None:
    start = time.monotonic()
    result = run(quick, WAIT[name])
    assert re.search(_STOPPED, result.value), result.value
    assert result.memory is None
    assert time.monotonic() - start < 20
    unharmed(host)


def test_a_result_that_is_forged_early_does_not_run_on_in_the_background(tool: PythonTool) -> None:
    code = 'import socket\ns = socket.socket(fileno=3)\ns.send(b\'{"did": "run"}\')\nwhile True: pass'
    before = set(tool.pool._kept)
    forged = run(tool, code)
    (pid,) = {interpreter.pid for interpreter in set(tool.pool._kept) - before}
    _stands_still(pid)
    assert run(tool, "1 + 1").value == "2"
    follows = run(tool, "2 + 2", forged.memory)
    assert re.search(_STOPPED, follows.value), follows.value


def test_a_process_that_lies_about_its_twin_ends_with_what_it_hid(tool: PythonTool) -> None:
    code = (
        "import os, socket, sys\ncells = sys.modules['turntree.envs.sandbox.inside.cells']\n"
        "def twin(channel, streams, fds):\n    if not cells._fork():\n        while True: pass\n"
        '    s = socket.socket(fileno=fds[0])\n    s.send(b\'{"did": "fork"}\')\n    s.detach()\n'
        "    return channel\ncells._twin = twin"
    )
    before = set(tool.pool._kept)
    first = run(tool, code)
    (liar,) = set(tool.pool._kept) - before
    opened = tool.pool.counts.opened
    assert run(tool, "1 + 1", first.memory).value == "2"
    assert tool.pool.counts.opened == opened + 1
    assert not liar.alive
    assert not liar.sandbox.interpreters
    assert liar.sandbox._pidfd == -1


@pytest.mark.parametrize("name", ["SIGCONT", "SIGCHLD"])
def test_what_happens_to_twins_is_not_noticed(name: str, tool: PythonTool) -> None:
    first = run(tool, f"import os, signal\nseen = []\nsignal.signal(signal.{name}, lambda *a: seen.append(1))\nseen")
    assert first.value == "[]"
    second = [run(tool, "seen", first.memory) for _ in range(2)]
    assert run(tool, "os._exit(0)", first.memory).memory is None
    assert {r.value for r in [*second, run(tool, "seen", first.memory), run(tool, "seen", second[0].memory)]} == {"[]"}


def test_a_background_thread_stands_still_between_cells(tool: PythonTool) -> None:
    code = (
        "import threading\nn = 0\ndef f():\n    global n\n    while True: n += 1\n"
        "threading.Thread(target=f, daemon=True).start()"
    )
    before = set(tool.pool._kept)
    first = run(tool, code)
    assert first.value == ""
    (pid,) = {interpreter.pid for interpreter in set(tool.pool._kept) - before}
    assert len(os.listdir(f"/proc/{pid}/task")) == 2
    _stands_still(pid)


def _stands_still(pid: int) -> None:
    """The process is stopped, soon after it was told to, and uses no time then."""
    end = time.monotonic() + 10
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        assert time.monotonic() < end, state
    used = _ticks(pid)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        assert _ticks(pid) == used


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_no_process_is_left(host: Host) -> None:
    """Also none that an attempt made, nor what makes the sandboxes."""
    tool = PythonTool(cpu_s=0.5, wall_s=20, memory_mb=201)
    memory = None
    for _ in range(3):
        memory = run(
            tool, "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", memory
        ).memory
    run(tool, "while True: pass", memory)
    family = _family(os.getpid())
    assert family
    tool.pool.close()
    mine = {pid for pid in family if _alive(pid) and f'"memory_mb": {201}' in _command(pid)}
    assert mine == set()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


def _family(pid: int) -> set[int]:
    """Every process below ``pid``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
