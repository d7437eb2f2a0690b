"""A loopback HTTP proxy that passes requests on and, by a script, spoils some of them: what real networks do."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

__all__ = ["PASS", "Fault", "FaultyProxy", "faulty_proxy"]

Kind = Literal["pass", "reset", "slow", "half", "no_json", "shape", "busy", "error", "outage"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What a request meets.

    ``reset``: the connection is reset; ``slow``: it waits ``seconds`` before it is passed on; ``half``: half of the
    answer, then the end; ``no_json`` and ``shape``: status 200 with something else; ``busy``: 429 with Retry-After
    ``seconds``; ``error``: 500; ``outage``: it is reset, and connections are refused for ``seconds``.
    """

    kind: Kind = "pass"
    seconds: float = 0.0


PASS = Fault()


class FaultyProxy:
    """In front of ``target`` (``http://host:port``). ``met`` counts what requests met, ``answered`` those passed on."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self.target = (parts.hostname or "", parts.port or 0)
        self.script: list[Fault] = []
        self.met: Counter[str] = Counter()
        self.answered = 0
        self.lock = threading.Lock()
        self._listener: _Listener | None = None
        self._timers: list[threading.Timer] = []
        self.port = self._open(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def down(self) -> bool:
        """Whether connections are refused now."""
        return self._listener is None

    def play(self, faults: Sequence[Fault]) -> None:
        """The next requests meet these, one each; what follows is passed on. Counters start anew."""
        with self.lock:
            self.script, self.met, self.answered = list(faults), Counter(), 0

    def calm(self) -> None:
        """Pass everything on from now; the counters stay."""
        with self.lock:
            self.script = []

    def next_fault(self) -> Fault:
        with self.lock:
            fault = self.script.pop(0) if self.script else PASS
            self.met[fault.kind] += 1
        return fault

    def outage(self, seconds: float) -> None:
        """Refuse connections for a while."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            timer = threading.Timer(seconds, self._open, (self.port,))
            self._timers.append(timer)
            timer.start()

    def recover(self) -> None:
        """End an outage."""
        self._stop_timers()
        if self._listener is None:
            self._open(self.port)

    def close(self) -> None:
        self._stop_timers()
        if self._listener is not None:
            self._listener.close()

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _open(self, port: int) -> int:
        self._listener = _Listener(self, port)
        return int(self._listener.server_address[1])


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, proxy: FaultyProxy, port: int) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no error here."""

    def close(self) -> None:
        """From any thread but the one that serves."""
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        assert isinstance(self.server, _Listener)
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if proxy.down:  # a connection of before the outage
            self._reset()
            return
        fault = proxy.next_fault()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fault.kind == "outage":
                proxy.outage(fault.seconds)
            if fault.kind in ("reset", "outage"):
                self._reset()
            elif fault.kind in ("no_json", "shape", "busy", "error"):
                self._answer(fault)
            else:
                self._pass_on(proxy, fault, body)

    do_GET = do_POST

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _answer(self, fault: Fault) -> None:
        status, content = {
            "no_json": (200, b"<html>502 Bad Gateway</html>"),
            "shape": (200, b'{"rows": 3}'),
            "busy": (429, b'{"error": {"message": "slow down"}}'),
            "error": (500, b'{"error": {"message": "oh no"}}'),
        }[fault.kind]
        headers = {"Retry-After": f"{fault.seconds:g}"} if fault.kind == "busy" else {}
        self._send(status, headers, content, len(content))

    def _pass_on(self, proxy: FaultyProxy, fault: Fault, body: bytes) -> None:
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        connection = http.client.HTTPConnection(*proxy.target, timeout=60)
        try:
            kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "accept-encoding")}
            connection.request(self.command, self.path, body or None, kept)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        left_out = ("content-length", "connection", "transfer-encoding", "date", "server")
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in left_out}
        if fault.kind == "half":
            self.close_connection = True
            self._send(answer.status, headers, content[: len(content) // 2], len(content))
            return
        with proxy.lock:
            proxy.answered += 1
        self._send(answer.status, headers, content, len(content))

    def _send(self, status: int, headers: dict[str, str], content: bytes, length: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def faulty_proxy(target: str) -> Iterator[FaultyProxy]:
    """A proxy that is closed at the end."""
    proxy = FaultyProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
