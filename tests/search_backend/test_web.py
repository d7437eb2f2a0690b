"""The web client on a loopback server: known styles, paths, keys that stay secret, markup."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from turntree import __version__
from turntree.errors import ConfigError, RetrievalError
from turntree.search_backend import Passage
from turntree.search_backend.replay import ReplayBackend
from turntree.search_backend.web import STYLES, WebBackend

SERPER = {
    "searchParameters": {"q": "who", "num": 2},
    "organic": [
        {"title": "Ada &amp; Co", "link": "https://a.example/", "snippet": "A <b>mathematician</b>, 1 < 2."},
        {"title": "No text", "link": "https://b.example/"},
        {"title": "Third", "link": "https://c.example/", "snippet": "more"},
    ],
}  # fmt: skip
FOUND = [
    Passage("https://a.example/", "Ada & Co", "A mathematician, 1 < 2."),
    Passage("https://b.example/", "No text", ""),
]


def web(url: str, **options: Any) -> WebBackend:
    return WebBackend(url, **{"backoff_s": 0.01, "timeout_s": 5.0, **options})


def test_serper(scripted_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", "k-123456")
    scripted_server.always = (200, {}, SERPER)
    backend = web(scripted_server.url, style="serper", key_env="SEARCH_KEY", fields={"gl": "us"})
    assert backend.search(["who", "谁", "who"], k=2) == [FOUND] * 3
    assert sorted(body["q"] for body in scripted_server.bodies) == ["who", "谁"]
    assert all(body.items() >= {"num": 2, "gl": "us"}.items() for body in scripted_server.bodies)
    for request in scripted_server.requests:
        assert request["method"] == "POST"
        assert request["headers"]["x-api-key"] == "k-123456"
        assert request["headers"]["user-agent"] == f"turntree/{__version__}"
        assert b"k-123456" not in request["body"]


ANSWERS: dict[str, tuple[str, Any]] = {
    "serpapi": ("q", {"organic_results": [{"title": "T", "link": "https://a/", "snippet": "text"}]}),
    "brave": ("q", {"web": {"results": [{"title": "T", "url": "https://a/", "description": "text"}]}}),
    "searxng": ("q", {"results": [{"title": "T", "url": "https://a/", "content": "text"}]}),
    "mediawiki": ("srsearch", {"query": {"search": [{"title": "T", "pageid": 7, "snippet": "<span>te</span>xt"}]}}),
    "generic": ("q", {"results": [{"title": "T", "link": "https://a/", "snippet": ["te", "xt"]}]}),
}


@pytest.mark.parametrize("style", ANSWERS)
def test_styles(style: str, scripted_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", "k-123456")
    name, answer = ANSWERS[style]
    scripted_server.always = (200, {}, answer)
    ((found,),) = web(scripted_server.url, style=style, key_env="SEARCH_KEY").search(["what's up?"], k=30)
    assert (found.title, found.text.replace(" ", ""), found.score) == ("T", "text", None)
    assert found.id in ("https://a/", "7")
    (request,) = scripted_server.requests
    if STYLES[style].get("method") == "GET":
        asked = parse_qs(urlsplit(request["path"]).query)
        assert asked[name] == ["what's up?"]
        if style == "brave":
            assert asked["count"] == ["20"]
    else:
        assert scripted_server.bodies[0][name] == "what's up?"


def test_paths_of_an_api_of_ones_own(scripted_server: Any) -> None:
    answer = {"a": [{"hits": [{"doc": {"name": "T"}, "body": "text"}, {"doc": {}, "body": ""}]}]}
    scripted_server.always = (200, {}, answer)
    backend = web(scripted_server.url, query_field="text", results="a.0.hits", title="doc.name", text="body", id="")
    ((found,),) = backend.search(["q"], k=5)
    assert (found.title, found.text) == ("T", "text")
    assert found.id.startswith("sha256:")
    scripted_server.always = (200, {}, [{"title": "T", "snippet": "text", "link": 1}])
    assert web(scripted_server.url, results="").search(["q"], k=5) == [[Passage("1", "T", "text")]]


def test_nothing_found_is_not_an_unknown_answer(scripted_server: Any) -> None:
    empties: list[dict[str, Any]] = [{"organic": []}, {"searchParameters": {"q": "x"}}]
    for empty in empties:
        scripted_server.always = (200, {}, empty)
        assert web(scripted_server.url, style="serper").search(["x"], k=3) == [[]]
    for wrong, words in (
        ({"message": "Unauthorized."}, "expected results under 'organic', found the keys"),
        ({"error": "quota"}, "quota"),
        ({"organic": {}}, "expected a list of results"),
        ({"organic": ["x"]}, "expected an object as a result"),
        ({"organic": [{"title": 5}]}, "expected a text under 'title'"),
        (b"<html>Attention</html>", "expected JSON, found '<html>Attention</html>'"),
        (b"", "an empty answer"),
    ):
        scripted_server.always = (200, {}, wrong)
        with pytest.raises(RetrievalError, match=words):
            web(scripted_server.url, style="serper", retries=1).search(["x"], k=3)


def test_the_key_is_in_no_log_no_message_no_pickle_and_no_store(
    scripted_server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("SEARCH_KEY", "se cret/123")
    scripted_server.always = (200, {}, {"organic_results": SERPER["organic"]})
    backend = web(scripted_server.url, style="serpapi", key_env="SEARCH_KEY", retries=0)
    live = ReplayBackend(tmp_path / "s.sqlite", backend, source=f"web:{scripted_server.url}")
    with caplog.at_level(logging.DEBUG):
        live.search(["who"], k=1)
        scripted_server.always = (500, {}, f"you asked {scripted_server.requests[0]['path']}".encode())
        with pytest.raises(RetrievalError) as caught:
            live.search(["else"], k=1)
    assert "se+cret%2F123" in scripted_server.requests[0]["path"]
    assert any("HTTP Request" in record.getMessage() for record in caplog.records)
    live.close()
    seen = [caplog.text, str(caught.value), repr(backend.settings), backend.fingerprint, repr(pickle.dumps(backend))]
    seen += [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()]
    for text in seen:
        assert not [form for form in ("se cret", "se+cret", "se%20cret", "cret/123", "cret%2F123") if form in text]


def test_fingerprints_say_what_is_asked_but_not_who_asks(scripted_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", "k-123456")
    base = web(scripted_server.url).fingerprint
    assert base.startswith("web:")
    assert web(scripted_server.url, key_env="SEARCH_KEY", timeout_s=9.0, user_agent="me").fingerprint == base
    for other in ({"fields": {"gl": "de"}}, {"query_field": "query"}, {"style": "serper"}, {"text": "body"}):
        assert web(scripted_server.url, **other).fingerprint != base
    copy: WebBackend = pickle.loads(pickle.dumps(web(scripted_server.url, style="serper", fields={"gl": "de"})))
    assert copy.settings.fields == {"gl": "de"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"style": "bing"}, "style='bing'"), ({"method": "PUT"}, "GET"), ({"query_field": ""}, "query_field"),
        ({"results_path": "x"}, "results_path"), ({"fields": {"q": "x"}}, "fields.q"), ({"timeout_s": -1}, "timeout_s"),
        ({"key_env": "NOT_SET_AT_ALL"}, "NOT_SET_AT_ALL"), ({"url": "https://h/?key=1"}, "query"),
    ],
)  # fmt: skip
def test_settings_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WebBackend(**{"url": "http://127.0.0.1:1/search", **options})
