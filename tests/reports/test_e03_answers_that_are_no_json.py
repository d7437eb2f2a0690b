"""E03: a server that answers '', HTML, half a JSON or an error fails the call, typed and bounded; the run goes on."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.envs.core import ToolCall, ToolFailure
from turntree.envs.tools import SearchTool, execute
from turntree.errors import RetrievalError
from turntree.search_backend.client import RemoteBackend

ANSWERS: dict[str, tuple[int, Any, str]] = {
    "empty": (200, b"", "expected JSON, found an empty answer"),
    "html": (200, b"<html>502 Bad Gateway</html>", "expected JSON, found '<html>502 Bad Gateway</html>'"),
    "truncated": (200, b'{"result": [[{"docu', 'expected JSON, found \'{"result"'),
    "error": (200, {"error": "index is loading"}, "found {'error': 'index is loading'}"),
    "error status": (502, b"<html>bad gateway</html>", "status 502: <html>bad gateway</html>"),
    "too few": (200, {"result": []}, "expected 1 lists"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_e03_wrong_answers_are_typed_quoted_and_tried_a_bounded_number_of_times(
    name: str, scripted_server: Any
) -> None:
    status, body, words = ANSWERS[name]
    scripted_server.always = (status, {}, body)
    with RemoteBackend(scripted_server.url, retries=2, backoff_s=0.01) as remote:
        with pytest.raises(RetrievalError) as caught:
            remote.search(["q"], k=1)
    assert words in str(caught.value)
    assert "failed after 3 tries" in str(caught.value)
    assert len(scripted_server.requests) == 3


def test_e03_one_bad_answer_is_mended_by_a_retry(scripted_server: Any) -> None:
    scripted_server.answers = [(200, {}, b""), (200, {}, {"result": [[{"id": "1", "contents": '"T"\ntext'}]]})]
    with RemoteBackend(scripted_server.url, backoff_s=0.01) as remote:
        ((found,),) = remote.search(["q"], k=1)
    assert (found.id, found.title, found.text) == ("1", "T", "text")


def test_e03_a_failed_call_is_an_outcome_that_no_reward_is_made_of(scripted_server: Any) -> None:
    scripted_server.always = (200, {}, b"<html>")
    with RemoteBackend(scripted_server.url, retries=0) as remote:
        (outcome,) = execute({"search": SearchTool(remote)}, [ToolCall("search", "q")], retries=1, backoff_s=0.0)
    assert isinstance(outcome, ToolFailure)
    assert outcome.kind == "RetrievalError"
