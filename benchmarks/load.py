"""``turntree serve`` under load: 200 clients for five minutes; no error, answer times, memory, open files, threads."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run
from _search_server import load

__all__ = ["measure"]

CLIENTS = 200


@dataclass(frozen=True, slots=True)
class Use:
    """What a process holds: resident megabytes, open files, threads."""

    megabytes: float
    files: int
    threads: int


def use(pid: int) -> Use:
    folder = Path("/proc", str(pid))
    pages = int((folder / "statm").read_text(encoding="utf-8").split()[1])
    size = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Use(size, len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())))


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """Address and process of ``turntree serve``."""
    command = [sys.executable, "-m", "turntree.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r" at (http://\S+)/retrieve", line):
                yield found[1], process.pid
                break
        else:
            raise RuntimeError(f"the server did not start:\n{said}")
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


def measure(args: argparse.Namespace) -> list[Figure]:
    """Warm up, then load; the server's process is looked at between and after, without clients."""
    from turntree.envs.worlds import generate_world

    seconds = args.seconds or (8.0 if args.quick else 300.0)
    with tempfile.TemporaryDirectory() as folder:
        world = generate_world("quickstart", seed=0, entities=2500, questions=2000)
        world.save(Path(folder))
        queries = [question.question for question in world.questions]

        def ask(number: int) -> str:
            return queries[number % len(queries)]

        with serving("--corpus", str(Path(folder, "corpus.jsonl"))) as (url, pid):
            load(url, clients=CLIENTS, seconds=min(10.0, seconds), ask=ask)
            before = settled(pid)
            found = load(url, clients=CLIENTS, seconds=seconds, ask=ask)
            after = settled(pid)
    name = f"turntree serve, BM25 of {len(world.passages)} passages, {CLIENTS} clients for {seconds:g} s"
    return [
        Figure(f"{name}: requests without an error", len(found.latencies), "requests", "higher"),
        Figure(f"{name}: other answers", 0, "requests", "lower", 0),  # the first one would have ended the measurement
        Figure(f"{name}: rate", found.rate, "queries/s", "higher"),
        Figure(f"{name}: p50", found.percentile(0.5), "ms", "lower"),
        Figure(f"{name}: p99", found.percentile(0.99), "ms", "lower"),
        Figure(f"{name}: slowest", found.percentile(1.0), "ms", "lower"),
        Figure(f"{name}: memory", after.megabytes, "MB", "lower"),
        Figure(f"{name}: memory more than before", after.megabytes - before.megabytes, "MB", "lower", 16),
        Figure(f"{name}: open files more than before", after.files - before.files, "files", "lower", 0),
        Figure(f"{name}: threads more than before", after.threads - before.threads, "threads", "lower", 0),
    ]


def settled(pid: int) -> Use:
    """What the process holds once the connections of the clients that left are closed."""
    last, deadline = use(pid), time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = use(pid)
        if now.files == last.files:
            return now
        last = now
    return last


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, help="how long the clients ask (default: 300, with --quick 8)")


if __name__ == "__main__":
    run(measure, description="The search server under load", options=options)
