"""A generated world, a tiny model and rules of a user's own: what runs of the whole machine are tested with."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from turntree.trainers.config import RunConfig

RULES = '''
"""Rules that a user plugs in by import path."""

import zlib
from dataclasses import replace
from pathlib import Path

from turntree.envs.core import Action
from turntree.envs.grammar import ParsedTurn
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import RetrievalError
from turntree.search_backend.bm25 import BM25Backend
from turntree.trainers.credit import Advantages, grpo
from turntree.trainers.expansion import Expansion
from turntree.trainers.losses import PolicyLoss


class Babble(WorldGrammar):
    """Finds an action in anything, so that a model with random weights searches, answers and errs."""

    fingerprint = "babble"
    stop = ("e", "a")

    def parse(self, text):
        draw = zlib.crc32(text.encode()) % 8
        if draw == 0:
            return ParsedTurn(Action("invalid", "no_action"))
        return ParsedTurn(Action("answer", "yes") if draw < 3 else Action("search", text.strip() or "who"))


class OnlySearch(Babble):
    def parse(self, text):
        return ParsedTurn(Action("search", text.strip() or "who"))


def busy(outcome):
    """More searches are worth more."""
    return len(outcome.observations) / 4


def paid(outcome):
    return 1.0


def rare(outcome):
    """1 for long episodes: few of them, so that most groups are equal."""
    return float(len(outcome.observations) >= 3)


def constant(finished):
    return [0.25 for _ in finished]


def first_gold(finished):
    return [replace(f, answer=f.task.golden_answers[0]) for f in finished]


def root_only(tree, k, rng):
    return [Expansion(tree.root, tree.root, None, "root")] * k


def ended(tree, k, rng):
    """Names a leaf, where nothing can grow."""
    return [Expansion(leaf, leaf, None, "leaf") for leaf in tree.leaves()[:k]]


def flat(occurrences, denominators):
    """A loss of one number; the weights stay as they are."""
    loss = occurrences.logp.sum() * 0 + 7.0
    return PolicyLoss(loss, *(loss.detach() * 0 for _ in range(3)))


def halved(groups, *, factor=0.5):
    plain = grpo(groups)
    return Advantages(plain.per, tuple(tuple(factor * leaf for leaf in group) for group in plain.values))


class Counting:
    """BM25 that writes down how many queries it was sent."""

    def __init__(self, corpus, log):
        self.inner, self.log = BM25Backend.from_corpus(corpus), Path(log)
        self.fingerprint = self.inner.fingerprint

    def search(self, queries, *, k):
        with self.log.open("a") as file:
            file.writelines("query\\n" for _ in queries)
        return self.inner.search(queries, k=k)


class Down:
    fingerprint = "down"

    def __init__(self, corpus):
        pass

    def search(self, queries, *, k):
        raise RetrievalError("the index is down")
'''


@dataclass(frozen=True)
class Bed:
    """Where the parts lie. ``args``: overrides of a run that takes a second or two."""

    root: Path
    world: Path
    model: Path
    rules: Path

    @property
    def args(self) -> list[str]:
        return [
            "algorithm=tree_grpo",
            f"model.path={self.model}",
            f"env.questions={self.world}",
            "env.grammar=users_rules:Babble",
            "reward.name=users_rules:busy",
            "search.top_k=1",
            "sampling.max_turn_tokens=12",
            "sampling.max_context_tokens=400",
            "trainer.steps=2",
            "trainer.prompts_per_step=4",
            "trainer.learning_rate=1e-3",
            "trainer.threads=1",
        ]


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    from turntree.envs.worlds import generate_world
    from turntree.trainers.quickstart import write_tiny_model

    root = tmp_path_factory.mktemp("bed")
    generate_world("quickstart", seed=1, split="train", questions=24).save(root / "world")
    write_tiny_model(root / "model", seed=0)
    rules = root / "rules"
    rules.mkdir()
    (rules / "users_rules.py").write_text(RULES, encoding="utf-8")
    sys.path.insert(0, str(rules))
    yield Bed(root, root / "world", root / "model", rules)
    sys.path.remove(str(rules))
    sys.modules.pop("users_rules", None)


@dataclass(frozen=True)
class LoopbackServer:
    """An OpenAI-compatible server in a process of its own; see ``tests/openai_server.py``."""

    url: str

    def faults(self, *faults: dict[str, Any]) -> None:
        """What the next requests meet, one each; the log starts anew."""
        self._call("/faults", list(faults))

    def log(self) -> list[dict[str, Any]]:
        """The requests since the last :meth:`faults`: path, body, headers, time of arrival."""
        return list(self._call("/log")["requests"])

    def most_at_once(self) -> int:
        """The most requests that were being answered at one time."""
        return int(self._call("/log")["most"])

    def _call(self, path: str, body: Any = None) -> Any:
        root = self.url.removesuffix("/v1")
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(root + path, data), timeout=30) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def openai_server(bed: Bed) -> Iterator[LoopbackServer]:
    """A real server that serves the bed's model; it loads it with the first request that needs it."""
    script = Path(__file__).with_name("openai_server.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(bed.model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield LoopbackServer(f"http://127.0.0.1:{int(process.stdout.readline())}/v1")
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture(scope="session")
def make_config(bed: Bed) -> Callable[..., RunConfig]:
    """``make_config(*overrides)``: a small run of the bed."""
    from turntree.trainers.compose import compose

    return lambda *overrides: compose([*bed.args, *overrides])


class ScriptedServer:
    """A loopback HTTP server that gives the answers it was told, one a request, then ``always``; it keeps requests.

    An answer is ``(status, headers, body)``; a body that is not bytes is sent as JSON, a fourth element is a pause.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[Any, ...]] = []
        self.always: tuple[Any, ...] = (200, {}, {"result": []})
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        owner, lock = self, threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with lock:
                    owner.requests.append({"method": self.command, "path": self.path, "headers": headers, "body": body})
                    owner.times.append(time.monotonic())
                    status, more, content, *pause = owner.answers.pop(0) if owner.answers else owner.always
                if pause:
                    time.sleep(pause[0])
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(content)), **more}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_POST

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/retrieve"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def bodies(self) -> list[Any]:
        """The JSON bodies of the requests so far."""
        return [json.loads(request["body"]) for request in self.requests]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def search_server() -> Iterator[Callable[..., str]]:
    """``search_server(backend, **settings)``: the address of a server of turntree's in this process.

    They stop when the module's tests are done, all at once: each takes its time to stop.
    """
    from turntree.search_backend.server import SearchServer, ServerSettings

    started: list[tuple[Any, threading.Thread]] = []

    def start(backend: Any, *, reranker: Any = None, **options: Any) -> str:
        import uvicorn

        from turntree.search_backend import serving

        settings = ServerSettings(port=0, **options)
        listener = serving.bind(settings)
        listener.listen()  # requests before the thread serves wait
        server = uvicorn.Server(serving.configure(SearchServer(backend, settings, reranker=reranker).app, settings))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        started.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, _ in started:
        server.should_exit = True
    for _, thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()


@dataclass
class ServeProcess:
    """``turntree serve`` in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, sign: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(sign)
        return self.process.wait(timeout=60)


@pytest.fixture
def serve_process() -> Iterator[Callable[..., ServeProcess]]:
    """``serve_process(*arguments)``: starts it and waits until it says that it serves."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> ServeProcess:
        command = [sys.executable, "-m", "turntree.cli", "serve", "--port", "0", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
        started.append(process)
        assert process.stdout is not None
        said = ""
        for line in process.stdout:  # ends when the process does
            said += line
            if found := re.search(r" at (http://\S+)/retrieve", line):
                return ServeProcess(process, found[1])
        raise AssertionError(f"the server did not start:\n{said}")

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()
