"""E11: the result of a try that was given up comes late: it is dropped and counted, and belongs to nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from turntree.search_backend import Passage
from turntree.search_backend.client import RemoteBackend


def answer(text: str) -> dict[str, Any]:
    return {"result": [[{"id": text, "contents": f'"T"\n{text}'}]]}


def test_e11_a_client_takes_the_try_it_waits_for(scripted_server: Any) -> None:
    """Try 1 is slow, try 2 answers; then try 1 returns, while the next search runs."""
    scripted_server.answers = [
        (200, {}, answer("late"), 0.6),
        (200, {}, answer("second")),
        (200, {}, answer("next"), 0.7),
    ]
    with RemoteBackend(scripted_server.url, timeout_s=0.3, backoff_s=0.01) as remote:
        assert remote.search(["a"], k=1)[0][0].id == "second"
        assert remote.stats == {"retries": 1, "requests": 1}
    with RemoteBackend(scripted_server.url, timeout_s=5.0, concurrency=1) as remote:
        assert remote.search(["b"], k=1)[0][0].id == "next"


class Gated:
    """Each search waits for its own gate."""

    fingerprint = "gated"

    def __init__(self) -> None:
        self.gates = {"slow": threading.Event()}
        self.asked: list[str] = []

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.asked += queries
        for query in queries:
            if query in self.gates:
                assert self.gates[query].wait(30)
        return [[Passage(query, "", query)] for query in queries]


def test_e11_a_server_drops_what_nobody_waits_for_and_counts_it(search_server: Callable[..., str]) -> None:
    backend = Gated()
    url = search_server(backend, search_timeout_s=0.3, max_batch=1)

    def ask(query: str) -> httpx2.Response:
        return httpx2.post(f"{url}/retrieve", json={"queries": [query]}, timeout=30)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, "slow")
        while backend.asked != ["slow"]:
            time.sleep(0.01)
        queued = ask("queued")
        for refused in (slow.result(), queued):
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "timeout")
            assert refused.headers["retry-after"] == "1"
        backend.gates["slow"].set()
    while "turntree_late_results_total 2.0" not in httpx2.get(f"{url}/metrics").text:
        time.sleep(0.01)
    assert ask("after").json()["result"][0][0]["id"] == "after"
    assert backend.asked == ["slow", "after"], "what waited in vain is not searched"
