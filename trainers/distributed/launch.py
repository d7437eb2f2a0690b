"""``trainer.ranks``: start the ranks of a run on this machine, watch them, and end them together.

The first rank speaks for all: its output is this command's. What another one says goes to a file and is shown only
where that rank fails. Ranks find each other through a file in a private folder, and talk over the loopback interface.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from turntree.errors import ConfigError, RankError
from turntree.trainers.distributed.ranks import STORE

__all__ = ["LOST", "is_first_rank", "follow_launcher", "is_launched", "launch", "starts_ranks"]

LOST = 3
"""Exit code of a rank that ended because another one did."""

_GRACE_S = 10.0
_POLL_S = 0.1
_TAIL = 15


def is_launched() -> bool:
    """Whether this process is a rank that :func:`launch` started."""
    return STORE in os.environ


def is_first_rank() -> bool:
    """Whether this process speaks for the run: the first rank of any launcher, or a process without one."""
    return os.environ.get("RANK", "0") == "0"


def starts_ranks(ranks: int | None) -> bool:
    """Whether this process has to start the ranks itself: more than one are asked for and no launcher is there."""
    return ranks is not None and ranks > 1 and "RANK" not in os.environ


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path


def launch(command: str, overrides: Sequence[str], *, ranks: int, resume: str) -> None:
    """Run ``turntree COMMAND OVERRIDES`` as ``ranks`` processes and wait for them.

    The first Ctrl-C is passed on once, so that all ranks stop after the step. Raises ``SystemExit`` with the first
    rank's exit code where that rank has said what is wrong, and ``RankError`` where another one failed or was killed;
    the message ends with ``resume``, the words to go on.
    """
    if sys.platform == "win32":
        raise ConfigError("trainer.ranks needs Linux or macOS; use torchrun")
    with tempfile.TemporaryDirectory(prefix="turntree-ranks-") as private:
        started = [_start(command, overrides, number, ranks, Path(private)) for number in range(ranks)]
        try:
            with _passing_on(started):
                failed = _wait(started)
        finally:
            _end(started)
        if failed is None:
            return
        if failed.number == 0 and failed.process.returncode > 0:
            raise SystemExit(failed.process.returncode)
        raise RankError(f"{_obituary(failed, ranks)}; {resume}")


def follow_launcher() -> None:
    """In a rank: end this process when its launcher is gone, however that died."""
    if not is_launched():
        return

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(LOST)

    threading.Thread(target=watch, daemon=True, name="turntree-launcher").start()


def _start(command: str, overrides: Sequence[str], number: int, ranks: int, private: Path) -> _Rank:
    log = private / f"rank-{number}.log"
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        STORE: str(private / "store"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
    }
    quiet = number > 0
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "turntree.cli", command, *overrides],
            env=environment,
            stdin=subprocess.PIPE,  # never written to: it ends when this process does
            stdout=file if quiet else None,
            stderr=file if quiet else None,
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
        )
    return _Rank(number, process, log)


@contextmanager
def _passing_on(started: Sequence[_Rank]) -> Iterator[None]:
    def handle(signum: int, frame: FrameType | None) -> None:
        del frame
        for rank in started:
            if rank.process.poll() is None:
                rank.process.send_signal(signum)

    previous = {name: signal.signal(name, handle) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, old in previous.items():
            signal.signal(name, signal.SIG_DFL if old is None else old)


def _wait(started: Sequence[_Rank]) -> _Rank | None:
    """Until all have ended, or one has failed and the others had time to notice; the one that failed first.

    Where all fail, of a wrong option for instance, it is the first rank, which has said so.
    """
    deadline: float | None = None
    failed: list[_Rank] = []
    while any(rank.process.poll() is None for rank in started):
        failed += [rank for rank in started if rank.process.poll() and rank not in failed]
        if failed and deadline is None:
            deadline = time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    failed += [rank for rank in started if rank.process.poll() and rank not in failed]
    own = [rank for rank in failed if rank.process.returncode != LOST]
    return next(iter([*(rank for rank in own if rank.number == 0), *own, *failed]), None)


def _end(started: Sequence[_Rank]) -> None:
    """End what still runs: asked first, then not."""
    for rank in started:
        if rank.process.poll() is None:
            rank.process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for rank in started:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        if rank.process.poll() is None:
            rank.process.kill()
            rank.process.wait()
        if rank.process.stdin is not None:
            rank.process.stdin.close()


def _obituary(rank: _Rank, ranks: int) -> str:
    code = rank.process.returncode
    how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = rank.log.read_text(errors="replace").splitlines()[-_TAIL:]
    said = "\nIts last words:\n" + "\n".join(f"  {line}" for line in lines) + "\n" if lines and code > 0 else ""
    return f"rank {rank.number} of {ranks} (process {rank.process.pid}) {how}{said}; the other ranks were ended"
