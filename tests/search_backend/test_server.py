"""The search server over real sockets: published forms byte for byte, limits, tokens, overload, metrics."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from turntree.errors import ConfigError, RetrievalError
from turntree.search_backend import BM25Backend, Passage
from turntree.search_backend.client import RemoteBackend
from turntree.search_backend.server import ServerSettings

Start = Callable[..., str]

PASSAGES = [
    Passage("7", "Paris", "Paris is the capital of France."),
    Passage("8", 'The "Seine"', "The river of Paris.\nIt is long."),
    Passage("9", "长江", "长江是中国的河流。"),
]
PARIS = {"id": "7", "contents": '"Paris"\nParis is the capital of France.'}


def bm25() -> BM25Backend:
    return BM25Backend.from_passages(PASSAGES)


class Slow:
    """Waits for ``gate`` in each search, and writes down the batches."""

    fingerprint = "slow"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.started = threading.Event()
        self.batches: list[tuple[int, list[str]]] = []

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.started.set()
        assert self.gate.wait(30)
        self.batches.append((k, list(queries)))
        if "poison" in queries:
            raise RetrievalError("poisoned")
        return [[Passage(q, "", f"about {q}", 0.1)][:k] for q in queries]


def exchange(url: str, request: bytes, *, timeout: float = 20) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read one whole answer: status, headers, body."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=timeout) as connection:
        connection.sendall(request)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            raise ConnectionError(f"closed after {data!r}")
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(lines[0].split()[1]), headers, body


# What `requests.post(url, json=payload)` of each project's client puts on the wire.
def published(path: str, body: str, *, accept: str = "*/*") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: python-requests/2.32.3\r\n"
        f"Accept-Encoding: gzip, deflate\r\nAccept: {accept}\r\nConnection: keep-alive\r\n"
        f"Content-Length: {len(body.encode())}\r\nContent-Type: application/json\r\n\r\n"
    )
    return head.encode() + body.encode()


SCORED = '{"result":[[{"document":{"id":"7","contents":"\\"Paris\\"\\nParis is the capital of France."},"score":S}]]}'
BARE = '{"result":[[{"id":"7","contents":"\\"Paris\\"\\nParis is the capital of France."}]]}'
CASES = {
    "search_r1": ("/retrieve", '{"queries": ["capital of France"], "topk": 1, "return_scores": true}', "*/*", SCORED),
    "search_r1 without scores": ("/retrieve", '{"queries": ["capital of France"], "topk": 1}', "*/*", BARE),
    "verl": (
        "/retrieve", '{"queries": ["capital of France"], "topk": 1, "return_scores": true}', "application/json", SCORED,
    ),
    "skyrl server": ("/retrieve", '{"query": "capital of France", "topk": 1, "return_scores": true}', "*/*", SCORED),
    "skyrl server without scores": ("/retrieve", '{"query": "capital of France", "topk": 1}', "*/*", BARE),
    "zerosearch": (
        "/retrieve", '{"query": "capital of France", "top_k": 1}', "*/*",
        '[{"id":"7","title":"Paris","text":"Paris is the capital of France.","score":S}]',
    ),
    "research": (
        "/search", '{"query": "capital of France", "top_n": 1, "return_score": true}', "*/*",
        '[[{"id":"7","contents":"\\"Paris\\"\\nParis is the capital of France."}],[S]]',
    ),
    "research batch": (
        "/batch_search", '{"query": ["capital of France"], "top_n": 1}', "*/*",
        '[[{"id":"7","contents":"\\"Paris\\"\\nParis is the capital of France."}]]',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_published_clients_get_what_their_own_server_answers_byte_for_byte(name: str, search_server: Start) -> None:
    backend = bm25()
    (best,) = backend.search(["capital of France"], k=1)[0]
    path, body, accept, expected = CASES[name]
    status, headers, answer = exchange(search_server(backend), published(path, body, accept=accept))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert answer.decode() == expected.replace("S", json.dumps(best.score))
    assert headers["turntree-fingerprint"] == backend.fingerprint


def test_search_r1s_own_reading_of_an_answer(search_server: Start) -> None:
    """Its ``_passages2string`` takes the first line of ``contents`` as the title."""
    url = search_server(bm25())
    result = httpx2.post(
        f"{url}/retrieve", json={"queries": ["river Paris", "长江"], "topk": 3, "return_scores": True}
    ).json()["result"]
    assert len(result) == 2
    for hits in result:
        for hit in hits:
            title, _, text = hit["document"]["contents"].partition("\n")
            assert title.startswith('"')
            assert text
            assert isinstance(hit["score"], float)
    assert result[1][0]["document"]["contents"] == '"长江"\n长江是中国的河流。'


class Lengths:
    """Scores a passage by its length: the longest first."""

    fingerprint = "lengths"

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[float(len(p.text)) for p in each] for each in passages]


def test_rerank_in_the_form_of_search_r1(search_server: Start) -> None:
    url = search_server(bm25(), reranker=Lengths())
    found = httpx2.post(
        f"{url}/retrieve", json={"queries": ["Paris"], "topk": 2, "return_scores": True}
    ).json()["result"]  # fmt: skip
    ask = {"queries": ["Paris"], "documents": found, "rerank_topk": 1, "return_scores": True}
    ranked = httpx2.post(f"{url}/rerank", json=ask).json()
    assert ranked == {"result": [[{"document": '(Title: "Paris") Paris is the capital of France.', "score": 31.0}]]}
    bare = httpx2.post(f"{url}/rerank", json={**ask, "return_scores": False}).json()
    assert bare == {"result": [['(Title: "Paris") Paris is the capital of France.']]}
    both = {"queries": ["Paris"], "topk_retrieval": 2, "topk_rerank": 1, "return_scores": True}
    assert httpx2.post(f"{url}/retrieve", json=both).json() == {
        "result": [[{"document": PARIS["contents"], "score": 31.0}]]
    }


def test_rerank_ranks_each_querys_own_documents_only(search_server: Start) -> None:
    url = search_server(bm25(), reranker=Lengths())
    ask = {"queries": ["a", "b"], "documents": [[PARIS], ["x\nshort"]], "rerank_topk": 5}
    result = httpx2.post(f"{url}/rerank", json=ask).json()["result"]
    assert [len(each) for each in result] == [1, 1]
    wrong = httpx2.post(f"{url}/rerank", json={"queries": ["a"], "documents": []})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, "documents")


def test_without_a_reranker_the_answer_says_so(search_server: Start) -> None:
    answer = httpx2.post(f"{search_server(bm25())}/rerank", json={"queries": ["a"], "documents": [[PARIS]]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "no_reranker")


BAD = {
    '{"queries": ["a"], "topk": -1}': "topk",
    '{"queries": ["a"], "topk": 1.5}': "topk",
    '{"queries": ["a"], "topk": "3"}': "topk",
    '{"queries": ["a"], "topk": true}': "topk",
    '{"queries": ["a"], "topk": 1001}': "topk",
    '{"query": "a", "top_k": 1001}': "top_k",
    '{"queries": ["a"], "topk_retrieval": 1001}': "topk_retrieval",
    '{"queries": ["a"], "topk_rerank": 1001}': "topk_rerank",
    '{"queries": "a"}': "queries",
    '{"queries": [1]}': "queries.0",
    '{"queries": ["a"], "top_k": 3}': "top_k",
    '{"queries": ["a"], "k": 3}': "k",
    '{"queries": ["a"], "return_score": true}': "return_score",
    '{"queries": ["a"], "returnscores": true}': "returnscores",
    '{"query": "a", "top_k": 3, "return_scores": true}': "return_scores",
    '{"queries": ["a", "b", "c"]}': "queries",
    '{"query": "0123456789x"}': "query",
    '{"topk": 3}': "queries",
    "[]": "",
    "{": "",
    "": "",
    '{"queries": ["\\ud800"]}': "",
}


@pytest.mark.parametrize("body", BAD)
def test_bad_requests_are_422_and_name_the_key(body: str, search_server: Start) -> None:
    url = search_server(bm25(), max_queries=2, max_query_chars=10)
    answer = httpx2.post(f"{url}/retrieve", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error.get("param", "")) == (422, "invalid_request", BAD[body])
    assert error["message"]


def test_keys_that_nobody_knows_have_no_effect_and_are_named(
    search_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients of forks send such keys, and the servers they were written for ignore them."""
    url = search_server(bm25())
    body: dict[str, Any] = {"queries": ["capital of France"], "topk": 1}
    plain = httpx2.post(f"{url}/retrieve", json=body)
    assert "turntree-ignored" not in plain.headers
    more = {"dataset": "hotpotqa", "collection": None, "a\r\nset-cookie: 长": 1}
    for _ in range(2):
        answer = httpx2.post(f"{url}/retrieve", json=body | more)
        assert (answer.status_code, answer.content) == (200, plain.content)
        assert answer.headers["turntree-ignored"] == "dataset, collection, a%0D%0Aset-cookie%3A%20%E9%95%BF"
        assert "set-cookie" not in answer.headers
    assert [r.getMessage().count("dataset") for r in caplog.records if "no effect" in r.getMessage()] == [1]
    assert "turntree_ignored_keys_total 2.0" in httpx2.get(f"{url}/metrics").text
    for path, form in (
        ("/search", {"query": "a"}),
        ("/batch_search", {"query": ["a"]}),
        ("/retrieve", {"query": "a", "topk": 1}),
        ("/retrieve", {"query": "a", "top_k": 1}),
    ):
        assert httpx2.post(f"{url}{path}", json=form | {"user": "x"}).headers["turntree-ignored"] == "user"


