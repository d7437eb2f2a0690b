"""What becomes of our processes when we are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from turntree.agents.engines.reaper import Reaper

PARENT = """
import subprocess, sys
from turntree.agents.engines.reaper import Reaper

ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
reaper = Reaper([child.pid], grace_s=0.2)
if sys.argv[1] == "release":
    reaper.release()
    reaper.release()
print(child.pid, flush=True)
sys.stdin.read()
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; one whose parent has not asked for its end counts."""
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def parent() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int]]]:
    started: list[tuple[subprocess.Popen[str], int]] = []

    def start(how: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        started.append((process, int(process.stdout.readline())))
        return started[-1]

    yield start
    for process, child in started:
        process.kill()
        process.communicate()
        if not gone(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_child_that_ignores_the_signal_ends_with_a_killed_parent(
    parent: Callable[[str], tuple[subprocess.Popen[str], int]],
) -> None:
    process, child = parent("keep")
    assert not gone(child)
    process.kill()
    process.wait(timeout=30)
    assert until(lambda: gone(child))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_released_child_lives_on(parent: Callable[[str], tuple[subprocess.Popen[str], int]]) -> None:
    process, child = parent("release")
    process.kill()
    process.wait(timeout=30)
    assert not until(lambda: gone(child), seconds=1.0)


def test_a_number_that_another_process_has_got_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr("turntree.agents.engines.reaper._started", lambda pid: "1")
    reaper = Reaper([other.pid], grace_s=0.1)
    assert reaper._process.stdin is not None
    reaper._process.stdin.close()
    assert reaper._process.wait(timeout=60) == 0
    assert other.poll() is None
    other.kill()
    other.wait()
