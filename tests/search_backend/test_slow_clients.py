"""Clients that dribble or flood are cut off one by one, and good clients are served all the while."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx2

from turntree.search_backend import BM25Backend, Passage

Start = Callable[..., str]

HEAD = b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
KINDS = {
    "head": (b"POST /retrieve HTTP/1.1\r\nX: ", b"a"),
    "body": (HEAD + b"Content-Length: 4000\r\n\r\n{", b" "),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "silent": (b"", b""),
    "flood": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"2000\r\n" + b" " * 0x2000 + b"\r\n"),
}
EACH = 24


class Dribblers:
    """Connections that send a little every 0.05 s until the server ends them, in one thread."""

    def __init__(self, port: int) -> None:
        self.open: dict[socket.socket, str] = {}
        self.ended: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.said: dict[str, bytes] = dict.fromkeys(KINDS, b"")
        for kind, (first, _) in KINDS.items():
            for _ in range(EACH):
                connection = socket.create_connection(("127.0.0.1", port), timeout=10)
                connection.sendall(first)
                connection.setblocking(False)
                self.open[connection] = kind
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + 30
        while self.open and time.monotonic() < deadline:
            with selectors.DefaultSelector() as ready:
                for connection in self.open:
                    ready.register(connection, selectors.EVENT_READ)
                ready.select(0.05)
            for connection, kind in list(self.open.items()):
                try:
                    self._hear(connection, kind)
                    connection.send(KINDS[kind][1])
                except BlockingIOError:
                    continue
                except OSError:
                    self.ended[kind] += 1
                    del self.open[connection]
                    connection.close()

    def _hear(self, connection: socket.socket, kind: str) -> None:
        """Take what the server said right before more is sent: what is sent to a closed end makes that be dropped."""
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        self.said[kind] = self.said[kind] or data
        if not data:
            raise ConnectionResetError

    def join(self) -> None:
        self._thread.join(timeout=40)
        for connection in self.open:
            connection.close()


def test_dribbling_and_flooding_clients_are_cut_while_others_are_served(search_server: Start) -> None:
    backend = BM25Backend.from_passages([Passage("1", "Paris", "Paris is the capital of France.")])
    url = search_server(backend, head_timeout_s=1.5, body_timeout_s=1.5, max_body_bytes=20_000, max_connections=200)
    dribblers = Dribblers(urlsplit(url).port or 0)
    served = 0
    with httpx2.Client() as client:
        start = time.monotonic()
        while dribblers.open and time.monotonic() - start < 25:
            answer = client.post(f"{url}/retrieve", json={"queries": ["Paris"], "topk": 1}, timeout=5)
            assert answer.json()["result"][0][0]["id"] == "1"
            served += 1
            time.sleep(0.01)  # leaves the processor to the server: both are in one process
    dribblers.join()
    assert dribblers.ended == dict.fromkeys(KINDS, EACH)
    assert served >= 5
    assert b" 408 " in dribblers.said["head"]
    assert b" 408 " in dribblers.said["body"]
    assert b" 408 " in dribblers.said["chunks"]
    assert b" 413 " in dribblers.said["flood"]
    assert dribblers.said["silent"] == b""
