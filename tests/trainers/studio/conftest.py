"""A studio on loopback, in this process, and a browser."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

KEY = "studiokey0"
CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@dataclass(frozen=True)
class Answer:
    """What the server said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _Unfollowed(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Client:
    """Asks a studio. ``with_key=False`` leaves the cookie out; ``headers`` go on top of the usual ones."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def entrance(self) -> str:
        return f"{self.url}/?key={KEY}"

    def ask(
        self, path: str, *, body: Any = None, with_key: bool = True, headers: dict[str, str] | None = None, **query: Any
    ) -> Answer:
        url = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        cookie = {"Cookie": f"turntree_studio_{self.port}={KEY}"} if with_key else {}
        kind = {"Content-Type": "application/json"} if body is not None else {}
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers={**cookie, **kind, **(headers or {})})
        try:
            with urllib.request.build_opener(_Unfollowed).open(request, timeout=120) as answer:
                return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


@pytest.fixture(scope="module")
def open_studio() -> Iterator[Callable[..., Client]]:
    """``open_studio(folder, **options of Studio)``: serves until the module's tests are done."""
    import uvicorn

    from turntree.trainers.studio.app import Studio, create_app
    from turntree.trainers.studio.data import Library
    from turntree.trainers.studio.serving import StudioSettings, bind

    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(folder: Path, **options: Any) -> Client:
        listener = bind(StudioSettings(port=0))
        listener.listen()  # requests before the thread serves wait
        port = listener.getsockname()[1]
        app = create_app(Studio(Library(folder), **options), key=KEY, cookie=f"turntree_studio_{port}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        started.append((server, thread))
        return Client(port)

    yield start
    for server, _ in started:
        server.should_exit = True
    for _, thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium of the system; the tests are skipped where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium here: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=CHROMIUM.split())
        yield started
        started.close()
