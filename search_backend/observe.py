"""Prometheus metrics of the search server, in one process or summed over its workers."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from turntree.search_backend.batching import Batch

__all__ = ["CONTENT_TYPE", "ServerMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus's text format."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """Counters, gauges and histograms of one server process; in the ``/metrics`` of any worker all are summed."""

    def __init__(self) -> None:
        own = CollectorRegistry()
        shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
        self._shared = bool(shared)
        if shared:
            _forget_dead(Path(shared))
        self._registry = own
        self.requests = Counter("turntree_requests", "Requests that were answered.", ("path", "status"), registry=own)
        self.latency = Histogram(
            "turntree_request_seconds",
            "From the first byte of a request to the last of its answer.",
            ("path",),
            buckets=_SECONDS,
            registry=own,
        )
        self.errors = Counter(
            "turntree_errors", "Requests that were refused or failed, by kind.", ("kind",), registry=own
        )
        self.batch = Histogram(
            "turntree_batch_queries", "Distinct queries of a search of the backend.", buckets=_SIZES, registry=own
        )
        self.search = Histogram(
            "turntree_search_seconds", "Time of a search of the backend.", buckets=_SECONDS, registry=own
        )
        self.failed = Counter(
            "turntree_failed_searches", "Searches of the backend that raised, by class.", ("error",), registry=own
        )
        self.ignored = Counter("turntree_ignored_keys", "Requests with keys that had no effect.", registry=own)
        self.dropped = Counter(
            "turntree_late_results", "Requests that stopped waiting; their results were dropped.", registry=own
        )
        self.queue = Gauge(
            "turntree_queue_queries", "Queries that wait to be searched.", registry=own, multiprocess_mode="livesum"
        )
        self.flight = Gauge(
            "turntree_requests_in_flight", "Requests that are not answered yet.", registry=own,
            multiprocess_mode="livesum",
        )  # fmt: skip

    def watch(self, batch: Batch) -> None:
        """Count a search of the backend."""
        if batch.requests:
            self.batch.observe(batch.queries)
            self.search.observe(batch.seconds)
        if batch.dropped:
            self.dropped.inc(batch.dropped)
        if batch.error:
            self.failed.labels(batch.error).inc()

    def render(self) -> bytes:
        """The exposition text."""
        if not self._shared:
            return generate_latest(self._registry)
        summed = CollectorRegistry()
        MultiProcessCollector(summed)  # type: ignore[no-untyped-call]
        return generate_latest(summed)


def _forget_dead(folder: Path) -> None:
    """What a worker that was killed had in flight is over; its counts stay."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
        except PermissionError:
            continue
