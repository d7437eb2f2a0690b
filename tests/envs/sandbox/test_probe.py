"""What this machine can do, what another user can, and that code is refused where walls cannot be had."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.core import ToolCall, ToolResult
from turntree.envs.sandbox import PythonTool, SandboxOptions, choose_walls, probe
from turntree.envs.sandbox.walls import Layer, Probe
from turntree.errors import ConfigError

SOURCE = Path(__file__).parents[3] / "src"
NAMESPACES = probe().unshare.works

CLOSED = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh"]
TRY = """
import os, sys
from turntree.envs.core import ToolCall
from turntree.envs.sandbox import PythonTool, probe
print("uid", os.getuid(), "unshare", probe().unshare.works, "bubblewrap", probe().bubblewrap.works)
tool = PythonTool(cpu_s=2, wall_s=60)
memory = None
for code in ("x = 20", "x += 1; x * 2", "import os; os.getuid()", "open('/etc/passwd')", "import os\\nos.fork()",
             "import socket; socket.socket()", "while True: pass"):
    (result,) = tool.run([ToolCall("python", code, memory)])
    memory = getattr(result, "memory", None) or memory
    print("result:", getattr(result, "value", result).strip().splitlines()[-1:])
print("forked", tool.pool.counts.forked)
tool.pool.close()
"""


def python(code: str, before: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with this turntree in a Python that ``before`` starts."""
    paths = os.pathsep.join([str(SOURCE), sysconfig.get_path("purelib")])
    env = {"PYTHONPATH": paths, "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **variables}
    return subprocess.run(
        [*before, variables.get("PYTHON", sys.executable), "-c", code],
        capture_output=True, text=True, timeout=150, env=env, cwd="/",
    )  # fmt: skip


def test_the_probe_says_what_each_layer_is() -> None:
    found = probe()
    names = [layer.name for layer in found.layers]
    assert "seccomp" in names
    assert all(layer.works or layer.note for layer in (*found.layers, found.unshare, found.bubblewrap))
    assert set(found.filters) <= {"landlock", "seccomp", "seccomp-notify"}


def test_what_is_missing_is_said() -> None:
    no = Layer("unshare", False, "unshare(user): Operation not permitted")
    layers = (Layer("user namespace", False, "Operation not permitted"), Layer("seccomp", True))
    found = Probe(layers, no, Layer("bubblewrap", False, "the program bwrap is not installed"))
    assert "user namespace: Operation not permitted" in found.missing
    assert "bwrap is not installed" in found.missing
    no_filter = Probe((Layer("seccomp", False, "no table for riscv64"),), Layer("unshare", True), no)
    assert no_filter.missing == "seccomp: no table for riscv64"


def test_isolation_by_name_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Layer("bubblewrap", False, "the program bwrap is not installed")
    found = Probe(probe().layers, probe().unshare, nothing)
    monkeypatch.setattr("turntree.envs.sandbox.walls.probe", lambda: found)
    with pytest.raises(ConfigError, match=r"bubblewrap: the program bwrap is not installed.*turntree\[sandbox\]"):
        choose_walls(SandboxOptions(isolation="bubblewrap"))


@pytest.mark.skipif(not (NAMESPACES and os.geteuid() == 0), reason="needs root, and user namespaces")
def test_without_namespaces_code_is_refused() -> None:
    """A real machine without them: nobody may make a user namespace below this one."""
    refused = python("from turntree.envs.sandbox import PythonTool; PythonTool()", CLOSED)
    assert refused.returncode == 1
    message = refused.stderr.splitlines()[-1]
    for part in ("ConfigError", "cannot be isolated", "user namespace", "max_user_namespaces", "allow_unisolated=true"):
        assert part in message


@pytest.mark.slow
@pytest.mark.skipif(not (NAMESPACES and os.geteuid() == 0), reason="needs root, and user namespaces")
def test_without_namespaces_code_can_be_allowed() -> None:
    allowed = python(TRY.replace("cpu_s=2", "allow_unisolated=True, cpu_s=2"), CLOSED)
    assert "result: ['42']" in allowed.stdout, allowed.stderr
    assert "result: ['error: the code used more than 2 seconds" in allowed.stdout
    assert "PermissionError" in allowed.stdout  # the filter of system calls is still there


@pytest.mark.slow
@pytest.mark.skipif(not (NAMESPACES and os.geteuid() == 0 and shutil.which("setpriv")), reason="needs root, setpriv")
def test_a_user_without_rights_gets_the_same_walls() -> None:
    """As nobody. The Python of this test may lie in a folder closed to others, so it is shown at another place."""
    base = Path(sys.base_prefix)
    script = 'mount --bind "$1" /mnt && shift && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh", str(base)]
    found = python(TRY, before, PYTHON=f"/mnt/bin/python3.{sys.version_info.minor}", PYTHONHOME="/mnt")
    if "Permission denied" in found.stderr and "turntree" in found.stderr:
        pytest.skip("the sources are closed to others")
    lines = found.stdout.splitlines()
    assert lines, found.stderr
    assert lines[0].startswith("uid 65534")
    if "unshare False" in lines[0]:
        pytest.skip("only root may make namespaces here")
    assert "result: ['42']" in lines
    assert "result: ['1000']" in lines
    assert any("FileNotFoundError" in line for line in lines)
    assert sum("PermissionError" in line for line in lines) == 2
    assert any("more than 2 seconds" in line for line in lines)
    assert "forked 5" in lines or "forked 6" in lines


@pytest.mark.slow
@pytest.mark.skipif(not probe().bubblewrap.works, reason=f"bubblewrap: {probe().bubblewrap.note}")
@pytest.mark.parametrize(
    ("code", "expected"),
    [("x = 1\nx + 1", "2"), ("open('/etc/passwd')", "FileNotFoundError"), ("import os\nos.fork()", "PermissionError"),
     ("import socket\nsocket.socket()", "PermissionError"), ("import os\nos.listdir('/proc')", "FileNotFoundError"),
     ("open('/new', 'w')", "Read-only|Permission"), ("import encodings.idna, sqlite3, ssl\n1", "1"),
     ("x = bytearray(10**10)", "MemoryError"), ("import os\nos._exit(0)", "interpreter ended")],
)  # fmt: skip
def test_bubblewrap_builds_the_same_walls(code: str, expected: str) -> None:
    tool = PythonTool(isolation="bubblewrap", wall_s=60)
    (result,) = tool.run([ToolCall("python", code)])
    assert isinstance(result, ToolResult)
    assert re.search(expected, result.value), result.value


@pytest.mark.slow
@pytest.mark.skipif(not probe().bubblewrap.works, reason=f"bubblewrap: {probe().bubblewrap.note}")
def test_bubblewrap_forks_and_leaves_nothing() -> None:
    tool: Any = PythonTool(isolation="bubblewrap", wall_s=61)
    (first,) = tool.run([ToolCall("python", "x = 1")])
    twins = tool.run([ToolCall("python", f"x + {i}", first.memory) for i in range(3)])
    assert [twin.value for twin in twins] == ["1", "2", "3"]
    assert tool.pool.counts.forked >= 1
    processes = set(tool.pool._builder._running)
    tool.pool.close()
    assert processes
    assert all(process.wait(timeout=10) is not None for process in processes)
