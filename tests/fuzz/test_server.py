"""Any request is answered once, with a result or a typed error, and never with a crash of the server."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.material import Tape, fuzz, json_like, text_of
from tests.trainers.studio.stored import write_run
from turntree.search_backend.bm25 import BM25Backend
from turntree.search_backend.dialects import DIALECTS, ShapeError, read_answer
from turntree.search_backend.forms import to_json
from turntree.search_backend.passage import Passage
from turntree.search_backend.server import SearchServer, ServerSettings
from turntree.trainers.studio.app import Studio, create_app
from turntree.trainers.studio.data import Library

PASSAGES = [
    Passage("7", "Paris", "Paris is the capital."),
    Passage("8", 'The "Seine"', "A river."),
    Passage("9", "长江", "河"),
]
KEYS = (
    "queries", "query", "topk", "top_k", "top_n", "topk_retrieval", "topk_rerank", "return_scores",
    "return_score", "documents",
    "rerank_topk", "dataset", "contents", "title", "text", "score", "id", "document",
)  # fmt: skip
PATHS = (
    "/retrieve", "/search", "/batch_search", "/rerank", "/healthz", "/info", "/metrics", "/openapi.json", "/",
    "/retrieve/", "//",
    "/../etc/passwd", "/%2e%2e", "/retrieve\x00", "/\ud800",
)  # fmt: skip
METHODS = ("POST", "POST", "POST", "GET", "PUT", "PATCH", "HEAD", "OPTIONS", "DELETE", "BREW", "")
HEADERS = (
    (b"host", b"127.0.0.1:8000"), (b"host", b"evil.example"), (b"host", b"[::1]:80"), (b"host", b"[::1"),
    (b"host", b":"), (b"host", b"\xff"),
    (b"content-type", b"application/json"), (b"content-type", b"text/plain"), (b"content-type", b"\xff;\x00"),
    (b"content-length", b"-1"), (b"content-length", b"99999999999999999999"), (b"content-length", b"\xb2"),
    (b"content-encoding", b"gzip"),
    (b"authorization", b"Bearer \xff"), (b"origin", b"http://[::1"), (b"origin", b"null"), (b"origin", b"http://127.0.0.1:8000"),
    (b"cookie", b"turntree_studio=key-of-the-test"), (b"cookie", b'a="\xff; ;=;'), (b"sec-fetch-site",
    b"cross-site"), (b"transfer-encoding", b"chunked"),
)  # fmt: skip


class Rank:
    """Scores by length."""

    fingerprint = "length"

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[float(len(p.text)) for p in each] for each in passages]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@functools.cache
def search_app() -> Any:
    settings = ServerSettings(
        max_body_bytes=2_000, max_queries=8, max_query_chars=400, max_k=5, max_wait_ms=0, body_timeout_s=5
    )
    return SearchServer(BM25Backend.from_passages(PASSAGES), settings, reranker=Rank()).app


@functools.cache
def studio_app() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="turntree-fuzz-"))
    write_run(folder / "r", steps=1, trees=1, leaves=3, evil=True)
    return create_app(Studio(Library(folder), fork=False), key="key-of-the-test")


def ask(app: Any, scope: dict[str, Any], parts: Sequence[bytes], *, leaves: bool = False) -> Answer | None:
    """Send one request past the socket; None where a client that left was not answered."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]]
    messages.append({"type": "http.request", "body": parts[-1], "more_body": leaves})
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    loop().run_until_complete(asyncio.wait_for(app(scope, receive, send), 20))
    if not sent:
        assert leaves
        return None
    start, *bodies = sent
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * len(bodies)]
    assert not bodies[-1].get("more_body", False)
    assert all(isinstance(part, bytes) for header in start["headers"] for part in header)
    return Answer(start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in bodies))


def scope_of(tape: Tape, paths: Sequence[str]) -> dict[str, Any]:
    path, method = tape.pick(paths), tape.pick(METHODS)
    if tape.byte() % 16 == 15:
        path = "/" + text_of(tape.some(8))
    headers = [tape.pick(HEADERS) for _ in range(tape.byte() % 4)]
    query = text_of(tape.some(tape.byte() % 12)).encode("utf-8", "replace")
    raw = path.encode("utf-8", "replace")
    return {
        "type": "http", "method": method, "path": path, "raw_path": raw, "query_string": query, "headers": headers,
        "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "asgi": {"version": "3.0"},
    }  # fmt: skip


def body_of(tape: Tape) -> bytes:
    if tape.byte() % 6 == 5:
        return tape.data[tape.at :] * (1 + tape.byte())
    value = json_like(tape, keys=KEYS, texts=("river", "Paris"))
    if not isinstance(value, dict):
        value = {tape.pick(KEYS[:2]): value, tape.pick(KEYS[2:7]): json_like(tape)}
    try:
        return json.dumps(value, ensure_ascii=bool(tape.byte() % 2)).encode("utf-8", "surrogatepass")
    except ValueError:
        return b"{}"


