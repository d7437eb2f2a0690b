"""The search server under load: 64 clients against the raw index, and beside a server that searches each request alone.

The index is FAISS ``Flat`` over random vectors, and a query's vector is looked up by its number, so that nothing but
search and server is measured. Clients are bare sockets in this process, the server is another one; they share the
machine's cores. ``python benchmarks/_search_server.py --serve batched`` is the server's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure

from turntree.search_backend.passage import Passage

__all__ = ["Load", "figures", "load"]

DIMENSIONS = 384
CLIENTS = 64
QUERIES = 4096
TOP_K = 3


class Vectors:
    """FAISS Flat over random vectors; the query ``q<n>`` has the n-th of a table. A :class:`SearchBackend`."""

    fingerprint = "random"

    def __init__(self, passages: int) -> None:
        import faiss

        rng = np.random.default_rng(0)
        self.index: Any = faiss.IndexFlatIP(DIMENSIONS)
        self.index.add(rng.standard_normal((passages, DIMENSIONS), dtype=np.float32))
        self.table: npt.NDArray[np.float32] = rng.standard_normal((QUERIES, DIMENSIONS), dtype=np.float32)
        self.text = "a passage of about a hundred words, as those of Wikipedia are cut; " * 9

    def encode(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.table[[int(query[1:]) % QUERIES for query in queries]]

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        scores, ids = self.index.search(self.encode(queries), k)
        rows = zip(ids.tolist(), scores.tolist(), strict=True)
        return [[Passage(str(i), f"Title {i}", self.text, s) for i, s in zip(*row, strict=True)] for row in rows]


# -- servers ---------------------------------------------------------------------------------------------------


def serve_batched(backend: Vectors) -> None:
    """The server of this project."""
    import functools

    from turntree.search_backend.server import SearchServer, ServerSettings
    from turntree.search_backend.serving import serve

    settings = ServerSettings(port=0)
    serve(functools.partial(SearchServer, backend, settings), settings, ready=lambda url: print(url, flush=True))


def serve_alone(backend: Vectors) -> None:
    """A server in the manner of Search-R1's: a plain function of FastAPI's that searches what one request holds."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    app = FastAPI()

    class Ask(BaseModel):
        queries: list[str]
        topk: int | None = None
        return_scores: bool = False

    def retrieve(ask: Ask) -> dict[str, Any]:
        found = backend.search(ask.queries, k=ask.topk or TOP_K)
        return {
            "result": [
                [{"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": p.score} for p in passages]
                for passages in found
            ]
        }

    retrieve.__annotations__["ask"] = Ask  # annotations are strings here, and the class is local
    app.post("/retrieve")(retrieve)
    config = uvicorn.Config(app, port=0, log_level="error")
    listener = config.bind_socket()
    listener.listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run([listener])


@contextmanager
def server(kind: str, passages: int) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, __file__, "--serve", kind, "--passages", str(passages)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


# -- clients ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients saw: queries answered in a second, and seconds of each request."""

    rate: float
    latencies: Sequence[float]

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        return float(np.percentile(np.array(self.latencies), 100 * share)) * 1000


def load(url: str, *, clients: int, seconds: float, each: int = 1, ask: Callable[[int], str] = "q{}".format) -> Load:
    """``clients`` that ask ``each`` queries a request, one request after the other, for ``seconds``.

    ``ask``: the n-th query. Raises ``RuntimeError`` for the first answer that is no result.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    latencies: list[float] = []

    async def client(number: int, until: float) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        asked = number * 61
        while time.perf_counter() < until:
            queries = [ask(asked + i) for i in range(each)]
            asked += each
            body = json.dumps({"queries": queries, "topk": TOP_K, "return_scores": True}).encode()
            head = f"POST /retrieve HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            start = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer[:20]:
                raise RuntimeError(f"expected status 200, found {answer[:200]!r}")
            length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
            await reader.readexactly(length)
            latencies.append(time.perf_counter() - start)
        writer.close()

    async def everyone() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(client(i, start + seconds) for i in range(clients)))
        return time.perf_counter() - start

    took = asyncio.run(everyone())
    return Load(len(latencies) * each / took, latencies)


def raw(backend: Vectors, *, batch: int, seconds: float) -> float:
    """Queries a second of the index itself, in batches."""
    vectors, count, start = backend.table[:batch], 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        backend.index.search(vectors, TOP_K)
        count += batch
    return count / (time.perf_counter() - start)


def figures(*, quick: bool) -> list[Figure]:
    """Rounds of raw index, batching server and plain server, one after the other; medians of the rounds."""
    passages, seconds, rounds = (20_000, 2.0, 3) if quick else (100_000, 8.0, 5)
    backend = Vectors(passages)
    rates: list[float] = []
    shares: list[float] = []
    ours: list[Load] = []
    theirs: list[Load] = []
    lists: list[float] = []
    with server("batched", passages) as batched, server("alone", passages) as alone:
        for url in (batched, alone):
            load(url, clients=CLIENTS, seconds=1.0)
        for _ in range(rounds):
            rates.append(raw(backend, batch=CLIENTS, seconds=seconds))
            ours.append(load(batched, clients=CLIENTS, seconds=seconds))
            rates.append(raw(backend, batch=CLIENTS, seconds=seconds))
            theirs.append(load(alone, clients=CLIENTS, seconds=seconds))
            shares.append(ours[-1].rate / statistics.mean(rates[-2:]))
            lists.append(load(batched, clients=8, seconds=seconds, each=64).rate / statistics.mean(rates[-2:]))
        one = load(batched, clients=1, seconds=seconds)
    name = f"server, FAISS Flat {passages // 1000}k x {DIMENSIONS}"

    def middle(loads: Sequence[Load], share: float) -> float:
        return statistics.median(each.percentile(share) for each in loads)

    rate, plain = (statistics.median(each.rate for each in loads) for loads in (ours, theirs))
    return [
        Figure(f"{name}: raw index, batches of {CLIENTS}", statistics.median(rates), "queries/s", "higher"),
        Figure(f"{name}: {CLIENTS} clients", rate, "queries/s", "higher"),
        Figure(f"{name}: {CLIENTS} clients / raw index", statistics.median(shares), "ratio", "higher", 0.8),
        Figure(f"{name}: {CLIENTS} clients, p50", middle(ours, 0.5), "ms", "lower"),
        Figure(f"{name}: {CLIENTS} clients, p99", middle(ours, 0.99), "ms", "lower"),
        Figure(f"{name}: 8 clients of 64 queries / raw index", statistics.median(lists), "ratio", "higher"),
        Figure(f"{name}: 1 client, p50", one.percentile(0.5), "ms", "lower"),
        Figure(f"{name}: each request searched alone, {CLIENTS} clients", plain, "queries/s", "higher"),
        Figure(f"{name}: each request searched alone, p50", middle(theirs, 0.5), "ms", "lower"),
        Figure(f"{name}: each request searched alone, p99", middle(theirs, 0.99), "ms", "lower"),
        Figure(f"{name}: {CLIENTS} clients / each request searched alone", rate / plain, "ratio", "higher"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server under load, as its own process; see figures().")
    parser.add_argument("--serve", choices=["batched", "alone"], required=True)
    parser.add_argument("--passages", type=int, required=True)
    arguments = parser.parse_args()
    {"batched": serve_batched, "alone": serve_alone}[arguments.serve](Vectors(arguments.passages))
