"""E17: without return_scores each query gets its own list of bare documents, for any number of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from turntree.errors import RetrievalError
from turntree.search_backend import BM25Backend, Passage
from turntree.search_backend.client import RemoteBackend

PASSAGES = [Passage(name, name.upper(), f"river {name}") for name in ("a1", "b2", "c3")]


@pytest.fixture(scope="module")
def url(search_server: Callable[..., str]) -> str:
    return search_server(BM25Backend.from_passages(PASSAGES)) + "/retrieve"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("explicit", [True, False])
def test_e17_each_query_has_its_own_list(count: int, explicit: bool, url: str) -> None:
    queries = ["a1", "b2", "c3"][:count]
    body: dict[str, Any] = {"queries": queries, "topk": 1, **({"return_scores": False} if explicit else {})}
    expected = [[{"id": q, "contents": f'"{q.upper()}"\nriver {q}'}] for q in queries]
    assert httpx2.post(url, json=body).json() == {"result": expected}


def test_e17_no_queries_have_no_results(url: str) -> None:
    for scores in (True, False):
        answer = httpx2.post(url, json={"queries": [], "return_scores": scores})
        assert (answer.status_code, answer.json()) == (200, {"result": []})


@pytest.mark.parametrize("topk", [0, -1, 10**6, 10**30, "3", 1.5])
def test_e17_topk_is_validated(topk: Any, url: str) -> None:
    answer = httpx2.post(url, json={"queries": ["river"], "topk": topk})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "topk")
    assert "topk" in answer.json()["error"]["message"]


def test_e17_null_is_the_servers_default(url: str) -> None:
    assert len(httpx2.post(url, json={"queries": ["river"], "topk": None}).json()["result"][0]) == 3


def test_e17_the_wrong_documents_of_such_a_server_are_no_result(scripted_server: Any) -> None:
    """With exactly two queries its answer is the first query's documents, one for each query or more."""
    scripted_server.always = (
        200,
        {},
        {"result": [{"id": "1", "contents": '"T"\nx'}, {"id": "2", "contents": '"T"\ny'}]},
    )
    with RemoteBackend(scripted_server.url, retries=0) as remote:
        with pytest.raises(RetrievalError, match="expected a list of documents for each query"):
            remote.search(["a", "b"], k=2)