@fuzz("server", size=160, share=10)
def test_any_request_of_the_search_server_is_answered(tape: Tape) -> None:
    scope, body = scope_of(tape, PATHS), body_of(tape)
    at = tape.number() % (len(body) + 1)
    answer = ask(search_app(), scope, (body[:at], body[at:]), leaves=tape.byte() % 16 == 15)
    if answer is None or (answer.status == 307 and scope["path"].endswith("/")):
        return
    assert answer.status in (200, 404, 405, 413, 415, 421, 422)  # none of them the server's own fault
    if scope["method"] == "HEAD" or scope["path"] in ("/metrics",):
        return
    document = json.loads(answer.body)
    if answer.status != 200:
        assert document["error"]["type"]
        assert document["error"]["message"]


@fuzz("server", size=160, share=10)
def test_a_result_holds_a_list_for_each_query_and_an_error_names_the_key(tape: Tape) -> None:
    queries = [text_of(tape.some(12)) for _ in range(tape.byte() % 10)]
    k: Any = tape.pick((1, 2, 3, 5, 6, 0, -1, None, "3", 2.0, True, 10**30))
    body = json.dumps({"queries": queries, "topk": k, "return_scores": tape.pick((True, False, None, 1))}).encode()
    scope = {**scope_of(Tape(b""), ("/retrieve",)), "headers": [(b"host", b"localhost")]}
    answer = ask(search_app(), scope, (body,))
    assert answer is not None
    document = json.loads(answer.body)
    if answer.status == 200:
        assert len(document["result"]) == len(queries)
        assert all(len(each) <= (k or 3) for each in document["result"])
    else:
        assert answer.status == 413 or (answer.status == 422 and document["error"].get("param", "") in ("", "queries",
        "topk", "return_scores", *(f"queries.{i}" for i in range(10))))  # fmt: skip


@fuzz("server", size=96, share=3)
def test_any_request_of_the_studio_is_answered(tape: Tape) -> None:
    paths = ("/", "/api/runs", "/api/steps", "/api/tree", "/api/tokens", "/api/search", "/api/export/html",
    "/api/fork/play", "/static/../guard.py", "/static/app.js", "/api/explain")  # fmt: skip
    scope, body = scope_of(tape, paths), body_of(tape)
    if tape.byte() % 2:
        scope["headers"] = [
            (b"host", b"127.0.0.1:8000"),
            (b"cookie", b"turntree_studio=key-of-the-test"),
            (b"content-type", b"application/json"),
        ]
        scope["query_string"] = tape.pick((b"run=r", b"run=..%2f..", b"run=%00&step=0&index=0",
        b"run=r&step=1e9&index=-1", b"run=r&q=x&before=9999999999999999999999", b"key=x",
        b"run=r&step=0&index=0&node=0.0"))  # fmt: skip
    answer = ask(studio_app(), scope, (body,))
    assert answer is not None
    assert answer.status in (200, 303, 400, 401, 403, 404, 405, 409, 413, 415, 421, 422)
    assert b"content-security-policy" in answer.headers
    assert b"turntree.trainers" not in answer.body or answer.status == 200


@fuzz("server", size=120, share=6)
def test_any_answer_of_a_server_is_read_or_refused(tape: Tape) -> None:
    """The other side: what a client is answered is as arbitrary."""
    count = tape.byte() % 4
    value = json_like(
        tape, keys=("result", "results", "documents", "data", "error", *KEYS), texts=("(Title: x) y", '"T"\nx')
    )
    for document in (value, [value] * count, {"result": [value] * count}, [[value] * count, [0.5] * count]):
        try:
            found = read_answer(document, count)
        except ShapeError:
            continue
        assert len(found) == count
        assert all(
            isinstance(p.text, str) and isinstance(p.title, str) and isinstance(p.id, str)
            for each in found
            for p in each
        )


@fuzz("server", size=96, share=6)
def test_what_is_sent_arrives(tape: Tape) -> None:
    """Every dialect writes what its server reads; passages come back as they were."""
    passages = []
    for number in range(1 + tape.byte() % 3):
        title, text = (" ".join(text_of(tape.some(8)).split()).strip('"') for _ in range(2))
        passages.append(Passage(f"{number}", title.strip(), text.strip() or "x", None))
    rows = [{"id": p.id, "contents": f'"{p.title.replace(chr(34), chr(34) * 2)}"\n{p.text}'} for p in passages]
    document = json.loads(to_json({"result": [rows]}))
    assert read_answer(document, 1) == [passages]
    queries = [text_of(tape.some(8)) for _ in range(2)]
    for dialect in DIALECTS.values():
        sent = json.loads(json.dumps(dialect.request(queries[:1] if dialect.single else queries, 3)))
        assert sent[dialect.queries] == (queries[0] if dialect.single else queries)