# -- security --------------------------------------------------------------------------------------------------


def test_oversized_bodies_are_cut_and_the_client_reads_why(search_server: Start) -> None:
    url = search_server(bm25(), max_body_bytes=10_000)
    announced = httpx2.post(f"{url}/retrieve", json={"queries": ["x" * 20_000]})
    assert (announced.status_code, announced.json()["error"]["type"]) == (413, "body_too_large")
    assert announced.headers["connection"] == "close"
    chunked = httpx2.post(
        f"{url}/retrieve", content=iter([b"x" * 5_000] * 4), headers={"Content-Type": "application/json"}
    )
    assert chunked.status_code == 413


def test_a_body_that_only_claims_to_be_large_is_refused_before_it_comes(search_server: Start) -> None:
    head = published("/retrieve", "{}").replace(b"Content-Length: 2", b"Content-Length: 99999999999")
    status, _, _ = exchange(search_server(bm25()), head)
    assert status == 413


def test_slow_bodies_and_slow_heads_are_cut(search_server: Start) -> None:
    url = search_server(bm25(), body_timeout_s=0.3, head_timeout_s=0.3)
    body = published("/retrieve", '{"queries": ["a"]}')[:-5]
    start = time.monotonic()
    status, headers, answer = exchange(url, body)
    assert (status, headers["connection"], json.loads(answer)["error"]["type"]) == (408, "close", "slow_body")
    status, _, answer = exchange(url, b"POST /retrieve HTTP/1.1\r\nHost: 127")
    assert (status, json.loads(answer)["error"]["type"]) == (408, "slow_head")
    assert time.monotonic() - start < 10
    parts = urlsplit(url)
    with socket.create_connection(("127.0.0.1", parts.port or 0), timeout=10) as silent:
        assert silent.recv(1) == b""  # a connection that says nothing is closed


