"""Runs the studio until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turntree.errors import ConfigError
from turntree.trainers.studio.app import Studio, create_app  # first: it says which extra is missing
from turntree.trainers.studio.data import Library
from turntree.trainers.studio.guard import is_loopback

import uvicorn  # isort: skip

__all__ = ["StudioSettings", "bind", "serve_studio"]

DEFAULT_PORT = 8320
_KEY_BYTES = 24


@dataclass(frozen=True, slots=True)
class StudioSettings:
    """Where the studio listens and what it may do.

    ``port``: None takes 8320, or any free one where that is taken; 0 any free one. ``token_env`` names an environment
    variable that holds the access key (at least 8 characters), so that links outlive a restart; without it a new key is
    drawn. ``fork=False`` plays no turns.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    token_env: str = ""
    fork: bool = True
    model: Path | None = None

    def key(self) -> str:
        """The access key. Raises ``ConfigError`` where the variable holds none, or a short one."""
        if not self.token_env:
            return secrets.token_urlsafe(_KEY_BYTES)
        key = os.environ.get(self.token_env, "")
        if len(key) < 8 or not key.isascii() or not key.isalnum():
            raise ConfigError(
                f"--token-env {self.token_env}: expected a key of at least 8 ASCII letters and digits in that variable"
            )
        return key


class _Announcing(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def serve_studio(root: Path, settings: StudioSettings, *, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve the runs in ``root`` until Ctrl-C. ``ready`` gets the address with its key once it accepts connections.

    Raises ``CheckpointError`` when there is no run, ``ConfigError`` when the address cannot be taken.
    """
    studio = Studio(Library(root), fork=settings.fork, model=settings.model)
    key = settings.key()
    listener = bind(settings)
    port = listener.getsockname()[1]
    hosts = frozenset() if is_loopback(settings.host) else _reachable(settings.host)
    # Browsers share cookies between the ports of a host: the port keeps two studios apart.
    app = create_app(studio, key=key, cookie=f"turntree_studio_{port}", hosts=hosts)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    name = settings.host if not hosts or settings.host not in ("0.0.0.0", "::") else socket.gethostname()  # noqa: S104
    shown = f"[{name}]" if ":" in name else name
    with contextlib.suppress(KeyboardInterrupt):
        _Announcing(config, lambda: ready(f"http://{shown}:{port}/?key={key}")).run([listener])


def _reachable(host: str) -> frozenset[str]:
    """Names by which a browser may call this machine, besides localhost."""
    names = {host.lower()}
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  # asked for by --host
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        with contextlib.suppress(OSError):
            names |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return frozenset(names)


def bind(settings: StudioSettings) -> socket.socket:
    """The listening socket. Raises ``ConfigError`` where the address cannot be taken."""
    wanted = [DEFAULT_PORT, 0] if settings.port is None else [settings.port]
    failure: Exception | None = None
    for port in wanted:
        try:
            found = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return listener
        except (OSError, UnicodeError, OverflowError) as error:
            failure = error
    raise ConfigError(f"cannot listen on {settings.host} port {wanted[-1]}: {failure}; choose another with --port")
