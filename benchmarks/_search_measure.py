"""Rates, latencies and memory of search backends, each in a process of its own where memory counts."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Figure

from turntree.search_backend.passage import SearchBackend

__all__ = ["Rates", "in_process", "latencies", "own_memory_mb", "rates", "ratio"]


@dataclass(frozen=True)
class Rates:
    """Queries a second, one at a time and in batches; latencies of single queries in milliseconds."""

    single: float
    batched: float
    p50: float
    p99: float

    def figures(self, name: str, *, gain: float | None = None) -> list[Figure]:
        """Figures; ``gain``: how many times faster batches must be than single queries."""
        return [
            Figure(f"{name}: one query at a time", self.single, "queries/s", "higher"),
            Figure(f"{name}: batches of 64", self.batched, "queries/s", "higher"),
            Figure(f"{name}: batched against single", self.batched / self.single, "x", "higher", gain),
            Figure(f"{name}: latency of one query, p50", self.p50, "ms", "lower"),
            Figure(f"{name}: latency of one query, p99", self.p99, "ms", "lower"),
        ]


def rates(backend: SearchBackend, queries: Sequence[str], *, k: int = 10, batch: int = 64) -> Rates:
    """Measure a backend; queries must differ, since equal ones of a batch are searched once."""
    singles = latencies(lambda q: backend.search([q], k=k), queries)
    seconds = _batches(lambda part: backend.search(part, k=k), queries, batch)
    ordered = sorted(singles)
    return Rates(
        len(queries) / sum(singles),
        len(queries) / seconds,
        1e3 * statistics.median(ordered),
        1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    )


def latencies(search: Callable[[str], Any], queries: Sequence[str]) -> list[float]:
    """Seconds of each query, after a first one that starts what starts once."""
    search(queries[0])
    found = []
    for query in queries:
        began = time.perf_counter()
        search(query)
        found.append(time.perf_counter() - began)
    return found


def _batches(search: Callable[[Sequence[str]], Any], queries: Sequence[str], batch: int) -> float:
    search(queries[:batch])
    began = time.perf_counter()
    for start in range(0, len(queries), batch):
        search(queries[start : start + batch])
    return time.perf_counter() - began


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], *, rounds: int) -> float:
    """Speed of ``ours`` in that of ``theirs``: the median over neighbouring runs, so that slow moments hit both."""
    ours()
    theirs()
    return statistics.median(_seconds(theirs) / _seconds(ours) for _ in range(rounds))


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def own_memory_mb() -> float:
    """Memory of this process that is its own, after its work: pages of mapped files are the system's to drop."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1e3


def in_process(function: str, *arguments: Any) -> dict[str, float]:
    """Call ``module:function`` with JSON arguments in a new interpreter; its dict, with ``rss_mb`` at the peak."""
    code = (
        "import importlib, json, resource, sys\n"
        "module, name = sys.argv[1].split(':')\n"
        "found = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))\n"
        "found['rss_mb'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3\n"
        "print(json.dumps(found))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, function, json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
