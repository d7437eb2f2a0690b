"""What a cell gives, and that it gives the same on every way to it: forked, continued, executed again."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turntree.envs.core import ToolCall, ToolFailure, ToolResult
from turntree.envs.history import History
from turntree.envs.sandbox import PythonTool, probe
from turntree.envs.sandbox.capture import Capture
from turntree.envs.task import FrozenDict, freeze, thaw
from turntree.envs.tools import check_tool
from turntree.errors import ConfigError

isolated = pytest.mark.skipif(bool(probe().missing), reason=f"no isolation here: {probe().missing}")
pytestmark = isolated


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    made = PythonTool(live=16, wall_s=60)
    yield made
    made.pool.close()


@pytest.fixture(scope="module")
def anew() -> Iterator[PythonTool]:
    """Keeps no interpreter: every cell is executed after all before it were executed again."""
    made = PythonTool(live=0, wall_s=60)
    yield made
    made.pool.close()


def run(tool: PythonTool, code: str, memory: Any = None) -> ToolResult:
    (outcome,) = tool.run([ToolCall("python", code, memory)])
    assert isinstance(outcome, ToolResult), outcome
    return outcome


def play(tool: PythonTool, cells: Sequence[str]) -> list[str]:
    values, memory = [], None
    for code in cells:
        result = run(tool, code, memory)
        values.append(result.value)
        memory = result.memory
    return values


RESULTS = [
    ("1 + 1", "2"),
    ("x = 3", ""),
    ("None", ""),
    ("print('a'); print('b')\n'c'", "a\nb\n'c'"),
    ("'红楼梦 👍'", "'红楼梦 👍'"),
    ("import sys; print('e', file=sys.stderr)", "e"),
    ("import os; os.write(1, b'raw\\n'); print('then')", "raw\nthen"),
    ("def f(x):\n    return 2 * x\nf(4)", "8"),
    ("```python\n3 * 3\n```", "9"),
    ("    a = 1\n    a + 1", "2"),
    ("import os\nos.getloadavg(), os.sched_getaffinity(0), os.cpu_count()", "((0.0, 0.0, 0.0), {0}, 1)"),
    ("import resource\nresource.getrusage(resource.RUSAGE_SELF).ru_utime", "0.0"),
    ("import os\nos.sysconf('SC_AVPHYS_PAGES') == os.sysconf('SC_PHYS_PAGES')", "True"),
    ("import shelve\nwith shelve.open('x') as s: s['a'] = 1\nwith shelve.open('x') as s: print(s['a'])", "1"),
    ("object()", "<object object at 0x...>"),
    ("print('\\udc80')", "?"),
    ("", ""),
    ("1 +", 'File "<cell 1>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax'),
    ("import asyncio\nasyncio.run(asyncio.sleep(5, 'slept'))", "'slept'"),
    ("import time\ntime.sleep(1000)\n'slept'", "'slept'"),
    ("import queue\nqueue.Queue().get(timeout=0.01)", "Empty"),
    ("import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as p: r = list(p.map(abs, [-1, 2]))\nr", "[1, 2]"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "expected"), RESULTS, ids=[code[:20] for code, _ in RESULTS])
def test_a_result_is_what_a_prompt_would_show(code: str, expected: str, tool: PythonTool) -> None:
    found = run(tool, code).value.strip()
    assert found == expected.strip() or (found.endswith(expected) and "Traceback" in found)


def test_a_traceback_names_cells_only(tool: PythonTool) -> None:
    memory = run(tool, "import json\ndef load(text):\n    return json.loads(text)").memory
    value = run(tool, "try:\n    load('{')\nexcept ValueError as e:\n    raise KeyError('k') from e", memory).value
    assert value.count("Traceback") == 2
    assert 'File "<cell 1>", line 3, in load' in value
    assert 'File "<cell 2>", line 2, in <module>' in value
    assert "KeyError: 'k'" in value
    assert "json/decoder.py" not in value
    assert sys.prefix not in value


def test_carets_stand_below_what_failed(tool: PythonTool) -> None:
    lines = run(tool, "x = 1\nif x:\n    y = 10 + x / 0\n").value.splitlines()
    assert lines[2][lines[3].index("~") :].startswith("x / 0")


def test_variables_stay_and_forks_are_apart(tool: PythonTool) -> None:
    first = run(tool, "x = [1]")
    left = run(tool, "x.append(2); x", first.memory)
    right = run(tool, "x.append(3); x", first.memory)
    assert (left.value, right.value) == ("[1, 2]", "[1, 3]")
    assert run(tool, "x", left.memory).value == "[1, 2]"
    assert run(tool, "x", first.memory).value == "[1]"


def test_files_of_forks_are_apart(tool: PythonTool) -> None:
    first = run(tool, "x = 1")
    left = run(tool, "open('f', 'w').write('left')", first.memory)
    right = run(tool, "import os\nos.listdir()", first.memory)
    assert right.value == "[]"
    again = [run(tool, "open('f').read()", left.memory).value for _ in range(2)]
    assert again == ["'left'", "'left'"]
    assert run(tool, "os.listdir()", right.memory).value == "[]"


def test_files_of_the_dead_are_gone(tool: PythonTool) -> None:
    first = run(tool, "x = 1")
    dead = run(tool, "import os\nopen('f', 'w').close()\nos._exit(1)", first.memory)
    assert dead.memory is None
    assert run(tool, "import os\nos.listdir()", first.memory).value == "[]"


def test_who_ended_starts_anew(tool: PythonTool) -> None:
    memory = run(tool, "x = 1").memory
    ended = run(tool, "import os\nos._exit(0)", memory)
    assert "all variables are gone" in ended.value
    assert ended.memory is None
    assert "NameError" in run(tool, "x", ended.memory).value
    assert run(tool, "x", memory).value == "1"


def test_open_descriptors_threads_and_shared_memory_are_not_forked_into_two(tool: PythonTool) -> None:
    """Their interpreter goes on itself; the sibling gets one that executed the cells again."""
    for code, more in (
        ("import os\nr, w = os.pipe()", "os.write(w, b'{}')\nos.set_blocking(r, False)\nos.read(r, 10)"),
        ("import mmap\nm = mmap.mmap(-1, 10)", "old = bytes(m[:1])\nm[:1] = b'{}'\nold + m[:1]"),
        ("import threading\ne = threading.Event()\nt = threading.Thread(target=e.wait, daemon=True)\nt.start()",
         "a = t.is_alive()\ne.set()\nt.join()\na, '{}'"),
    ):  # fmt: skip
        first = run(tool, code)
        before = tool.pool.counts.replayed
        values = [run(tool, more.format(name), first.memory).value for name in "lr"]
        assert values[0].replace("l", "r") == values[1]
        assert tool.pool.counts.replayed == before + 1


# -- the same on every way ------------------------------------------------------------------------------------------

CELLS = (
    "x = globals().get('x', 0) + 1\nx",
    "import random\nrandom.random(), random.sample(range(100), 3)",
    "random = __import__('random')\nrandom.seed(3)\nrandom.shuffle(l := list(range(9)))\nl",
    "import time, datetime\ntime.time(), time.perf_counter_ns(), datetime.datetime.now(), datetime.date.today()",
    "import uuid\nuuid.uuid4(), uuid.uuid1()",
    "import os, secrets\nos.urandom(5), secrets.token_hex(4), os.getpid(), os.getcwd()",
    "{'b', 'a', 'c'}, hash('text'), {object() for _ in range(3)}",
    "import tempfile\nwith tempfile.NamedTemporaryFile() as f: name = f.name\nname",
    "kept = open('/tmp/file', 'a+')\nkept.write('more'); kept.flush()\nopen('/tmp/file').read()",
    "import os\nsorted(os.listdir('/tmp'))",
    "raise ValueError(globals().get('x'))",
    "def f(n): return n and f(n - 1)\nf(2000)",
    "class C:\n    def __del__(s): print('deleted')\na, b = C(), C()\na.b, b.a = b, a\ndel a, b",
    "import threading\nt = threading.Thread(target=lambda: print('thread'))\nt.start(); t.join()",
    "print('x' * 10000)",
    "import os\nos._exit(1)",
    "import itertools\nc = globals().get('c') or itertools.count()\nnext(c)",
    "import asyncio\nasync def f(): await asyncio.sleep(3); return 1\nasyncio.run(f()), __import__('time').monotonic()",
    "import random\nr = random.SystemRandom()\nr.random(), random.Random().random()",
)


def check_every_way(tool: PythonTool, anew: PythonTool, cells: list[str], branch: int) -> None:
    forked = play(tool, cells)
    assert forked == play(anew, cells)
    # A sibling from the middle, after which the first one is as it was.
    memory = None
    for code in cells[:branch]:
        memory = run(tool, code, memory).memory
    sibling = [run(tool, code, memory).value for code in (CELLS[1], CELLS[1])]
    assert sibling[0] == sibling[1]
    assert play(tool, cells) == forked


SEQUENCES = st.lists(st.sampled_from(CELLS), min_size=1, max_size=6)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SEQUENCES, st.integers(0, 4))
def test_the_same_cells_give_the_same_results_on_every_way(
    tool: PythonTool, anew: PythonTool, cells: list[str], branch: int
) -> None:
    check_every_way(tool, anew, cells, branch)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SEQUENCES, st.integers(0, 5))
def test_many_more_sequences_give_the_same_results_on_every_way(
    tool: PythonTool, anew: PythonTool, cells: list[str], branch: int
) -> None:
    check_every_way(tool, anew, cells, branch)


def test_the_same_in_another_process(tool: PythonTool) -> None:
    code = (
        "import json, sys\nfrom turntree.envs.core import ToolCall\nfrom turntree.envs.sandbox import PythonTool\n"
        "from turntree.envs.task import freeze, thaw\nmemory = freeze(json.loads(sys.argv[1]))\n"
        "tool = PythonTool(live=16, wall_s=60)\nr, = tool.run([ToolCall('python', sys.argv[2], memory)])\n"
        "print(json.dumps([r.value, thaw(r.memory)]))"
    )
    memory = None
    for cell in CELLS[:7]:
        memory = run(tool, cell, memory).memory
    here = run(tool, CELLS[1], memory)
    there = subprocess.run(
        [sys.executable, "-c", code, json.dumps(thaw(memory)), CELLS[1]],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(there.stdout) == [here.value, thaw(here.memory)]


def test_a_record_that_is_not_repeated_is_a_failure_not_a_result(tool: PythonTool) -> None:
    memory = FrozenDict({"cells": History([("x = 2\nx", "2\n"), ("x + 1", "4\n")])})
    (outcome,) = tool.run([ToolCall("python", "x", memory)])
    assert isinstance(outcome, ToolFailure)
    assert outcome.kind == "ReplayError"
    assert "cell 2 of 2" in outcome.message
    assert "'4\\n'" in outcome.message
    assert "'3\\n'" in outcome.message


def test_code_that_differs_each_time_is_found(anew: PythonTool) -> None:
    """What is asked of the machine behind our back."""
    code = "import ctypes\nb = ctypes.create_string_buffer(8)\nctypes.CDLL(None).getrandom(b, 8, 0)\nb.raw"
    memory = run(anew, code).memory
    (outcome,) = anew.run([ToolCall("python", "1", memory)])
    assert isinstance(outcome, ToolFailure)
    assert outcome.kind == "ReplayError"


def test_packages_that_were_asked_for_are_there_and_frozen_too() -> None:
    tool, anew = (
        PythonTool(packages=("numpy",), memory_mb=1024),
        PythonTool(packages=("numpy",), memory_mb=1024, live=0),
    )
    cells = [
        "import numpy as np\nnp.random.default_rng().integers(100, size=3)",
        "np.random.rand(2), np.arange(3).sum()",
    ]
    try:
        assert play(tool, cells) == play(anew, cells)
        assert "ModuleNotFoundError" in run(tool, "import gymnasium").value
        assert "numpy" in tool.description
    finally:
        tool.pool.close()
        anew.pool.close()
    with pytest.raises(ConfigError, match="no package 'no_such_package'"):
        PythonTool(packages=("no_such_package",)).run([ToolCall("python", "1")])


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_a_batch_keeps_its_order_and_siblings_run_together(tool: PythonTool) -> None:
    memory = run(tool, "base = 10").memory
    outcomes = tool.run([ToolCall("python", f"base + {i}", memory) for i in range(12)])
    assert [o.value for o in outcomes if isinstance(o, ToolResult)] == [str(10 + i) for i in range(12)]


def test_threads_may_share_a_tool(tool: PythonTool) -> None:
    found: dict[int, list[str]] = {}

    def work(i: int) -> None:
        found[i] = play(tool, [f"x = {i}", "x += 1", "x"])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {i: ["", "", str(i + 1)] for i in range(6)}


def test_few_interpreters_are_kept() -> None:
    tool = PythonTool(live=3, wall_s=60)
    try:
        ends = [run(tool, f"x = {i}").memory for i in range(6)]
        assert len(tool.pool._kept) == 3
        assert [run(tool, "x", memory).value for memory in ends] == [str(i) for i in range(6)]
    finally:
        tool.pool.close()


def test_few_descriptors_are_enough() -> None:
    """Interpreters that are kept make room for those that are needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tool = PythonTool(workers=1, memory_mb=204)
    try:
        run(tool, "1")  # what makes the sandboxes runs
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, hard))
        first = [run(tool, f"x = {i}") for i in range(12)]
        assert [run(tool, "x", each.memory).value for each in first] == [str(i) for i in range(12)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        tool.pool.close()


def test_descriptors_do_not_pile_up() -> None:
    tool = PythonTool(live=2, wall_s=62)

    def cycle() -> None:
        memory = run(tool, "x = 1").memory
        for code in ("x", "import os\nos._exit(1)", "open('f', 'w').close()"):
            run(tool, code, memory)

    for _ in range(8):
        cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        cycle()
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    tool.pool.close()


def test_a_killed_zygote_is_replaced() -> None:
    tool = PythonTool(live=2, wall_s=61)
    try:
        memory = run(tool, "x = 1").memory
        process = tool.pool._builder._process  # type: ignore[attr-defined]
        process.kill()
        process.wait()
        assert run(tool, "2").value == "2"
        assert run(tool, "x", memory).value == "1"
    finally:
        tool.pool.close()


def test_a_kept_interpreter_that_was_killed_is_replaced(tool: PythonTool) -> None:
    memory = run(tool, "x = 'killed'").memory
    for interpreter in list(tool.pool._kept):
        os.kill(interpreter.pid, 9)
    assert run(tool, "x", memory).value == "'killed'"


def test_the_tool_holds_the_laws_of_tools(tool: PythonTool) -> None:
    assert check_tool(tool, "1 + 1", "import random\nrandom.random()")[0] == "2"
    assert PythonTool(cpu_s=1).fingerprint != tool.fingerprint == PythonTool(live=3, wall_s=60).fingerprint


def test_memory_that_is_not_the_tools_is_a_failure(tool: PythonTool) -> None:
    for memory in ({"cells": 3}, {"cells": [["x"]]}, "x"):
        with pytest.raises(Exception, match="expected the memory of the code tool"):
            tool.run([ToolCall("python", "1", freeze(memory))])


def test_code_that_is_too_long_is_not_run(tool: PythonTool) -> None:
    memory = run(tool, "x = 1").memory
    result = run(tool, "#" * 20_001, memory)
    assert result.value.startswith("error: expected at most 20000 characters")
    assert run(tool, "x", result.memory).value == "1"


def test_a_memory_is_shared_between_forks_and_survives_json(tool: PythonTool) -> None:
    first = run(tool, "1")
    second = run(tool, "2", first.memory)
    assert second.memory["cells"]._parent is first.memory["cells"]
    assert freeze(json.loads(json.dumps(thaw(second.memory)))) == second.memory


@pytest.mark.parametrize(
    "options",
    [{"cpu_s": 0}, {"wall_s": float("nan")}, {"memory_mb": 3}, {"threads": 0}, {"packages": ("../x",)},
     {"isolation": "chroot"}, {"isolation": "none"}, {"live": -1}, {"output_chars": True}, {"seconds": 3}],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PythonTool(**options)


@given(st.lists(st.text(max_size=300), max_size=8), st.integers(100, 400))
@settings(deadline=None)
def test_of_a_long_output_beginning_and_end_are_kept(parts: list[str], limit: int) -> None:
    parts = [part.encode("utf-8", "replace").decode() for part in parts]
    text = "".join(parts)
    capture = Capture(limit)
    data = text.encode()
    for start in range(0, len(data), 7):  # cuts inside of characters
        capture.feed(data[start : start + 7])
    found = capture.text()
    if len(text) <= limit:
        assert found == text or "at 0x" in text
    else:
        assert found.startswith(text[: limit - limit // 2])
        assert found.endswith(text[-(limit // 2) :])
        assert f"[{len(text) - limit} characters left out]" in found
