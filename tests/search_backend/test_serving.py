"""``turntree serve`` as processes: it starts, shares, finishes what it began, and comes back."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from turntree.cli import cli
from turntree.errors import ConfigError, RetrievalError
from turntree.search_backend import BM25Backend, Passage, save_corpus
from turntree.search_backend.client import RemoteBackend

Start = Callable[..., Any]

PASSAGES = [Passage(str(i), f"T {i}", f"river number{i}") for i in range(30)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    save_corpus(path, PASSAGES)
    return path


def until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/healthz", timeout=5).status_code == 200
    return False


def test_serve_a_corpus_die_come_back(corpus: Path, serve_process: Start) -> None:
    local = BM25Backend.from_corpus(corpus, k1=1.5)
    server = serve_process("--corpus", str(corpus), "--arg", "k1=1.5", "--max-k", "7")
    with RemoteBackend(f"{server.url}/retrieve", retries=2, backoff_s=0.01, breaker_reset_s=0.05) as remote:
        assert remote.fingerprint == local.fingerprint
        assert remote.search(["river", "number7"], k=7) == local.search(["river", "number7"], k=7)
        with pytest.raises(RetrievalError, match="topk: at most 7, found 8"):
            remote.search(["river"], k=8)
        server.process.kill()
        server.process.wait(timeout=30)
        with pytest.raises(RetrievalError, match="failed after 3 tries"):
            remote.search(["river"], k=7)
        again = serve_process("--corpus", str(corpus), "--arg", "k1=1.5", "--port", str(server.port))
        assert remote.search(["river"], k=7) == local.search(["river"], k=7)
        assert again.stop(signal.SIGINT) == 130


SLOW = """
import functools, sys, time
from turntree.search_backend import Passage
from turntree.search_backend.server import SearchServer, ServerSettings
from turntree.search_backend.serving import serve

class Slow:
    fingerprint = "slow"
    def search(self, queries, *, k):
        time.sleep(1.0)
        return [[Passage(q, "", "found")] for q in queries]

settings = ServerSettings(port=0, max_batch=1)
serve(functools.partial(SearchServer, Slow(), settings), settings, ready=lambda url: print(url, flush=True))
print("all done", flush=True)
"""


@pytest.fixture
def slow_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait(timeout=30)
    process.stdout.close()


def test_sigterm_finishes_what_is_in_flight(slow_server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = slow_server
    body = {"queries": ["q"]}
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(httpx2.post, f"{url}/retrieve", json=body, timeout=30) for _ in range(2)]
        until(lambda: re.search(r"turntree_requests_in_flight 3\.0", httpx2.get(f"{url}/metrics").text) is not None)
        process.send_signal(signal.SIGTERM)
        assert [answer.result().status_code for answer in running] == [200, 200]
    assert process.wait(timeout=30) == 0
    assert process.stdout is not None
    assert process.stdout.read() == "all done\n"
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/healthz")


@pytest.fixture(scope="module")
def index(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from turntree.search_backend.index import build_index

    folder = tmp_path_factory.mktemp("index") / "bm25"
    build_index(corpus, folder, kind="bm25")
    return folder


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Processes whose parent it is and that hold its socket: spawn's helper does not listen."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and b"resource_tracker" not in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_workers_share_an_index_are_replaced_and_stop_together(index: Path, serve_process: Start) -> None:
    server = serve_process("--index", str(index), "--workers", "2")
    workers = workers_of(server.process)
    assert len(workers) == 2
    with RemoteBackend(f"{server.url}/retrieve", retries=5) as remote, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: remote.search([f"number{i % 30}"], k=1)[0][0].id, range(60)))
        assert found == [str(i % 30) for i in range(60)]
        text = httpx2.get(f"{server.url}/metrics").text
        assert re.search(r'turntree_requests_total\{path="/retrieve",status="200"\} 60\.0', text)
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: len(workers_of(server.process)) == 2 and workers[0] not in workers_of(server.process))
        assert remote.search(["number3"], k=1)[0][0].id == "3"
    assert server.stop() == 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_parent(index: Path, serve_process: Start) -> None:
    server = serve_process("--index", str(index), "--workers", "2")
    workers = workers_of(server.process)
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not answers(server.url))
    until(lambda: not [pid for pid in workers if Path(f"/proc/{pid}").exists()])


def test_one_mapped_index_is_served(index: Path, serve_process: Start) -> None:
    server = serve_process("--index", str(index))
    assert httpx2.get(f"{server.url}/info").json()["passages"] == 30
    answer = httpx2.post(f"{server.url}/retrieve", json={"queries": ["number4"], "topk": 1}).json()
    assert answer["result"][0][0]["id"] == "4"
    assert server.stop() == 0


def test_wrong_commands_say_what_to_do(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    base = ["serve", "--corpus", str(corpus), "--port", "0"]
    for arguments, words in (
        (["serve"], "expected one of --index DIR and --corpus FILE"),
        ([*base, "--host", "0.0.0.0"], "expected a token"),
        ([*base, "--token-env", "NO_SUCH_TOKEN"], "NO_SUCH_TOKEN is not set"),
        ([*base, "--workers", "2"], "turntree index build"),
        ([*base, "--arg", "k2=1"], "k2"),
        ([*base, "--max-batch", "0"], "max_batch=0"),
        (["serve", "--index", str(tmp_path)], "manifest"),
    ):
        with pytest.raises(Exception, match=words):
            CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_a_port_that_is_taken_is_named(corpus: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
            CliRunner().invoke(
                cli, ["serve", "--corpus", str(corpus), "--port", str(port)], catch_exceptions=False
            )  # fmt: skip
