"""The client: requests byte for byte, every published answer, retries, breaker, fingerprints, pickling."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import ConfigError, RetrievalError
from turntree.search_backend import BM25Backend, Passage
from turntree.search_backend.client import RemoteBackend
from turntree.search_backend.dialects import DIALECTS, ShapeError, contents_of, read_answer
from turntree.search_backend.passage import SearchBackend
from turntree.search_backend.transport import CircuitBreaker

PARIS = {"id": "7", "contents": '"Paris"\nThe capital.'}
HIT = Passage("7", "Paris", "The capital.", 0.5)


def quick(url: str, **options: Any) -> RemoteBackend:
    return RemoteBackend(url, **{"backoff_s": 0.01, "timeout_s": 5.0, **options})


# -- requests --------------------------------------------------------------------------------------------------

REQUESTS = {
    "search_r1": b'{"queries":["who?","\xe8\xb0\x81"],"topk":3,"return_scores":true}',
    "skyrl": b'{"query":"who?","topk":3,"return_scores":true}',
    "zerosearch": b'{"query":"who?","top_k":3}',
    "research": b'{"query":["who?","\xe8\xb0\x81"],"top_n":3,"return_score":true}',
    "queries": b'{"queries":["who?","\xe8\xb0\x81"]}',
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_requests_byte_for_byte(dialect: str) -> None:
    """What goes over the wire, read from a bare socket."""
    received = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            nonlocal received
            connection, _ = listener.accept()
            with connection:
                while b"\r\n\r\n" not in received or not received.endswith(b"}"):
                    received += connection.recv(65536)
                body = json.dumps({"result": [[PARIS]] * (1 if DIALECTS[dialect].single else 2)}).encode()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with quick(f"http://127.0.0.1:{port}/retrieve", dialect=dialect) as remote:
            remote.search(["who?"] if DIALECTS[dialect].single else ["who?", "谁"], k=3)
        thread.join(timeout=10)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = [line.lower() for line in head.split(b"\r\n")]
    assert lines[0] == b"post /retrieve http/1.1"
    assert {b"accept: application/json", b"content-type: application/json"} <= set(lines)
    assert body == REQUESTS[dialect]


def test_equal_queries_are_sent_once_and_many_in_parts(scripted_server: Any) -> None:
    scripted_server.answers = [(200, {}, {"result": [[PARIS], []]}), (200, {}, {"result": [[]]})]
    with quick(scripted_server.url, max_queries=2, concurrency=1) as remote:
        found = remote.search(["a", "b", "a", "c", "b"], k=1)
    assert [body["queries"] for body in scripted_server.bodies] == [["a", "b"], ["c"]]
    assert [len(hits) for hits in found] == [1, 0, 1, 0, 0]


# -- answers ---------------------------------------------------------------------------------------------------

ONE = {
    "search_r1": {"result": [[{"document": PARIS, "score": 0.5}]]},
    "flashrag rows": {"result": [[{"document": {**PARIS, "title": "Paris", "text": "The capital."}, "score": 0.5}]]},
    "text and title": {"result": [[{"id": 7, "title": "Paris", "text": "The capital.", "score": 0.5}]]},
    "research search": [[PARIS], [0.5]],
    "research batch": [[[PARIS]], [[0.5]]],
    "zerosearch": [{"id": "7", "title": "Paris", "text": "The capital.", "score": 0.5}],
    "results": {"results": [[{"docid": "7", "title": "Paris", "content": "The capital.", "score": 0.5}]]},
    "documents alone": {"result": [{"document": PARIS, "score": 0.5}]},
    "list of lists": [[{"document": PARIS, "score": 0.5}]],
}


@pytest.mark.parametrize("name", ONE)
def test_published_answers_to_one_query(name: str) -> None:
    assert read_answer(ONE[name], 1) == [[HIT]]


TWO: dict[str, Any] = {
    "search_r1": {"result": [[{"document": PARIS, "score": 0.5}], []]},
    "list of lists": [[{"document": PARIS, "score": 0.5}], []],
    "research batch": [[[PARIS], []], [[0.5], []]],
}


@pytest.mark.parametrize("name", TWO)
def test_published_answers_to_two_queries(name: str) -> None:
    assert read_answer(TWO[name], 2) == [[HIT], []]


def test_answers_without_scores_ids_or_objects() -> None:
    bare = Passage("7", "Paris", "The capital.")
    assert read_answer({"result": [[PARIS]]}, 1) == [[bare]]
    ((web,),) = read_answer({"result": [[{"document": {"contents": '"Paris"\nThe capital.'}}]]}, 1)
    assert (web.title, web.text, web.score) == ("Paris", "The capital.", None)
    assert web.id.startswith("sha256:")
    ((headed,),) = read_answer({"result": [['(Title: "Paris") The capital.']]}, 1)
    assert headed == web
    assert read_answer({"result": [["just a text"]]}, 1)[0][0].text == "just a text"


@pytest.mark.parametrize("empty", [{"result": [[]]}, [[]], [], [[], []]])
def test_nothing_found(empty: Any) -> None:
    assert read_answer(empty, 1) == [[]]


WRONG: list[tuple[Any, int, str]] = [
    ({"error": "index is loading"}, 1, "index is loading"),
    ({"result": [[]], "error": "half done"}, 1, "half done"),
    ({"detail": "not found"}, 1, "not found"),
    ({"result": []}, 1, "expected 1 lists"),
    ({"result": [[]]}, 2, "expected 2 lists"),
    ({"result": [[], []]}, 1, "expected 1 lists"),
    ({"result": [PARIS, PARIS]}, 2, "list of documents for each query"),
    ({"result": None}, 1, "None"),
    ({"result": [[{"score": 1.0}]]}, 1, "contents or text"),
    ({"result": [[{"document": PARIS, "score": "high"}]]}, 1, "finite number"),
    ({"result": [[{"document": PARIS, "score": float("nan")}]]}, 1, "finite number"),
    ({"result": [[{"id": [], "text": "t"}]]}, 1, "id"),
    ({"result": [[{"id": "1", "text": 5}]]}, 1, "strings"),
    ({"result": [[5]]}, 1, "found 5"),
    ([[[PARIS]], [[0.5, 0.6]]], 1, "a score for each"),
    ("text", 1, "expected an object or a list"),
    (None, 1, "expected an object or a list"),
]


@pytest.mark.parametrize(("answer", "count", "words"), WRONG)
def test_wrong_answers_say_what_came(answer: Any, count: int, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        read_answer(answer, count)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["result", "document", "score", "id", "contents", "text", "error"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(json_values, st.integers(1, 3))
def test_any_json_is_the_right_number_of_lists_or_a_shape_error(answer: Any, count: int) -> None:
    try:
        found = read_answer(answer, count)
    except ShapeError:
        return
    assert len(found) == count
    assert all(isinstance(p, Passage) and isinstance(p.text, str) for hits in found for p in hits)


lines = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20).map(str.strip)


@given(lines, st.lists(lines, min_size=1, max_size=3).map("\n".join).map(str.strip))
def test_contents_round_trip(title: str, text: str) -> None:
    row = {"id": "1", "contents": contents_of(Passage("1", title, text))}
    assert read_answer({"result": [[row]]}, 1) == [[Passage("1", title, text)]]


def test_remote_equals_local_for_every_dialect(search_server: Callable[..., str]) -> None:
    local = BM25Backend.from_passages([Passage(str(i), f'T "{i}"', f"river\nnumber {i} 号") for i in range(30)])
    url = search_server(local)
    queries = ["river 3", "T 7", "nothing-of-this", "river 3", "号"]
    for dialect in ("search_r1", "skyrl", "zerosearch", "research"):
        with quick(f"{url}/{'batch_search' if dialect == 'research' else 'retrieve'}", dialect=dialect) as remote:
            assert isinstance(remote, SearchBackend)
            assert remote.search(queries, k=4) == local.search(queries, k=4)
            assert remote.search([], k=4) == []


# -- retries, breaker --------------------------------------------------------------------------------------------


def test_retried_are_connections_5xx_and_429_but_no_other_4xx(scripted_server: Any) -> None:
    good: tuple[int, dict[str, str], Any] = (200, {}, {"result": [[PARIS]]})
    for status in (500, 502, 503, 504, 429, 408):
        scripted_server.answers = [(status, {}, b"busy"), good]
        with quick(scripted_server.url) as remote:
            assert len(remote.search(["q"], k=1)[0]) == 1
            assert remote.stats == {"retries": 1, "requests": 1}
    for status in (400, 404, 413, 422):
        scripted_server.answers, scripted_server.requests = [(status, {}, b"no such thing"), good], []
        with quick(scripted_server.url) as remote:
            with pytest.raises(RetrievalError, match=f"status {status}: no such thing"):
                remote.search(["q"], k=1)
        assert len(scripted_server.requests) == 1
    scripted_server.answers = [(302, {"Location": "http://elsewhere/"}, b"")]
    with quick(scripted_server.url) as remote, pytest.raises(RetrievalError, match="not followed"):
        remote.search(["q"], k=1)


def test_retry_after_is_waited_for_up_to_the_time_limit(scripted_server: Any) -> None:
    scripted_server.answers = [(503, {"Retry-After": "1"}, b""), (200, {}, {"result": [[]]})]
    with quick(scripted_server.url) as remote:
        remote.search(["q"], k=1)
    assert scripted_server.times[1] - scripted_server.times[0] >= 1
    scripted_server.always = (429, {"Retry-After": "3600"}, b"slow down")
    with quick(scripted_server.url) as remote:
        start = time.monotonic()
        with pytest.raises(RetrievalError, match="slow down; it asks to wait 3600 s"):
            remote.search(["q"], k=1)
        with pytest.raises(RetrievalError, match=r"asked again in 3\d\d\d"):
            remote.search(["q"], k=1)
        assert time.monotonic() - start < 3
        assert remote.stats == {"failures": 1, "stopped": 1}


def test_a_refused_connection_is_tried_a_bounded_number_of_times() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with quick(f"http://127.0.0.1:{port}/retrieve", retries=2) as remote:
        with pytest.raises(RetrievalError, match="failed after 3 tries: ConnectError"):
            remote.search(["q"], k=1)


def test_an_answer_that_dribbles_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dribble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                try:
                    while True:
                        connection.sendall(b" ")
                        time.sleep(0.02)
                except OSError:
                    return

        thread = threading.Thread(target=dribble, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
        with quick(url, retries=0, timeout_s=0.3) as remote:
            with pytest.raises(RetrievalError, match=r"no whole answer within timeout_s=0\.3"):
                remote.search(["q"], k=1)
        thread.join(timeout=10)


def test_the_breaker_opens_probes_and_closes() -> None:
    now = 0.0
    breaker = CircuitBreaker(2, 10.0, clock=lambda: now)
    assert breaker.admit() == 0
    breaker.failure()
    assert breaker.admit() == 0
    breaker.failure()
    assert breaker.admit() == 10
    now = 10.5
    assert breaker.admit() == 0  # the probe
    assert breaker.admit() > 0  # everyone else waits for it
    breaker.failure()
    assert breaker.admit() == 10
    now = 21
    assert breaker.admit() == 0
    breaker.abandon()
    assert breaker.admit() == 0
    breaker.success()
    assert [breaker.admit(), breaker.admit()] == [0, 0]


def test_a_dead_server_costs_nobody_a_time_limit(scripted_server: Any) -> None:
    scripted_server.always = (500, {}, b"dead")
    with quick(scripted_server.url, retries=1, breaker_failures=3, breaker_reset_s=0.3) as remote:
        for words in ("dead", "dead", "not asked"):  # the third failure opens it, within the second call
            with pytest.raises(RetrievalError, match=words if words != "dead" else "dead|not asked"):
                remote.search(["q"], k=1)
        asked = len(scripted_server.requests)
        assert asked == 3
        scripted_server.always = (200, {}, {"result": [[PARIS]]})
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                assert len(remote.search(["q"], k=1)[0]) == 1
                break
            except RetrievalError:  # still open: nothing is sent
                time.sleep(0.02)
        assert len(scripted_server.requests) == asked + 1


def test_requests_in_flight_are_bounded(scripted_server: Any) -> None:
    scripted_server.always = (200, {}, {"result": [[]]}, 0.05)
    with quick(scripted_server.url, dialect="skyrl", concurrency=3) as remote:
        remote.search([f"q{i}" for i in range(9)], k=1)
    times = scripted_server.times
    assert len(times) == 9
    assert max(sum(0 <= t - start < 0.04 for t in times) for start in times) <= 3


# -- identity --------------------------------------------------------------------------------------------------


def test_fingerprints(search_server: Callable[..., str], scripted_server: Any) -> None:
    local = BM25Backend.from_passages([Passage("1", "", "river")])
    with quick(f"{search_server(local)}/retrieve") as remote:
        assert remote.fingerprint == local.fingerprint
    for status, answer in ((404, b"nothing"), (200, b"<html>"), (200, {"name": "other"}), (200, [1])):
        scripted_server.always = (status, {}, answer)
        with quick(scripted_server.url) as peer:
            assert peer.fingerprint.startswith("unverified:")
            assert peer.fingerprint == peer.fingerprint
    with quick(scripted_server.url, fingerprint="wiki-18-e5") as named:
        assert named.fingerprint == "wiki-18-e5"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with quick(f"http://127.0.0.1:{port}/retrieve", retries=0) as dead:
        with pytest.raises(RetrievalError, match="ConnectError"):
            _ = dead.fingerprint


def test_another_index_at_the_same_address_is_no_silent_change(scripted_server: Any) -> None:
    scripted_server.answers = [
        (200, {"turntree-fingerprint": "one"}, {"result": [[PARIS]]}),
        (200, {"turntree-fingerprint": "two"}, {"result": [[PARIS]]}),
    ]
    with quick(scripted_server.url) as remote:
        remote.search(["q"], k=1)
        with pytest.raises(RetrievalError, match="expected the index one, found two"):
            remote.search(["q"], k=1)


def test_pickling_carries_settings_and_no_secret(
    search_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_TOKEN", "a very secret token")
    local = BM25Backend.from_passages([Passage("1", "", "river")])
    remote = quick(f"{search_server(local)}/retrieve", token_env="CLIENT_TOKEN", concurrency=2)
    fingerprint = remote.fingerprint
    data = pickle.dumps(remote)
    assert b"very secret" not in data
    remote.close()
    with pytest.raises(RetrievalError, match="closed"):
        remote.search(["river"], k=1)
    with pickle.loads(data) as copy:
        assert (copy.settings.url, copy.settings.limits) == (remote.settings.url, remote.settings.limits)
        assert copy.fingerprint == fingerprint
        assert copy.search(["river"], k=1) == local.search(["river"], k=1)


def test_one_client_for_many_threads(search_server: Callable[..., str]) -> None:
    local = BM25Backend.from_passages([Passage(str(i), "", f"river number{i}") for i in range(40)])
    with quick(f"{search_server(local)}/retrieve", concurrency=4) as remote, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: remote.search([f"number{i}"], k=1), range(40)))
    assert [hits[0][0].id for hits in found] == [str(i) for i in range(40)]


def test_the_token_is_in_no_message(scripted_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_TOKEN", "sesame&open")
    scripted_server.always = (403, {}, b"refused Bearer sesame&open and sesame%26open")
    with quick(scripted_server.url, token_env="CLIENT_TOKEN") as remote:
        with pytest.raises(RetrievalError) as caught:
            remote.search(["q"], k=1)
    assert "[key]" in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert scripted_server.requests[0]["headers"]["authorization"] == "Bearer sesame&open"


@pytest.mark.parametrize(
    "options",
    [
        {"url": "127.0.0.1:8000"}, {"url": "http://me:secret@h/"}, {"url": "ftp://h/"}, {"dialect": "other"},
        {"retries": -1}, {"concurrency": 0}, {"max_queries": 0}, {"breaker_failures": 0}, {"retries": 1.5},
        {"max_queries": 2.0}, {"concurrency": True},
        {"token_env": "NOT_SET_AT_ALL"},
    ],
)  # fmt: skip
def test_settings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RemoteBackend(**{"url": "http://127.0.0.1:1/retrieve", **options})


@pytest.mark.parametrize(("queries", "k"), [("text", 1), ([None], 1), (["\ud800"], 1), (["q"], 0), (["q"], True)])
def test_searches_are_checked_before_they_are_sent(queries: Any, k: Any) -> None:
    with RemoteBackend("http://127.0.0.1:1/retrieve") as remote, pytest.raises(RetrievalError, match="expected"):
        remote.search(queries, k=k)