def test_dribbled_heads_do_not_live_longer(search_server: Start) -> None:
    url = search_server(bm25(), head_timeout_s=0.5)
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=10) as slow:
        start, answer = time.monotonic(), b""
        slow.settimeout(0.05)
        slow.sendall(b"POST /retrieve HTTP/1.1\r\n")
        while time.monotonic() - start < 8:
            try:
                answer = slow.recv(1000)
                break
            except TimeoutError:
                slow.sendall(b"a")
    assert b" 408 " in answer
    assert time.monotonic() - start < 5


def test_endless_heads_are_cut(search_server: Start) -> None:
    status, _, _ = exchange(search_server(bm25()), b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
    assert status == 431


def test_connections_are_bounded(search_server: Start) -> None:
    url = search_server(bm25(), max_connections=2)
    address = ("127.0.0.1", urlsplit(url).port or 0)
    with socket.create_connection(address), socket.create_connection(address):
        status, headers, answer = exchange(url, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (status, headers["retry-after"], json.loads(answer)["error"]["type"]) == (503, "1", "too_many_connections")


def test_tokens(search_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "correct horse")
    monkeypatch.setenv("WRONG_TOKEN", "correct hors")
    url = search_server(bm25(), token_env="SERVER_TOKEN")
    for headers in ({}, {"Authorization": "Bearer correct hors"}, {"Authorization": "Basic correct horse"}):
        for path in ("/info", "/metrics", "/openapi.json"):
            assert httpx2.get(url + path, headers=headers).status_code == 401
        refused = httpx2.post(f"{url}/retrieve", json={"queries": ["a"]}, headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert "correct horse" not in refused.text
    assert httpx2.get(f"{url}/healthz").status_code == 200
    with RemoteBackend(f"{url}/retrieve", token_env="SERVER_TOKEN") as remote:
        assert remote.search(["capital"], k=1) == bm25().search(["capital"], k=1)
        assert remote.fingerprint == bm25().fingerprint
    with RemoteBackend(f"{url}/retrieve", token_env="WRONG_TOKEN") as wrong:
        with pytest.raises(RetrievalError, match="status 401"):
            wrong.search(["capital"], k=1)
        with pytest.raises(RetrievalError, match="status 401"):
            _ = wrong.fingerprint


def test_other_machines_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "search.example"):
        with pytest.raises(ConfigError, match="token"):
            ServerSettings(host=host)
        ServerSettings(host=host, token_env="SERVER_TOKEN")
        ServerSettings(host=host, allow_unauthenticated=True)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        ServerSettings(host=host)
    monkeypatch.setenv("SERVER_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 8 characters"):
        ServerSettings(token_env="SERVER_TOKEN").token()
    monkeypatch.delenv("SERVER_TOKEN")
    with pytest.raises(ConfigError, match="SERVER_TOKEN is not set"):
        ServerSettings(token_env="SERVER_TOKEN").token()


def test_names_that_were_rebound_to_this_machine_are_refused(search_server: Start) -> None:
    url = search_server(bm25())
    for host, status in (("evil.example", 421), ("evil.example:80", 421), ("localhost", 200), ("[::1]:99", 200)):
        assert httpx2.get(f"{url}/healthz", headers={"Host": host}).status_code == status


def test_forms_of_a_browser_are_refused(search_server: Start) -> None:
    url = search_server(bm25())
    answer = httpx2.post(f"{url}/retrieve", content=b'{"queries": ["a"]}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert httpx2.post(
        f"{url}/retrieve", content=b"x", headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}
    ).status_code == 415  # fmt: skip


def test_errors_of_the_backend_are_typed_and_one_request_is_not_another(search_server: Start) -> None:
    backend = Slow()
    url = search_server(backend, max_wait_ms=200.0)
    backend.gate.set()

    def ask(query: str) -> httpx2.Response:
        return httpx2.post(f"{url}/retrieve", json={"queries": [query]}, timeout=30)

    with ThreadPoolExecutor(3) as pool:
        good, bad, fine = pool.map(ask, ["good", "poison", "fine"])
    assert (good.status_code, fine.status_code) == (200, 200)
    assert (bad.status_code, bad.json()["error"]["type"]) == (500, "search_failed")
    assert "poisoned" in bad.json()["error"]["message"]


# -- batches, overload ---------------------------------------------------------------------------------------------


def test_concurrent_requests_share_a_search_by_k_and_equal_queries_are_searched_once(search_server: Start) -> None:
    backend = Slow()
    url = search_server(backend)

    def ask(number: int) -> Any:
        body = {"queries": [f"q{number % 4}"], "topk": 1 + number // 8, "return_scores": True}
        return httpx2.post(f"{url}/retrieve", json=body, timeout=30).json()["result"]

    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(ask, 0)
        assert backend.started.wait(10)
        rest = [pool.submit(ask, number) for number in range(16)]
        while "turntree_queue_queries 16.0" not in httpx2.get(f"{url}/metrics").text:
            time.sleep(0.01)
        backend.gate.set()
        found = [future.result() for future in [first, *rest]]
    assert [hits[0][0]["document"]["id"] for hits in found] == [f"q{n % 4}" for n in [0, *range(16)]]
    assert len(backend.batches) == 3
    assert sorted((k, sorted(queries)) for k, queries in backend.batches[1:]) == [
        (1, ["q0", "q1", "q2", "q3"]),
        (2, ["q0", "q1", "q2", "q3"]),
    ]


def test_overload_is_answered_early_and_the_server_goes_on(search_server: Start) -> None:
    backend = Slow()
    url = search_server(backend, max_queue=4, max_queries=4)

    def ask(size: int) -> httpx2.Response:
        return httpx2.post(f"{url}/retrieve", json={"queries": [f"q{i}" for i in range(size)]}, timeout=30)

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, 1)
        assert backend.started.wait(10)
        waiting = pool.submit(ask, 4)
        while "turntree_queue_queries 4.0" not in httpx2.get(f"{url}/metrics").text:
            time.sleep(0.01)
        start = time.monotonic()
        refused = ask(1)
        assert time.monotonic() - start < 5
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "overloaded"
        assert httpx2.get(f"{url}/healthz").status_code == 200
        backend.gate.set()
        assert [running.result().status_code, waiting.result().status_code] == [200, 200]
    assert ask(2).status_code == 200


def test_the_event_loop_answers_while_a_search_runs(search_server: Start) -> None:
    backend = Slow()
    url = search_server(backend)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx2.post, f"{url}/retrieve", json={"queries": ["q"]}, timeout=30)
        assert backend.started.wait(10)
        assert httpx2.get(f"{url}/healthz", timeout=5).json() == {"status": "ok"}
        backend.gate.set()
        assert running.result().status_code == 200


