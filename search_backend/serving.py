"""Runs the search server: listens, in one process or several, and ends when what is in flight is done."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from turntree.errors import ConfigError, TurnTreeError
from turntree.search_backend.server import SearchServer, ServerSettings  # first: it says which extra is missing

import uvicorn  # isort: skip
import uvicorn.supervisors  # isort: skip

from turntree.search_backend.guard import GuardedConfig, GuardedProtocol  # isort: skip

__all__ = ["bind", "configure", "serve"]


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket. Raises ``ConfigError`` where the address cannot be taken."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error}; choose another") from error
    listener.set_inheritable(True)
    return listener


def serve(
    make: Callable[[], SearchServer], settings: ServerSettings, *, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what is in flight; returns when all is done.

    ``make`` opens the backend; with several workers each process calls it, so it must be picklable, and what the
    backend maps from disk is in memory once. ``ready`` gets the address once it accepts connections.
    """
    listener = bind(settings)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with _quiet_term():
        if settings.workers == 1:
            server = make()
            _Announcing(configure(server.app, settings), lambda: ready(url)).run([listener])
        else:
            make().close()  # an index that cannot be opened is one message here, not a worker that dies for ever
            with _shared_metrics():
                _serve_many(make, settings, listener, lambda: ready(url))


def configure(app: Any, settings: ServerSettings, **more: Any) -> GuardedConfig:
    """Uvicorn's configuration with the limits of ``settings``; ``more``: further arguments of it."""
    config = GuardedConfig(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.graceful_s)),
        timeout_worker_healthcheck=120,
        **more,
    )
    config.head_timeout_s, config.max_connections = settings.head_timeout_s, settings.max_connections
    return config


class _Announcing(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


@contextlib.contextmanager
def _quiet_term() -> Iterator[None]:
    """A server that finished its work on SIGTERM ends with exit code 0: uvicorn sends itself the signal again."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: None)
    except ValueError:  # not the main thread, which gets the signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- several processes ---------------------------------------------------------------------------------------------


def _serve_many(
    make: Callable[[], SearchServer], settings: ServerSettings, listener: socket.socket, ready: Callable[[], None]
) -> None:
    config = configure(functools.partial(_worker, make), settings, factory=True, workers=settings.workers)
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        _Workers(config, [listener], ready).run()
    finally:
        listener.close()
        for sig, handler in before.items():
            signal.signal(sig, handler)


class _Workers(uvicorn.supervisors.Multiprocess):
    """Uvicorn's processes: one that dies is started again, SIGTERM and Ctrl-C stop all of them."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        super().__init__(config, sockets)
        self._ready = ready

    def init_processes(self) -> None:
        super().init_processes()
        started = [process.wait_until_ready(600.0) for process in self.processes]
        if all(started):
            self._ready()


def _worker(make: Callable[[], SearchServer]) -> Any:
    """In a worker: the application; an index that cannot be opened ends all of them."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        return make().app
    except (TurnTreeError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(3)  # uvicorn's word for a start that cannot succeed


def _follow_parent() -> None:
    """A worker whose parent was killed stops too: nobody else would stop it, and it holds the port."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _shared_metrics() -> Iterator[None]:
    """A folder in which the workers count together."""
    folder = tempfile.mkdtemp(prefix="turntree-metrics-")
    before = os.environ.get(_METRICS)
    os.environ[_METRICS] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_METRICS]
        else:
            os.environ[_METRICS] = before
        shutil.rmtree(folder, ignore_errors=True)


_METRICS = "PROMETHEUS_MULTIPROC_DIR"