# -- what it says of itself -------------------------------------------------------------------------------------------


def test_metrics_info_and_openapi(search_server: Start) -> None:
    url = search_server(bm25(), max_k=50)
    for body in ({"queries": ["Paris", "river"]}, {"queries": ["a"], "topk": 99}):
        httpx2.post(f"{url}/retrieve", json=body)
    httpx2.get(f"{url}/nowhere/{'x' * 100}")
    text = httpx2.get(f"{url}/metrics").text
    for line in (
        'turntree_requests_total{path="/retrieve",status="200"} 1.0',
        'turntree_requests_total{path="/retrieve",status="422"} 1.0',
        'turntree_requests_total{path="other",status="404"} 1.0',
        'turntree_errors_total{kind="invalid_request"} 1.0',
        "turntree_batch_queries_sum 2.0",
        "turntree_search_seconds_count 1.0",
        "turntree_queue_queries 0.0",
        'turntree_request_seconds_count{path="/retrieve"} 2.0',
    ):
        assert line in text
    page = (Path(__file__).parents[2] / "docs" / "search-server.md").read_text(encoding="utf-8")
    kinds = dict(re.findall(r"^# TYPE (turntree_\w+) (\w+)$", text, re.MULTILINE))
    names = [name for name, kind in kinds.items() if not (kind == "gauge" and name.endswith("_created"))]
    assert len(names) == 10
    assert not [name for name in names if f"`{name}`" not in page]
    info = httpx2.get(f"{url}/info").json()
    assert (info["server"], info["fingerprint"], info["passages"]) == ("turntree", bm25().fingerprint, 3)
    assert info["limits"]["max_k"] == 50
    paths = httpx2.get(f"{url}/openapi.json").json()["paths"]
    assert {"/retrieve", "/search", "/batch_search", "/rerank", "/healthz", "/info", "/metrics"} <= paths.keys()
    schema = paths["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert next(sorted(form["properties"]) for form in schema["anyOf"]) == ["queries", "return_scores", "topk"]
    assert not re.search("http[s]?://", httpx2.get(f"{url}/openapi.json").text)


@pytest.mark.parametrize(
    "options",
    [{"port": 70000}, {"port": "80"}, {"workers": 0}, {"workers": 1.5},
     {"max_batch": 0}, {"max_wait_ms": -1}, {"body_timeout_s": float("inf")},
     {"search_timeout_s": 0}, {"max_queue": 10, "max_queries": 20}],
)  # fmt: skip
def test_settings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerSettings(**options)
